"""A training example acts back on its own output: what a closure misses that takes weights as independent of it.

Example i's output z_i fluctuates with the weights, by u_i = b_i + r_i: what it shares with the swing of all outputs
(`common_swing`), and all else. Every time i is drawn it pushes against that fluctuation along its own features, by its
clipped residual rho: at the rate kappa_i = eta sum_j k_j x_ij^2/n a step (k_j: the optimizer's gain). What it has
pushed so far, y_i, fades only as fast as other examples undo it, lambda_y:

    y' = -kappa (rho(z) - E rho) - lambda_y y + noise of its own draws,   z = E z + u + y,   r' = -lambda_r r + noise.

Own derivation, the cavity (leave-one-out) argument. Three things follow.

The law of z is no Gaussian, and narrower than that of u: a clipped residual pushes no harder however wrong it is, and
one near 0 hardly pushes at all. The density p of s = r + y is advanced on a grid, with E[r | s] and E[y | s] linear in
s and b a Gaussian given s, around beta s, beta = E[b y]/Var s:

    dp/dt = d/ds ([kappa (E[rho | s] - E rho) + c s] p) + 1/2 d^2/ds^2 ([noise of r and of own draws] p),
    c = (lambda_r E[r s] + lambda_y E[y s])/Var s.

b is apart since it may come and go many times while s stays.

An example whose y has compensated r no longer holds the weights: of its curvature only Cov(r, rho)/Var r is left.

And what is pushed lies in the weights, where all others feel it as noise that lasts. w_j has the part
k_j x_ij y_i/sum_l k_l x_il^2 of it, so that

    Cov(w_j, rho_i) = Var w_j x_ij Cov(r, rho)/Var r + k_j x_ij Cov(y, rho)/sum_l k_l x_il^2,

and the second part, negative, takes less from Var w_j than the first alone (`Held.lasting`). It matters where examples
have many rare features.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from noisecast.theory.fokker_planck import advance_densities
from noisecast.theory.output_law import Cosines, GaussianLaw, GridLaw, OutputLaw

Array = Any
GRID = np.linspace(-5.0, 5.0, 81)  # of s/S, S^2 = Var r and what own draws alone would make of y; and of z - E z
SPACING = float(GRID[1] - GRID[0])
COSINES = Cosines(len(GRID), SPACING)
SMALLEST = 1e-6  # variance: an output that does not move
LARGEST_TILT = 0.5  # beta: more is of what is left of an output that hardly moves
PUSHED = 0.02  # of Var u, on average: less leaves outputs Gaussians
LEAST_LEFT = 0.05  # of Cov(b, z)/Var b, of which a quotient is taken
AT_ONCE = 1_000  # examples with a density: of so many a dozen arrays stay in the cache, of 25,000 they take gigabytes


class Held(NamedTuple):
    """How an example's residual follows its output's parts; (n,) each, but for the last.

    Args:
      swing, slow: Cov(b, rho)/Var b, Cov(r, rho)/Var r: with which it holds weights.
      lasting: -Cov(y, rho): by how much less it takes from their variance than that says.
      slope: Cov(s, rho)/Var s.   given, squared: E[rho | s], E[rho^2 | s] at the places of `GRID`; (81, n), or
        None without a density.
    """

    swing: Array
    slow: Array
    lasting: Array
    slope: Array
    given: Array | None = None
    squared: Array | None = None


class Pull(NamedTuple):
    """How an example's own draws move its output a step; (n,) each.

    Args:
      strength: kappa.   held: of rho; `Held`.   squared: E rho^2.   own_noise: variance of the draws, over rho^2.
    """

    strength: Array
    held: Held
    squared: Array
    own_noise: Array


class _Parts(NamedTuple):
    """Of z = E z + (1 + beta) s + what of b is left; (n,) each, but for the places.

    Args:
      width: S.   middle: E s/S on `GRID`.   places: s - E s there; (81, n).   variance: Var s.   tilt: beta.
      std: of z.   along: (1 + beta) S over it.   blur: standard deviation of what is left of b, over it.
    """

    width: Array
    middle: Array
    places: Array
    variance: Array
    tilt: Array
    std: Array
    along: Array
    blur: Array


class OwnPush(NamedTuple):
    """What examples have pushed.

    Args:
      with_swing, with_slow: E[b y], E[r y] <= 0; (n,).
      drawn: variance that own draws alone would have given y; (n,).
      density: of s/S at the places of `GRID`, S^2 = Var r + `drawn`; (81, n). None as long as s is near enough to a
        Gaussian, having pushed less than `PUSHED` away.
    """

    with_swing: Array
    with_slow: Array
    drawn: Array
    density: Array | None

    @classmethod
    def none(cls, num_examples: int) -> "OwnPush":
        """At the start, before any draw."""
        nothing = np.zeros(num_examples)
        return cls(nothing, nothing, nothing, None)

    def law(self, mean: Array, swing: Array, slow: Array) -> OutputLaw:
        """Of z.

        Args:
          mean: E z; (n,).   swing, slow: Var b, Var r; (n,) >= 0.
        """
        if self.density is None:
            return GaussianLaw(mean, np.maximum(swing + 2 * self.with_swing + self._variance(slow), 0.0))
        places, shares = self._by_some(OwnPush._places, swing, slow)
        return GridLaw(mean, places, shares)

    def _by_some(self, function: Callable[..., tuple[Array, ...]], *arrays: Array) -> list[Array]:
        """function(these, arrays), `AT_ONCE` examples at a time: none looks at another.

        Args:
          arrays: (..., n) each.
        Returns: what it returns, (..., n) each.
        """
        whole: Any = self
        several = (slice(first, first + AT_ONCE) for first in range(0, len(self.drawn), AT_ONCE))
        found = [
            function(OwnPush(*(each[..., some] for each in whole)), *(each[..., some] for each in arrays))
            for some in several
        ]
        return [np.concatenate(each, axis=-1) for each in zip(*found, strict=True)]

    def _places(self, swing: Array, slow: Array) -> tuple[Array, Array]:
        """z - E z and its shares; (81, n), in single precision."""
        parts = self._parts(swing, slow)
        (of_s,) = _at((self.density,), GRID[:, None] / parts.along + parts.middle)
        of_s /= of_s.sum(axis=0)
        shares = COSINES.blurred(of_s, parts.blur)
        places = GRID[:, None] - GRID @ shares
        widened = np.sqrt((shares * places**2).sum(axis=0))  # by what is linear between places
        return (parts.std / widened * places).astype(np.float32), shares

    def _variance(self, slow: Array) -> Array:
        """Var s of a Gaussian: y follows r but for its own draws."""
        return slow + 2 * self.with_slow + self.with_slow**2 / np.maximum(slow, SMALLEST) + self.drawn

    def _parts(self, swing: Array, slow: Array) -> "_Parts":
        density: Any = self.density
        width = np.sqrt(np.maximum(slow + self.drawn, SMALLEST))
        middle = GRID @ density
        places = width * (GRID[:, None] - middle)
        variance = (density * places**2).sum(axis=0)
        tilt = np.clip(self.with_swing / np.maximum(variance, SMALLEST), -LARGEST_TILT, 0.0)
        following = (1 + tilt) ** 2 * variance  # what of Var z is s, and what of b follows it
        total = np.maximum(swing + 2 * self.with_swing + variance, np.maximum(following, SMALLEST))
        std = np.sqrt(total)
        return _Parts(
            width, middle, places, variance, tilt, std, (1 + tilt) * width / std, np.sqrt(1 - following / total)
        )

    def remaining_share(self, swing: Array, slow: Array) -> Array:
        """E[u z]/E u^2.

        Args:
          swing, slow: as `law`.
        Returns: (n,) in [0, 1].
        """
        return np.clip(1 + (self.with_swing + self.with_slow) / np.maximum(swing + slow, 1e-30), 0.0, 1.0)

    def swinging_share(self, swing: Array) -> Array:
        """E[b z]/E b^2: the share of b that the example has not pushed away; (n,) in [0, 1]."""
        return np.clip(1 + self.with_swing / np.maximum(swing, 1e-30), 0.0, 1.0)

    def held(self, swing: Array, slow: Array, law: OutputLaw, residual: Array) -> Held:
        """Of a residual.

        Args:
          swing, slow: as `law`.   law: of z.   residual: rho at its places; (m, n).
        """
        slow_left = np.clip(slow + self.with_slow, 0.0, slow)
        share = np.where(slow > 0, slow_left / np.maximum(slow, 1e-30), 1.0)
        if self.density is None:
            slope = np.maximum(law.hermite_means(residual, 2)[1] / law.std, 0.0)
            lasting = self._lasting(slow_left - self._variance(slow)) * slope
            return Held(self.swinging_share(swing) * slope, share * slope, lasting, slope)
        swinging, lasting, slope, given, squared = self._by_some(
            OwnPush._held_on_grid, swing, slow, slow_left, law.shares, residual
        )
        return Held(swinging, share * slope, lasting, slope, given, squared)

    def _held_on_grid(
        self, swing: Array, slow: Array, slow_left: Array, shares: Array, residual: Array
    ) -> tuple[Array, ...]:
        """Of `Held` what a density says: swing, lasting, slope, given, squared."""
        parts = self._parts(swing, slow)
        there = parts.along * (GRID[:, None] - parts.middle)
        given, squared = _at((COSINES.blurred(residual, parts.blur), COSINES.blurred(residual**2, parts.blur)), there)
        derived = -(COSINES.derived(shares) * residual).sum(axis=0) / parts.std
        slope = (self.density * parts.places * given).sum(axis=0) / np.maximum(parts.variance, SMALLEST)
        slope, away = np.maximum(slope, 0.0), self.swinging_share(swing) - 1
        swinging = np.maximum(away * slope + (1 - away * parts.tilt) * derived, 0.0)
        return swinging, self._lasting(slow_left - parts.variance) * slope, slope, given, np.maximum(squared, 0.0)

    def _lasting(self, found: Array) -> Array:
        """-E[y s] as found, which E y^2 >= 0 leaves no larger than -E[r y]."""
        return np.clip(found, 0.0, -self.with_slow)

    def advance(
        self, num_steps: int, *, middle: "OwnPush", swing: Array, slow: Array, pull: Pull, swing_rate: Array,
        slow_rate: Array, slow_noise: Array, growth: Array, fading_rate: Array, rate_share: float = 1.0,
    ) -> "OwnPush":  # fmt: skip
        """After num_steps more with everything else frozen half-way.

        E[b y]' = -kappa Cov(b, rho) - (lambda_y + lambda_b) E[b y], the same with r; and p in a frame as wide as S.

        Args:
          num_steps: >= 0.   middle: what is pushed half-way.   swing, slow: Var b and Var r there.
          pull: of each example's own draws, there.
          swing_rate, slow_rate: lambda_b, lambda_r, at which b and r forget; >= 0.
          slow_noise: variance that r is given.   growth: of Var r.   fading_rate: lambda_y >= 0.   All (n,), per step.
          rate_share: in [0, 1], of lambda_r + lambda_y where r and y meet: both are made of columns, each with its own
            rate, and what they have in common is of the slow ones.
        Returns: OwnPush.
        """
        held, after = pull.held, list[Array]()
        left = np.maximum(1 + middle.with_swing / np.maximum(swing, 1e-30), LEAST_LEFT)
        parts = (
            (self.with_swing, swing, swing_rate + rate_share * fading_rate, held.swing / left),
            (self.with_slow, slow, rate_share * (slow_rate + fading_rate), held.slope),
        )
        for crossing, variance, rate, slope in parts:
            decay = pull.strength * slope + rate
            settled = -pull.strength * slope * variance / np.maximum(decay, 1e-30)
            after.append(settled + (crossing - settled) * np.exp(-decay * num_steps))
        own = pull.own_noise * pull.squared - 2 * fading_rate * middle.drawn
        drawn = np.maximum(self.drawn + own * num_steps, 0.0)
        density = middle.density
        if density is not None and held.given is not None:
            start = density if self.density is None else self.density
            fading = rate_share * fading_rate  # of y along s, but for what of it is r
            forgotten = slow_rate * slow + (rate_share * slow_rate - fading) * middle.with_slow - fading * slow
            pushing = pull.strength, pull.own_noise, slow_noise, forgotten, fading, growth + own
            moved = partial(OwnPush._moved, num_steps=num_steps)
            (density,) = middle._by_some(moved, swing, slow, start, held.given, held.squared, *pushing)
        return OwnPush(after[0], after[1], drawn, density)

    def _moved(
        self, swing: Array, slow: Array, start: Array, given: Array, squared: Array, strength: Array, own_noise: Array,
        slow_noise: Array, forgotten: Array, fading: Array, growth: Array, *, num_steps: int,
    ) -> tuple[Array]:  # fmt: skip
        """The density that `start` becomes where these are pushed half-way."""
        parts, density = self._parts(swing, slow), self.density
        fading = fading + forgotten / np.maximum(parts.variance, SMALLEST) + growth / (2 * parts.width**2)
        force = -strength * (given - (density * given).sum(axis=0)) - fading * parts.places
        diffusion = (slow_noise + own_noise * squared) / (2 * parts.width**2)
        law = advance_densities(start, drift=force / parts.width, diffusion=diffusion, spacing=SPACING, time=num_steps)
        return (law,)

    def resolved(self, swing: Array, slow: Array) -> "OwnPush":
        """With a density, where more than `PUSHED` is pushed away, on average.

        Args:
          swing, slow: as `law`.
        """
        if self.density is not None or self.remaining_share(swing, slow).mean() > 1 - PUSHED:
            return self
        share = np.clip(self._variance(slow) / np.maximum(slow + self.drawn, SMALLEST), SPACING**2, 2.0)
        gaussian = np.exp(-(GRID[:, None] ** 2) / (2 * share))
        return self._replace(density=gaussian / gaussian.sum(axis=0))


def _at(values: tuple[Array, ...], place: Array) -> list[Array]:
    """Functions on `GRID` at other places, linear between its own, and as at its ends beyond them; (81, n) each."""
    index = np.clip((place - GRID[0]) / SPACING, 0.0, len(GRID) - 1.0).astype(np.float32)
    left = np.minimum(index.astype(np.int32), len(GRID) - 2)
    share = index - left.astype(np.float32)
    left *= np.int32(place.shape[1])
    left += np.arange(place.shape[1], dtype=np.int32)
    right = left + np.int32(place.shape[1])
    return [each.ravel()[left] * (1 - share) + each.ravel()[right] * share for each in values]
