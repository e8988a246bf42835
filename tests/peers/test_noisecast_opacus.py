"""noisecast.opacus: the sign step, per-example gradients against one at a time, and the mechanism that really runs."""

import copy
import dataclasses
import math
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import noisecast as nc
from noisecast.advice.numbers import Numbers, Tuned, advise_from_numbers

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
opacus = pytest.importorskip("opacus", reason="Opacus is not installed")
from noisecast.opacus import (  # noqa: E402
    DPSignSGD,
    advise,
    measure,
    mechanism_of,
    poisson_sampler,
    privacy_spent,
)

pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:Full backward hook", "ignore:Optimal order")


def toy(num_examples=200, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_examples, 5, generator=generator)
    return torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())


def network(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))


def private(dataset, *, batch_size=20, make=DPSignSGD, accountant="prv", **options):
    """(engine, module, optimizer, loader) of one make_private."""
    module, engine = network(), opacus.PrivacyEngine(accountant=accountant)
    settings = {"noise_multiplier": 1.2, "max_grad_norm": 0.5} | options
    made = engine.make_private(
        module=module, optimizer=make(module.parameters(), lr=0.01),
        data_loader=torch.utils.data.DataLoader(dataset, batch_size=batch_size, shuffle=True), **settings,
    )  # fmt: skip
    return engine, made[0], made[1], made[-1]


def train(module, optimizer, loader, *, epochs=1):
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()


def test_a_private_step_moves_by_the_sign_of_opacus_private_gradient():
    _, module, optimizer, loader = private(toy())
    for x, y in list(loader)[:3]:
        before = [p.detach().clone() for p in module.parameters()]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
        for old, param in zip(before, module.parameters()):
            gradient = jnp.asarray(param.grad.numpy())  # what Opacus clipped, summed and gave noise
            direction, _ = nc.DPSignSGD(learning_rate=0.01).direction(gradient, None, 0)
            expected = torch.tensor(np.asarray(old.numpy() - np.float32(0.01) * np.asarray(direction)))
            torch.testing.assert_close(param.detach(), expected, rtol=0, atol=0)
        assert float((param.grad == 0).float().mean()) < 0.1


def test_it_is_a_torch_optimizer():
    a, b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = DPSignSGD([{"params": [a]}, {"params": [b], "lr": 0.5}], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (a - 3).sum() + (b + 3).sum() * torch.tensor(2.0)
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == pytest.approx(6.0)
    scheduler.step()
    optimizer.step(closure)
    torch.testing.assert_close(a.detach(), torch.full((2,), -0.11))
    torch.testing.assert_close(b.detach(), torch.full((2,), -0.55))
    DPSignSGD([a, b], lr=1.0).load_state_dict(copy.deepcopy(DPSignSGD([a, b], lr=0.2).state_dict()))
    a.grad = None
    optimizer.step()  # a parameter without a gradient stays
    for lr in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="learning_rate"):
            DPSignSGD([a], lr=lr)


def one_at_a_time(module, loss_fn, dataset):
    """(n, d) gradients by autograd, example by example."""
    rows = []
    for x, y in dataset:
        loss = loss_fn(module(x[None]), y[None])
        found = torch.autograd.grad(loss, [p for p in module.parameters() if p.requires_grad])
        rows.append(torch.cat([g.flatten() for g in found]).double().numpy())
    return np.array(rows)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("frozen", [False, True])
