"""The forecast on generated data: twenty-six kinds of features, two classes, trained until each mean loss is known.

  python -m benchmarks.forecast_generated
  python -m benchmarks.forecast_generated wide,zipf-counts --most-seeds 2048 --output cells.csv
  python -m benchmarks.forecast_generated --again cells.csv       # its cells forecast anew, against its trained runs
  python -m benchmarks.forecast_generated one-hot --noise-multipliers 0.05,0.3 --batch-size 24 --optimizer dp-sign-sgd

For each kind: the learning rate and clip norm that `forecast_best` names at noise 1 for each optimizer; then forecasts
and trained runs over noise multipliers 0.5, 2 and 8 (or those asked for), a third of, once and three times that rate,
half of and once that clip norm, 54 cells. The kinds are none that the forecast was made with: what it takes for granted
should fail here.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse
from cyclopts import App
from rich.console import Console
from rich.table import Table

from noisecast.cli.accuracy import percent, summary
from noisecast.cli.output import TABLE_STYLE
from noisecast.cli.trained import trained_on
from noisecast.figures import accuracy_picture
from noisecast.forecasting import forecast_best
from noisecast.privacy.mechanism import SampledGaussian
from noisecast.privacy.sampling import Poisson
from noisecast.problems.datasets import Dataset
from noisecast.problems.linear import LinearModel, linear_model
from noisecast.runners import Moments, Training, answer
from noisecast.scenario import Scenario
from noisecast.scenario_file import OPTIMIZER_NAMES

SEED_DATA = 960_001
NUM_STEPS, RECORD_AT = 500, (100, 500)
RATE_FACTORS, CLIP_FACTORS = (1 / 3, 1.0, 3.0), (0.5, 1.0)
FIRST_SEEDS = 16
Features = np.ndarray | scipy.sparse.csr_array
console = Console(width=130, highlight=False)
app = App(help=__doc__, help_format="plaintext")


def binary(rng: np.random.Generator) -> Features:
    """Rows of very different length."""
    share = np.exp(rng.normal(-4, 1.2, (4000, 1))).clip(0.002, 0.6)
    return scipy.sparse.csr_array((rng.random((4000, 600)) < share).astype(np.float32))


def one_factor(rng: np.random.Generator) -> Features:
    return (rng.normal(size=(2500, 1)) + 0.7 * rng.normal(size=(2500, 400))) / 20


def five_factors(rng: np.random.Generator) -> Features:
    common = rng.normal(size=(2500, 5)) @ rng.normal(size=(5, 500))
    return (0.6 * common + 0.7 * rng.normal(size=(2500, 500))) / 500**0.5


def positive(rng: np.random.Generator) -> Features:
    return rng.lognormal(0, 0.7, size=(2500, 400)) / 20


def standardised(rng: np.random.Generator) -> Features:
    raw = rng.normal(size=(2500, 400)) * rng.uniform(0.3, 3, 400) + rng.normal(size=(2500, 1))
    return (raw - raw.mean(axis=0)) / raw.std(axis=0) / 20


def copies(rng: np.random.Generator) -> Features:
    """Forty groups of fifteen noisy copies."""
    groups = rng.normal(size=(2500, 40))
    return (groups[:, np.arange(600) % 40] + 0.1 * rng.normal(size=(2500, 600))) / 600**0.5


def zipf_counts(rng: np.random.Generator) -> Features:
    """ln(1 + count) of words, in texts of very different length."""
    return scipy.sparse.csr_array(np.log1p(_words(rng)).astype(np.float32))


def zipf_binary(rng: np.random.Generator) -> Features:
    return scipy.sparse.csr_array((_words(rng) > 0).astype(np.float32))


def _words(rng: np.random.Generator, num_texts: int = 4000, num_words: int = 3000) -> np.ndarray:
    frequency = 1 / (np.arange(num_words) + 3.0)
    lengths = np.exp(rng.normal(4, 0.9, num_texts)).clip(5, 800).astype(int)
    return np.stack([rng.multinomial(length, frequency / frequency.sum()) for length in lengths])


def wide(rng: np.random.Generator) -> Features:
    """More features than rows."""
    share = rng.uniform(0.01, 0.15, (1000, 1))
    return scipy.sparse.csr_array((rng.random((1000, 2000)) < share).astype(np.float32))


def scales(rng: np.random.Generator) -> Features:
    """Features and rows of very different size, positive."""
    raw = rng.gamma(1, 1, (2500, 1)) * abs(rng.normal(size=(2500, 500))) * np.exp(rng.normal(0, 1.5, 500))
    return raw / np.sqrt((raw**2).sum(axis=1).mean())


def tf_idf(rng: np.random.Generator) -> Features:
    """Rows of length 1, rare words heavier."""
    counts = _words(rng)
    weighted = np.log1p(counts) * np.log((1 + len(counts)) / (1 + (counts > 0).sum(axis=0)))
    return scipy.sparse.csr_array((weighted / np.sqrt((weighted**2).sum(axis=1, keepdims=True))).astype(np.float32))


def one_hot(rng: np.random.Generator) -> Features:
    """Twelve columns of categories, two to a hundred each; one row in seven has the second label."""
    levels = (2, 3, 5, 7, 9, 16, 7, 2, 41, 6, 100, 14)
    columns = [np.eye(n, dtype=np.float32)[rng.choice(n, 5000, p=rng.dirichlet(np.full(n, 0.7)))] for n in levels]
    return scipy.sparse.csr_array(np.hstack(columns))


def table(rng: np.random.Generator) -> Features:
    """Thirty correlated columns of size 1, many rows."""
    return rng.normal(size=(6000, 30)) @ rng.normal(size=(30, 30)) / 30**0.5


def small_table(rng: np.random.Generator) -> Features:
    return rng.normal(size=(400, 20))


def pixels(rng: np.random.Generator) -> Features:
    """Smooth pictures of 14 by 14, from 0 to 1."""
    at = np.stack(np.meshgrid(np.arange(14), np.arange(14)), axis=-1).reshape(-1, 2)
    near = np.exp(-((at[:, None] - at[None]) ** 2).sum(axis=-1) / 8) + 1e-4 * np.eye(196)
    return (rng.normal(size=(4000, 196)) @ np.linalg.cholesky(near).T).clip(0, 1)


def heavy_tails(rng: np.random.Generator) -> Features:
    """Student's t with three degrees of freedom; one row in six has the second label."""
    return rng.standard_t(3, size=(3000, 60)) / 8


