"""Forecasts of matrix factorisations.

Rows are independent Gaussians: a mean, and a variance a number in the basis of the numbers (a rotation, the same for
all rows) in which the means of most rows are uncorrelated. A rating's error is Gaussian, and knows what the rating's
own pushes have done (`theory.factorization_moments`). All ratings are used: `subsample` and `full_covariance_features`
have no meaning here, and `time_steps` is how often the basis, an optimizer's memory and the own pushes are renewed.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from noisecast.problems.matrix_factorization import MatrixFactorization
from noisecast.runners.moments.factorization_rows import (
    Pairs,
    Rows,
    errors_of,
    mean_squares,
    pair_change,
    pairs_of,
    single,
    sums_of,
    variance_change,
)
from noisecast.runners.moments.factorization_spread import Leg, Past, Snapshot
from noisecast.runners.moments.forecast import Forecast, Metrics, collected
from noisecast.scenario import Scenario
from noisecast.theory.closures import GradientLaw, expected_norm
from noisecast.theory.factorization_moments import (
    ClippedError,
    chebyshev_step,
    clipped_error,
    remaining_share,
    stages_for,
    variance_of_squares,
)

LARGEST_STEP = 2.0  # eta times the largest curvature met on the way: there steps start to explode
LARGEST_LATTICE_STEP = 1.0  # the same where directions are not linear in gradients: there their lattice or lag shows
HOPELESS = 100.0  # the same: what explodes so is not followed, in however many stages
LARGEST_GROWTH = 3.0  # of the sum of squares within one step of ours
MOST_HALVINGS = 40
MOST_SIGNAL = 0.03  # of a step's square, where directions are not linear in gradients: beyond it numbers move together
MOST_NUMBERS = 250_000_000  # of a past, 1 GB: a longer one is not kept, and no spread over runs is said
FEWEST_DIMS = 16  # of a row: the errors of fewer are no Gaussians
LEAST_SHARE = 0.9  # mean D: with less left, rows that fit each other's noise are no longer independent


class Prepared(NamedTuple):
    """What scenarios on a problem share: ratings, initial rows (R, dim), and 2 w of the loss w e^2."""

    train: Pairs
    test: Pairs | None
    start: np.ndarray
    slope: float


def handles(problem: Any) -> bool:
    return isinstance(problem, MatrixFactorization)


def why_unsupported(scenario: Scenario) -> str | None:
    return None


def prepare(problem: MatrixFactorization, settings: Any) -> Prepared:
    start = np.asarray(problem.initial_params(), np.float64).reshape(problem.num_rows, problem.dim)
    test = None if problem.test is None else pairs_of(problem.test, problem.num_rows)
    return Prepared(pairs_of(problem.train, problem.num_rows), test, start, 2 * problem.error_weight)


def forecast(scenario: Scenario, prepared: Prepared, record_at: Sequence[int], settings: Any) -> Forecast:
    return _FactorSolve(scenario, prepared, settings).forecast(record_at, settings.time_steps)


# --- The time steps -----------------------------------------------------------------------------------------------


class _Field(NamedTuple):
    """What the ratings make of Gaussian rows, before the optimizer.

    Args:
      errors, spread: E e and s^2; (n,) each.   squared_lengths: E|x_r|^2; (R,).
      clipped: of 2 w e, times n over the declared size.
      lever: d E r/d(|x_u|^2/2) by the bound C/|(x_u, x_w)|; (n,).
      force, curvature: mean clipped gradient and its Jacobian's diagonal; (R, dim).
      law: of the private gradient, in the original basis; mean (R, dim), all else by row (R, 1).
    """

    errors: np.ndarray
    spread: np.ndarray
    clipped: ClippedError
    squared_lengths: np.ndarray
    lever: np.ndarray
    force: np.ndarray
    curvature: np.ndarray
    law: GradientLaw


class _Directions(NamedTuple):
    """Of one step: E u in the original basis, (R, dim); by row, as their mean, gains and what noise adds to variances,
    eta^2 (Var u - k^2 Var F); (R,) each.
    """

    expected: np.ndarray
    gain: np.ndarray
    noise: np.ndarray


def _tame(before: Rows, after: Rows) -> bool:
    """Whether rows grew little enough that curvatures met on the way are those of the start."""
    return bool(after.squared_lengths.sum() <= LARGEST_GROWTH * before.squared_lengths.sum())


class _FactorSolve:
    """The time steps of one scenario."""

    def __init__(self, scenario: Scenario, prepared: Prepared, settings: Any):
        self.prepared, self.pairs = prepared, prepared.train
        self.mechanism, self.num_steps = scenario.mechanism, scenario.num_steps
        self.learning_rate = np.float64(scenario.optimizer.learning_rate)  # overflows to inf, not to an error
        self.closure: Any = scenario.optimizer.theory.closure
        self.shape, self.steepest, self.signal = prepared.start.shape, 0.0, 0.0
        self.memory, self.is_finite, self.halvings = None, True, 0
        self.basis = np.eye(self.shape[1])
        self.share = np.ones(len(self.pairs.labels))  # D
        self.ratings_of = self.pairs.sum_of(*2 * [np.ones(len(self.pairs.labels))])
        self.fill = self.mechanism.sampler.batch_fill(scenario.problem.num_examples)
        of_a_batch = self.fill * self.mechanism.expected_batch_size * self.ratings_of / len(self.pairs.labels)
        self.presence = np.maximum(-np.expm1(-of_a_batch), 1e-12)[:, None]
        self.loss_alone, self.turn, self.leg = settings.loss_alone, np.eye(self.shape[1]), None
        # A sampler's batch noise is a * second moment - b * mean^2; a and b are read off the sampler itself.
        self.of_batch, of_both = (float(self.mechanism.sampler.batch_noise_variance(m, 1.0)) for m in (0.0, 1.0))
        self.of_mean = self.of_batch - of_both
        self.is_noisy = self.mechanism.mean_noise_std > 0 or self.of_batch > 0

    def forecast(self, record_at: Sequence[int], time_steps: int) -> Forecast:
        # Rows grow from small ones ever faster, and their noise as the root of time: steps that lengthen with time.
        grid = np.rint(self.num_steps * (np.arange(time_steps + 1) / time_steps) ** 2).astype(int).tolist()
        stops = sorted({*grid, *record_at})
        is_short = len(stops) * (2 * self.prepared.start.size + 5 * len(self.pairs.labels)) <= MOST_NUMBERS
        self.past = Past(self.pairs.users, self.pairs.items, is_kept=is_short and not self.loss_alone)
        at = Rows(self.prepared.start, np.zeros(self.shape), np.zeros(len(self.pairs.labels)))
        recorded = {}
        for step, end in zip(stops, [*stops[1:], None]):
            at = self._turned(at) if self.is_finite else at
            field = self._field(at, self.share)
            self._remember(at, field)
            if step in record_at:
                recorded[step] = self._metrics(at, field), self._out_of_depth()
            if end is not None:
                at = self._reach(at, field, step, end)
        return collected(recorded, reasons=self._reasons())

    @property
    def _largest_step(self) -> float:
        return LARGEST_STEP if self.closure.is_linear else LARGEST_LATTICE_STEP

    def _turned(self, at: Rows) -> Rows:
        """In the basis where means, weighted by ratings, are uncorrelated: there variances alone say most."""
        _, turn = np.linalg.eigh((at.mean * self.ratings_of[:, None]).T @ at.mean)
        self.basis, self.turn = self.basis @ turn, turn
        return Rows(at.mean @ turn, at.variance @ turn**2, at.pair)

    def _reach(self, at: Rows, field: _Field, step: int, end: int) -> Rows:
        """From `step` to `end`, in several steps where rows grow too much for one."""
        while self.is_finite and step < end:
            length = end - step
            after, memory, share, leg = self._advance(at, field, step, length)
            while length > 1 and self.halvings < MOST_HALVINGS and not _tame(at, after):
                length, self.halvings = length // 2, self.halvings + 1
                after, memory, share, leg = self._advance(at, field, step, length)
            at, self.memory, self.share, self.leg = after, memory, share, leg
            self.is_finite = bool(np.isfinite(at.flat).all())
            step += length
            if step < end:
                field = self._field(at, share)
                self.turn = np.eye(self.shape[1])
                self._remember(at, field)
        return at

    def _advance(self, at: Rows, field: _Field, step: int, num_steps: int) -> tuple[Rows, Any, np.ndarray, Leg]:
        """Memory and D half-way, the rows with these, then memory and D to the end."""
        halfway = self.closure.memory(self.memory, field.law, step, max(1, num_steps // 2))
        noise_share = self.closure.noise_share(step, num_steps)
        before = self._directions(field, halfway, noise_share)
        steepest = 2.2 * self.learning_rate * float(np.max(before.gain * self._steepest_of_rows(at, field)))
        self.steepest = max(self.steepest, steepest)
        leg = self._leg(field, before, noise_share, num_steps, steepest)
        if not steepest <= HOPELESS:
            return Rows.of(np.full_like(at.flat, np.nan), self.shape), self.memory, self.share, leg
        kept = self._renewal(field, before)
        spread = field.spread + kept["noise"] * num_steps / 4  # on average until half-way
        share = remaining_share(self.share, spread=spread, num_steps=num_steps / 2, **kept)

        def change(flat: np.ndarray) -> np.ndarray:
            rows = Rows.of(flat, self.shape)
            there = self._field(rows, share)
            return self._change(rows, there, self._directions(there, halfway, noise_share))

        stages = stages_for(steepest * num_steps)
        flat = chebyshev_step(change, at.flat, change(at.flat), num_steps, stages)
        after = Rows.of(flat, self.shape)
        after = after._replace(variance=np.maximum(after.variance, 0.0))
        spread = (field.spread + errors_of(self.pairs, after.mean, after.variance)[1]) / 2
        share = remaining_share(self.share, spread=spread, num_steps=num_steps, **kept)
        return after, self.closure.memory(self.memory, field.law, step, num_steps), share, leg

    def _remember(self, at: Rows, field: _Field) -> None:
        if not self.past.is_kept:
            return
        clipped, count = field.clipped, len(field.errors)
        slope = self.prepared.slope * clipped.slope
        of_ratings = (part / count for part in (clipped.push, slope, self.share * slope, field.lever, clipped.square))
        self.past.add(Snapshot(at.mean, at.variance, self.turn, *of_ratings), self.leg)

    def _leg(self, field: _Field, directions: _Directions, noise_share: float, num_steps: int, steepest: float) -> Leg:
        pull = self.learning_rate * directions.gain
        of_batch = (field.law.noise_variance - field.law.privacy_variance)[:, 0]
        independent = np.maximum(directions.noise - noise_share * pull**2 * of_batch, 0.0)
        pull, independent = (single(part[:, None]) for part in (pull, independent))
        shares = noise_share * self.of_batch, noise_share * self.of_mean
        return Leg(num_steps, steepest * num_steps, pull, independent, *shares)

    def _field(self, at: Rows, share: np.ndarray) -> _Field:
        users, items, slope = self.pairs.users, self.pairs.items, self.prepared.slope
        mean, variance = single(at.mean), single(at.variance)
        errors, spread = errors_of(self.pairs, mean, variance)
        errors += at.pair
        squares = at.squared_lengths
        of_both = squares[users] + squares[items]
        bound = self.mechanism.l2_clip_norm / np.sqrt(of_both)
        clipped = clipped_error(slope * errors, slope**2 * share * spread, bound).times(self.fill)
        force, curvature = sums_of(self.pairs, mean, variance, clipped.push, slope * clipped.slope, share)
        second = self.pairs.sum_of(clipped.square * squares[items], clipped.square * squares[users])
        second /= len(errors) * self.shape[1]
        of_force, signal = np.empty(len(force)), np.empty(len(force))
        mean_squares(force, curvature, at.variance, of_force, signal)
        batch = self.mechanism.sampler.batch_noise_variance(np.sqrt(of_force), second)
        noise = np.maximum(batch + self.mechanism.mean_noise_std**2, 1e-30)
        law = GradientLaw(
            force @ self.basis.T, signal[:, None], noise[:, None],
            presence=self.presence, privacy_variance=self.mechanism.mean_noise_std**2,
        )  # fmt: skip
        lever = -clipped.by_bound * bound / of_both
        return _Field(errors, spread, clipped, squares, lever, force, curvature, law)

    def _directions(self, field: _Field, memory: Any, noise_share: float) -> _Directions:
        found = self.closure.response(field.law, memory)
        gain, variance = found.gain.mean(axis=1), found.variance.mean(axis=1)
        if not self.closure.is_linear:
            signal = (found.expected**2).mean(axis=1) @ self.ratings_of
            self.signal = max(self.signal, float(signal / max(signal + variance @ self.ratings_of, 1e-300)))
        left = np.maximum(variance - gain**2 * field.law.signal_variance[:, 0], 0.0)
        return _Directions(found.expected, gain, self.learning_rate**2 * noise_share * left)

    def _change(self, at: Rows, field: _Field, directions: _Directions) -> np.ndarray:
        """The expected step, and how variances and own pushes change with it; flat, as `Rows`."""
        eta, gain, num_rows = self.learning_rate, directions.gain, self.shape[0]
        flat = np.empty(2 * self.shape[0] * self.shape[1] + len(at.pair))
        change, total, fading = Rows.of(flat, self.shape), np.empty(num_rows), np.empty(num_rows)
        np.matmul(-eta * directions.expected, self.basis, out=change.mean)
        variance_change(eta * gain, directions.noise, field.curvature, at.variance, change.variance, total, fading)
        push = eta / len(field.errors) * field.clipped.push
        pair_change(self.pairs.users, self.pairs.items, push, gain, total, fading, at.pair, change.pair)
        return flat

    def _renewal(self, field: _Field, directions: _Directions) -> dict[str, np.ndarray]:
        """By how much s^2 grows, and errors are damped by their own pushes, a step: what decides D; (n,) each."""
        lengths, own = field.squared_lengths, self.learning_rate / len(field.errors)
        damping = 2 * own * self.prepared.slope * field.clipped.slope * self._across(directions.gain, lengths)
        return {"noise": self._across(directions.noise, lengths), "damping": damping}

    def _across(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """a_u b_w + a_w b_u of every rating, of numbers by row; (R,), (R,) -> (n,)."""
        users, items = self.pairs.users, self.pairs.items
        return one[users] * other[items] + one[items] * other[users]

    def _steepest_of_rows(self, at: Rows, field: _Field) -> np.ndarray:
        """The largest curvature within each row: of the means at most their trace, which one direction mostly has.

        The coupling of users with items can double it, and no more.
        """
        lengths = (at.mean**2).sum(axis=1)
        slope = self.prepared.slope / len(field.errors) * field.clipped.slope
        trace = self.pairs.sum_of(slope * lengths[self.pairs.items], slope * lengths[self.pairs.users])
        largest = field.curvature.max(axis=1)
        return np.clip(trace, largest, 2 * largest)

    # --- What is reported ---

    def _metrics(self, at: Rows, field: _Field) -> Metrics:
        metrics = self._loss(self.pairs, at, field.errors, self.share * field.spread, self.share, name="")
        metrics |= {
            "clip_fraction": field.clipped.clip_fraction.mean(),
            "params_norm": expected_norm(
                float(field.squared_lengths.sum()), float(np.sum(2 * at.variance**2 + 4 * at.mean**2 * at.variance))
            ),
        }
        if self.prepared.test is not None:
            unseen = self.prepared.test
            errors, spread = errors_of(unseen, at.mean, at.variance)
            found = self._loss(unseen, at, errors, spread, np.ones(len(errors)), name="test_")
            found.pop("test_gradient_norm")
            metrics |= found
        return {name: float(value) for name, value in metrics.items()}

    def _loss(
        self, pairs: Pairs, at: Rows, errors: np.ndarray, variance: np.ndarray, share: np.ndarray, *, name: str
    ) -> Metrics:
        """Mean loss, its spread over runs, and its gradient's length.

        Its variance over runs is that of what is linear in the rows, followed through the run by `Past`, and of what is
        quadratic: in rows and in errors, which are independent.
        """
        slope, count = self.prepared.slope, len(errors)
        gradient, hessian = sums_of(pairs, at.mean, at.variance, slope * errors, np.full(count, slope), share)
        squared_error = float(np.mean(errors**2 + variance))
        lengths = at.squared_lengths
        of_errors = variance * (lengths[pairs.users] + lengths[pairs.items]) + errors**2 * (
            at.variance.sum(axis=1)[pairs.users] + at.variance.sum(axis=1)[pairs.items]
        )
        spread = np.sum(hessian**2 * at.variance) + np.sum((slope / count) ** 2 * of_errors)
        found = {
            f"{name}loss": slope / 2 * squared_error,
            f"{name}rmse": math.sqrt(squared_error) if squared_error >= 0 else math.nan,
            f"{name}gradient_norm": math.sqrt(np.sum(gradient**2) + spread),
        }
        if self.past.is_kept:
            of_two = share * errors_of(pairs._replace(labels=np.zeros(count)), at.variance, np.zeros(self.shape))[0]
            by_errors = (slope / 2 / count) ** 2 * variance_of_squares(errors, variance, of_two)
            by_rows = np.sum((hessian * at.variance) ** 2) / 2
            # Without noise runs do not differ, and signs have infinite gains.
            by_noise = self.past.variance(gradient) if self.is_noisy else 0.0
            found[f"{name}loss_std"] = math.sqrt(by_noise + by_rows + by_errors)
        return found

    def _out_of_depth(self) -> bool:
        follows = self.steepest <= self._largest_step and self.share.mean() >= LEAST_SHARE
        follows &= self.signal <= MOST_SIGNAL
        return not (self.is_finite and follows and self.shape[1] >= FEWEST_DIMS)

    def _reasons(self) -> list[str]:
        reasons = []
        if not self.is_finite:
            reasons.append("The forecast leaves every bound: expect the run to diverge, or to be all noise.")
        if self.steepest > self._largest_step:
            reasons.append(
                f"A step is large next to the curvature: learning_rate * gain * curvature reaches {self.steepest:.3g}, "
                f"and beyond {self._largest_step:g} steps overshoot, which the forecast does not follow."
            )
        if self.shape[1] < FEWEST_DIMS:
            reasons.append(
                f"A rating's error is a sum of {self.shape[1]} products, too few to be Gaussian: the loss may be "
                "off by tens of per cent."
            )
        if self.signal > MOST_SIGNAL:
            reasons.append(
                f"Noise is small beside what steps are sure of, {self.signal:.0%} of their square: numbers of a row "
                "then move together, which the closure takes for independent; the loss may be up to 20 % higher, and "
                "vary half as much."
            )
        if self.share.mean() < LEAST_SHARE:
            reasons.append(
                f"Ratings have pushed more than {1 - LEAST_SHARE:.0%} of their errors' own fluctuation away: rows fit "
                "each other's noise, which the closure takes for independent, and the loss may be up to twice as high."
            )
        return reasons
