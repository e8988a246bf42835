"""Learning rates that change along a run: the staircase, who takes its steps, and who says that it cannot."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noisecast import (
    DPSGD,
    ClosedForm,
    DPAdam,
    DPSignSGD,
    Moments,
    Poisson,
    Question,
    SampledGaussian,
    Scenario,
    Schedule,
    Sde,
    Stream,
    Training,
    advise,
    answer,
    bundled,
    linear_model,
    quadratic,
    run_sweep,
    train,
)
from noisecast.cli import main
from noisecast.engines.simulate import SimulatedPaths
from noisecast.optimizers import CONSTANT, SHAPES
from noisecast.privacy.noise import RandomRoot
from noisecast.runners.sde import GeneralPaths
from noisecast.sweeps import estimate_seconds

EXAMPLES = Path(__file__).parents[1] / "examples"
STAIRS = Schedule((0, 100, 250), (1.0, 0.25, 2.0))
OPTIMIZERS = [DPSGD(learning_rate=0.02), DPSignSGD(learning_rate=0.01), DPAdam(learning_rate=0.004)]


def asked(
    optimizer=OPTIMIZERS[0], schedule=STAIRS, *, noise_multiplier=1.0, example_noise_std=0.1, num_steps=400
) -> Scenario:
    mechanism = SampledGaussian(noise_multiplier=noise_multiplier, l2_clip_norm=50.0, sampler=Stream(256))
    problem = quadratic([2.0, 1.0, 0.5], 0.1, example_noise_std=example_noise_std)
    return Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, num_steps=num_steps, schedule=schedule)


def on_data(schedule=STAIRS, optimizer=OPTIMIZERS[0], **settings) -> Scenario:
    problem = linear_model(*bundled("iris"))
    mechanism = SampledGaussian(
        noise_multiplier=1.0, l2_clip_norm=1.0, sampler=Poisson.for_batch_size(16, problem.num_examples)
    )
    return Scenario(problem=problem, mechanism=mechanism, optimizer=optimizer, schedule=schedule, num_steps=400)


# --- The staircase ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "starts, factors, words",
    [
        ((), (), "steps that rise from 0"),
        ((1, 5), (1.0, 2.0), "steps that rise from 0"),
        ((0, 5, 5), (1.0, 2.0, 3.0), "steps that rise from 0"),
        ((0, 2.5), (1.0, 2.0), "steps that rise from 0"),
        ((0, 5), (1.0,), "as many factors as starts"),
        ((0, 5), (1.0, 0.0), "factors between"),
        ((0, 5), (1.0, float("nan")), "factors between"),
        ((0, 5), (1.0, float("inf")), "factors between"),
        ((0, 5), (1.0, 1e-50), "factors between"),
        (0, 1.0, "steps that rise from 0"),
        ((0, 5), 1.0, "to be numbers"),
        ((0, 5), ("a", "b"), "to be numbers"),
        ((0, 5), (1.0, 10**400), "to be numbers"),
    ],
)
def test_a_staircase_that_is_none_is_refused(starts, factors, words):
    with pytest.raises(ValueError, match=words):
        Schedule(starts, factors)


@given(st.sampled_from(list(SHAPES)), st.integers(1, 400), st.data())
def test_stretches_are_all_the_steps_each_at_one_rate(shape, num_steps, data):
    schedule = Schedule.shaped(shape, num_steps, warmup_steps=data.draw(st.integers(0, num_steps - 1)))
    step = data.draw(st.integers(0, num_steps))
    to_step = data.draw(st.integers(step, num_steps))
    at = step
    for begin, stop, ends_phase in schedule.stretches(step, to_step):
        assert begin == at < stop
        assert len({schedule.at(k) for k in range(begin, stop)}) == 1
        assert ends_phase == (stop in schedule.starts)
        at = stop
    assert at == to_step


@pytest.mark.parametrize("warmup_steps", [0, 100])
def test_shapes_are_their_curves_to_half_a_phase(warmup_steps):
    k = np.arange(1000) + 0.5
    share = np.clip((k - warmup_steps) / (1000 - warmup_steps), 0, 1)
    curves = {"constant": np.ones(1000), "linear": 1 - share, "cosine": (1 + np.cos(np.pi * share)) / 2}
    for shape, curve in curves.items():
        schedule = Schedule.shaped(shape, 1000, warmup_steps=warmup_steps)
        found = np.array([schedule.at(step) for step in range(1000)])
        risen = np.where(k < warmup_steps, k / max(warmup_steps, 1), curve)
        # Half of a phase: the steepest rises by 1/20 or falls by pi/200 in one.
        assert np.abs(found - risen).max() <= (0.03 if warmup_steps else 0.01)
        np.testing.assert_allclose(found.mean(), risen.mean(), rtol=1e-3)


def test_shapes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="constant, linear, cosine, got square"):
        Schedule.shaped("square", 10)
    for steps, warmup_steps in ((10.0, 0), ("10", 0), (10, 2.5)):
        with pytest.raises(ValueError, match="whole numbers of steps"):
            Schedule.shaped("linear", steps, warmup_steps=warmup_steps)
    for warmup_steps in (-1, 10, 11):
        with pytest.raises(ValueError, match="0 <= warmup_steps < num_steps = 10"):
            Schedule.shaped("linear", 10, warmup_steps=warmup_steps)


# --- A scenario -------------------------------------------------------------------------------------------------------


def test_a_schedule_is_part_of_the_question_and_costs_nothing():
    with_stairs, without = asked(), asked(schedule=CONSTANT)
    assert with_stairs.id != without.id  # its noise is its own
    assert without.id == dataclasses.replace(without, schedule=Schedule([0], [1.0])).id
    assert asked(schedule=Schedule(np.array([0, 100, 250]), (1, np.float32(0.25), 2))).id == with_stairs.id
    assert on_data().privacy_spent == on_data(CONSTANT).privacy_spent
    with pytest.raises(ValueError, match=r"begin before num_steps = 250, got one that begins at step 250"):
        asked(num_steps=250)
    with pytest.raises(ValueError, match="Expected schedule to be a Schedule, got 'cosine'"):
        asked(schedule="cosine")


def test_a_short_warm_up_rises():
    schedule = Schedule.shaped("constant", 10_000, warmup_steps=37)
    factors = [schedule.at(step) for step in range(38)]
    assert factors == sorted(factors) and factors[0] < 0.05 and len(set(factors)) > 15 and factors[37] == 1.0


# --- Who takes its steps ----------------------------------------------------------------------------------------------


def test_moments_of_dp_sgd_are_the_exact_recursion():
    question = asked()
    h, mean, variance = np.array([2.0, 1.0, 0.5]), np.full(3, 0.1), np.zeros(3)
    noise = 0.1**2 / 256 + question.mechanism.mean_noise_std**2
    for rate in 0.02 * np.array([1.0] * 100 + [0.25] * 150 + [2.0] * 150):
        mean, variance = (1 - rate * h) * mean, (1 - rate * h) ** 2 * variance + rate**2 * noise
    found = Moments().forecast(question, []).metrics["loss"][-1]
    assert found == pytest.approx(0.5 * np.sum(h * (mean**2 + variance)), rel=1e-10)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: each.name)
def test_runners_agree(optimizer):
    """And with a constant rate the loss would be another: the comparison can fail."""
    table = answer(
        [asked(optimizer)], runners=[Training(), Sde(), Moments()], insecure_seeds=range(3000), record_at=[250]
    )
    losses = table[table["metric"] == "loss"]
    constant = Moments().forecast(asked(optimizer, CONSTANT), [250]).metrics["loss"]
    for step, other in zip((250, 400), constant[-2:]):
        at = {name: rows["value"] for name, rows in losses[losses["step"] == step].groupby("runner")}
        trained, forecast = at["training"].mean(), at["moments"].item()
        error = at["training"].sem()
        assert abs(trained - forecast) < 4 * error + 0.02 * forecast, (trained, error, forecast)
        assert abs(at["sde"].mean() - forecast) < 4 * at["sde"].sem() + 0.06 * forecast
        assert abs(other - forecast) > 0.1 * forecast


@pytest.mark.parametrize(
    "schedule", [CONSTANT, Schedule((0, 200), (1.0, 0.01)), Schedule.shaped("linear", 201)], ids=str
)
def test_steps_too_large_for_the_closure_are_said_whatever_comes_later(schedule):
    problem = quadratic([1.0] * 4, 5.0, example_noise_std=0.01)
    mechanism = SampledGaussian(noise_multiplier=0.05, l2_clip_norm=100.0, sampler=Stream(1000))
    question = Scenario(
        problem=problem, mechanism=mechanism, optimizer=DPSignSGD(learning_rate=0.05), num_steps=201, schedule=schedule
    )
    found = Moments().forecast(question, [200])
    assert found.extrapolated[-1] and "A step is large next to the noise" in found.reasons[0]


def test_both_kinds_of_paths_take_the_same_steps():
    questions = [asked(noise_multiplier=0.0, example_noise_std=1e-6)]
    root = RandomRoot.from_insecure_seed(0)
    found = []
    for paths in (SimulatedPaths, GeneralPaths):
        run = paths(questions, repeats=[0], root=root, substeps=8)
        run.advance(133)
        run.advance(400)
        found.append(float(run.evaluate()["loss"][0, 0]))
    assert found[0] == pytest.approx(found[1], rel=0.02)
    assert found[0] != pytest.approx(_quiet_loss(), rel=0.2)  # at a constant rate


def _quiet_loss() -> float:
    h = np.array([2.0, 1.0, 0.5])
    return float(0.5 * np.sum(h * (0.1 * np.exp(-0.02 * 400 * h)) ** 2))


def test_a_released_run_is_resumed_by_its_own_schedule_alone(tmp_path):
    path = tmp_path / "checkpoint"
    question = on_data()

    class Enough(Exception):
        pass

    def stop(moment):
        raise Enough

    with pytest.raises(Enough):
        train(question, insecure_seed=1, checkpoint=path, watch=stop)
    with pytest.raises(ValueError, match="checkpoint"):
        train(on_data(CONSTANT), checkpoint=path, resume=True)
    resumed = train(question, checkpoint=path, resume=True)
    straight = train(question, insecure_seed=1)
    assert np.isfinite(resumed.params).all() and resumed.params.shape == straight.params.shape


# --- Who says that it cannot ------------------------------------------------------------------------------------------


def test_closed_forms_and_other_forecasts_say_that_they_cannot():
    for runner, question in ((ClosedForm(), asked()), (Moments(), on_data())):
        assert runner.why_unsupported(question) == (
            f"{runner.name} knows constant learning rates alone, got a schedule; "
            'use runner "training", or leave it out.'
        )
    for question in (on_data(), asked()):  # also one that has a forecast
        with pytest.raises(ValueError, match="constant learning rates to advise about"):
            advise([question], target_epsilons=[1.0])
    with pytest.raises(ValueError, match="scenarios of one schedule"):
        answer([asked(), asked(schedule=CONSTANT)], runners=[Training()], record_at=[0])


def test_what_would_forget_it_refuses_it(tmp_path, monkeypatch, capsys):
    """A store's tables say the highest learning rate alone; a search for the best one is among constant ones."""
    question = Question(scenarios=(asked(),), runners=(Training(),), record_at=(0,), num_seeds=1)
    with pytest.raises(ValueError, match="constant learning rates in a sweep"):
        run_sweep([question], tmp_path / "store", workers=0)
    monkeypatch.chdir(tmp_path)
    text = (EXAMPLES / "quadratic.toml").read_text(encoding="utf-8")
    (tmp_path / "question.toml").write_text('schedule = "linear"\n' + text, encoding="utf-8")
    for option in ("--best", "--crossing"):
        assert main(["forecast", "question.toml", option]) == 2
        assert "Expected constant learning rates to search among" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(ValueError, match="constant learning rates in a sweep"):
        estimate_seconds([question])
    for command in ("forecast", "answer"):
        assert main([command, "question.toml", "--json"]) == 0
        said = capsys.readouterr()
        assert "The learning rates that are shown change along the run: times" in said.err
        found = json.loads(said.out)
        is_forecast = command == "forecast"
        written = found["forecasts"][0]["schedule"] if is_forecast else next(iter(found["schedules"].values()))
        assert len(written["starts"]) == len(written["factors"]) == 100
    assert main(["audit", "question.toml"]) == 2
    assert "constant learning rates to audit" in " ".join(capsys.readouterr().err.split())