def long_binary(rng: np.random.Generator) -> Features:
    """More texts and more words."""
    return scipy.sparse.csr_array((_words(rng, 12_000, 6000) > 0).astype(np.float32))


def rare_label(rng: np.random.Generator) -> Features:
    """Forty correlated columns of size 1; one row in thirty has the second label."""
    raw = rng.normal(size=(4000, 40)) @ rng.normal(size=(40, 40)) + rng.normal(size=(4000, 40))
    return raw / raw.std(axis=0)


def repeated_rows(rng: np.random.Generator) -> Features:
    """A hundred and fifty different rows, each one to sixty times."""
    rows = np.repeat(rng.normal(size=(150, 50)), rng.integers(1, 61, 150), axis=0) / 5
    return rows[rng.permutation(len(rows))]


def click_log(rng: np.random.Generator) -> Features:
    """Nine columns of categories, up to four hundred each, frequent and rare, and four counts; one click in eight."""
    columns: list[np.ndarray] = []
    for levels in (4, 7, 24, 30, 60, 120, 200, 300, 400):
        frequency = 1 / (np.arange(levels) + 1.0)
        columns.append(np.eye(levels)[rng.choice(levels, 4000, p=frequency / frequency.sum())])
    counts = np.log1p(rng.negative_binomial(0.6, 0.08, size=(4000, 4)))
    return scipy.sparse.csr_array(np.hstack([*columns, counts]).astype(np.float32))


def raw_columns(rng: np.random.Generator) -> Features:
    """Thirty columns of size 1 around 5."""
    return 5 + rng.normal(size=(2000, 30))


def wide_dense(rng: np.random.Generator) -> Features:
    """More features than rows, none of them related."""
    return rng.normal(size=(1000, 2000)) / 2000**0.5


def expression(rng: np.random.Generator) -> Features:
    """Few rows of very many columns, as of genes: twelve factors and noise, standardised, rows of length 1."""
    raw = 0.3 * rng.normal(size=(375, 12)) @ rng.normal(size=(12, 4000)) + rng.normal(size=(375, 4000))
    standard = (raw - raw.mean(axis=0)) / raw.std(axis=0)
    return standard / np.sqrt((standard**2).sum(axis=1, keepdims=True))


