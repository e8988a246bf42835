"""Noise multipliers z* at which an adaptive optimizer overtakes DP-SGD: measured, forecast and by formulas.

Works on the frame of `fig_threshold`: final losses by run, and shares of clipped examples.
"""

from typing import Any

import numpy as np
import pandas as pd

from noisecast.privacy.sampling import steps_of_epochs
from noisecast.reproduction.fits import LOST, Estimate, last_crossing
from noisecast.reproduction.tasks import FORUM, IMDB, MOVIELENS_CENTRED, MOVIELENS_PAPER_LIKE
from noisecast.reproduction.which_task import task_of
from noisecast.theory.optimal import (
    nominal_epsilon,
    threshold_epsilon_as_printed,
    threshold_noise_multiplier_all_clipped,
    threshold_noise_multipliers,
)

ADAPTIVE = {"DP-SignSGD": np.pi / 2, "DP-Adam": 1.0}  # their noise penalty

# The window of epsilon that the paper shows, in its own counting; the examples it counts; its figure.
WINDOWS = {
    IMDB.name: ((0.75, 1.25), 10_000, "eps_star"),
    FORUM.name: ((0.15, 0.75), 246_092, "eps_star_sotag"),
    MOVIELENS_PAPER_LIKE.name: ((0.75, 1.5), 100_000, "eps_star_sotag"),
    MOVIELENS_CENTRED.name: ((0.75, 1.5), 100_000, "eps_star_sotag"),
}


def threshold_voices(frame: Any) -> Any:
    """z*, of every adaptive optimizer at every batch size, in four voices.

    Returns: a frame: problem, optimizer, batch_size, num_steps, num_examples, is_clipped (whether most examples are),
      source ("training", "moments", "corrected" and "printed" formula), noise_multiplier with low and high, and both
      epsilons there.
    """
    rows = []
    for (problem, batch_size), at_size in frame.groupby(["problem", "expected_batch_size"], sort=False):
        axis, is_clipped = _Axis(at_size), most_are_clipped(at_size)
        for name in ADAPTIVE:
            measured = {runner: _measured(at_size, runner, name) for runner in ("training", "moments")}
            formulas = {"corrected": _corrected(at_size, name), "printed": _printed(at_size, axis)}
            for source, found in (measured | formulas).items():
                about = {"problem": problem, "optimizer": name, "batch_size": batch_size, "source": source}
                rows.append(about | {"is_clipped": is_clipped} | axis.about | _columns(found, axis))
    return pd.DataFrame(rows)


class _Axis:
    """From the noise multiplier to both epsilons, at one batch size."""

    def __init__(self, rows: Any):
        levels = rows.drop_duplicates("noise_multiplier").sort_values("noise_multiplier")
        self.noise, self.epsilons = (levels[name].to_numpy(float) for name in ("noise_multiplier", "epsilon"))
        self.nominal_times_noise = float((levels["nominal_epsilon"] * levels["noise_multiplier"]).iloc[0])
        first = levels.iloc[0]
        self.num_examples = round(first["expected_batch_size"] / first["sampling_probability"])
        self.about = {"num_steps": int(first["num_steps"]), "num_examples": self.num_examples}

    def epsilon(self, noise: float) -> float:
        """As accounted, between the levels; nan beyond them: an accountant is not extrapolated."""
        if not self.noise[0] <= noise <= self.noise[-1]:
            return np.nan
        return float(np.exp(np.interp(np.log(noise), np.log(self.noise), np.log(self.epsilons))))

    def nominal(self, noise: float) -> float:
        return self.nominal_times_noise / noise if noise > 0 else np.inf


def _columns(found: Estimate, axis: _Axis) -> dict[str, float]:
    return {
        "noise_multiplier": found.value, "low": found.low, "high": found.high, "epsilon": axis.epsilon(found.value),
        "nominal_epsilon": axis.nominal(found.value),
    }  # fmt: skip


def gaps(rows: Any, runner: str, optimizer: str) -> tuple[np.ndarray, np.ndarray]:
    """DP-SGD's final loss less the other's at one batch size, seed by seed of those that both have.

    Returns: noise multipliers (points,), gaps (points, seeds); empty where the runner was not asked.
    """
    chosen: Any = rows[(rows["metric"] == "loss") & (rows["runner"] == runner)]
    # A diverged run has lost, by however much: no mean may hide it.
    chosen = chosen.assign(
        value=chosen["value"].where(chosen["status"] != "diverged", LOST), seed=chosen["seed"].fillna(0)
    )
    found = {name: part.pivot(index="noise_multiplier", columns="seed", values="value")
             for name, part in chosen.groupby("optimizer")}  # fmt: skip
    if not found:
        return np.empty(0), np.empty((0, 0))
    gap = (found["DP-SGD"] - found[optimizer]).dropna(axis=1)
    return gap.index.to_numpy(float), gap.to_numpy(float)


