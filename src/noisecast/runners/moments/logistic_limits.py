"""Where the forecast of a logistic model may be off, and the sentences that say why."""

import math
from dataclasses import dataclass

from noisecast.runners.moments.forecast import FITTED, OF_A_FIT
from noisecast.runners.moments.lagging import Lagging
from noisecast.theory.frozen_steps import largest_stable_step

ENOUGH = 0.02  # of the loss: a subsample that adds less is large enough
LARGEST_MOVE = 5.0  # of the logits by the first step
FEWEST_EXAMPLES = 20
SMALLEST_BOUND = 1e-6  # of a clipped residual: single precision knows probabilities to 6e-8
# eta times the largest curvature of one coordinate on the way, in halves of what explodes: steps overshoot.
LARGEST_STEP = 1.5
LARGEST_LASTING_STEP = 1.2  # the same of all coordinates together: where it is no passing one
LEAST_SHARE = 0.85  # of curvature with which examples hold the weights: with less they fit each other's noise
LEAST_THROWN_SHARE, THROWN = 0.9, 1.0  # the same, of logits that a step moves by so much
LARGEST_LASTING_MOVE = 1.5  # of the logits by a step later on, on average: no path is made of such steps
LARGEST_KNOWN_MOVE = 10  # the same: within several per cent until then, and up to a third off beyond
WIDEST_SPREAD = 0.43  # of the loss, from run to run: beyond it no one Gaussian holds all runs
WIDEST_HIGH_SPREAD, HIGH = 0.18, 2.0  # the same where the loss is so many times that of the start
# Of the loss, what columns make together of which the closure does not know. Where words leave their group a quarter
# to a half of the time the loss came out too high by up to a third of that.
TOGETHER = 0.1
# Signs: eta J_jj/s_j of one column, beyond which its weight goes back and forth between few multiples of the learning
# rate, and what it may add to the loss by that. Of one column 40 times as long as others losses were up to 5 % off
# where it was 0.7 to 1.5 %; many columns make up for each other.
LARGEST_LATTICE_RATIO, ON_LATTICE = 2.0, 0.007
SKEWED = 0.1  # of the loss, what the skewness of outputs takes: their law beyond the third moment is not known
LARGEST_OWN_MOVE = 0.5  # of the output of an example that is alone in its batch
FAR, OF_FEW = 0.9, 2.75  # such a move, and as many times the loss: the loss is that of few outputs, thrown far


def of_a_first_move(move: float) -> str:
    return f"The first step alone moves the logits by {move:.2g}: what follows is no small step either."


