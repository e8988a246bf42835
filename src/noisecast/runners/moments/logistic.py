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
from noisecast.runners.moments.averaged_steps import no_averages
from noisecast.runners.moments.examples import Examples, why_too_long
from noisecast.runners.moments.forecast import Forecast, collected
from noisecast.runners.moments.lagging import Lagging
from noisecast.runners.moments.logistic_field import Field, Fields, Seen
from noisecast.runners.moments.logistic_limits import ENOUGH, Limits
from noisecast.runners.moments.logistic_steps import FrozenSteps
from noisecast.runners.moments.logistic_weights import LogisticMetrics, Weights, is_finite
from noisecast.runners.moments.mean_output import MeanOutput
from noisecast.runners.moments.parted_rows import gain_in_block
from noisecast.runners.moments.time_steps import is_nearly_free, time_grid, with_first
from noisecast.scenario import Scenario
from noisecast.theory.closures import Response
from noisecast.theory.collective_skew import CollectiveSkew, Past
from noisecast.theory.common_swing import Swing
from noisecast.theory.frozen_steps import (
    OVERSHOOTING,
    halvings_of,
    power_iteration,
    way_to_rest,
)
from noisecast.theory.own_push import OwnPush

SMALLEST_SUBSAMPLE, LARGEST_SUBSAMPLE = 8_000, 50_000  # where nobody asks for a number
FEW_COLUMNS = 100  # of twice as many rows and no more: all are taken, or the first forecast is often made in vain
LARGEST_BEND = 0.3  # of the examples' slopes within half a time step: beyond it the step is halved
LARGEST_BEND_OF_LAWS = 0.1  # the same where each output has its own: a loss of few outputs, far out, feels their shape
# Where a time step is nearly free: the same, of its first and its second half; and up to step 100, or a tenth of the
# run, no step is longer than so much of the steps before, divided by how many are asked for. Not with few rows a
# column: what their skewness, known by three moments, leaves out makes a loss 9 % too low in short steps, 1 % in long.
LARGEST_BENDS_OF_FEW = 0.15, 0.3
FIRST, FIRST_GROWTH, MANY_ROWS = 100, 1.2, 4
POWERS = 3  # of the curvature a time step


def handles(problem: Any) -> bool:
    return isinstance(problem, LinearModel) and problem.likelihood is LOGISTIC


def why_unsupported(scenario: Scenario) -> str | None:
    return why_too_long(scenario.problem)


def prepare(problem: LinearModel, settings: Any) -> Callable[[int], Examples]:
    return cache(lambda size: Examples.of(problem, settings.full_covariance_features, size))


def forecast(
    scenario: Scenario, prepared: Callable[[int], Examples], record_at: Sequence[int], settings: Any
) -> Forecast:
    """With the subsample asked for; else with as many examples as bring the error that one adds below a limit."""
    problem: Any = scenario.problem
    num_examples = problem.num_examples
    are_few = num_examples <= 2 * SMALLEST_SUBSAMPLE and problem.train.rows.num_features <= FEW_COLUMNS
    size = settings.subsample or (num_examples if are_few else SMALLEST_SUBSAMPLE)
    while True:
        found = _forecast(scenario, prepared(min(size, num_examples)), settings, record_at)
        lacks = found.subsample_error > ENOUGH  # not where the forecast diverges, and so the error is no number
        if settings.subsample or size >= min(num_examples, LARGEST_SUBSAMPLE) or not lacks:
            return found
        # What a subsample adds falls as 1/size. Doubled so often that it does: few sizes are prepared, and kept.
        doublings = math.ceil(math.log2(1.5 * min(found.subsample_error / ENOUGH, 8.0)))
        size = min(LARGEST_SUBSAMPLE, size * 2**doublings)


def _forecast(scenario: Scenario, examples: Examples, settings: Any, record_at: Sequence[int]) -> Forecast:
    """With averages followed where they should be, and can: else they are not."""
    for follows_averages in (None, True, False):
        found = _LogisticSolve(scenario, examples, settings, follows_averages=follows_averages).forecast(record_at)
        if found is not None:
            return found
    raise AssertionError("the last of them returns")


