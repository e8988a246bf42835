"""Advice from numbers alone: which optimizer at which epsilon, which learning rate, and what re-tuning would cost.

`floors` has what is known and its bounds; an answer that the bounds do not decide is not given.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from noisecast.advice.floors import Kept, Numbers, Tuned, batch_noise_shares, loss_ratio, threshold_formulas
from noisecast.advice.transfer import Branch, Settings, Transfer, branch_of, transfer
from noisecast.advice.tuning_price import TuningPrice, tuning_price
from noisecast.privacy.accounting import epsilon_text
from noisecast.theory.dp_sgd import DP_SGD

__all__ = ["Numbers", "NumbersAdvice", "Tuned", "advise_from_numbers"]

TIE = 1.1  # floors that differ by less are called alike: the formula is no better than that
NOT_A_GUARANTEE = "the paper's nominal epsilon, not a guarantee"


# --- The answer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Threshold:
    """A noise at which the better of two optimizers changes, with its bounds; in all three countings.

    noise_multiplier, epsilon (accounted) and nominal_epsilon (not a guarantee): (as the formula without clipping has
    it, least, most).
    """

    noise_multiplier: tuple[float, float, float]
    epsilon: tuple[float, float, float]
    nominal_epsilon: tuple[float, float, float]


@dataclass(frozen=True)
class ThresholdAdvice:
    """Where an adaptive optimizer has the lower floor than DP-SGD, both with their settings kept.

    verdict: "always", "above" (above the one noise multiplier, so below that epsilon), "outside" (DP-SGD wins between
    the two), or None: the numbers do not tell how many there are.
    """

    optimizer: str
    verdict: str | None
    thresholds: tuple[Threshold, ...]
    sentence: str


@dataclass(frozen=True)
class OptimizerAdvice:
    """One optimizer at one epsilon.

    Args:
      noise_penalty: phi.   branch: which noise limits it.
      noise_ratio: privacy noise over batch noise (standard deviations), least and most.
      relative_floor: its floor, settings kept, over the lowest of all; (least, most).
      relative_pace: its effective learning rate over DP-SGD's, settings kept; None without DP-SGD.
      retuned: its learning rate for this noise; None where it is not known at which noise it was tuned.
      excess_loss: settings kept, on a quadratic with equal curvatures of the given trace; None without one.
    """

    name: str
    noise_penalty: float
    branch: Branch
    noise_ratio: tuple[float, float]
    relative_floor: tuple[float, float]
    relative_pace: float | None
    retuned: Transfer | None
    excess_loss: float | None


@dataclass(frozen=True)
class EpsilonAdvice:
    """What to do at one epsilon.

    keep: the optimizer to use if the settings are kept; None where the numbers do not tell.
    contenders: those that the numbers do not rule out.   sentences: keep, re-tune, price; in this order.
    """

    target_epsilon: float
    noise_multiplier: float
    nominal_epsilon: float
    optimizers: tuple[OptimizerAdvice, ...]
    keep: str | None
    contenders: tuple[str, ...]
    price: TuningPrice
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class NumbersAdvice:
    """The whole answer. unknown: what the numbers do not tell, one sentence each."""

    thresholds: tuple[ThresholdAdvice, ...]
    epsilons: tuple[EpsilonAdvice, ...]
    unknown: tuple[str, ...]


def advise_from_numbers(numbers: Numbers, target_epsilons: Sequence[float]) -> NumbersAdvice:
    """Which optimizer and learning rate at each epsilon, where the better one changes, what re-tuning costs.

    Args:
      numbers: all that is known.   target_epsilons: > 0, finite; of training and of `numbers.before`.
    Raises: ValueError for an epsilon out of reach.

    >>> from noisecast.privacy.sampling import Poisson
    >>> from noisecast.theory.dp_sign_sgd import DP_SIGN_SGD
    >>> imdb = Numbers(
    ...     num_params=10_001, sampler=Poisson.for_batch_size(64, 25_000), num_steps=39_000, target_delta=1e-5,
    ...     optimizers=(Tuned(theory=DP_SGD, learning_rate=5.0, l2_clip_norm=0.5),
    ...                 Tuned(theory=DP_SIGN_SGD, learning_rate=0.1, l2_clip_norm=0.5)),
    ...     tuned_noise_multiplier=1.0, nominal_num_examples=10_000)
    >>> advice = advise_from_numbers(imdb, [0.2])
    >>> advice.epsilons[0].keep
    'DP-SignSGD'
    >>> [round(z, 2) for z in advice.thresholds[0].thresholds[0].noise_multiplier]
    [3.21, 3.21, 3.21]
    >>> print(advice.epsilons[0].optimizers[0].retuned.sentence)
    DP-SGD: learning rate 0.605 in place of 5: ...
    """
    return NumbersAdvice(
        thresholds=tuple(_threshold_advice(numbers, other) for other in numbers.adaptive),
        epsilons=tuple(_at(numbers, float(epsilon)) for epsilon in target_epsilons),
        unknown=tuple(_unknown(numbers)),
    )


# --- Thresholds -----------------------------------------------------------------------------------------------------


def _threshold_advice(numbers: Numbers, other: Tuned) -> ThresholdAdvice:
    sgd = numbers.sgd
    assert sgd is not None
    formulas = threshold_formulas(numbers, sgd, other)
    counts = {len(each.noise_multipliers) for each in formulas}
    if counts == {0}:
        sentence = f"{other.name} has the lower floor than {sgd.name} at every epsilon, with these settings."
        return ThresholdAdvice(other.name, "always", (), sentence)
    if len(counts) > 1:
        sentence = (
            f"{other.name} against {sgd.name}: the numbers do not tell how many thresholds there are "
            f"({' or '.join(str(count) for count in sorted(counts))}); measure the noise per example."
        )
        return ThresholdAdvice(other.name, None, (), sentence)
    values = np.array([each.noise_multipliers for each in formulas])  # (formulas, thresholds)
    thresholds = tuple(_counted(numbers, (zs[0], zs.min(), zs.max())) for zs in values.T)
    verdict = formulas[0].verdict
    return ThresholdAdvice(other.name, verdict, thresholds, _threshold_sentence(other.name, verdict, thresholds))


def _counted(numbers: Numbers, noise: tuple[float, float, float]) -> Threshold:
    """In epsilon: it falls with noise, so the bounds change places. Close ones are accounted once."""
    point, low, high = (float(z) for z in noise)
    if high / low - 1 < 1e-3:
        epsilons = (numbers.epsilon(point),) * 3
    else:
        epsilons = tuple(numbers.epsilon(z) for z in (point, high, low))
    nominal = tuple(numbers.nominal_epsilon(z) for z in (point, high, low))
    return Threshold((point, low, high), epsilons, nominal)  # pyright: ignore[reportArgumentType]


def _threshold_sentence(name: str, verdict: str, thresholds: Sequence[Threshold]) -> str:
    def said(threshold: Threshold) -> str:
        epsilon, nominal, z = threshold.epsilon, threshold.nominal_epsilon, threshold.noise_multiplier
        text = f"epsilon {epsilon_text(epsilon[0], 3)}"
        if z[2] / z[1] > 1.02:
            text += f" (between {epsilon_text(epsilon[1], 3)} and {epsilon_text(epsilon[2], 3)})"
        return f"{text}, nominal {nominal[0]:.3g}"

    if verdict == "outside":
        return (
            f"{name} has the lower floor below {said(thresholds[1])}, and again above {said(thresholds[0])}; between "
            f"them DP-SGD has it."
        )
    return f"{name} has the lower floor below {said(thresholds[0])}; above it DP-SGD has it."


# --- At one epsilon -------------------------------------------------------------------------------------------------


def _at(numbers: Numbers, target_epsilon: float) -> EpsilonAdvice:
    z = numbers.noise_multiplier(target_epsilon)
    everybody = numbers.optimizers
    ratios = {
        (one.name, other.name): loss_ratio(numbers, z, one, other)
        for one in everybody
        for other in everybody
        if one is not other
    }
    contenders = tuple(
        one.name
        for one in everybody
        if not any(ratios[one.name, other.name][0] > TIE for other in everybody if other is not one)
    )
    keep = contenders[0] if len(contenders) == 1 else None
    each = tuple(_optimizer_advice(numbers, tuned, z, ratios) for tuned in everybody)
    price = tuning_price(numbers.mechanism(z), num_steps=numbers.num_steps, target_delta=numbers.target_delta)
    sentences = (_keep_sentence(numbers, z, each, keep, contenders), _retune_sentence(each), _price_sentence(price))
    return EpsilonAdvice(target_epsilon, z, numbers.nominal_epsilon(z), each, keep, contenders, price, sentences)


def _optimizer_advice(numbers: Numbers, tuned: Tuned, z: float, ratios: dict) -> OptimizerAdvice:
    extremes = [Kept(numbers, tuned, z, share) for share in batch_noise_shares(numbers)]
    privacy = extremes[0].mechanism.mean_noise_std
    batch = [math.sqrt(max(each.noise_std**2 - privacy**2, 0.0)) for each in extremes]
    over = sorted(privacy / noise if noise else math.inf for noise in batch)
    shares = sorted((privacy / each.noise_std) ** 2 for each in extremes)
    against = [bounds for (one, _), bounds in ratios.items() if one == tuned.name]
    relative = max([1.0, *(low for low, _ in against)]), max([1.0, *(high for _, high in against)])
    sgd, retuned = numbers.sgd, None
    if numbers.tuned_noise_multiplier is not None:
        retuned = transfer(
            Settings(tuned.learning_rate, numbers.num_steps),
            numbers.mechanism(numbers.tuned_noise_multiplier, tuned.l2_clip_norm),
            extremes[-1].mechanism,
            tuned,
            num_params=numbers.num_params,
            # By the rule for a spread of curvatures, which losses have; the trace alone would say that all are equal.
            example_noise_std=numbers.example_noise_std,
        )
    return OptimizerAdvice(
        name=tuned.name,
        noise_penalty=tuned.theory.noise_penalty,
        branch=branch_of(shares[0], shares[-1]),
        noise_ratio=(over[0], over[-1]),
        relative_floor=relative,
        relative_pace=None if sgd is None else extremes[-1].pace / Kept(numbers, sgd, z, 1.0).pace,
        retuned=retuned,
        excess_loss=None if numbers.curvature is None else extremes[-1].excess_loss(numbers.curvature),
    )


# --- Sentences --------------------------------------------------------------------------------------------------------


def _keep_sentence(
    numbers: Numbers, z: float, each: Sequence[OptimizerAdvice], keep: str | None, contenders: Sequence[str]
) -> str:
    by_name = {advice.name: advice for advice in each}
    if len(each) == 1:
        return f"Settings kept: {each[0].name} is the only optimizer that was given."
    what = "floor" if numbers.curvature is None else "excess loss"
    if keep is None:
        bounds = [by_name[name].relative_floor for name in contenders]
        close = all(high <= TIE for _, high in bounds)
        why = f"their {what}s are within {TIE - 1:.0%}" if close else "what is not known decides between them"
        return f"Settings kept: {' or '.join(contenders)}; {why}."
    best = by_name[keep]
    behind = ", ".join(f"{name}'s is {_times(other.relative_floor)}" for name, other in by_name.items() if name != keep)
    if best.relative_pace is None:
        because = "as its settings are"
    elif keep == DP_SGD.name:
        because = "whose steps are the smaller ones at this noise"
    elif best.relative_pace < 1:
        because = f"whose steps this noise has shortened to {best.relative_pace:.2g} of DP-SGD's"
    else:
        because = "whose clip norm lets in less noise"
    return f"Settings kept: {keep}, {because}, has the lowest {what} ({behind})."


def _times(bounds: tuple[float, float]) -> str:
    low, high = bounds
    return f"{low:.3g} times that" if high / low < 1.02 else f"{low:.3g} to {high:.3g} times that"


def _retune_sentence(each: Sequence[OptimizerAdvice]) -> str:
    if each[0].retuned is None:
        return "Re-tuned: at which noise the settings were tuned is not known, so no learning rate can be given."
    moved = [advice.retuned.sentence.split(":")[0] for advice in each if advice.retuned and advice.retuned.moves]
    rates = ", ".join(f"{advice.name} {advice.retuned.learning_rate:.3g}" for advice in each if advice.retuned)
    must = f" ({' and '.join(moved)} must follow the noise)" if moved else ""
    # sqrt(phi): `optimal_gradient_norm_bound`, all else being equal.
    least = min(advice.noise_penalty for advice in each)
    bounds = " : ".join(f"{math.sqrt(advice.noise_penalty / least):.3g}" for advice in each)
    return (
        f"Re-tuned: learning rates {rates}{must}; at the best rates the bounds are as {bounds}"
        f"{' in that order, so the choice matters little' if len(each) > 1 else ''}."
    )


def _price_sentence(price: TuningPrice) -> str:
    return (
        f"Price of re-tuning by a 7 x 7 sweep on the same data: epsilon {epsilon_text(price.best_of, 3)} for the best "
        f"of about {price.num_runs} trials, {epsilon_text(price.all_counted, 3)} if all runs are seen, in place of "
        f"{epsilon_text(price.one_run, 3)}; a transferred learning rate costs nothing more."
    )


def _unknown(numbers: Numbers) -> Iterable[str]:
    if numbers.example_noise_std is None:
        yield (
            "The noise per example was not measured: it is bounded by the clip norm (batch noise between 0 and "
            "C^2/(d B)), and what depends on it is given as a range."
        )
    clips = {tuned.l2_clip_norm for tuned in numbers.optimizers}
    if len(clips) > 1 and any(tuned.clipped_share is None for tuned in numbers.optimizers):
        yield (
            "How many records are clipped is not known and the clip norms differ: thresholds lie between those "
            "without clipping, which are named first, and those where everything is clipped."
        )
    if numbers.curvature is None:
        yield (
            "Without curvature and initial loss nothing is known of absolute losses, nor whether the steps are enough "
            "to reach the floors that are compared."
        )
    else:
        yield "Losses are those of a quadratic with equal curvatures and no clipping: to compare by, not to expect."
    if numbers.tuned_noise_multiplier is None:
        yield "At which noise the settings were tuned is not known: learning rates for other noise cannot be given."
    yield "Clipping bias, a loss that is far from quadratic and the optimizer's transient are not in these formulas."