def _measured(rows: Any, runner: str, optimizer: str) -> Estimate:
    found = gaps(rows, runner, optimizer)
    # The last, for with little noise DP-SGD may need more steps than it has, and is the worse one again.
    return last_crossing(*found) if found[1].size else Estimate(np.nan, np.nan, np.nan)


def _corrected(rows: Any, optimizer: str) -> Estimate:
    """The floors' threshold; batch noise is left out of it, for it is at most B / (z^2 d) of the noise."""
    settings = rows.drop_duplicates("optimizer").set_index("optimizer")
    sgd, other = settings.loc["DP-SGD"], settings.loc[optimizer]
    shared: dict[str, Any] = {
        "sgd_learning_rate": sgd["learning_rate"],
        "sgd_l2_clip_norm": sgd["l2_clip_norm"],
        "adaptive_learning_rate": other["learning_rate"],
        "noise_penalty": ADAPTIVE[optimizer],
        "expected_batch_size": sgd["expected_batch_size"],
    }
    if most_are_clipped(rows):
        found = threshold_noise_multiplier_all_clipped(**shared, num_params=10**9)
    else:
        found = threshold_noise_multipliers(
            **shared, adaptive_l2_clip_norm=other["l2_clip_norm"], example_noise_std=0.0
        )
    z = found.noise_multipliers[0] if found.noise_multipliers else np.nan
    return Estimate(z, np.nan, np.nan)


def _printed(rows: Any, axis: _Axis) -> Estimate:
    sgd = rows[rows["optimizer"] == "DP-SGD"].iloc[0]
    # Without its batch noise: with it, it is smaller still.
    epsilon = threshold_epsilon_as_printed(
        example_noise_std=0.0,
        expected_batch_size=sgd["expected_batch_size"],
        l2_clip_norm=sgd["l2_clip_norm"],
        num_steps=axis.about["num_steps"],
        target_delta=task_of(sgd["problem"]).target_delta,
        num_examples=axis.num_examples,
    )
    return Estimate(axis.nominal_times_noise / epsilon, np.nan, np.nan)


def most_are_clipped(rows: Any) -> bool:
    """Whether DP-SGD clips most examples after its last step, where floors are compared."""
    chosen = rows[(rows["metric"] == "clip_fraction") & (rows["optimizer"] == "DP-SGD")]
    return bool(chosen["value"].median() > 0.5)


def window_of(problem: str, batch_size: float) -> tuple[float, float]:
    """The noise multipliers of the window of epsilon that the paper shows, as it counts epsilon.

    >>> [round(z, 2) for z in window_of("logistic on imdb", 64)]
    [2.17, 3.62]
    """
    task = task_of(problem)
    (low, high), counted, _ = WINDOWS[task.name]
    at_one = nominal_epsilon(
        1.0, sampling_probability=batch_size / counted, target_delta=task.target_delta,
        num_steps=steps_of_epochs(task.epochs, batch_size / counted),
    )  # fmt: skip
    return at_one / high, at_one / low


def slope_on_batch_size(voice: Any) -> Estimate:
    """Of log nominal epsilon* on log B; batch sizes are trained independently, so their errors add in squares."""
    log_b, log_z = np.log(voice.index.to_numpy(float)), np.log(voice["noise_multiplier"].to_numpy(float))
    log_nominal = np.log(voice["nominal_epsilon"].to_numpy(float))
    if len(log_b) < 2 or not np.isfinite(log_z).all():
        return Estimate(np.nan, np.nan, np.nan)
    centred = log_b - log_b.mean()
    weights = centred / (centred @ centred)
    slope = float(weights @ log_nominal)
    with np.errstate(divide="ignore"):
        half = np.maximum(np.log(voice["high"]) - log_z, log_z - np.log(voice["low"])).to_numpy(float)
    reach = float(np.sqrt(np.square(weights * half).sum()))
    return Estimate(slope, slope - reach, slope + reach)
