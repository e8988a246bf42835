"""How much the examples of a linear model push their own outputs, and what of it lasts (`own_push`)."""

from typing import Any, NamedTuple

import numpy as np

from noisecast.runners.moments.examples import Rows
from noisecast.theory.own_push import Held, OwnPush, Pull

CLASSES = 2  # of columns by their rates, to each factor of e
LEAST_ANSWER = 1e-3  # share of what is pushed along the block that answers to the rest: a quotient is taken of it


class Spreads(NamedTuple):
    """Variance of each output, own pushes left out: by the common swing, and by all else; (n,) each.

    Args:
      swings: a_i, of each output with the swing.   swing: a_i^2.   slow: all else.   rest: of that beside the block.
    """

    swings: np.ndarray
    swing: np.ndarray
    slow: np.ndarray
    rest: np.ndarray

    @property
    def whole(self) -> np.ndarray:
        """Variance of each output; (n,)."""
        return self.swing + self.slow

    @classmethod
    def of(cls, rows: Rows, swings: np.ndarray, at: Any) -> "Spreads":
        """Of these rows' outputs at the weights `at`."""
        block, rest = rows.block_spread(at.covariance), rows.rest_spread(at.variance)
        swing = np.minimum(swings**2, block)
        return cls(swings, swing, block - swing + rest, rest)


class Reach(NamedTuple):
    """Where what an example pushes goes to.

    Args:
      kept: share of it, along the block's columns, that lasts as long as elsewhere; (K + 1 + r,).
      gain: of the optimizer, k; (d,).   in_block: of the block's columns; (K + 1 + r,).
      answers: share of what is pushed along the block that answers to the rest; (n,).
      squared: sum_j k_j x_ij^2 of what lasts; (n,) > 0.
    """

    kept: np.ndarray
    gain: np.ndarray
    in_block: np.ndarray
    answers: np.ndarray
    squared: np.ndarray


class Step(NamedTuple):
    """Steps of which everything is frozen half-way.

    Args:
      so_far: steps before half-way.   num_steps: how many.   since: the start, half-way; 0 where that is half-way.
      before, spreads: of the outputs at the start, and half-way.   slow_noise, swing_noise: variance they are given.
      held, squared: of residuals.   jacobian: what bends each column, in the block and the rest.
      variance: of the weights beside the swing, along the block's columns and in the rest.
    """

    so_far: int
    num_steps: int
    since: int
    before: Spreads
    spreads: Spreads
    swing_noise: np.ndarray
    slow_noise: np.ndarray
    held: Held
    squared: np.ndarray
    jacobian: tuple[np.ndarray, np.ndarray]
    variance: tuple[np.ndarray, np.ndarray]

    def growth(self, start: np.ndarray, now: np.ndarray, given: np.ndarray) -> np.ndarray:
        """Of a variance a step; where half-way is the start what it was on average so far, or what is given."""
        if self.since:
            return (now - start) / self.since
        return np.minimum(now / self.so_far, given) if self.so_far else given


