"""The learning rate that goes with another noise: from tuned settings, by noise multipliers, without data.

With effective learning rate e (what an optimizer does to a small gradient; `OptimizerTheory`), gradient noise s per
coordinate, noise penalty phi, shrink factor h of clipping, T steps and start f_0, two things can be made small:

* the mean squared gradient over the run, at most [f_0/(e T) + phi e Tr H s^2/2]/h: best at
  e = sqrt(2 f_0/(phi Tr H T))/s, so e s sqrt(T) stays what it was, and h has no part in it;
* the final loss on f = lambda |x|^2/2: best at e = y/(2 h lambda T), e^y + y = 8 h^2 lambda T f_0/(phi d s^2) + 1
  (`final_loss_effective_learning_rate`). There e falls like s^-a, a = 2 (e^y + y - 1)/(y (e^y + 1)), which is 2 for
  small y (the noise is all there is), 1 at y = 2 and goes to 0 as 2/y (steps are what is missing).

A spread of curvatures has directions with every y, and a is near 1 again; so the first is the rule where nothing is
known of the curvature. It makes DP-SGD's eta = e fall like 1/s and leaves eta = e s (DP-Adam), e s sqrt(pi/2)
(DP-SignSGD) as it is, whatever the batch noise. That is exact only for the first criterion, and while |grad_j f| << s.
Own derivation; the paper has the limits s = C z/B and s = sigma/sqrt B of the first rule (Thms sgd_opt, signsgd_opt).
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from noisecast.privacy.mechanism import SampledGaussian
from noisecast.theory.optimal import final_loss_effective_learning_rate
from noisecast.theory.optimizer_theory import OptimizerTheory

SAME = 0.01  # learning rates that differ by less are not worth a change


class Branch(StrEnum):
    """Which noise is the larger in the private mean gradient."""

    BATCH_NOISE = "batch-noise limited"
    PRIVACY_NOISE = "privacy-noise limited"
    UNKNOWN = "not known: the batch noise was not measured"


class HasTheory(Protocol):
    """An optimizer, or whatever else carries its theory."""

    @property
    def theory(self) -> OptimizerTheory: ...


@dataclass(frozen=True)
class Settings:
    """What was tuned, beside the mechanism. learning_rate: eta > 0, in its optimizer's units.   num_steps: T >= 1."""

    learning_rate: float
    num_steps: int

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"Expected 0 < learning_rate < inf, got {self.learning_rate}.")
        if self.num_steps < 1:
            raise ValueError(f"Expected num_steps >= 1, got {self.num_steps}.")


@dataclass(frozen=True)
class Curvature:
    """Of a quadratic whose curvatures are all equal. initial_loss: f_0 - f* > 0 [loss].   hessian_trace: Tr H > 0."""

    initial_loss: float
    hessian_trace: float

    def __post_init__(self) -> None:
        for name in ("initial_loss", "hessian_trace"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"Expected 0 < {name} < inf, got {getattr(self, name)}.")


@dataclass(frozen=True)
class Transfer:
    """What `transfer` advises.

    Args:
      learning_rate: eta for the new mechanism.
      low, high: between which it lies whatever the batch noise is; equal where that was measured.
      branch: which noise limits the new run.
      privacy_share: least and most share of the privacy noise in the new run's noise variance.
      sentence: the advice and its reason.   assumed: what it takes for granted, one sentence each.
      moves: whether the learning rate changes, by more than 1 %.
    """

    learning_rate: float
    low: float
    high: float
    branch: Branch
    privacy_share: tuple[float, float]
    sentence: str
    assumed: tuple[str, ...]
    moves: bool