def neighbours(rng: np.random.Generator) -> Features:
    """Of points in a square the twenty nearest of four hundred places: columns that overlap, one with the next."""
    points, places = rng.random((2000, 2)), rng.random((400, 2))
    near = np.argsort(((points[:, None] - places) ** 2).sum(axis=-1), axis=1)[:, :20]
    features = np.zeros((2000, 400), np.float32)
    np.put_along_axis(features, near, 1, axis=1)
    return scipy.sparse.csr_array(features)


def n_grams(rng: np.random.Generator) -> Features:
    """One to three letters in a row that a name has, names being chains of two to seven of twenty syllables."""
    syllables = ["".join(rng.choice(list("abdeiklmnorstu"), rng.integers(2, 4))) for _ in range(20)]
    follows = rng.dirichlet(np.full(20, 0.4), 20)
    names = list[set[str]]()
    for _ in range(2000):
        at = int(rng.integers(20))
        name = "^" + syllables[at]
        for _ in range(rng.integers(1, 7)):
            at = int(rng.choice(20, p=follows[at]))
            name += syllables[at]
        names.append({name[i : i + size] for size in (1, 2, 3) for i in range(len(name) - size + 1)})
    grams = {gram: place for place, gram in enumerate(sorted(set.union(*names)))}
    features = np.zeros((2000, len(grams)), np.float32)
    for row, name in zip(features, names, strict=True):
        row[[grams[gram] for gram in name]] = 1
    return scipy.sparse.csr_array(features)


def rare_events(rng: np.random.Generator) -> Features:
    """Few of eighty amounts in a row, none below 0; one label in fifty."""
    return scipy.sparse.csr_array(((rng.random((5000, 80)) < 0.08) * rng.exponential(1, (5000, 80))).astype(np.float32))


KINDS: dict[str, Callable[[np.random.Generator], Features]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        binary, one_factor, five_factors, positive, standardised, copies, zipf_counts, zipf_binary, wide, scales,
        tf_idf, one_hot, table, small_table, pixels, heavy_tails, long_binary, rare_label, repeated_rows, click_log,
        raw_columns, wide_dense, expression, neighbours, n_grams, rare_events,
    )
}  # fmt: skip
OFFSETS = {
    "one-hot": -2.5,
    "heavy-tails": -2.0,
    "rare-label": -4.5,
    "click-log": -2.6,
    "rare-events": -5.0,
}  # of the margins: labels of unequal number


@app.default
def main(
    kinds: str = "", /, *, noise_multipliers: str = "0.5,2,8", batch_size: int = 64, optimizer: str = "",
    share: float = 0.005, most_seeds: int = 1024, output: Path | None = None, again: Path | None = None,
) -> None:  # fmt: skip
    trained = None if again is None else pd.read_csv(again)
    names = kinds.split(",") if kinds else list(KINDS if trained is None else trained["data"].unique())
    optimizers = [optimizer] if optimizer else list(OPTIMIZER_NAMES)
    for asked, known in ((names, KINDS), (optimizers, OPTIMIZER_NAMES)):
        if unknown := set(asked) - set(known):
            raise SystemExit(f"Expected out of {', '.join(known)}, got {', '.join(sorted(unknown))}.")
    noises = [float(noise) for noise in noise_multipliers.split(",")]
    kinds_of_optimizer = [OPTIMIZER_NAMES[each] for each in optimizers]
    shown = Table(title="Forecast against training: final training loss, on generated data", **TABLE_STYLE)
    for header in (
        "data", "n x p", "cells", "diverged", "sound", "median", "95 %", "worst", "worst sound", "std", "known to",
        "time",
    ):  # fmt: skip
        shown.add_column(header, justify="right")
    found = []
    for name in names:
        began, problem = time.monotonic(), problem_of(name)
        if trained is None:
            scenarios = grid(problem, kinds_of_optimizer, noises, batch_size)
            cells = compared(problem, scenarios, share=share, most_seeds=most_seeds)
        else:
            cells = forecast_again(problem, trained[trained["data"] == name], batch_size)
        found.append(cells.assign(data=name))
        shown.add_row(name, f"{problem.num_examples} x {problem.num_features}", *_row(cells), _since(began))
        console.print(f"{name}: {_since(began)}")
        if output is not None:
            pd.concat(found).to_csv(output, index=False)
    console.print(shown)