def test_measured_gradients_are_autograds_one_at_a_time(reduction, frozen):
    dataset, module = toy(53), network()
    module[0].weight.requires_grad_(not frozen)
    before = copy.deepcopy(module.state_dict())
    loss_fn = torch.nn.CrossEntropyLoss(reduction=reduction)
    loader = torch.utils.data.DataLoader(dataset, batch_size=10, shuffle=False)
    rows = one_at_a_time(module, loss_fn, dataset)
    norms = np.linalg.norm(rows, axis=1)
    clip = float(np.sort(norms)[20:22].mean())
    clipped = rows * np.minimum(1, clip / norms)[:, None]
    seen = measure(module, loss_fn, loader, l2_clip_norm=clip, loss_reduction=reduction)
    assert (seen.num_params, seen.num_examples) == (rows.shape[1], 53)
    np.testing.assert_allclose(seen.non_private_norms, norms, rtol=1e-5)
    assert seen.non_private_share_clipped() == np.mean(norms > clip) == 32 / 53
    assert seen.non_private_share_clipped(1e9) == 0 and seen.non_private_share_clipped(1e-9) == 1
    np.testing.assert_allclose(seen.non_private_quantiles(0.1, 0.5), np.quantile(norms, [0.1, 0.5]), rtol=1e-5)
    np.testing.assert_allclose(seen.non_private_example_noise_std, np.sqrt(clipped.var(axis=0).mean()), rtol=1e-5)
    np.testing.assert_allclose(seen.non_private_gradient_norm, np.linalg.norm(rows.mean(axis=0)), rtol=1e-5)
    x, y = dataset.tensors
    np.testing.assert_allclose(seen.non_private_loss, torch.nn.functional.cross_entropy(module(x), y).item(), rtol=1e-5)
    assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())
    assert not any(hasattr(p, "grad_sample") for p in module.parameters())
    torch.optim.SGD(module.parameters(), lr=0.1).step()  # still a plain module


def test_a_gradient_that_is_not_finite_is_clipped_and_left_out_of_the_spread():
    x, y = toy(12).tensors
    loader = torch.utils.data.DataLoader(toy(12), batch_size=12)
    x = x.clone()
    x[3] = float("nan")
    bad = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=12)
    good, spoilt = (measure(network(), torch.nn.CrossEntropyLoss(), at, l2_clip_norm=1e6) for at in (loader, bad))
    assert good.non_private_share_clipped() == 0 and spoilt.non_private_share_clipped() == 1 / 12
    assert math.isfinite(spoilt.non_private_example_noise_std) and math.isfinite(spoilt.non_private_gradient_norm)


@pytest.mark.parametrize("reduction, declared", [("sum", "mean"), ("mean", "sum")])
@pytest.mark.parametrize("batch_size", [1, 20])
def test_a_reduction_that_is_not_the_declared_one_is_seen_without_being_told(reduction, declared, batch_size):
    """A plain function does not say what it does over the batch; believed, every norm would be wrong by its size."""
    loader = torch.utils.data.DataLoader(toy(), batch_size=batch_size)
    module = torch.nn.Sequential(torch.nn.Dropout(0.9), network())  # of which chance must not be seen

    def loss_fn(outputs, targets):
        return torch.nn.functional.cross_entropy(outputs, targets, reduction=reduction)

    with pytest.raises(ValueError, match=f"takes the {declared} over the batch and is . times as large"):
        measure(module, loss_fn, loader, l2_clip_norm=1.0, loss_reduction=declared)
    seen = measure(module, loss_fn, loader, l2_clip_norm=1.0, loss_reduction=reduction)
    assert seen.non_private_share_clipped() < 1


def test_a_batch_without_loss_shows_no_reduction_and_the_next_one_does():
    x = torch.cat([torch.zeros(4, 5), torch.ones(4, 5)])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.zeros(8, 2)), batch_size=4)
    module = torch.nn.Linear(5, 2, bias=False)
    assert measure(module, torch.nn.MSELoss(), loader, l2_clip_norm=1.0).num_examples == 8
    with pytest.raises(ValueError, match="got one that is 2 times as large"):
        measure(module, lambda o, t: (o - t).square().sum(), loader, l2_clip_norm=1.0)