def transfer(
    settings: Settings,
    from_mechanism: SampledGaussian,
    to_mechanism: SampledGaussian,
    optimizer: HasTheory,
    *,
    num_params: int,
    to_num_steps: int | None = None,
    example_noise_std: float | None = None,
    curvature: Curvature | None = None,
) -> Transfer:
    """The learning rate for `to_mechanism` of an optimizer that was tuned for `from_mechanism`.

    Noise, clip norm, batch size and number of steps may differ. What counts is s^2 = (C z/B)^2 + batch noise, with z
    the accounted noise multiplier: epsilon and the paper's nominal epsilon have no part in it.

    Args:
      settings: as tuned.   from_mechanism: with which they were tuned.   to_mechanism: with which training will run.
      optimizer: its `theory` is used; its own learning rate is not.   num_params: d.
      to_num_steps: T of the new run; None: as many.
      example_noise_std: sigma, per example and coordinate, measured (publicly, or by a probe) [loss/params]. None: no
        clipped gradient is longer than C, so the batch noise lies between 0 and C^2/(d B); the largest is assumed.
      curvature: of a loss that is known to have equal curvatures: make its final value small. None: make the mean
        squared gradient small, right for a spread of curvatures. Each rule is far off on the other kind of loss.
    Raises: ValueError where a number is out of range or a mechanism has no noise at all.

    >>> from noisecast.privacy.sampling import Poisson
    >>> from noisecast.theory.dp_sgd import DP_SGD
    >>> from noisecast.theory.dp_sign_sgd import DP_SIGN_SGD
    >>> class Sgd: theory = DP_SGD
    >>> class Sign: theory = DP_SIGN_SGD
    >>> old = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=0.5, sampler=Poisson.for_batch_size(64, 25_000))
    >>> new = old.with_noise_multiplier(4.0)
    >>> found = transfer(Settings(5.0, 39_000), old, new, Sgd(), num_params=10_001)
    >>> round(found.learning_rate, 2), str(found.branch)
    (1.25, 'privacy-noise limited')
    >>> transfer(Settings(0.1, 39_000), old, new, Sign(), num_params=10_001).learning_rate
    0.1
    """
    _check(num_params, to_num_steps, example_noise_std)
    to_num_steps = to_num_steps or settings.num_steps
    theory = optimizer.theory
    usual = (
        _batch_moments(num_params, example_noise_std, from_mechanism),
        _batch_moments(num_params, example_noise_std, to_mechanism),
    )
    # The quietest and the noisiest batches: between them the learning rate changes in one direction.
    extremes = (1.0,) if example_noise_std is not None else (0.0, 1.0)
    noises = [(_noise_std(from_mechanism, k * usual[0]), _noise_std(to_mechanism, k * usual[1])) for k in extremes]
    rates = [
        _rate(theory, settings, old, new, to_num_steps, num_params, curvature)
        for old, new in noises
        if old > 0 and new > 0
    ]
    if not rates:
        raise ValueError("Expected noise in both mechanisms, got none; without noise there is nothing to transfer by.")
    shares = sorted(_privacy_share(to_mechanism, k * usual[1]) for k in extremes)
    branch = branch_of(shares[0], shares[-1])
    return Transfer(
        learning_rate=rates[-1],
        low=min(rates),
        high=max(rates),
        branch=branch,
        privacy_share=(shares[0], shares[-1]),
        moves=_moves(settings.learning_rate, rates),
        sentence=_sentence(theory.name, settings.learning_rate, rates, branch, noises[-1]),
        assumed=_assumed(example_noise_std, curvature, noises[-1]),
    )


def gradient_noise_std(mechanism: SampledGaussian, *, num_params: int, example_noise_std: float | None) -> float:
    """s of the private mean gradient: s^2 = (C z/B)^2 + v (1 - q)/B, v = sigma^2, but at most C^2/d [loss/params].

    A clipped gradient is no longer than C, so C^2/d is the most that its coordinates' squares can be in the mean. That
    is also what is taken where sigma is None. (The factor is the sampler's: 1 - q is Poisson's.)

    >>> from noisecast.privacy.sampling import Poisson
    >>> mechanism = SampledGaussian(noise_multiplier=3.0, l2_clip_norm=2.0, sampler=Poisson(1e-9, 4))
    >>> round(gradient_noise_std(mechanism, num_params=25, example_noise_std=0.0), 6)
    1.5
    """
    return _noise_std(mechanism, _batch_moments(num_params, example_noise_std, mechanism))


def _batch_moments(num_params: int, example_noise_std: float | None, mechanism: SampledGaussian) -> float:
    """The mean square of a coordinate of a clipped gradient, at most."""
    most = mechanism.l2_clip_norm**2 / num_params
    return most if example_noise_std is None else min(example_noise_std**2, most)


