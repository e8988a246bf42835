"""Directions that are averages of gradients lag behind them: at first they are followed one by one, where that pays."""

from dataclasses import dataclass

from noisecast.runners.moments.averaged_steps import first_stops
from noisecast.runners.moments.forecast import Rough
from noisecast.theory.frozen_steps import largest_stable_step

# Times the lag of directions behind gradients: runs that are short, steps that are followed, steps until swings calm.
SHORTEST_RUN, FOLLOWED, SWINGS_CALM = 10, 10, 15
SWINGS_KNOWN = 3  # the same, where they are followed: until then losses were up to 5 % off, and more in large steps
# Steps and weights of a run whose first steps are followed: they take as long as all others of a long one.
LONGEST_FOLLOWED, MOST_FOLLOWED = 1_000, 200_000


@dataclass(frozen=True)
class Lagging:
    """What is known of them, and what not.

    Args:
      lag: L, of directions behind gradients late in a run, in steps; >= 0.   num_steps, num_weights: of the run.
      is_followed: whether averages are followed until directions have calmed.
    """

    lag: float
    num_steps: int
    num_weights: int
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
        return 0 < step < self.known and 4 * self.lag * curvature > 1

    def should_be_followed(self, step: int, curvature: float, largest: float) -> bool:
        """Whether averages are not, in a run of which the first steps are no small part, and swing.

        Args:
          curvature: as `swings`.   largest: the same, the first step included.
        """
        pays = self.num_steps <= LONGEST_FOLLOWED and self.num_weights <= MOST_FOLLOWED
        asked = self.num_steps < SHORTEST_RUN * self.lag or self.swings(step, curvature)
        return pays and asked and not self.is_followed and self.are_followed(step, largest)

    def are_followed(self, step: int, curvature: float) -> bool:
        """Whether from this step on: until they are nearly calm, or steps explode and no field is seen often enough."""
        return step < self._last and curvature < largest_stable_step(self.lag)

    def stops(self, grid: list[int]) -> list[int]:
        """The grid of time steps from 0 on, the first of them as short as what is followed asks for."""
        first = first_stops(min(self.num_steps, self._last)) if self.is_followed else [0]
        return first + [stop for stop in grid if stop > first[-1]]

    def of_swings(self) -> str:
        return Rough(
            f"Directions lag by {self.lag:.2g} steps and swing past where the force turns: before step "
            f"{self.known} the loss may be off by {'up to ten' if self.is_followed else 'tens of'} per cent."
        )