class Boxed:
    """Inputs that are no tensor."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Boxed(self.x.to(device))


class OfBoxes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(5, 2)

    def forward(self, boxed):
        return self.inner(boxed.x)


def test_a_reduction_that_cannot_be_looked_at_must_be_said():
    x, y = toy(8).tensors
    batches = [(Boxed(x), y)]
    assert measure(OfBoxes(), torch.nn.CrossEntropyLoss(), batches, l2_clip_norm=1.0).num_examples == 8
    with pytest.raises(TypeError, match="got Boxed and Tensor; or give a loss_fn that says its reduction"):
        measure(OfBoxes(), torch.nn.functional.cross_entropy, batches, l2_clip_norm=1.0)


def test_measure_refuses_what_it_would_measure_wrongly():
    loader, loss_fn = torch.utils.data.DataLoader(toy(), batch_size=20), torch.nn.CrossEntropyLoss()
    _, wrapped, _, poisson = private(toy())
    frozen = network().requires_grad_(False)
    for arguments, error, sentence in [
        ((wrapped, loss_fn, loader), TypeError, "plain module"),
        ((network(), loss_fn, poisson), TypeError, "each example once"),
        ((frozen, loss_fn, loader), ValueError, "trainable"),
        ((network(), torch.nn.CrossEntropyLoss(reduction="sum"), loader), ValueError, "reduction 'mean'"),
        ((network(), lambda o, t: o.sum(dim=1), loader), ValueError, "scalar"),
        ((network(), loss_fn, [torch.zeros(3, 5)]), TypeError, "inputs, targets"),
    ]:
        with pytest.raises(error, match=sentence):
            measure(*arguments, l2_clip_norm=1.0)
    with pytest.raises(ValueError, match="l2_clip_norm > 0"):
        measure(network(), loss_fn, loader, l2_clip_norm=0.0)


def test_the_mechanism_is_what_make_private_was_asked_for():
    _, _, optimizer, loader = private(toy())
    mechanism = mechanism_of(optimizer, loader)
    assert (mechanism.noise_multiplier, mechanism.l2_clip_norm, mechanism.expected_batch_size) == (1.2, 0.5, 20)
    assert 0.1 <= mechanism.sampling_probability < 0.1 + 2.0**-24
    assert mechanism.adjacency == nc.Adjacency.ADD_OR_REMOVE_ONE
    _, _, summed, loader = private(toy(), loss_reduction="sum")
    assert mechanism_of(summed, loader).expected_batch_size == 1


@pytest.mark.parametrize(
    "kind", [{"clipping": "per_layer", "max_grad_norm": [0.3, 0.4, 0.0001, 1.2]}, {"grad_sample_mode": "ghost"}]
)
def test_a_clip_norm_that_is_kept_twice_is_refused(kind):
    """A scheduler changes the one that scales the noise and not the one that clips: epsilon would be far too small."""
    _, _, optimizer, loader = private(toy(), **kind)
    with pytest.raises(ValueError, match="of which noisecast has no proof"):
        mechanism_of(optimizer, loader)


def test_an_engine_that_counted_nothing_is_no_proof_that_nothing_was_spent():
    engine, _, optimizer, loader = private(toy())
    with pytest.raises(ValueError, match="Expected an engine that has counted steps, got none"):
        privacy_spent(engine, optimizer, loader, target_delta=1e-5)


@pytest.mark.parametrize("scale, passes", [(1.0, True), (0.97, False), (1.03, False)])
def test_the_noise_that_opacus_draws_is_the_mechanisms(scale, passes):
    """On an empty batch the private gradient is noise alone."""
    torch.manual_seed(910_021)
    _, module, optimizer, loader = private(toy())
    drawn = []
    for _ in range(400):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(torch.zeros(0, 5)), torch.zeros(0, dtype=torch.long)).backward()
        optimizer.pre_step()
        drawn += [param.grad.flatten().numpy().copy() for param in module.parameters()]
    numbers = scale * np.concatenate(drawn).astype(float) / mechanism_of(optimizer, loader).mean_noise_std
    statistic = np.sum(numbers**2)
    p = 2 * min(stats.chi2.sf(statistic, numbers.size), stats.chi2.cdf(statistic, numbers.size))
    assert (p > 1e-6) == passes


def test_the_sampling_probability_is_the_samplers_and_not_the_accountants():
    """25,000 records in batches of 64 are 391; Opacus' private loader has 390, and its accountant is told 1/390."""
    _, _, optimizer, loader = private(torch.utils.data.TensorDataset(torch.zeros(25_000, 5)), batch_size=64)
    mechanism = mechanism_of(optimizer, loader)
    assert len(loader) == 390 and mechanism.sampling_probability == pytest.approx(1 / 391, rel=1e-4)
    assert mechanism.sampling_probability >= 1 / 391
    torch.manual_seed(910_022)
    drawn = sum(len(batch) for batch in loader.batch_sampler)  # 390 batches
    trials = 390 * 25_000
    assert stats.binomtest(drawn, trials, mechanism.sampling_probability).pvalue > 1e-6
    assert stats.binomtest(drawn, trials, 1.05 * mechanism.sampling_probability).pvalue < 1e-6


