"""Directions that are averages of gradients lag behind them: at first they are followed one by one, where that pays."""

from dataclasses import dataclass

from noisecast.runners.moments.forecast import Rough
from noisecast.runners.moments.time_steps import FEW_NUMBERS, is_nearly_free, with_first
from noisecast.theory.frozen_steps import largest_stable_step

# Times the lag of directions behind gradients: runs that are short, steps that are followed, steps until swings calm.
SHORTEST_RUN, FOLLOWED, SWINGS_CALM = 10, 10, 15
SWINGS_KNOWN = 3  # the same, where they are followed: until then losses were up to 5 % off, and more in large steps
# How far from a spring's the force on the mean output may be until then, on average: what is followed is taken for
# Gaussian, and on raw columns with every example clipped, at 0.8, losses came out 13 to 20 % too low.
MOST_BENT = 0.4
# Followed one by one, the first steps may take as long as all others. They are where a field reads so few numbers, of
# rows times columns with a full covariance, and covariances have so few; or else in runs of hardly more steps, of so
# many weights at most.
FEW_COVARIANCES, MOST_WEIGHTS = 45_000, 200_000
GROWTH = 0.1  # of the step so far: as many steps in one field


@dataclass(frozen=True)
class Lagging:
    """What is known of them, and what not.

    Args:
      lag: L, of directions behind gradients late in a run, in steps; >= 0.   num_steps, num_weights: of the run.
      num_numbers, num_covariances: in the block, and between its columns; of all outputs.
      is_followed: whether averages are followed until directions have nearly calmed.
    """

    lag: float
    num_steps: int
    num_weights: int
    num_numbers: int
    num_covariances: int
    is_followed: bool = False

    @property
    def calm(self) -> int:
        """Steps after which they have calmed down, as b1^t, whatever the curvature has become meanwhile."""
        return round(SWINGS_CALM * self.lag)

    @property
    def known(self) -> int:
        """Steps after which a loss is known well, also where weights swing."""
        return round(SWINGS_KNOWN * self.lag) if self.is_followed else self.calm

    @property
    def _last(self) -> int:
        return round(FOLLOWED * self.lag)

    def swings(self, step: int, curvature: float) -> bool:
        """Whether weights shoot past where the force turns, and back, and how far is not known well.

        They move as an underdamped oscillator, eta lambda > 1/(4 L), and it is early. Where averages are not followed,
        only the envelope of that is computed.

        Args:
          curvature: learning rate times the largest so far.
        """
        known_first = 1 if self.is_followed else 0  # a first direction is no average yet
        return known_first < step < self.known and 4 * self.lag * curvature > 1

    def should_be_followed(self, step: int, curvature: float) -> bool:
        """Whether averages are not, where that pays and weights swing, or the run is short, or it costs nothing.

        Args:
          curvature: learning rate times the largest so far, the first step included.
        """
        is_short = self.num_steps < SHORTEST_RUN * self.lag
        swings = step < self.calm and 4 * self.lag * curvature > 1
        asked = is_short or swings or is_nearly_free(self.num_numbers, self.num_covariances)
        pays = self.num_numbers <= FEW_NUMBERS and self.num_covariances <= FEW_COVARIANCES
        pays = pays or (self.num_steps < self.calm and self.num_weights <= MOST_WEIGHTS)
        return pays and asked and not self.is_followed and self.are_followed(step, curvature)

    def are_followed(self, step: int, curvature: float) -> bool:
        """Whether from this step on: until they are nearly calm, or steps explode and no field is seen often enough."""
        return step < self._last and curvature < largest_stable_step(self.lag)

    def is_bent(self, step: int, bent: float) -> bool:
        """Whether what is followed is no Gaussian.

        Args:
          bent: sum over the steps until then, of the first `known`, of `MeanOutput.bent`.
        """
        until = min(self.known, self.num_steps)
        return self.is_followed and step >= until and bent > MOST_BENT * until

    def stops(self, grid: list[int]) -> list[int]:
        """The grid of time steps from 0 on, the first of them as short as what is followed asks for."""
        return with_first(grid, self._last if self.is_followed else 0, GROWTH)

    def of_swings(self) -> str:
        return Rough(
            f"Directions lag by {self.lag:.2g} steps and swing past where the force turns: before step "
            f"{self.known} the loss may be off by {'up to ten' if self.is_followed else 'tens of'} per cent."
        )