def problem_of(name: str) -> LinearModel:
    """Labels from random weights, with margins of standard deviation 1.5; a fifth of the rows for test."""
    rng = np.random.default_rng([SEED_DATA, list(KINDS).index(name)])
    features: Any = KINDS[name](rng)
    if not scipy.sparse.issparse(features):
        features = features.astype(np.float32)
    margin = np.asarray(features @ rng.normal(size=features.shape[1]))
    margin = 1.5 * (margin - margin.mean()) / margin.std() + OFFSETS.get(name, 0.0)
    labels = (rng.random(len(margin)) < 1 / (1 + np.exp(-margin))).astype(np.int32)
    split = len(labels) * 4 // 5
    parts = [Dataset(name, features[at], labels[at], ("no", "yes")) for at in (slice(split), slice(split, None))]
    return linear_model(*parts)


def grid(
    problem: LinearModel, optimizers: Sequence[type], noise_multipliers: Sequence[float], batch_size: int
) -> list[Scenario]:
    sampler = Poisson.for_batch_size(batch_size, problem.num_examples)
    mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=0.5, sampler=sampler)
    found = []
    for kind in optimizers:
        best = forecast_best(problem, mechanism, kind(learning_rate=1.0), num_steps=NUM_STEPS).scenario
        for noise, rate, clip in itertools.product(noise_multipliers, RATE_FACTORS, CLIP_FACTORS):
            at = replace(best.mechanism, l2_clip_norm=clip * best.mechanism.l2_clip_norm, noise_multiplier=noise)
            optimizer = replace(best.optimizer, learning_rate=rate * best.optimizer.learning_rate)
            found.append(replace(best, mechanism=at, optimizer=optimizer))
    return found


def compared(problem: LinearModel, cells: Sequence[Scenario], *, share: float, most_seeds: int) -> pd.DataFrame:
    """`accuracy_picture.data` of every cell, each trained until its mean final loss is known to `share`."""
    seeds = min(FIRST_SEEDS, most_seeds)
    table = answer(cells, runners=[Training(), Moments()], num_seeds=seeds, record_at=RECORD_AT)
    for further in trained_on(cells, table, share, seeds, most_seeds, RECORD_AT, lambda _: None):
        table = further
    return accuracy_picture.data(table)


def forecast_again(problem: LinearModel, trained: pd.DataFrame, batch_size: int) -> pd.DataFrame:
    """The same cells forecast by this version, against the runs that were trained then."""
    classes = {kind(learning_rate=1.0).name: kind for kind in OPTIMIZER_NAMES.values()}
    sampler, scenarios = Poisson.for_batch_size(batch_size, problem.num_examples), list[Scenario]()
    for _, cell in trained.drop_duplicates("scenario").iterrows():
        noise = {"noise_multiplier": cell["noise_multiplier"], "l2_clip_norm": cell["l2_clip_norm"]}
        optimizer = classes[cell["optimizer"]](learning_rate=cell["learning_rate"])
        asked = {"problem": problem, "mechanism": SampledGaussian(**noise, sampler=sampler), "optimizer": optimizer}
        scenarios.append(Scenario(**asked, num_steps=int(cell["num_steps"])))
        if scenarios[-1].id != cell["scenario"]:
            raise SystemExit(f"Expected cells of {problem.name} with batches of {batch_size}, got others; train anew.")
    table = answer(scenarios, runners=[Moments()], record_at=RECORD_AT)
    found = table.pivot(index=["scenario", "step"], columns="metric", values="value")
    status = table[table["metric"] == "loss"].set_index(["scenario", "step"])["status"]
    places = pd.MultiIndex.from_frame(trained[["scenario", "step"]])
    cells = trained.assign(
        forecast=found["loss"].reindex(places).to_numpy(),
        forecast_std=found["loss_std"].reindex(places).to_numpy(),
        status=status.reindex(places).to_numpy(),
    )
    return accuracy_picture.with_errors(cells).drop(columns="data")


def _row(cells: pd.DataFrame) -> list[str]:
    found, last = summary(cells), accuracy_picture.last_steps(cells)
    shares = [
        found.get(name) for name in ("median", "percentile_95", "worst", "worst_of_others", "median_error_of_std")
    ]
    known = (last["trained_sem"] / last["trained_mean"]).max()
    counts = found["num_cells"], found["num_left_out"], found["num_cells"] - found["num_extrapolated"]
    return [*map(str, counts), *(percent(share) for share in (*shares, known))]


def _since(began: float) -> str:
    return f"{time.monotonic() - began:.0f} s"


if __name__ == "__main__":
    app()