def test_a_probe_is_refused_before_it_spends(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (EXAMPLES / "advise.toml").read_text(encoding="utf-8")
    (tmp_path / "question.toml").write_text('schedule = "linear"\n' + text, encoding="utf-8")
    assert main(["advise", "question.toml", "--epsilon", "1", "--private-probe", "0.1"]) == 2
    assert "constant learning rates to advise about" in " ".join(capsys.readouterr().err.split())


# --- From files and the command line ----------------------------------------------------------------------------------


def test_a_model_says_its_schedule(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lines = [f"{x:.3f},{'yes' if x > 0 else 'no'}" for x in rng.normal(size=60)]
    (tmp_path / "rows.csv").write_text("\n".join(["x,label", *lines]), encoding="utf-8")
    arguments = ["train", "rows.csv", "--batch-size", "8", "--num-steps", "50", "--noise-multiplier", "1"]
    arguments += ["--learning-rate", "0.1", "--schedule", "cosine", "--warmup-steps", "5"]
    assert main([*arguments, "--output", "model"]) == 0
    assert "times 0.0003 to 1 in 50 phases" in " ".join(capsys.readouterr().out.split())
    schedule = json.loads((tmp_path / "model" / "model.json").read_text())["scenario"]["schedule"]
    assert Schedule(**schedule) == Schedule.shaped("cosine", 50, warmup_steps=5)
    assert main(["report", "model", "--output", "page.html"]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "0.1, times 0.0003 to 1 in 50 phases" in page and "The learning rate changed along the run" in page
    arguments[arguments.index("5")] = "50"
    assert main([*arguments, "--output", "other"]) == 2
    assert "Expected 0 <= warmup_steps < num_steps = 50, got 50." in " ".join(capsys.readouterr().err.split())


def test_a_starting_rate_is_for_the_steps_that_are_taken(tmp_path, monkeypatch):
    """The bound's best rate goes as 1/sqrt(sum of the squared factors): a third of the steps for a line down to 0."""
    monkeypatch.chdir(tmp_path)
    lines = [f"{x:.3f},{'yes' if x > 0 else 'no'}" for x in np.random.default_rng(0).normal(size=60)]
    (tmp_path / "rows.csv").write_text("\n".join(["x,label", *lines]), encoding="utf-8")
    rates = []
    for shape in ("constant", "linear"):
        arguments = ["train", "rows.csv", "--batch-size", "8", "--num-steps", "2000", "--noise-multiplier", "30"]
        assert main([*arguments, "--schedule", shape, "--output", shape]) == 0
        rates.append(json.loads((tmp_path / shape / "model.json").read_text())["scenario"]["learning_rate"])
    assert rates[1] / rates[0] == pytest.approx(3**0.5, rel=0.06)  # rates have two digits