@dataclass
class Limits:
    """What the time steps of one solve have met; beyond the limits a row is `extrapolated`.

    Args:
      lagging: of the optimizer's directions behind gradients.
      used, num_examples: with how many examples it computes, and of how many.   least_bound: of a clipped residual.
      steepest: learning rate times the largest curvature of one coordinate, at any step.
      curvature: learning rate times the largest curvature of all, at the step seen last.
      move, first_move: of the logits by a step: by chance, at the step seen last; by the first one alone.
      share: with which examples still hold the weights, on average.
    """

    lagging: Lagging
    used: int
    num_examples: int
    least_bound: float
    steepest: float = 0.0
    curvature: float = 0.0
    move: float = 0.0
    first_move: float = 0.0
    own_move: float = 0.0  # of the output of an example, by a fixed-size batch of few that has it
    share: float = 1.0
    is_fitted: bool = False  # by the row judged last, as the next one
    is_of_few: bool = False
    spread: float = 0.0  # of the loss from run to run, relative, as of the row judged last
    is_high: bool = False  # the loss of the row judged last, beside the start's
    together: float = 0.0  # as `are_passed_by` has it, of the row judged last
    skewed: float = 0.0  # the same
    on_lattice: float = 0.0  # of the loss, what one column adds whose weight is on few places, at the step seen last
    bounces: float = 0.0  # the same, as a share, of the row judged last
    overshot: bool = False  # by directions that lag, at some step judged

    @property
    def are_passed(self) -> bool:
        """By what is known without the loss."""
        too_small = self.used < FEWEST_EXAMPLES or self.least_bound < SMALLEST_BOUND
        too_far = self.steepest > LARGEST_STEP * self._reach or self.first_move > LARGEST_MOVE
        too_far = too_far or self.share < self._least_share or self.own_move > LARGEST_OWN_MOVE
        return bool(too_far or too_small or self.move > LARGEST_LASTING_MOVE)

    def are_passed_by(
        self, loss: float, loss_std: float, *, step: int, curvature: float, steepest: float, move: float,
        together: float, skewed: float, on_lattice: float,
    ) -> bool:  # fmt: skip
        """By the loss of a row that was seen when curvature and move were these.

        Args:
          steepest: the largest curvature until then.
          together: share of the loss that columns make together which are taken for independent.
          skewed: share of the loss that the skewness of outputs takes away.
          on_lattice: what one column adds whose weight is on few places.
        """
        self.together, self.skewed = together, skewed
        self.is_fitted, self.spread = loss < FITTED * math.log(2), loss_std / loss if loss else 0.0
        self.is_high = loss > HIGH * math.log(2)
        self.is_of_few = move > max(FAR, OF_FEW * loss)
        lasts = min(curvature, self.curvature) > LARGEST_LASTING_STEP * self._reach
        overshoots = self.lagging.swings(step, steepest)
        self.overshot = self.overshot or overshoots
        self.bounces = on_lattice / loss if loss else 0.0
        is_other = together > TOGETHER or skewed > SKEWED or self.bounces > ON_LATTICE
        return self.is_fitted or self.is_of_few or self._is_scattered or lasts or overshoots or is_other

    @property
    def _reach(self) -> float:
        """Half of what explodes."""
        return largest_stable_step(self.lagging.lag) / 2

    @property
    def _least_share(self) -> float:
        return LEAST_THROWN_SHARE if self.move > THROWN else LEAST_SHARE

    @property
    def _is_scattered(self) -> bool:
        """Whether runs differ so much that they feel different forces: one whose loss is high is driven back harder
        than the mean run, and its like are rarer than they would be.
        """
        return self.spread > (WIDEST_HIGH_SPREAD if self.is_high else WIDEST_SPREAD)

    def reasons(self, *, is_finite: bool, subsample_error: float) -> list[str]:
        """Why rows may be off, a sentence each.

        Args:
          is_finite: whether the weights are, at the end.   subsample_error: of the loss, relative.
        """
        if not is_finite:
            return ["The weights grow without bound."]
        return [sentence for holds, sentence in self._sentences(subsample_error) if holds]

    def _sentences(self, subsample_error: float) -> list[tuple[bool, str]]:
        largest, lasting = max(self.steepest, self.curvature), self.move > LARGEST_LASTING_MOVE
        return [
            (
                self.steepest > LARGEST_STEP * self._reach or self.curvature > LARGEST_LASTING_STEP * self._reach,
                f"Steps overshoot: learning rate times curvature reaches {largest:.2g}, and {2 * self._reach:.2g} "
                "explodes. The loss swings from run to run, and its mean "
                "may be far from the forecast.",
            ),
            (
                self.first_move > LARGEST_MOVE,
                of_a_first_move(self.first_move),
            ),
            (
                self.own_move > LARGEST_OWN_MOVE,
                f"A batch moves the outputs of the few examples that make it by {self.own_move:.2g}: no small steps, "
                "and the loss is likely higher, by up to ten per cent.",
            ),
            (
                lasting,
                f"Every step moves the logits by {self.move:.2g} by chance: their law is made of jumps, and the loss "
                f"may be off by {'tens of' if self.move > LARGEST_KNOWN_MOVE else 'several'} per cent.",
            ),
            (
                self.is_of_few and not lasting,
                f"Every step moves the logits by {self.move:.2g} by chance, and the loss is small: it is made by few "
                "outputs, thrown far, and may be off by more than ten per cent.",
            ),
            (
                self._is_scattered,
                f"From run to run the loss differs by {self.spread:.0%} of itself. Runs with a high one are driven "
                "back harder than the mean run, which the closure follows in part: the mean loss may be off by five to "
                "fifteen per cent.",
            ),
            (
                self.share < self._least_share,
                f"Examples have pushed more than {1 - self._least_share:.0%} of their outputs' own fluctuation away: "
                "they fit each other's noise, which the closure follows only roughly, and the loss may be off by up to "
                "ten per cent.",
            ),
            (
                self.together > TOGETHER,
                "Columns without a full covariance often come together and are taken for independent: by that alone "
                f"the loss may be as much as {self.together / 2:.0%} too high. Use more full_covariance_features, or "
                "fewer columns.",
            ),
            (
                self.skewed > SKEWED,
                f"Outputs are skew, by which the loss is {self.skewed:.0%} off that of Gaussian ones. Their law is "
                f"known by three moments only: the loss may be off by half of that, {self.skewed / 2:.0%}.",
            ),
            (
                self.bounces > ON_LATTICE,
                "The weight of one column, far from 0 or by far the longest, goes back and forth between few multiples "
                "of the learning rate: the loss depends on which of them it is on, and may be off by ten per cent and "
                "more. Centre that column, or scale it down.",
            ),
            (self.is_fitted, OF_A_FIT),
            (
                self.overshot,
                self.lagging.of_swings(),
            ),
            (
                self.used < FEWEST_EXAMPLES,
                f"{self.used} examples are too few: every one of them moves the weights.",
            ),
            (
                self.least_bound < SMALLEST_BOUND,
                "The clip norm lies below the resolution at which gradients are computed in training.",
            ),
            (
                subsample_error > ENOUGH,
                f"{self.used:,} of {self.num_examples:,} examples were used, which may move the loss by "
                f"{subsample_error:.0%} or more.",
            ),
        ]