@pytest.mark.parametrize("num_examples, batch_size", [(200, 20), (1437, 128), (390, 1), (1000, 17), (65, 32)])
def test_what_is_planned_is_what_make_private_does(num_examples, batch_size):
    dataset = toy(num_examples)
    _, _, optimizer, loader = private(dataset, batch_size=batch_size)
    planned = poisson_sampler(torch.utils.data.DataLoader(dataset, batch_size=batch_size, shuffle=True))
    assert mechanism_of(optimizer, loader).sampler == planned
    with pytest.raises(TypeError, match="plain DataLoader"):
        poisson_sampler(loader)


def test_only_poisson_batches_are_accounted_as_poisson():
    _, _, optimizer, loader = private(toy(), poisson_sampling=False)
    with pytest.raises(ValueError, match="Expected a loader that draws Poisson batches"):
        mechanism_of(optimizer, loader)
    _, _, optimizer, _ = private(toy())
    weighted = torch.utils.data.WeightedRandomSampler(torch.arange(200.0), 200)
    with pytest.raises(ValueError, match="Expected a loader that draws Poisson batches"):
        mechanism_of(optimizer, torch.utils.data.DataLoader(toy(), batch_size=20, sampler=weighted))


def test_what_has_no_proof_is_refused():
    adaptive = {
        "clipping": "adaptive", "target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.1, "max_clipbound": 2.0,
        "min_clipbound": 0.1, "unclipped_num_std": 5.0,
    }  # fmt: skip
    _, _, optimizer, loader = private(toy(), **adaptive)
    with pytest.raises(ValueError, match="AdaClipDPOptimizer"):
        mechanism_of(optimizer, loader)
    _, _, optimizer, loader = private(toy())
    with pytest.raises(ValueError, match="of one make_private"):
        mechanism_of(optimizer, private(toy(300), batch_size=30)[3])
    with pytest.raises(TypeError, match="Expected the optimizer that make_private returned"):
        mechanism_of(optimizer.original_optimizer, loader)
    with pytest.raises(TypeError, match="Expected the loader"):
        mechanism_of(optimizer, [1, 2])


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_epsilon_is_checked_against_opacus_own(accountant):
    """Never below the lower bound that Opacus' PRV accountant proves; close to its upper bound."""
    engine, module, optimizer, loader = private(toy(), accountant=accountant, noise_multiplier=0.9)
    train(module, optimizer, loader, epochs=5)
    spent = privacy_spent(engine, optimizer, loader, target_delta=1e-5)
    assert engine.accountant.history == [(0.9, 0.1, 50)]
    same = nc.epsilon_spent(mechanism_of(optimizer, loader), num_steps=50, target_delta=1e-5)
    assert spent.epsilon == same.epsilon
    referee = opacus.accountants.PRVAccountant()
    referee.history = list(engine.accountant.history)
    low, _, high = referee._get_dprv(eps_error=0.01, delta_error=1e-8).compute_epsilon(1e-5, 1e-8, 0.01)
    assert low <= spent.epsilon <= 1.02 * high
    assert 0.75 * engine.get_epsilon(1e-5) < spent.epsilon < 1.02 * engine.get_epsilon(1e-5)


