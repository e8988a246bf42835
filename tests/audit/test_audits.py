"""The audits themselves: every sampler, optimizer and engine; and the command."""

import json

import numpy as np
import pytest

from noisecast import DPSGD, FixedSize, Poisson, SampledGaussian, Shuffled, Stream, engines
from noisecast.audit import LowerBound, Verdict, canary, one_run_audit, white_box_audit
from noisecast.audit.standard import standard_audits
from noisecast.cli import main
from noisecast.optimizers import OPTIMIZERS
from noisecast.privacy.drawing import Batches
from noisecast.privacy.mechanism import Adjacency
from noisecast.privacy.noise import RandomRoot

QUICK_AUDIT = ["--engine", "row_sparse", "--runs", "1000", "--insecure-seed", "1", "--json"]
ROOT = RandomRoot.from_insecure_seed(20261121)
REPLACE = Adjacency.REPLACE_ONE


def gaussian(sampler, adjacency=Adjacency.ADD_OR_REMOVE_ONE, z=1.0, clip=1.0) -> SampledGaussian:
    return SampledGaussian(noise_multiplier=z, l2_clip_norm=clip, sampler=sampler, adjacency=adjacency)


@pytest.mark.parametrize(
    "clip", [pytest.param(1e-3, marks=pytest.mark.slow), 1.0, pytest.param(50.0, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("engine", ["row_sparse", "dense", "simulate"])
def test_the_canary_is_one_direction_of_the_clips_length_at_every_step(engine, clip):
    """Next to no noise: 3 steps move the parameters by 3 C along u with it, by 0 or -3 C without, and nowhere else."""
    for adjacency, without in ((Adjacency.ADD_OR_REMOVE_ONE, 0.0), (REPLACE, -1.0)):
        sampler = Stream(1) if engine == "simulate" else Shuffled(2, 2)
        steps = 1 if engine == "simulate" else 3
        pair = canary.pair(gaussian(sampler, adjacency, z=1e-6, clip=clip), DPSGD(learning_rate=1.0), engine, steps)
        for scenario, expected in zip(pair, (1.0, without)):
            run = engines.start([scenario], repeats=[0], root=ROOT)
            run.advance(steps)
            along = canary.along_canary(run.params, scenario)[0, 0]
            unit = steps * scenario.optimizer.learning_rate * clip / sampler.expected_batch_size
            np.testing.assert_allclose(along / unit, expected, atol=1e-4)


def test_a_null_audit_proves_nothing():
    found = white_box_audit(
        gaussian(Shuffled(2, 2)), DPSGD(learning_rate=1.0), engine="row_sparse", num_steps=2, target_delta=1e-5,
        root=ROOT, runs=4096, with_canary=False,
    )  # fmt: skip
    assert (found.bound.epsilon, found.epsilon, found.contradiction()) == (0.0, 0.0, None)


def test_too_large_a_lower_bound_contradicts_in_a_sentence():
    honest = white_box_audit(
        gaussian(Shuffled(2, 2), z=0.5), DPSGD(learning_rate=1.0), engine="row_sparse", num_steps=1, target_delta=0.1,
        root=ROOT, runs=4096,
    )  # fmt: skip
    assert honest.is_consistent
    lying = type(honest)(**vars(honest) | {"epsilon": honest.bound.epsilon / 2})
    assert "do not release a model" in (lying.contradiction() or "")


def test_what_cannot_be_audited_is_refused():
    settings = {"num_steps": 1, "target_delta": 1e-5, "root": ROOT}
    for mechanism, engine, words in [
        (gaussian(Shuffled(2, 2)), "fast", "an engine among"),
        (gaussian(Shuffled(2, 2)), "simulate", "engine simulate for a stream"),
        (gaussian(Shuffled(2, 2), z=0.0), "dense", "noise to audit"),
    ]:
        with pytest.raises(ValueError, match=words):
            white_box_audit(mechanism, DPSGD(learning_rate=1.0), engine=engine, **settings)
    with pytest.raises(ValueError, match="at least 10 canaries"):
        one_run_audit(DPSGD(learning_rate=1.0), target_epsilon=1.0, target_delta=1e-5, root=ROOT, num_canaries=3)


def test_one_run_stays_below_and_sees_the_canaries_when_there_is_little_noise():
    common = {"target_epsilon": 1.0, "target_delta": 1e-5, "root": ROOT, "num_canaries": 400, "num_steps": 60}
    little = one_run_audit(DPSGD(learning_rate=1.0), **common, noise_multiplier=0.4)
    much = one_run_audit(DPSGD(learning_rate=1.0), **common, noise_multiplier=20.0)
    assert 1.0 < little.bound.epsilon <= little.epsilon
    assert much.bound.epsilon <= much.epsilon


def test_one_run_of_the_standard_audits_can_prove_something():
    """At delta 1e-3 a thousand canaries may all be guessed by chance: whatever the attack does, its bound is 0."""
    audits = standard_audits(
        target_epsilon=4.0, target_delta=1e-3, root=ROOT, optimizers=(DPSGD,), engines=("row_sparse",)
    )
    found = list(audits)[-1]()
    assert (found.runs, found.bound.delta) == (1, 1e-5)
    assert 0.5 < found.bound.epsilon <= found.epsilon


def test_standard_audits_are_of_every_sampler_optimizer_and_engine():
    audits = list(standard_audits(target_epsilon=4.0, target_delta=1e-3, root=ROOT))
    white_box, null, one_run = 5 * 2 * 3 + 3, 2, 2 * 3  # five settings of data and one of a stream
    rare = 2  # of DP-SGD
    assert len(audits) == white_box + rare + null + one_run


def everybody(sampler, key, start, stop, num_examples):
    return HONEST_BATCHES(Poisson(1.0, sampler.expected_batch_size), key, start, stop, num_examples)


def the_first_row(sampler, key, start, stop, num_examples):
    del key, num_examples
    mask = np.zeros((stop - start, sampler.width), bool)
    mask[:, 0] = True
    return Batches(np.zeros(mask.shape, np.int32), mask)


HONEST_BATCHES = Poisson.batches


@pytest.mark.parametrize("engine", ["row_sparse", "dense"])
@pytest.mark.parametrize("batches, is_consistent", [(HONEST_BATCHES, True), (everybody, False), (the_first_row, False)])
def test_a_record_that_is_drawn_too_often_is_seen(engine, batches, is_consistent, monkeypatch):
    """By the audit of rare sampling; the other settings prove nothing of batches that hold everybody."""
    audits = list(standard_audits(
        target_epsilon=4.0, target_delta=1e-3, root=ROOT, optimizers=(DPSGD,), engines=(engine,), runs=400
    ))  # fmt: skip
    monkeypatch.setattr(Poisson, "batches", batches)
    found = audits[-2]()
    assert (found.epsilon <= 1.0, found.bound.delta, found.is_consistent) == (True, 0.01, is_consistent)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("engine", ["row_sparse", "dense"])
@pytest.mark.parametrize(
    "sampler, adjacency, num_steps",
    [
        (Poisson(1.0, 2), Adjacency.ADD_OR_REMOVE_ONE, 2),
        (Shuffled(2, 2), REPLACE, 2),
        (Poisson(0.5, 2), Adjacency.ADD_OR_REMOVE_ONE, 2),
        (Poisson(0.5, 2), REPLACE, 2),
        (FixedSize(2, 16), REPLACE, 3),
        (Shuffled(2, 4), Adjacency.ADD_OR_REMOVE_ONE, 4),
    ],
)
def test_no_attack_beats_the_accountant(sampler, adjacency, num_steps, engine, optimizer):
    mechanism = gaussian(sampler, adjacency, z=1.2 * (2 if adjacency == REPLACE else 1))
    found = white_box_audit(
        mechanism, optimizer(learning_rate=1.0), engine=engine, num_steps=num_steps, target_delta=1e-3, root=ROOT
    )
    print(f"{found.optimizer}, {engine}, {found.what}: {found.bound.epsilon:.3f} <= {found.epsilon:.3f}")
    assert found.is_consistent
    if mechanism.sampling_probability == 1:
        assert found.bound.epsilon >= found.epsilon / 3


def test_a_shown_bound_is_rounded_down_and_a_shown_epsilon_up(monkeypatch, capsys):
    from noisecast.cli import audit

    bound = LowerBound(1.2349, 1e-5, 0.999, "a rule")
    found = Verdict("an attack", "DP-SGD", "dense", 1.99801, bound, 100, "parameters")
    monkeypatch.setattr(audit, "_audits", lambda *_: [lambda: found])
    assert main(["audit"]) == 0
    said = capsys.readouterr()
    assert "1.234 of 1.999" in said.err
    assert "1.234" in said.out and "1.999" in said.out


def test_the_command_audits_a_scenario_file(tmp_path, capsys):
    path = tmp_path / "scenario.toml"
    path.write_text(
        'num_steps = 2\ntarget_delta = 0.01\n[problem]\nkind = "bundled"\nname = "iris"\n'
        '[mechanism]\nnoise_multiplier = 2.0\nl2_clip_norm = 0.5\nbatch_size = 120\nsampler = "shuffled"\n'
        '[[optimizer]]\nname = "dp-sgd"\nlearning_rate = 0.1\n'
    )
    assert main(["audit", str(path), *QUICK_AUDIT]) == 0
    (verdict,) = json.loads(capsys.readouterr().out)["verdicts"]
    assert verdict["is_consistent"] and 0 <= verdict["lower_bound"] <= verdict["epsilon"]


def test_a_file_with_several_mechanisms_is_one_audit_each_and_says_which(tmp_path, capsys):
    path = tmp_path / "scenario.toml"
    path.write_text(
        'num_steps = 2\ntarget_delta = 0.01\n[problem]\nkind = "bundled"\nname = "iris"\n'
        '[mechanism]\nnoise_multiplier = 2.0\nl2_clip_norm = [0.5, 1.0]\nbatch_size = 120\nsampler = "shuffled"\n'
        '[[optimizer]]\nname = "dp-sgd"\nlearning_rate = [0.1, 0.2]\n'
    )
    assert main(["audit", str(path), *QUICK_AUDIT]) == 0
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    half, whole = (each["what"] for each in verdicts)  # a rate is the audit's own
    assert half.startswith("noise 2, clip 0.5, ") and whole.startswith("noise 2, clip 1, ")


def test_the_command_refuses_in_one_sentence(capsys):
    for arguments, words in [(["--runs", "3"], "--runs >= 100"), (["--confidence", "1"], "--confidence < 1")]:
        assert main(["audit", *arguments]) == 2
        said = capsys.readouterr().err
        assert words in said and len(said.splitlines()) == 1
