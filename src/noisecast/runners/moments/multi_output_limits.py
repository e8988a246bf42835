"""Where the forecast of a model with several outputs may be off, and the sentences that say why."""

import math
from dataclasses import dataclass

from noisecast.runners.moments.forecast import FITTED, OF_A_FIT

LARGEST_STEP = 1.5  # eta times the largest curvature met on the way: steps overshoot
NOISE_ALONE = 0.8  # of the loss, that fluctuations of the weights make: beyond it a trained loss is far lower
TOGETHER = 0.05  # of the loss, by which columns that move together without covariances make it too high


@dataclass
class Limits:
    """What the time steps of one solve have met; beyond the limits a row is `extrapolated`.

    Args:
      num_in_block: features with a full covariance.   used, num_examples: with how many it computes, and of how many.
      competes: whether outputs compete, more than two of them: they are taken for independent.
      steepest: learning rate times the largest curvature of all, at any step.
      first_loss: where the run starts.   has_risen: to more than twice that, at any step.
      is_fitted, is_noise_alone: of the row judged last.
      of_columns_together: share of its loss, about, that is too much.
    """

    num_in_block: int
    used: int
    num_examples: int
    competes: bool
    steepest: float = 0.0
    first_loss: float = math.inf
    has_risen: bool = False
    is_fitted: bool = False
    is_noise_alone: bool = False
    of_columns_together: float = 0.0

    def meet(self, loss: float, step: int) -> None:
        if step == 0:
            self.first_loss = loss
        self.has_risen = self.has_risen or loss > 2 * self.first_loss

    @property
    def are_passed(self) -> bool:
        """By what was met so far."""
        return self.has_risen or self.steepest > LARGEST_STEP

    def are_passed_by(self, loss: float, *, of_noise: float, together: float) -> bool:
        """By one row.

        Args:
          of_noise: share of the loss that would be gone without fluctuations.
          together: share of the logits' variance that is forecast as of independent weights, and is not.
        """
        self.is_noise_alone = of_noise > NOISE_ALONE and self.competes
        # Of pixels, with more and fewer joint directions: 6 to 240 %, where this says from as much to three times that.
        self.of_columns_together = 1.1 * of_noise * together * (1 + together**4)
        self.is_fitted = loss < FITTED * self.first_loss
        return self.is_noise_alone or self.is_fitted or self.of_columns_together > TOGETHER

    def reasons(self) -> list[str]:
        """One sentence for each limit that was passed, and for what was left out."""
        reasons = []
        if self.steepest > LARGEST_STEP:
            reasons.append(
                f"The learning rate times the largest curvature is {self.steepest:.3g}, above {LARGEST_STEP:g}: "
                "steps overshoot."
            )
        if self.has_risen:
            reasons.append("The forecast loss rises to more than twice its start: time steps may be too coarse for it.")
        if self.is_fitted:
            reasons.append(OF_A_FIT)
        if self.is_noise_alone:
            reasons.append(
                f"Fluctuations of the weights make more than {NOISE_ALONE:.0%} of the loss. They are taken to be "
                "independent from output to output; the loss is likely more than a tenth too high."
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
