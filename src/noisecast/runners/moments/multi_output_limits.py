"""Where the forecast of a model with several outputs may be off, and the sentences that say why."""

import math
from dataclasses import dataclass

from noisecast.runners.moments.forecast import FITTED, OF_A_FIT
from noisecast.runners.moments.lagging import Lagging
from noisecast.runners.moments.logistic_limits import LARGEST_MOVE, of_a_first_move

# eta times the largest curvature met on the way: steps overshoot. The second where DP-Adam's averages are followed.
LARGEST_STEP, LARGEST_FOLLOWED_STEP = 1.5, 3.0
NOISE_ALONE = 0.8  # of the loss, that fluctuations of the weights make: beyond it a trained loss is far lower
# The same of a loss that is small beside the start's, as of labels that can nearly be told apart: of three classes the
# forecast was 6 to 9 % too high at 0.6 of the loss, by 1,200 seeds, and 5 at a little less.
NOISE_OF_LITTLE, LITTLE = 0.5, 0.2
TOGETHER = 0.05  # of the loss, by which columns that move together without covariances make it too high


@dataclass
class Limits:
    """What the time steps of one solve have met; beyond the limits a row is `extrapolated`.

    Args:
      num_in_block: features with a full covariance.   used, num_examples: with how many it computes, and of how many.
      competes: whether outputs compete, more than two of them: they are taken for independent.
      lagging: of the optimizer's directions behind gradients.
      first_move: of the logits by the first step.
      steepest: learning rate times the largest curvature of all, at any step.
      on_the_way: the same, beyond the first step.   overshot: by directions that lag, at some row.
      first_loss: where the run starts.   has_risen: to more than twice that, at any step.
      is_fitted, is_noise_alone, of_noise, is_little_of_noise: of the row judged last.
      of_columns_together: share of its loss, about, that is too much.
    """

    num_in_block: int
    used: int
    num_examples: int
    competes: bool
    lagging: Lagging
    first_move: float = 0.0
    steepest: float = 0.0
    on_the_way: float = 0.0
    overshot: bool = False
    first_loss: float = math.inf
    has_risen: bool = False
    is_fitted: bool = False
    is_noise_alone: bool = False
    of_noise: float = 0.0
    is_little_of_noise: bool = False
    of_columns_together: float = 0.0

    def meet(self, loss: float, step: int) -> None:
        """The loss at a step."""
        if step == 0:
            self.first_loss = loss
        self.has_risen = self.has_risen or loss > 2 * self.first_loss

    @property
    def are_passed(self) -> bool:
        """By what was met so far."""
        return self.has_risen or self.steepest > self._largest_step or self.first_move > LARGEST_MOVE

    @property
    def _largest_step(self) -> float:
        return LARGEST_FOLLOWED_STEP if self.lagging.is_followed else LARGEST_STEP

    def meet_curvature(self, curvature: float, step: int) -> None:
        """Learning rate times the largest one, at a step."""
        self.steepest = max(self.steepest, curvature)
        self.on_the_way = max(self.on_the_way, curvature) if step else 0.0

    def are_passed_by(self, loss: float, *, step: int, of_noise: float, together: float) -> bool:
        """By one row.

        Args:
          of_noise: share of the loss that would be gone without fluctuations.
          together: share of the logits' variance that is forecast as of independent weights, and is not.
        """
        self.of_noise, self.is_noise_alone = of_noise, of_noise > NOISE_ALONE and self.competes
        is_little = loss < LITTLE * self.first_loss
        self.is_little_of_noise = is_little and NOISE_OF_LITTLE < of_noise <= NOISE_ALONE and self.competes
        # Of pixels, with more and fewer joint directions: 6 to 240 %, where this says from as much to four times that.
        self.of_columns_together = 1.4 * of_noise * together * (1 + together**4)
        self.is_fitted = loss < FITTED * self.first_loss
        overshoots = self.lagging.swings(step, self.on_the_way)
        self.overshot = self.overshot or overshoots
        is_of_noise = self.is_noise_alone or self.is_little_of_noise
        return overshoots or is_of_noise or self.is_fitted or self.of_columns_together > TOGETHER

    def reasons(self) -> list[str]:
        """One sentence for each limit that was passed, and for what was left out."""
        reasons = []
        if self.steepest > self._largest_step:
            reasons.append(
                f"The learning rate times the largest curvature is {self.steepest:.3g}, above {self._largest_step:g}: "
                "steps overshoot."
            )
        if self.has_risen:
            reasons.append("The forecast loss rises to more than twice its start: time steps may be too coarse for it.")
        if self.first_move > LARGEST_MOVE:
            reasons.append(of_a_first_move(self.first_move))
        if self.is_fitted:
            reasons.append(OF_A_FIT)
        if self.overshot:
            reasons.append(self.lagging.of_swings())
        if self.is_noise_alone:
            reasons.append(
                f"Fluctuations of the weights make more than {NOISE_ALONE:.0%} of the loss. They are taken to be "
                "independent from output to output; the loss is likely more than a tenth too high."
            )
        if self.is_little_of_noise:
            reasons.append(
                f"Fluctuations of the weights make {self.of_noise:.0%} of a loss that is small beside the start's. "
                "They are taken to be independent from output to output; the loss may be up to a tenth too high."
            )
        if self.of_columns_together > TOGETHER:
            reasons.append(
                f"Columns beyond the {self.num_in_block} with a full covariance move together and are taken for "
                f"independent: the loss may be as much as {self.of_columns_together:.0%} too high. Centre the columns, "
                "or use fewer."
            )
        if self.used < self.num_examples:
            reasons.append(f"Computed from {self.used:,} of {self.num_examples:,} training examples.")
        return reasons
