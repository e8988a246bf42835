"""Stores to report on, filled by a formula instead of training: what a page says of rows does not depend on who ran."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import noisecast as nc
from noisecast.question import Question
from noisecast.report import tuning_cost
from noisecast.sweeps import Store
from noisecast.sweeps.ledger import Ledger, ledger_of
from noisecast.sweeps.store import Finished

LEVELS = (1.0, 4.0)
RATES = {nc.DPSGD: (0.5, 4.0), nc.DPSignSGD: (0.01, 0.1), nc.DPAdam: (0.01, 0.1)}
STEPS = {32: 40, 64: 20}
SEEDS = 3
METRICS = ("test_loss", "loss", "test_accuracy", "accuracy", "clip_fraction")


def questions() -> list[Question]:
    train, _ = nc.bundled("breast_cancer")
    problem = nc.linear_model(train)
    return [
        Question(
            scenarios=tuple(
                nc.Scenario(
                    problem=problem,
                    mechanism=nc.SampledGaussian(
                        noise_multiplier=z,
                        l2_clip_norm=clip,
                        sampler=nc.Poisson.for_batch_size(batch_size, train.num_examples),
                    ),
                    optimizer=kind(learning_rate=rate),
                    num_steps=num_steps,
                    target_delta=1e-4,
                )
                for z in LEVELS
                for kind, rates in RATES.items()
                for rate in rates
                for clip in (0.1, 0.5)
            ),
            runners=(nc.Training(), nc.Moments()),
            num_seeds=SEEDS,
            record_at=tuple(range(0, num_steps + 1, num_steps // 4)),
        )
        for batch_size, num_steps in STEPS.items()
    ]


def rows_of(asked: list[Question]) -> pd.DataFrame:
    """A loss that falls with the steps and rises with the noise, each optimizer with a slope of its own."""
    rng, rows = np.random.default_rng(0), []
    for question in asked:
        for scenario in question.scenarios:
            columns = scenario.columns()
            noise, rate = columns["noise_multiplier"], columns["learning_rate"]
            slope = {"DP-SGD": 0.2, "DP-SignSGD": 0.05, "DP-Adam": 0.1}[columns["optimizer"]]
            end = 0.3 - 0.02 * np.log(slope) + slope * noise * rate**0.3 + 0.01 * columns["l2_clip_norm"]
            for runner, seed in [("moments", None), *(("training", seed) for seed in range(SEEDS))]:
                for step in question.record_at:
                    loss = end + (2 - end) * np.exp(-5 * step / columns["num_steps"])
                    loss += 0 if seed is None else 0.01 * rng.standard_normal()
                    for i, metric in enumerate(METRICS):
                        value = 1 / (1 + loss) if "accuracy" in metric else loss + 0.01 * i
                        rows.append(columns | {"runner": runner, "seed": seed, "step": step, "metric": metric,
                                               "value": value, "status": "ok"})  # fmt: skip
    return pd.DataFrame(rows).assign(problem="logistic on somebody's data")


def store_of(folder, rows: pd.DataFrame, ledger: Ledger | None):
    with Store.open_for_writing(folder) as store:
        store.add(rows, Finished(cells=("a",), code="b", data=("c",), seconds=1.0))
        if ledger is not None:
            store.write_ledger(ledger)
    return folder


@pytest.fixture(scope="session", autouse=True)
def each_price_once():
    """The accountant's own answers, remembered: many pages are made of one ledger."""
    known = {}

    def remembered(function):
        def ask(runs, **options):
            key = (function.__name__, repr(runs), repr(options))
            if key not in known:
                known[key] = function(runs, **options)
            return known[key]

        return ask

    with pytest.MonkeyPatch.context() as patch:
        for name in ("composed_epsilon", "repeat_select_epsilon"):
            patch.setattr(tuning_cost, name, remembered(getattr(tuning_cost, name)))
        yield


@pytest.fixture(scope="session")
def swept(tmp_path_factory):
    """A finished store."""
    asked = questions()
    return store_of(tmp_path_factory.mktemp("report") / "store", rows_of(asked), ledger_of(asked))


@pytest.fixture
def made(swept, tmp_path):
    """`made(change, ledger)`: a store of the same rows after `change`, with the ledger changed too; None drops it."""

    def make(change=lambda table: table, ledger=lambda whole: whole):
        before = Store(swept)
        return store_of(tmp_path / "made", change(before.read()), ledger(before.ledger()))

    return make


@pytest.fixture
def unfinished():
    """The ledger of a sweep with one more run than has finished."""

    def change(ledger: Ledger) -> Ledger:
        (scenario, _), run = next(iter(ledger.runs.items()))
        return replace(ledger, runs={**ledger.runs, (scenario, 99): run})

    return change


@pytest.fixture
def model_folder(tmp_path):
    """`model_folder(**changes of the statement)`: what `noisecast train` writes, as far as a report reads it."""
    from noisecast.files import strict_json
    from noisecast.statement import privacy_statement

    def make(reproducible=False, noise_multiplier=2.0, names=("no", "yes"), problem="logistic on rows.csv"):
        scenario = questions()[0].scenarios[0]
        scenario = replace(scenario, mechanism=scenario.mechanism.with_noise_multiplier(noise_multiplier))
        folder = tmp_path / "model"
        folder.mkdir()
        said = privacy_statement(scenario, reproducible=reproducible).to_json()
        (folder / "privacy.json").write_text(strict_json(said), encoding="utf-8")
        about = {"format": 1, "label_names": list(names), "scenario": scenario.columns() | {"problem": problem}}
        (folder / "model.json").write_text(strict_json(about), encoding="utf-8")
        (folder / "non_private.json").write_text(json.dumps({"loss": 0.5, "test_accuracy": 0.875}), encoding="utf-8")
        return folder

    return make