def test_epsilon_of_a_run_that_changed_on_the_way_is_refused():
    engine, module, optimizer, loader = private(toy())
    train(module, optimizer, loader)
    with pytest.raises(ValueError, match="sampling rate 1/15, got"):
        privacy_spent(engine, optimizer, private(toy(300))[3], target_delta=1e-5)  # as large batches, of more records
    optimizer.noise_multiplier = 5.0
    with pytest.raises(ValueError, match="counted noise multiplier"):
        privacy_spent(engine, optimizer, loader, target_delta=1e-5)
    train(module, optimizer, loader)
    with pytest.raises(ValueError, match="2 different stretches"):
        privacy_spent(engine, optimizer, loader, target_delta=1e-5)


def test_epsilon_is_of_the_engine_that_counts_the_steps():
    """Another engine of equal settings has another number of steps; a hook of one's own counts some, or none."""
    dataset = toy()
    (engine, module, optimizer, loader), (other, *others) = private(dataset), private(dataset)
    train(module, optimizer, loader, epochs=3)
    train(*others)
    for wrong in (other, opacus.PrivacyEngine(accountant="rdp")):
        with pytest.raises(ValueError, match="Expected an optimizer whose steps this engine counts"):
            privacy_spent(wrong, optimizer, loader, target_delta=1e-5)
    assert privacy_spent(engine, optimizer, loader, target_delta=1e-5).epsilon > 0
    for hook in (lambda optimizer: None, None):
        optimizer.attach_step_hook(hook)
        with pytest.raises(ValueError, match="leave its step hook as it is"):
            privacy_spent(engine, optimizer, loader, target_delta=1e-5)


def test_opacus_does_not_drop_a_gradient_that_is_not_finite():
    """Which docs/opacus.md warns of: the day this fails, take the warning out."""
    _, module, optimizer, _ = private(toy())
    x = torch.zeros(4, 5)
    x[2, 2] = float("nan")
    torch.nn.functional.cross_entropy(module(x), torch.zeros(4, dtype=torch.long)).backward()
    optimizer.pre_step()
    assert any(bool(param.grad.isnan().any()) for param in module.parameters())


OPTIMIZERS = [nc.DPSGD(learning_rate=0.5), nc.DPSignSGD(learning_rate=0.01)]


def test_advice_is_that_of_the_measured_numbers():
    loader = torch.utils.data.DataLoader(toy(2000), batch_size=50)
    seen = measure(network(), torch.nn.CrossEntropyLoss(), loader, l2_clip_norm=1.0)
    mechanism = nc.SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=poisson_sampler(loader))
    asked = {"optimizers": OPTIMIZERS, "num_steps": 400, "target_epsilons": [8.0, 0.5], "target_delta": 1e-5}
    advice = advise(seen, mechanism, **asked)
    numbers = Numbers(
        num_params=58, sampler=mechanism.sampler, num_steps=400, target_delta=1e-5, tuned_noise_multiplier=1.0,
        example_noise_std=seen.non_private_example_noise_std,
        optimizers=tuple(
            Tuned(theory=o.theory, learning_rate=o.learning_rate, l2_clip_norm=1.0,
                  clipped_share=seen.non_private_share_clipped())
            for o in OPTIMIZERS
        ),
    )  # fmt: skip
    plain = advise_from_numbers(numbers, [8.0, 0.5])
    assert (advice.epsilons, advice.thresholds) == (plain.epsilons, plain.thresholds)
    assert advice.unknown[:-1] == plain.unknown and "non-private" in advice.unknown[-1]
    rates = [[o.retuned.learning_rate for o in at.optimizers] for at in advice.epsilons]
    assert rates[1][0] < 0.5 * rates[0][0]  # DP-SGD slows down under more noise, by what was measured
    assert rates[1][1] == pytest.approx(rates[0][1], rel=0.02)  # DP-SignSGD keeps its rate
    with pytest.raises(ValueError, match="Expected gradients that were measured"):
        advise(seen, dataclasses.replace(mechanism, l2_clip_norm=2.0), **asked)


def test_without_torch_the_import_says_what_to_install():
    code = "import sys; sys.modules['torch'] = None; import noisecast.opacus"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr.strip().splitlines()[-1] == (
        "ImportError: noisecast.opacus needs PyTorch and Opacus; install them with `pip install 'noisecast[opacus]'`."
    )