class _LogisticSolve:
    """The time steps of one scenario.

    Args:
      follows_averages: whether an optimizer's averages are followed step by step until directions have nearly calmed;
        None: no, unless they should be.
    """

    def __init__(self, scenario: Scenario, examples: Examples, settings: Any, *, follows_averages: bool | None):
        self.optimizer, self.mechanism = scenario.optimizer, scenario.mechanism
        self.learning_rate = np.float64(scenario.optimizer.learning_rate)  # overflows to inf, not to an error
        self.num_steps, self.num_examples = scenario.num_steps, int(scenario.problem.num_examples or 0)
        self.closure: Any = self.optimizer.theory.closure
        self.rows, self.settings = examples.train, settings
        self.asks = self.closure.averages is not None and follows_averages is None
        self.split = self.rows.split
        width = self.rows.block.shape[1]
        nearly_free = is_nearly_free(self.rows.block.size, width**2) and not settings.loss_alone
        self.is_fine = nearly_free and self.rows.num_examples > MANY_ROWS * width
        self.direction = np.full(width, 1 / np.sqrt(width))  # in the block, of the largest curvature
        clip = self.mechanism.l2_clip_norm
        self.common = MeanOutput(self.rows)
        self.fields = Fields(scenario, self.rows, self.common)
        self.limits = Limits(
            Lagging(
                self.closure.lag,
                self.num_steps,
                self.rows.num_weights,
                self.rows.block.size,
                width**2,
                bool(follows_averages),
            ),
            self.rows.num_examples,
            self.num_examples,
            float(self.fields.bound.min()),
        )
        self.metrics = LogisticMetrics(examples, self.common, self.num_examples, clip, loss_alone=settings.loss_alone)
        if self.fields.batch_shape is not None:
            self.limits.own_move = float(self.learning_rate) * self.fields.batch_shape.own_reach
        self.passing: set[int] = set()  # steps to record
        self.passed: dict[int, Weights] = {}  # the weights there
        self.steps = FrozenSteps(scenario, self.rows, self.common, self.fields.second_share)

    def _start(self) -> Weights:
        width, num_rest = self.rows.block.shape[1], self.rows.rest.shape[1]
        mean, covariance, rest = np.zeros(self.split + num_rest), np.zeros((width, width)), np.zeros(num_rest)
        averages = no_averages(mean, covariance, np.stack([rest, rest])) if self.limits.lagging.is_followed else None
        return Weights(
            mean, covariance, rest, rest, None,
            OwnPush.none(self.rows.num_examples), Swing.gaussian(), Past(), CollectiveSkew.none(), averages,
        )  # fmt: skip

    def forecast(self, record_at: Sequence[int]) -> Forecast | None:
        """In time steps that do not depend on `record_at`, so that looking on the way does not move the end.

        None where averages should be followed, and are not; or are, and cannot be.
        """
        grid = time_grid(self.num_steps, self.settings.time_steps)
        if self.is_fine:
            grid = with_first(grid, max(FIRST, self.num_steps // 10), FIRST_GROWTH / self.settings.time_steps)[1:]
        stops = self.limits.lagging.stops(grid)
        at = self._start()
        recorded, last, steepest, largest, bent = {}, -1, 0.0, 0.0, 0.0
        self.passing = set(record_at)
        with ThreadPoolExecutor(1) as beside:  # a third of the time goes into what is seen on the way: on another core
            seen = self._seen(at)
            for step, end in zip(stops, [*stops[1:], None]):
                beyond = self._out_of_depth(seen.field, at, step)
                steepest = max(steepest, self.limits.curvature) if step else 0.0
                largest = max(largest, self.limits.curvature)
                if self.asks and self.limits.lagging.should_be_followed(step, largest):
                    return None
                for asked in (asked for asked in record_at if last < asked <= step):
                    metrics = beside.submit(copy_context().run, self.metrics.of, self.passed.pop(asked, at))
                    then = {"curvature": self.limits.curvature, "steepest": steepest, "move": self.limits.move}
                    then["on_lattice"] = self.limits.on_lattice
                    recorded[asked] = metrics, beyond, then
                if end is not None and is_finite(at):
                    if not self.limits.lagging.are_followed(step, largest):
                        at = at._replace(averages=None)
                    if at.averages is not None and step < self.limits.lagging.known:
                        bent += (end - step) * self._bent(seen)
                    if self.limits.lagging.is_bent(end, bent):
                        return None
                    halvings = halvings_of(self.num_steps) if at.averages is None else 0
                    at, seen = self._advance(at, seen, step, end - step, halvings=halvings)
                last = step
            found = {}
            for asked, (metrics, beyond, then) in recorded.items():
                metrics, subsample_error, together, skewed = metrics.result()
                then |= {"step": asked, "together": together, "skewed": skewed}
                is_off = self.limits.are_passed_by(metrics["loss"], metrics["loss_std"], **then)
                found[asked] = metrics, beyond or is_off
        reasons = self.limits.reasons(is_finite=is_finite(at), subsample_error=subsample_error)
        return collected(found, subsample_error, reasons)

    def _bent(self, seen: Seen) -> float:
        at, field = seen
        share = float(field.spreads.swing.mean() / max(field.spreads.whole.mean(), 1e-300))
        return self.common.bent(at, share, field.given)

    def _advance(self, at: Weights, seen: Seen, step: int, num_steps: int, *, halvings: int) -> tuple[Weights, Seen]:
        """By the exponential midpoint rule: the field half-way, linear in the mean around it. And the end, as seen."""
        at = at._replace(pushed=at.pushed.resolved(*seen.field.spreads[1:3]))
        seen = seen._replace(weights=seen.weights._replace(pushed=at.pushed))
        half = num_steps // 2
        if half == 0:
            return self._leapt(at, seen, seen, step, num_steps, since=0)
        if num_steps == 2 and at.averages is None:  # single ones read no more fields
            return self._halved(at, seen, step, num_steps, halvings)
        if step == 0 and halvings and half > 1:
            # Weights move fastest here: a first step is hardly ever short enough.
            return self._halved(at, seen, step, num_steps, halvings - 1)
        middle = self._halfway(at, seen, step, half, may_halve=halvings > 0)
        if middle is None:
            return self._halved(at, seen, step, num_steps, halvings - 1)
        if not is_finite(middle.weights):
            return middle.weights, middle
        end, after = self._leapt(at, seen, middle, step, num_steps, since=half)
        share = way_to_rest(*(each.field.spreads.whole for each in (seen, middle, after)))
        if share < 1:
            middle = self._seen(middle.weights.on_the_way_from(at, share))
            end, after = self._leapt(at, seen, middle, step, num_steps, since=half)
        if self.is_fine and halvings and is_finite(end) and middle.field.bent(after.field) > LARGEST_BENDS_OF_FEW[1]:
            return self._halved(at, seen, step, num_steps, halvings - 1)
        return end, after

    def _halfway(self, at: Weights, seen: Seen, step: int, half: int, *, may_halve: bool) -> Seen | None:
        """None where too much bends on the way there: nothing of it is kept while the step is halved."""
        given = self.steps.given(at, seen, step, half, since=0)
        middle = self._seen(self.steps.frozen(at, seen, seen, given, step, half, since=0, overshooting=OVERSHOOTING))
        largest = LARGEST_BENDS_OF_FEW[0] if self.is_fine else LARGEST_BEND
        largest = largest if at.pushed.density is None else LARGEST_BEND_OF_LAWS
        bends = may_halve and is_finite(middle.weights) and seen.field.bent(middle.field) > largest
        return None if bends else middle

    def _leapt(
        self, at: Weights, before: Seen, middle: Seen, step: int, num_steps: int, *, since: int
    ) -> tuple[Weights, Seen]:
        """`FrozenSteps.frozen`, and what changes after half-way. Leaves behind what is asked for on the way."""
        given = self.steps.given(at, middle, step, num_steps, since=since)
        after = self._seen(self.steps.frozen(at, before, middle, given, step, num_steps, since=since))
        found = {step + num_steps: after.weights}
        for asked in (asked for asked in self.passing if step < asked < step + num_steps):
            on_the_way = self.steps.given(at, middle, step, asked - step, since=since)
            found[asked] = self.steps.frozen(at, before, middle, on_the_way, step, asked - step, since=since)
        if since and at.averages is None and is_finite(after.weights):
            change = self.steps.change(middle, given, after, step + since, num_steps - since, since)
            found = {
                then: self.steps.changed(one, middle.field, given.taken, change, then - step)
                for then, one in found.items()
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
        return Seen(at, self.fields.at(at))

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
        of_block = self.steps.direction_covariance(field, gain_in_block(self.rows, found.gain), of_rest, memory)
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
