"""Steps of a binary logistic model in a field that is frozen half-way, and what changes after that."""

import math
from typing import Any

import numpy as np

from noisecast.runners.moments.averaged_steps import Followed, Frozen, followed
from noisecast.runners.moments.examples import Rows
from noisecast.runners.moments.logistic_field import Change, Directions, Field, Given, Seen
from noisecast.runners.moments.logistic_weights import Weights
from noisecast.runners.moments.mean_output import MeanOutput
from noisecast.runners.moments.parted_rows import direction_covariance, gain_in_block
from noisecast.runners.moments.pushes import Pushes, Step, bend_together
from noisecast.scenario import Scenario
from noisecast.theory.adam_averages import Averages
from noisecast.theory.collective_skew import CollectiveSkew, Past, Span
from noisecast.theory.frozen_steps import (
    SATURATED,
    SMALLEST_GAIN,
    Drift,
    advance_covariance,
    advance_variance,
    drift_covariance,
    drift_variance,
    krylov_response,
)

MOST_OFTEN = 4.0  # of what an example does to itself within the block
OF_CHANGE = 0.02  # tolerance: of how far a force that changes moves the mean, itself a correction


class FrozenSteps:
    """The optimizer of a scenario, at work on such rows.

    Args:
      common: of the rows.   second_share: of batch noise (`Fields`).
    """

    def __init__(self, scenario: Scenario, rows: Rows, common: MeanOutput, second_share: float):
        self.learning_rate = np.float64(scenario.optimizer.learning_rate)  # overflows to inf, not to an error
        self.closure: Any = scenario.optimizer.theory.closure
        self.rows, self.common, self.split = rows, common, rows.split
        self.pushes = Pushes(rows, self.learning_rate, second_share)

    def given(self, at: Weights, seen: Seen, step: int, num_steps: int, *, since: int) -> Given:
        """What `seen` gives the weights in num_steps, `since` steps after `at`'s step."""
        field, taken = seen.field, self._directions(at, seen, step, num_steps)
        bends = bend_together(field.jacobian)
        reach = self.pushes.reach(taken.slope, taken.gain, bends, field.held, field.spreads, step + since)
        lasting, rest_lasting = self.pushes.lasting(reach, field.held)
        return Given(taken, reach, taken.noise + lasting, taken.rest_noise + rest_lasting)

    def frozen(
        self, at: Weights, before: Seen, middle: Seen, given: Given, step: int, num_steps: int, *, since: int,
        overshooting: float = math.inf,
    ) -> Weights:  # fmt: skip
        """num_steps from `at` in the field of `middle`, `since` steps after that of `before`, that gives so much."""
        if at.averages is None:
            moved = self._linear(at, middle, given, num_steps, overshooting)
        else:
            moved = self._averaged(at, at.averages, middle, given, step, num_steps)
        pushing = self._pushing(before.field, middle, given.taken, step, num_steps, since)
        pushed = self.pushes.advanced(at.pushed, middle.weights.pushed, given.reach, pushing)
        is_halfway = math.isfinite(overshooting)
        past = self._past(at, before.field, middle.field, given.taken, moved.covariance, step, num_steps, since)
        skew = self._skew(past, middle.field) if at.skew.is_any or not is_halfway else at.skew
        return moved._replace(pushed=pushed, past=past, skew=skew)

    def change(self, middle: Seen, given: Given, end: Seen, step: int, num_steps: int, since: int) -> Change:
        """A step, from half-way to an end num_steps later, where all that is frozen half-way leads to.

        What a force changes since the mean moves is left out, by the slopes on the way: the response knows of it.
        """
        (at, field), (after, there), eta = middle, end, self.learning_rate
        then, moved = self.given(after, end, step + num_steps, 1, since=0), after.mean - at.mean
        stiffness, later = given.taken.stiffness(field), then.taken.stiffness(there)
        bent = stiffness * field.curve(self.rows, moved) + later * there.curve(self.rows, moved)
        force = (then.taken.expected - given.taken.expected - bent / 2) / stiffness
        block = then.injected(there, at.covariance, eta) - given.injected(field, at.covariance, eta)
        rest = then.injected_in_rest(there, at.variance, eta) - given.injected_in_rest(field, at.variance, eta)
        return Change(force / num_steps, Drift(block / num_steps, since), Drift(rest / num_steps, since))

    def changed(self, after: Weights, field: Field, taken: Directions, change: Change, num_steps: int) -> Weights:
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

    def direction_covariance(
        self, field: Field, gain: np.ndarray, of_rest: np.ndarray, memory: np.ndarray | None
    ) -> np.ndarray:
        """Cov u along the block's columns."""
        own = slice(None, self.split)
        among = self.closure.covariance(
            field.mean[own], field.covariance[own, own], None if memory is None else memory[own]
        )
        return direction_covariance(self.rows, among, field.covariance, gain, of_rest, field.law.variance[self.split :])

    def _linear(self, at: Weights, middle: Seen, given: Given, num_steps: int, overshooting: float) -> Weights:
        """Steps in which directions answer to gradients at once, or later by a lag."""
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
        return at._replace(
            mean=mean, covariance=covariance, variance=variance, apart=unheld, memory=taken.memory, swing=swing
        )

    def _averaged(
        self, at: Weights, averages: Averages, middle: Seen, given: Given, step: int, num_steps: int
    ) -> Weights:
        """Steps of which averages of gradients are followed one by one."""
        (around, field), (taken, _, noise, rest_noise) = middle, given
        rest, gain = slice(self.split, None), np.maximum(taken.gain, 1e-150)
        lasting = (noise - taken.noise) / np.outer(gain, gain)
        rest_lasting = (rest_noise - taken.rest_noise) / np.maximum(taken.slope[rest], 1e-150) ** 2
        apart = np.maximum(field.law.noise_variance[rest] - field.noise_along, 0.0)
        frozen = Frozen(
            pull=lambda mean: field.mean + field.curve(self.rows, mean - around.mean),
            variance=field.law.variance,
            jacobian=field.jacobian,
            noise=field.covariance - field.jacobian @ around.covariance @ field.jacobian + lasting,
            rest_jacobian=np.stack([field.jacobian_diag, np.zeros_like(apart)]),
            rest_noise=np.stack([apart + field.noise_shared + rest_lasting, apart]),
        )
        start = Followed(at.mean, at.covariance, np.stack([at.variance, at.apart]), averages)
        steps = self.closure.averages
        mean, covariance, (variance, unheld), averages = followed(
            start, frozen, steps, self.rows, self.learning_rate, step, num_steps
        )
        memory = steps.memory(averages.second, step + num_steps)
        return at._replace(
            mean=mean, covariance=covariance, variance=variance, apart=unheld, memory=memory, averages=averages
        )

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
        noise = self.direction_covariance(field, gain, of_rest, halfway) - counted[:, None] * spread * counted
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