class Pushes:
    """Of these rows.

    Args:
      second_share: of a batch's second moment, in the variance of its mean.
    """

    def __init__(self, rows: Rows, learning_rate: Any, second_share: float):
        self.rows, self.learning_rate, self.second_share = rows, learning_rate, second_share
        ones = np.ones(rows.num_examples)
        beside = np.maximum(rows.rest_second_moment(ones) - rows.rest_moment_along(ones), 0.0)
        self.energies = rows.block_squared.mean(axis=0, dtype=np.float64), beside
        whole = max(float(rows.rest_second_moment(ones).sum()), 1e-30)
        # What the joint directions hold of the rest: by so much they are the block's, and else the rest's.
        self.joint_share = min(1.0, max(0.0, 1 - float(beside.sum()) / whole))

    def reach(
        self, gain: np.ndarray, in_block: np.ndarray, jacobian: np.ndarray, held: Held, spreads: Spreads, step: int
    ) -> Reach:
        """Of a column of the block 1/(1 + lambda_j tau) is kept, lambda_j at which its weight forgets.

        tau is the time in which outputs are pushed back, or that of the run so far: columns that all rows have come and
        go with the common swing. And what a row does to its own output within the block, the covariance there knows: of
        what it pushes along the block only the part counts that answers to the rest.

        Args:
          gain: k; (d,).   in_block: of the block's columns.   jacobian: what bends them.   step: so far.
        """
        rows, of_rest = self.rows, gain[self.rows.split :]
        beside = self._beside(of_rest)
        rate = self.learning_rate * float((beside * held.slope).mean()) / rows.num_examples + 1 / (step + 1)
        kept = 1 / (1 + self.learning_rate * in_block * jacobian / rate)
        answers = np.maximum(spreads.rest / np.maximum(spreads.slow, 1e-30), LEAST_ANSWER)
        squared = answers * rows.block_squared_dot(self._within(kept * in_block)) + beside
        return Reach(kept, gain, in_block, answers, np.maximum(squared, 1e-30))

    def lasting(self, reach: Reach, held: Held) -> tuple[np.ndarray, np.ndarray]:
        """What examples have pushed and push on, as noise of one step's direction: in the block, and in the rest.

        2/eta k_j k_l (1/n) sum_i x_ij x_il (-Cov(y_i, rho_i))/sum_m k_m x_im^2.
        """
        rows, along = self.rows, reach.kept * reach.in_block
        each = held.lasting / reach.squared * (2 / self.learning_rate)
        beside = np.maximum(rows.rest_second_moment(each) - rows.rest_moment_along(each), 0.0)
        return along[:, None] * rows.block_second_moment(each) * along, reach.gain[rows.split :] ** 2 * beside

    def advanced(self, pushed: OwnPush, middle: OwnPush, reach: Reach, step: Step) -> OwnPush:
        """After a step, from where half-way `middle` is pushed."""
        rows, eta = self.rows, self.learning_rate
        strength = eta * reach.squared * rows.copies / rows.num_examples  # copies of a row push along one line
        own_noise = eta * reach.squared * strength * self.second_share
        now, start = step.spreads, step.before
        swing_growth = step.growth(start.swing, now.swing, step.swing_noise)
        slow_growth = step.growth(start.slow, now.slow, step.slow_noise)
        slow_rate = _forgetting(step.slow_noise, slow_growth, step.spreads.slow)
        fading_rate = self._fading_rate(reach, step.jacobian)
        return pushed.advance(
            step.num_steps,
            middle=middle,
            swing=step.spreads.swing,
            slow=step.spreads.slow,
            pull=Pull(strength, step.held, step.squared, own_noise),
            swing_rate=_forgetting(step.swing_noise, swing_growth, step.spreads.swing),
            slow_rate=slow_rate,
            slow_noise=step.slow_noise,
            growth=slow_growth,
            fading_rate=fading_rate,
            rate_share=self._rate_share(reach, step, float((slow_rate + fading_rate).mean())),
        )

    def _fading_rate(self, reach: Reach, jacobian: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """At which other examples undo what one has pushed; (n,)."""
        rows, split = self.rows, self.rows.split
        in_block, of_rest = jacobian
        within = rows.block_squared_dot(self._within((reach.kept * reach.in_block) ** 2 * in_block))
        fading = reach.answers * within + self._beside(reach.gain[split:] ** 2 * of_rest)
        return self.learning_rate * fading / reach.squared

    def _within(self, weights: np.ndarray) -> np.ndarray:
        """Of the block's columns, with the share of the joint directions that is theirs."""
        return np.concatenate([weights[: self.rows.split], self.joint_share * weights[self.rows.split :]])

    def _beside(self, weights: np.ndarray) -> np.ndarray:
        """sum_j w_j x_ij^2 in the rest, with the share of the joint directions that is the rest's; (n,)."""
        beside = self.rows.rest_spread(weights)
        return beside + (1 - self.joint_share) * np.maximum(self.rows.rest_squared_dot(weights) - beside, 0.0)

    def _rate_share(self, reach: Reach, step: Step, mean_rate: float) -> float:
        """lambda_r + lambda_y of one column for all that would push as much away as these do, over the mean one; <= 1.

        Once settled, E[r_j y] = -Var r_j s K_j/(1 + s K_j) with K_j = sum_l kappa_l/(lambda_j + lambda_l), s the slope:
        columns that forget slowly, rare ones, have more of it than their share. A run so far of t steps adds 1/t, and
        counts as settled once the mean rate, times t, is more than 1.
        """
        eta, split, so_far = self.learning_rate, self.rows.split, 1 / (step.so_far + 1)
        columns = zip(step.jacobian, (reach.in_block, reach.gain[split:]), self.energies, step.variance, strict=True)
        parts = [
            (eta * gain * bend, eta * gain * energy, energy * variance) for bend, gain, energy, variance in columns
        ]
        parts[0][1][:] *= reach.kept
        rates, pushes, variances = (np.concatenate(part) for part in zip(*parts, strict=True))
        places = np.round(CLASSES * np.log(np.maximum(rates, 1e-30))).astype(int)
        _, classes = np.unique(places, return_inverse=True)
        push, variance = (np.bincount(classes, part) for part in (pushes / self.rows.num_examples, variances))
        rate = np.bincount(classes, rates) / np.bincount(classes)
        slope, total = float(step.held.slope.mean()), float(variance.sum())
        if not (slope > 0 and total > 0 and push.sum() > 0 and mean_rate > 0):
            return 1.0
        pushed = slope * (push / (rate[:, None] + rate + so_far)).sum(axis=1)
        away = float(variance @ (pushed / (1 + pushed))) / total
        rate = max(slope * float(push.sum()) * (1 - away) / away - so_far, 0.0)
        settled = (mean_rate * step.so_far) ** 2  # before then nothing has forgotten anything
        return 1 - max(0.0, 1 - rate / mean_rate) * settled / (1 + settled)


def bend_together(jacobian: np.ndarray) -> np.ndarray:
    """sum_l J_jl^2/J_jj: what bends column j along what it is together with others; m J_jj of m that are one."""
    return np.einsum("ij,ij->i", jacobian, jacobian) / np.maximum(np.diag(jacobian), 1e-30)


def _forgetting(injected: np.ndarray, growth: np.ndarray, now: np.ndarray) -> np.ndarray:
    """The rate lambda of s' = injected - 2 lambda s."""
    return np.maximum(injected - growth, 0.0) / (2 * np.maximum(now, 1e-30))
