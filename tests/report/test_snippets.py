"""Settings to copy run as they are printed: ours is read back, the others train a toy."""

import tomllib

import numpy as np
import pytest

import noisecast as nc
from noisecast.privacy.mechanism import Adjacency
from noisecast.report.snippets import Settings, snippets
from noisecast.scenario_file import read_scenario_file

OPTIMIZERS = ("DP-SGD", "DP-SignSGD", "DP-Adam")
N, B, T = 40, 8, 3


def settings(optimizer, sampler=None, **changes):
    sampler = sampler or nc.Poisson.for_batch_size(B, N)
    given = {"optimizer": optimizer, "learning_rate": 0.05, "noise_multiplier": 0.7, "l2_clip_norm": 0.5,
             "expected_batch_size": B, "sampling_probability": sampler.sampling_probability, "num_steps": T,
             "target_delta": 1e-3, "sampler": sampler, "adjacency": Adjacency.ADD_OR_REMOVE_ONE}  # fmt: skip
    return Settings(**given | changes)


def code_of(tool, optimizer):
    return next(s.code for s in snippets(settings(optimizer)) if s.tool == tool)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("sampler", [nc.Poisson.for_batch_size(B, 455), nc.FixedSize(B, 455), nc.Shuffled(B, 455)])
def test_toml_is_read_back_as_the_same_scenario(optimizer, sampler, tmp_path):
    replaces = nc.Adjacency.REPLACE_ONE if isinstance(sampler, nc.FixedSize) else nc.Adjacency.ADD_OR_REMOVE_ONE
    wanted = settings(optimizer, sampler, adjacency=replaces)
    code = snippets(wanted)[0].code
    assert tomllib.loads(code)["optimizer"][0]["learning_rate"] == 0.05
    file = tmp_path / "copied.toml"
    file.write_text(code + '\n[problem]\nkind = "bundled"\nname = "breast_cancer"\n', encoding="utf-8")
    [scenario] = read_scenario_file(file).scenarios
    assert scenario.optimizer.name == optimizer and scenario.optimizer.learning_rate == 0.05
    assert scenario.mechanism.sampler == sampler and scenario.mechanism.adjacency == replaces
    assert (scenario.mechanism.noise_multiplier, scenario.mechanism.l2_clip_norm) == (0.7, 0.5)
    assert (scenario.num_steps, scenario.target_delta) == (T, 1e-3)


def test_floats_are_copied_in_full():
    exact = settings("DP-SGD", learning_rate=0.1 + 0.2, noise_multiplier=1e-7)
    assert "0.30000000000000004" in snippets(exact)[0].code
    assert tomllib.loads(snippets(exact)[0].code)["mechanism"]["noise_multiplier"] == 1e-7


@pytest.mark.parametrize("examples_are_drawn", [True, False])
@pytest.mark.parametrize("tool", ["JAX Privacy", "Optax"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_jax_snippets_run(tool, optimizer, examples_are_drawn):
    pytest.importorskip("optax")
    if tool == "JAX Privacy":
        pytest.importorskip("jax_privacy")
    import jax.numpy as jnp

    def loss(params, example):
        return jnp.sum((params["x"] - example) ** 2) + params["b"] ** 2

    params = {"x": jnp.zeros(3), "b": jnp.ones(())}
    names = {"loss": loss, "params": params, "examples": np.ones((N, 3), np.float32)}
    code = code_of(tool, optimizer)
    if not examples_are_drawn:  # batches that are empty, as small ones are now and then
        assert "expected_batch_size / len(examples)" in code
        code = code.replace("expected_batch_size / len(examples)", "1e-12")
    exec(code, names)
    moved = np.append(names["params"]["x"], names["params"]["b"])
    assert np.isfinite(moved).all()
    assert np.abs(moved - np.array([0, 0, 0, 1])).max() > 1e-6  # how far is the next test's: keys are fresh each time
    if optimizer == "DP-SignSGD":  # every step moves every coordinate by the learning rate
        assert np.allclose(np.abs(moved[:3]) / 0.05 % 2, T % 2, atol=1e-3)


@pytest.mark.parametrize("tool", ["JAX Privacy", "Optax"])
def test_jax_snippets_have_the_noise_that_they_name(tool):
    """One step from 0 with a loss without gradient: the step is -lr N(0, (z C / B)^2), whatever the batch."""
    pytest.importorskip("optax")
    if tool == "JAX Privacy":
        pytest.importorskip("jax_privacy")
    import jax.numpy as jnp
    import scipy.stats

    code = code_of(tool, "DP-SGD").replace(f", {T}\n", ", 1\n")
    names = {"loss": lambda x, example: 0.0 * jnp.sum(x) * example[0], "params": jnp.zeros(20_000),
             "examples": np.ones((N, 3), np.float32)}  # fmt: skip
    exec(code, names)
    drawn = np.asarray(names["params"], np.float64)
    for scale, passes in ((1.0, True), (0.95, False), (1.05, False)):
        total = float(np.square(drawn * scale / (0.05 * 0.7 * 0.5 / B)).sum())
        p = 2 * min(scipy.stats.chi2.cdf(total, drawn.size), scipy.stats.chi2.sf(total, drawn.size))
        assert (p > 1e-6) == passes


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore")
def test_opacus_snippet_runs(optimizer, capsys):
    torch = pytest.importorskip("torch")
    pytest.importorskip("opacus")
    if optimizer == "DP-SignSGD":
        pytest.importorskip("noisecast.opacus")
    torch.set_num_threads(1)
    dataset = torch.utils.data.TensorDataset(torch.ones(N, 3), torch.ones(N, 1))
    model = torch.nn.Linear(3, 1)
    before = [p.detach().clone() for p in model.parameters()]

    def loss_of(model, batch):
        return ((model(batch[0]) - batch[1]) ** 2).mean()

    names = {"model": model, "dataset": dataset, "loss_of": loss_of}
    exec(code_of("Opacus", optimizer), names)
    assert names["step"] == T and names["optimizer"].noise_multiplier == 0.7 and names["optimizer"].max_grad_norm == 0.5
    assert any((a - b).abs().max() > 1e-4 for a, b in zip(before, model.parameters()))
    assert float(capsys.readouterr().out.split()[-1]) > 0
    said = next(s.differs for s in snippets(settings(optimizer)) if s.tool == "Opacus")
    assert f"= {names['optimizer'].expected_batch_size} (ours" in said


def test_other_samplers_are_not_printed_as_poisson():
    for sampler in (nc.FixedSize(B, N), nc.Shuffled(B, N)):
        ours, *others = snippets(settings("DP-SGD", sampler))
        assert ours.code is not None and all(s.code is None and "epsilon is another" in s.differs for s in others)
    unknown = snippets(Settings(**vars(settings("DP-SGD")) | {"sampler": None}))
    assert all(s.code is None for s in unknown[1:]) and "not recorded" in unknown[0].differs
    assert all(s.code is None for s in snippets(settings("DP-SGD", adjacency=Adjacency.REPLACE_ONE))[1:])
    assert all(s.code is None for s in snippets(settings("DP-Something")))
