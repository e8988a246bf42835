"""Forecasts of binary logistic models.

Full covariance among the features of most energy, the bias and the directions in which the others move together,
variances elsewhere. Logits are Gaussian, but for what all have in common (`mean_output`) and what an example's own
steps push away (`own_push`). Time runs in growing steps within which the response is linear.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from typing import Any

import numpy as np

from noisecast.problems.linear import LOGISTIC, LinearModel
from noisecast.runners.moments.batch_shape import BatchShape
from noisecast.runners.moments.examples import Examples
from noisecast.runners.moments.forecast import Forecast, collected, time_grid
from noisecast.runners.moments.logistic_field import Change, Directions, Field, Given, Seen
from noisecast.runners.moments.logistic_limits import ENOUGH, Limits
from noisecast.runners.moments.logistic_weights import LogisticMetrics, Weights, is_finite, residual_bound
from noisecast.runners.moments.mean_output import MeanOutput
from noisecast.runners.moments.parted_rows import direction_covariance, gain_in_block
from noisecast.runners.moments.pushes import Pushes, Spreads, Step, bend_together
from noisecast.scenario import Scenario
from noisecast.theory.closures import GradientLaw, Response
from noisecast.theory.collective_skew import CollectiveSkew, Past, Span
from noisecast.theory.common_swing import Swing
from noisecast.theory.frozen_steps import (
    OVERSHOOTING,
    SATURATED,
    SMALLEST_GAIN,
    Drift,
    advance_covariance,
    advance_variance,
    drift_covariance,
    drift_variance,
    halvings_of,
    krylov_response,
    power_iteration,
)
from noisecast.theory.logistic_moments import ClippedExpectations, clipped_expectations, residual_given
from noisecast.theory.output_law import OutputLaw
from noisecast.theory.own_push import Held, OwnPush

SMALLEST_SUBSAMPLE, LARGEST_SUBSAMPLE = 8_000, 50_000  # where nobody asks for a number
LARGEST_BEND = 0.3  # of the examples' slopes within half a time step: beyond it the step is halved
LARGEST_BEND_OF_LAWS = 0.1  # the same where each output has its own: a loss of few outputs, far out, feels their shape
MOST_OFTEN = 4.0  # of what an example does to itself within the block
OF_CHANGE = 0.02  # tolerance: of how far a force that changes moves the mean, itself a correction
POWERS = 3  # of the curvature a time step


def handles(problem: Any) -> bool:
    return isinstance(problem, LinearModel) and problem.likelihood is LOGISTIC


def why_unsupported(scenario: Scenario) -> str | None:
    return None


def prepare(problem: LinearModel, settings: Any) -> Callable[[int], Examples]:
    return cache(lambda size: Examples.of(problem, settings.full_covariance_features, size))


def forecast(
    scenario: Scenario, prepared: Callable[[int], Examples], record_at: Sequence[int], settings: Any
) -> Forecast:
    """With the subsample asked for; else with as many examples as bring the error that one adds below a limit."""
    num_examples = int(scenario.problem.num_examples or 0)
    size = settings.subsample or SMALLEST_SUBSAMPLE
    while True:
        found = _LogisticSolve(scenario, prepared(min(size, num_examples)), settings).forecast(record_at)
        lacks = found.subsample_error > ENOUGH  # not where the forecast diverges, and so the error is no number
        if settings.subsample or size >= min(num_examples, LARGEST_SUBSAMPLE) or not lacks:
            return found
        # What a subsample adds falls as 1/size. Doubled so often that it does: few sizes are prepared, and kept.
        doublings = math.ceil(math.log2(1.5 * min(found.subsample_error / ENOUGH, 8.0)))
        size = min(LARGEST_SUBSAMPLE, size * 2**doublings)


class _LogisticSolve:
    """The time steps of one scenario."""

    def __init__(self, scenario: Scenario, examples: Examples, settings: Any):
        self.optimizer, self.mechanism = scenario.optimizer, scenario.mechanism
        self.learning_rate = np.float64(scenario.optimizer.learning_rate)  # overflows to inf, not to an error
        self.num_steps, self.num_examples = scenario.num_steps, int(scenario.problem.num_examples or 0)
        self.closure: Any = self.optimizer.theory.closure
        self.rows, self.settings = examples.train, settings
        self.split = self.rows.split
        width = self.rows.block.shape[1]
        self.direction = np.full(width, 1 / np.sqrt(width))  # in the block, of the largest curvature
        clip = self.mechanism.l2_clip_norm
        self.bound = residual_bound(clip, self.rows)
        self.limits = Limits(
            self.closure.lag, self.num_steps, self.rows.num_examples, self.num_examples, float(self.bound.min())
        )
        self.common = MeanOutput(self.rows)
        self.metrics = LogisticMetrics(examples, self.common, self.num_examples, clip, loss_alone=settings.loss_alone)
        self.fill = self.mechanism.sampler.batch_fill(scenario.problem.num_examples)
        self.presence = self.rows.presence(
            self.fill * self.mechanism.expected_batch_size, self.mechanism.sampler.exact_batch_size
        )
        self.batch_shape = self._batch_shape()
        if self.batch_shape is not None:
            self.limits.own_move = float(self.learning_rate) * self.batch_shape.own_reach
        self.passing: set[int] = set()  # steps to record
        self.passed: dict[int, Weights] = {}  # the weights there
        # A sampler's batch noise is a * second moment - b * mean^2; a and b are read off the sampler itself.
        self.second_share = float(self.mechanism.sampler.batch_noise_variance(0.0, 1.0))
        self.pushes = Pushes(self.rows, self.learning_rate, self.second_share)
        self.mean_share = self.second_share - float(self.mechanism.sampler.batch_noise_variance(1.0, 1.0))

    def _batch_shape(self) -> BatchShape | None:
        if not self.closure.feels_shape:
            return None
        size = self.mechanism.expected_batch_size
        rate = self.fill * size / self.rows.num_examples
        privacy = self.mechanism.mean_noise_std**2
        residual = np.minimum(self.bound, 0.5)
        sampler = self.mechanism.sampler
        drawn: Any = {"probability": sampler.sampling_probability or 0.0, "exactly": sampler.exact_batch_size}
        return BatchShape.of(self.rows, residual, rate=rate, batch_size=size, privacy_variance=privacy, **drawn)

    def forecast(self, record_at: Sequence[int]) -> Forecast:
        """In time steps that do not depend on `record_at`, so that looking on the way does not move the end."""
        stops = [0, *time_grid(self.num_steps, self.settings.time_steps)]
        width, num_rest = self.rows.block.shape[1], self.rows.rest.shape[1]
        at = Weights(
            np.zeros(self.split + num_rest), np.zeros((width, width)), np.zeros(num_rest), np.zeros(num_rest), None,
            OwnPush.none(self.rows.num_examples), Swing.gaussian(), Past(), CollectiveSkew.none(),
        )  # fmt: skip
        recorded, last, steepest = {}, -1, 0.0
        self.passing = set(record_at)
        with ThreadPoolExecutor(1) as beside:  # a third of the time goes into what is seen on the way: on another core
            seen = self._seen(at)
            for step, end in zip(stops, [*stops[1:], None]):
                beyond = self._out_of_depth(seen.field, at, step)
                steepest = max(steepest, self.limits.curvature) if step else 0.0
                for asked in (asked for asked in record_at if last < asked <= step):
                    metrics = beside.submit(copy_context().run, self.metrics.of, self.passed.pop(asked, at))
                    then = {"curvature": self.limits.curvature, "steepest": steepest, "move": self.limits.move}
                    then["on_lattice"] = self.limits.on_lattice
                    recorded[asked] = metrics, beyond, then
                if end is not None and is_finite(at):
                    at, seen = self._advance(at, seen, step, end - step, halvings=halvings_of(self.num_steps))
                last = step
            found = {}
            for asked, (metrics, beyond, then) in recorded.items():
                metrics, subsample_error, together, skewed = metrics.result()
                then |= {"step": asked, "together": together, "skewed": skewed}
                is_off = self.limits.are_passed_by(metrics["loss"], metrics["loss_std"], **then)
                found[asked] = metrics, beyond or is_off
        reasons = self.limits.reasons(is_finite=is_finite(at), subsample_error=subsample_error)
        return collected(found, subsample_error, reasons)

    def _advance(self, at: Weights, seen: Seen, step: int, num_steps: int, *, halvings: int) -> tuple[Weights, Seen]:
        """By the exponential midpoint rule: the field half-way, linear in the mean around it. And the end, as seen."""
        at = at._replace(pushed=at.pushed.resolved(*seen.field.spreads[1:3]))
        seen = seen._replace(weights=seen.weights._replace(pushed=at.pushed))
        half = num_steps // 2
        if half == 0:
            return self._leapt(at, seen, seen, step, num_steps, since=0)
        if step == 0 and halvings and half > 1:
            # Weights move fastest here: a first step is hardly ever short enough.
            return self._halved(at, seen, step, num_steps, halvings - 1)
        middle = self._halfway(at, seen, step, half, may_halve=half > 1 and halvings > 0)
        if middle is None:
            return self._halved(at, seen, step, num_steps, halvings - 1)
        if not is_finite(middle.weights):
            return middle.weights, middle
        return self._leapt(at, seen, middle, step, num_steps, since=half)

    def _halfway(self, at: Weights, seen: Seen, step: int, half: int, *, may_halve: bool) -> Seen | None:
        """None where too much bends on the way there: nothing of it is kept while the step is halved."""
        given = self._given(at, seen, step, half, since=0)
        middle = self._seen(self._frozen(at, seen, seen, given, step, half, since=0, overshooting=OVERSHOOTING))
        largest = LARGEST_BEND if at.pushed.density is None else LARGEST_BEND_OF_LAWS
        bends = may_halve and is_finite(middle.weights) and seen.field.bent(middle.field) > largest
        return None if bends else middle

    def _leapt(
        self, at: Weights, before: Seen, middle: Seen, step: int, num_steps: int, *, since: int
    ) -> tuple[Weights, Seen]:
        """`_frozen`, and what changes after half-way. Leaves behind what is asked for on the way."""
        given = self._given(at, middle, step, num_steps, since=since)
        after = self._seen(self._frozen(at, before, middle, given, step, num_steps, since=since))
        found = {step + num_steps: after.weights}
        for asked in (asked for asked in self.passing if step < asked < step + num_steps):
            on_the_way = self._given(at, middle, step, asked - step, since=since)
            found[asked] = self._frozen(at, before, middle, on_the_way, step, asked - step, since=since)
        if since and is_finite(after.weights):
            change = self._change(middle, given, after, step + since, num_steps - since, since)
            found = {
                then: self._changed(one, middle.field, given.taken, change, then - step) for then, one in found.items()
            }
        self.passed |= {asked: one for asked, one in found.items() if asked in self.passing}
        return found[step + num_steps], after

    def _halved(self, at: Weights, seen: Seen, step: int, num_steps: int, halvings: int) -> tuple[Weights, Seen]:
        half = num_steps // 2
        middle, around = self._advance(at, seen, step, half, halvings=halvings)
        if not is_finite(middle):
            return middle, around
        return self._advance(middle, around, step + half, num_steps - half, halvings=halvings)

    def _seen(self, at: Weights) -> Seen:
        return Seen(at, self._field(at))

    def _frozen(
        self, at: Weights, before: Seen, middle: Seen, given: Given, step: int, num_steps: int, *, since: int,
        overshooting: float = math.inf,
    ) -> Weights:  # fmt: skip
        """num_steps from `at` in the field of `middle`, `since` steps after that of `before`, that gives so much."""
        (around, field), taken = middle, given.taken
        linear = {"learning_rate": self.learning_rate, "num_steps": num_steps, "lag": taken.lag, "most": SATURATED}
        held = {"jacobian": field.jacobian, "gain": taken.gain, "overshooting": overshooting}
        apart = {"jacobian": field.jacobian_diag, "gain": taken.slope[self.split :]}
        mean, covariance, swing = self.common.carried(
            at,
            around,
            at.mean - self._travelled(field, taken, at.mean - around.mean, num_steps),
            advance_covariance(at.covariance, noise=given.noise, **held, **linear),
            num_steps,
            force=self.learning_rate * self.rows.in_block(taken.expected),
            gain=self.learning_rate * taken.gain,
            jacobian=field.jacobian,
            residuals=field.given,
            noise=self.learning_rate**2 * taken.noise,
            lag=taken.lag,
        )
        variance = advance_variance(at.variance, noise=given.rest_noise, **apart, **linear)
        unheld = at.apart + self.learning_rate**2 * num_steps * taken.noise_apart
        pushing = self._pushing(before.field, middle, taken, step, num_steps, since)
        pushed = self.pushes.advanced(at.pushed, around.pushed, given.reach, pushing)
        is_halfway = math.isfinite(overshooting)
        past, skew = self._past(at, before.field, field, taken, covariance, step, num_steps, since), at.skew
        if skew.is_any or not is_halfway:
            skew = self._skew(past, field)
        return Weights(mean, covariance, variance, unheld, taken.memory, pushed, swing, past, skew)

    def _past(
        self, at: Weights, before: Field, field: Field, taken: Directions, covariance: np.ndarray, step: int,
        num_steps: int, since: int,
    ) -> Past:  # fmt: skip
        """Beside the common swing, whose law is known."""
        covariances = self.common.apart(at.covariance), self.common.apart(covariance)
        span = Span(step, step + num_steps, self.learning_rate * taken.gain, field.jacobian, covariances)
        seen = {step: before.bends[1], step + since: field.bends[1]}
        return at.past.then(span, tuple(seen), tuple(seen.values()))

    def _skew(self, past: Past, field: Field) -> CollectiveSkew:
        """Of outputs, by what they have pushed of each other and, within the block, of themselves."""
        if not np.isfinite(past.spans[-1].covariances[1]).all():
            return CollectiveSkew.none()
        few, spreads = self.common.chosen, field.spreads
        # An example's own law knows what it pushes of the rest, and of the block as far as that answers to the rest:
        # left is b/s, of pushes against all of its output, of which b is the block's.
        of_block = np.maximum(spreads.slow - spreads.rest, 1e-30)[few]
        own = np.minimum(spreads.slow[few] / of_block, MOST_OFTEN)
        return CollectiveSkew.of(self.common.few, field.bends[0], own, past, self.rows.num_examples)

    def _directions(self, at: Weights, middle: Seen, step: int, num_steps: int) -> Directions:
        around, field = middle
        rest = slice(self.split, None)
        halfway = self.closure.memory(at.memory, field.law, step, max(1, num_steps // 2))
        gain_share = self.closure.gain_share(field.law, halfway, step, num_steps)
        found = self.closure.response(field.law, halfway)
        slope = gain_share * found.gain
        slope = np.maximum(slope, SMALLEST_GAIN * slope.max())
        # Cov u counts the spread of the weights; the linear step counts it too, as eta^2 K J V J K. Of a share above 1
        # that would be more than there is.
        spread = field.jacobian @ around.covariance @ field.jacobian
        of_rest, gain = found.variance[rest], gain_in_block(self.rows, slope)
        counted = gain_in_block(self.rows, np.minimum(slope, found.gain))
        noise = self._direction_covariance(field, gain, of_rest, halfway) - counted[:, None] * spread * counted
        along = field.law.signal_variance[rest] + field.noise_along
        noise_apart = np.maximum(of_rest - slope[rest] ** 2 * along, 0.0)
        share = self.closure.noise_share(step, num_steps)
        return Directions(
            expected=gain_share * found.expected,
            slope=slope,
            gain=gain,
            noise=share * noise,
            rest_noise=share * (noise_apart + slope[rest] ** 2 * field.noise_shared),
            noise_apart=share * noise_apart,
            lag=self.closure.lag_of(step, num_steps),
            memory=self.closure.memory(at.memory, field.law, step, num_steps),
        )

    def _given(self, at: Weights, seen: Seen, step: int, num_steps: int, *, since: int) -> Given:
        field, taken = seen.field, self._directions(at, seen, step, num_steps)
        bends = bend_together(field.jacobian)
        reach = self.pushes.reach(taken.slope, taken.gain, bends, field.held, field.spreads, step + since)
        lasting, rest_lasting = self.pushes.lasting(reach, field.held)
        return Given(taken, reach, taken.noise + lasting, taken.rest_noise + rest_lasting)

    def _pushing(self, before: Field, middle: Seen, taken: Directions, step: int, num_steps: int, since: int) -> Step:
        """What examples' own pushes are advanced by."""
        around, field = middle
        squared = self.learning_rate**2
        noise = self.common.noise_of(around.covariance, field.spreads.swings, squared * taken.noise)
        return Step(
            so_far=step + since,
            num_steps=num_steps,
            since=since,
            before=before.spreads,
            spreads=field.spreads,
            swing_noise=noise[0],
            slow_noise=noise[1] + squared * self.rows.rest_squared_dot(taken.rest_noise),
            held=field.held,
            squared=field.squared_residual,
            jacobian=(bend_together(field.jacobian), field.jacobian_diag),
            variance=(self.common.beside(around.covariance), around.variance),
        )

    def _direction_covariance(
        self, field: Field, gain: np.ndarray, of_rest: np.ndarray, memory: np.ndarray | None
    ) -> np.ndarray:
        """Cov u along the block's columns."""
        own = slice(None, self.split)
        among = self.closure.covariance(
            field.mean[own], field.covariance[own, own], None if memory is None else memory[own]
        )
        return direction_covariance(self.rows, among, field.covariance, gain, of_rest, field.law.variance[self.split :])

    def _travelled(self, field: Field, taken: Directions, offset: np.ndarray, num_steps: int) -> np.ndarray:
        """eta sum_i (I - eta D J)^i (E u + D J offset)."""
        force = taken.expected / taken.stiffness(field)
        if offset.any():
            force = force + field.curve(self.rows, offset)
        return self._response(field, taken, force, num_steps)

    def _response(self, field: Field, taken: Directions, force: np.ndarray, num_steps: int, **asked: Any) -> np.ndarray:
        """eta sum_i (I - eta D J)^i D force."""
        root, eta = np.sqrt(taken.stiffness(field)), self.learning_rate
        asked |= {"lag": taken.lag, "most": SATURATED}
        response = krylov_response(
            lambda v: eta * root * field.curve(self.rows, root * v), root * force, num_steps, **asked
        )
        return eta * root * response

    def _change(self, middle: Seen, given: Given, end: Seen, step: int, num_steps: int, since: int) -> Change:
        """A step, from half-way to an end num_steps later, where all that is frozen half-way leads to.

        What a force changes since the mean moves is left out, by the slopes on the way: the response knows of it.
        """
        (at, field), (after, there), eta = middle, end, self.learning_rate
        then, moved = self._given(after, end, step + num_steps, 1, since=0), after.mean - at.mean
        stiffness, later = given.taken.stiffness(field), then.taken.stiffness(there)
        bent = stiffness * field.curve(self.rows, moved) + later * there.curve(self.rows, moved)
        force = (then.taken.expected - given.taken.expected - bent / 2) / stiffness
        block = then.injected(there, at.covariance, eta) - given.injected(field, at.covariance, eta)
        rest = then.injected_in_rest(there, at.variance, eta) - given.injected_in_rest(field, at.variance, eta)
        return Change(force / num_steps, Drift(block / num_steps, since), Drift(rest / num_steps, since))

    def _changed(self, after: Weights, field: Field, taken: Directions, change: Change, num_steps: int) -> Weights:
        """What is led to by num_steps of which not all is frozen."""
        linear = {"learning_rate": self.learning_rate, "num_steps": num_steps, "lag": taken.lag, "most": SATURATED}
        block = {"jacobian": field.jacobian, "gain": taken.gain, "apart": self.common.direction}
        rest = {"jacobian": field.jacobian_diag, "gain": taken.slope[self.split :]}
        moved = self._response(field, taken, change.force, num_steps, tolerance=OF_CHANGE, since=change.block.since)
        return after._replace(
            mean=after.mean - moved,
            covariance=drift_covariance(after.covariance, change.block, **block, **linear),
            variance=drift_variance(after.variance, change.rest, **rest, **linear),
        )

    def _field(self, at: Weights) -> Field:
        rows, split, privacy = self.rows, self.split, self.mechanism.mean_noise_std**2
        swings, labels = self.common.swings(rows, at.covariance), rows.labels
        spreads = Spreads.of(rows, swings, at)
        law = at.pushed_law(rows, spreads, self.common)
        variance, few = law.std**2, self.common.chosen
        correlations = self.common.correlations(swings, law.std, at.pushed.swinging_share(spreads.swing))
        found = clipped_expectations(law, labels, self.bound, at.swing.departures(correlations))
        bends = self._bends(law, found.values)
        given = residual_given(law.mean[few], variance[few], labels[few], self.bound[few], correlations[few], at.swing)
        follows = correlations[few] * law.std[few]
        found = ClippedExpectations(*(self.fill * part for part in found))  # of the sum over a batch, over B
        mean = rows.mean_of(found.residual)
        held = self._held(found, at, law, spreads)
        jacobian, jacobian_diag, stiffer = self._jacobian(held, at, follows @ given)
        noise = self.second_share * rows.block_second_moment(found.squared_residual)
        pull = rows.in_block(mean)
        noise = noise - self.mean_share * np.outer(pull, pull) + privacy * np.eye(len(pull))
        rest_noise = self.second_share * rows.rest_second_moment(found.squared_residual)
        rest_noise = rest_noise - self.mean_share * mean[split:] ** 2 + privacy
        noise_along = self.second_share * rows.rest_moment_along(found.squared_residual)
        spread = jacobian @ at.covariance @ jacobian
        noise_shared = (rows.company - 1) * np.maximum(rest_noise - privacy - noise_along, 0.0)
        signal = np.concatenate([np.diag(spread)[:split], jacobian_diag**2 / rows.company * at.variance])
        noise_variance = np.maximum(np.concatenate([np.diag(noise)[:split], rest_noise]), 1e-30)
        gradient = GradientLaw(mean, signal, noise_variance, presence=self.presence, privacy_variance=privacy)
        if self.batch_shape is not None:
            of_one = found.residual / self.fill, found.squared_residual / self.fill
            gradient, felt = self.batch_shape.seen_by_sign(gradient, *of_one, found.slope)
            found, given = found.felt(felt), felt[few, None] * given
            held = self._held(found, at, law, spreads)
            jacobian, jacobian_diag, stiffer = self._jacobian(held, at, follows @ given)
        return Field(
            found.slope, found.squared_residual, mean, spreads, jacobian, jacobian_diag, noise_along, noise_shared,
            held, noise + spread, gradient, stiffer, self.common.stiffness(at, jacobian), self.fill * given, bends,
        )  # fmt: skip

    def _bends(self, law: OutputLaw, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the examples that stand for all, std of their outputs and rho'': E[rho (x^2 - x E x^3 - 1)]/Var z.

        That is E rho'' of a Gaussian, and else what of Cov(z^2, rho) is not of the straight force Cov(z, rho)/Var z.
        """
        few = self.common.chosen
        places, shares = (each if each.shape[1] == 1 else each[:, few] for each in (law.places, law.shares))
        third = (shares * places**3).sum(axis=0)
        found = (shares * values[:, few] * (places**2 - third * places - 1)).sum(axis=0).astype(np.float64)
        return law.std[few], self.fill * found / law.std[few] ** 2

    def _held(self, found: ClippedExpectations, at: Weights, law: OutputLaw, spreads: Spreads) -> Held:
        """Of these residuals, with what the common swing makes of slopes."""
        held = at.pushed.held(*spreads[1:3], law, found.values)
        of_own_law = law.hermite_means(found.values, 2)[1] / law.std
        share = np.where(of_own_law > 1e-12, found.slope / np.maximum(of_own_law, 1e-12), 1.0)
        return held._replace(swing=held.swing * share, slow=held.slow * share)

    def _jacobian(
        self, held: Held, at: Weights, pull: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, tuple[float, np.ndarray]]:
        """J of examples that hold weights so, and of such a pull on the mean output at the places of its swing.

        Returns: J in the block; its diagonal in the rest, as in `Field`; `MeanOutput.stiffer`.
        """
        # Single precision may leave a variance of nothing below nothing.
        of_rest = np.maximum(self.rows.rest_second_moment(held.slow) - self.rows.rest_moment_along(held.slow), 0.0)
        of_rest *= self.rows.company
        within = self.rows.block_second_moment(held.slow)
        within += self.common.secant(at.covariance, np.maximum(held.swing - held.slow, 0.0))
        stiffer, along = self.common.stiffer(at, within, pull)
        return within + stiffer * np.outer(along, along), of_rest, (stiffer, along)

    def _out_of_depth(self, field: Field, at: Weights, step: int) -> bool:
        if not np.isfinite(field.mean).all():
            return True
        limits, memory = self.limits, self.closure.memory(at.memory, field.law, step, 1)
        found = self.closure.response(field.law, memory)
        gain = found.gain
        limits.move = self._move(field, found, memory) if step else 0.0
        curvature = np.concatenate([np.diag(field.jacobian)[: self.split], field.jacobian_diag])
        limits.steepest = max(limits.steepest, self.learning_rate * float(np.max(gain * curvature)))
        limits.curvature = self.learning_rate * self._largest_curvature(field, gain)
        if step == 0:
            moved = self.rows.dot(self.learning_rate * found.expected)
            limits.first_move = float(np.sqrt(np.mean(moved**2)))
        limits.share = float(at.pushed.remaining_share(*field.spreads[1:3]).mean())
        limits.on_lattice = field.on_lattice(self.learning_rate, self.split) if self.closure.feels_shape else 0.0
        return limits.are_passed

    def _move(self, field: Field, found: Response, memory: Any) -> float:
        """By how much a step moves the logits by chance; a step that averages gradients by that of what they average,
        less what is averaged out.
        """
        of_rest = found.variance[self.split :]
        of_block = self._direction_covariance(field, gain_in_block(self.rows, found.gain), of_rest, memory)
        variance = self.rows.block_spread(of_block) + self.rows.rest_squared_dot(of_rest)
        return self.learning_rate * math.sqrt(float(variance.mean()) / (1 + 2 * self.closure.lag))

    def _largest_curvature(self, field: Field, gain: np.ndarray) -> float:
        """Of the optimizer's drift: in the block by a power iteration that goes on from step to step, since correlated
        features bend together far more than each alone; in the rest that of each. At the start it may pass 2 unharmed.
        """
        root = np.sqrt(gain_in_block(self.rows, gain))
        of_block, self.direction = power_iteration(
            lambda v: root * (field.jacobian @ (root * v)), self.direction, POWERS
        )
        return float(np.max(gain[self.split :] * field.jacobian_diag, initial=of_block))