def _noise_std(mechanism: SampledGaussian, second_moment: float) -> float:
    batch = float(mechanism.sampler.batch_noise_variance(0.0, second_moment))
    return math.sqrt(batch + mechanism.mean_noise_std**2)


def _privacy_share(mechanism: SampledGaussian, second_moment: float) -> float:
    variance = _noise_std(mechanism, second_moment) ** 2
    return mechanism.mean_noise_std**2 / variance if variance else 0.0


def _rate(
    theory: OptimizerTheory,
    settings: Settings,
    old: float,
    new: float,
    to_num_steps: int,
    num_params: int,
    curvature: Curvature | None,
) -> float:
    """eta with the noise `new` that goes with `settings` at the noise `old`."""
    if curvature is None:
        change = old / new * math.sqrt(settings.num_steps / to_num_steps)
    else:
        then, now = (
            float(
                final_loss_effective_learning_rate(
                    initial_loss=curvature.initial_loss,
                    curvature=curvature.hessian_trace / num_params,
                    num_steps=num_steps,
                    num_params=num_params,
                    gradient_noise_std=noise,
                    noise_penalty=theory.noise_penalty,
                )
            )
            for num_steps, noise in ((settings.num_steps, old), (to_num_steps, new))
        )
        change = now / then
    # Effective rates are proportional to rates, with a factor of the noise's that is the optimizer's own.
    units = float(theory.effective_learning_rate(1.0, old)) / float(theory.effective_learning_rate(1.0, new))
    factor = change * units
    return settings.learning_rate * (1.0 if math.isclose(factor, 1.0, rel_tol=1e-12) else factor)


def branch_of(least: float, most: float) -> Branch:
    """By the least and the most share that privacy noise may have in the noise variance."""
    if least > 0.5:
        return Branch.PRIVACY_NOISE
    return Branch.BATCH_NOISE if most <= 0.5 else Branch.UNKNOWN


def _moves(tuned: float, rates: list[float]) -> bool:
    return any(abs(each / tuned - 1) >= SAME for each in rates)


def _sentence(name: str, tuned: float, rates: list[float], branch: Branch, noise: tuple[float, float]) -> str:
    rate, (old, new) = rates[-1], noise
    why = f"the noise of the mean gradient goes from {old:.3g} to {new:.3g} a coordinate, and the run is {branch}"
    if not _moves(tuned, rates):
        return f"{name}: keep the learning rate {tuned:.4g}; {why}."
    span = ""
    if max(rates) / min(rates) - 1 > SAME:
        span = f" (between {min(rates):.3g} and {max(rates):.3g}, whatever the batch noise is)"
    return f"{name}: learning rate {rate:.3g}{span} in place of {tuned:.4g}: {why}."


def _assumed(
    example_noise_std: float | None, curvature: Curvature | None, noise: tuple[float, float]
) -> tuple[str, ...]:
    sentences = []
    if example_noise_std is None:
        sentences.append(
            "The batch noise was not measured: clipped gradients are taken to be as long as the clip norm, the most "
            "that they can be."
        )
    sentences.append(
        "The loss has a spread of curvatures (the mean squared gradient is made small), and |gradient| is below its "
        "noise in every coordinate."
        if curvature is None
        else "All curvatures are equal, and nothing is clipped: the final loss is made small."
    )
    if noise[1] < noise[0]:
        sentences.append(
            "With less noise a rate may meet the curvature (2 / largest eigenvalue) first: not known here."
        )
    return tuple(sentences)


def _check(num_params: int, to_num_steps: int | None, example_noise_std: float | None) -> None:
    if num_params < 1:
        raise ValueError(f"Expected num_params >= 1, got {num_params}.")
    if to_num_steps is not None and to_num_steps < 1:
        raise ValueError(f"Expected to_num_steps >= 1, got {to_num_steps}.")
    if example_noise_std is not None and not 0 <= example_noise_std < math.inf:
        raise ValueError(f"Expected a finite example_noise_std >= 0, got {example_noise_std}.")
