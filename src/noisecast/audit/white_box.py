"""Two data sets, many runs of the engine itself, and an attacker who sees what each run released."""

import math
from dataclasses import replace

import numpy as np
from scipy import stats
from scipy.special import logsumexp

from noisecast import engines
from noisecast.audit.bounds import lower_bound_of_scores
from noisecast.audit.canary import WIDTH, along_canary, pair
from noisecast.audit.verdict import Verdict
from noisecast.optimizers import DPSGD, DPAdam, Optimizer
from noisecast.privacy.accounting import epsilon_spent
from noisecast.privacy.mechanism import Adjacency, SampledGaussian
from noisecast.privacy.noise import RandomRoot
from noisecast.privacy.sampling import Shuffled, Stream
from noisecast.scenario import Scenario

LANES = 512  # runs side by side, where they cannot share what must be independent
RUNS, SAMPLED_RUNS = 30_000, 1_000  # by default; sampled batches are drawn anew for every run
MOST_LOOKS = 64  # an observer of every step of long runs would cost more than it sees
REPEATS_AT_ONCE = 500


def white_box_audit(
    mechanism: SampledGaussian,
    optimizer: Optimizer,
    *,
    engine: str,
    num_steps: int,
    target_delta: float,
    root: RandomRoot,
    runs: int | None = None,
    confidence: float = 0.999,
    with_canary: bool = True,
) -> Verdict:
    """Train on D and on D' with the worst-case canary (`audit.canary`), and tell them apart by what was released.

    The observer knows everything but the noise and the batches, and sees the parameters: after every step where batches
    are sampled and of DP-Adam (whose momentum is undone), else after the last (of DP-SGD with the canary in each batch
    they are the sum of all private sums, and nothing tells more). What an optimizer keeps to itself, as DP-SignSGD the
    size of the sum, is not shown.

    Args:
      mechanism, num_steps, target_delta: what is audited; noise_multiplier > 0.
      optimizer: DPSGD, DPSignSGD or DPAdam; its learning rate is replaced.
      engine: "row_sparse", "dense" or "simulate", the engine that computes it.
      root: of all randomness.
      runs: on each data set, >= 4; None for as many as are cheap.   confidence: of the bound.
      with_canary: False for a null audit: D' against D', whose bound must be 0.
    Raises: ValueError: an engine, a mechanism or a number of runs that cannot be audited.

    >>> from noisecast.privacy.sampling import Poisson
    >>> mechanism = SampledGaussian(noise_multiplier=1.0, l2_clip_norm=1.0, sampler=Poisson(1.0, 2))
    >>> found = white_box_audit(mechanism, DPSGD(learning_rate=1.0), engine="row_sparse", num_steps=1,
    ...                         target_delta=1e-5, root=RandomRoot.from_insecure_seed(0), runs=4096)
    >>> round(found.epsilon, 2), 1 < found.bound.epsilon < 3
    (4.38, True)
    """
    if isinstance(mechanism.sampler, Stream):  # a record meets one step: one example, one step
        mechanism, num_steps = replace(mechanism, sampler=Stream(1)), 1
    inside, outside = pair(mechanism, optimizer, engine, num_steps, with_canary=with_canary)
    runs = runs or (RUNS if _shares_batches(mechanism) else SAMPLED_RUNS)
    looks = _looks(inside)
    scores = [
        _scores(_observations(scenario, looks, runs, first, root), scenario, looks)
        # Numbers of their own: one scenario asked twice, as a null audit does, must not give the same runs.
        for scenario, first in ((inside, 0), (outside, runs))
    ]
    spent = epsilon_spent(mechanism, num_steps=num_steps, target_delta=target_delta)
    return Verdict(
        what=_setting(mechanism, num_steps) if with_canary else "null: one data set twice",
        optimizer=optimizer.name,
        engine=engine,
        epsilon=spent.epsilon if with_canary else 0.0,
        bound=lower_bound_of_scores(*scores, delta=target_delta, confidence=confidence),
        runs=runs,
        observer="parameters after every step" if len(looks) > 1 else "parameters after the last step",
    )


def _looks(scenario: Scenario) -> list[int]:
    path_tells_more = not _shares_batches(scenario.mechanism) or isinstance(scenario.optimizer, DPAdam)
    every_step = path_tells_more and scenario.num_steps <= MOST_LOOKS
    return list(range(1, scenario.num_steps + 1)) if every_step else [scenario.num_steps]


def _shares_batches(mechanism: SampledGaussian) -> bool:
    """Whether runs that share their batches are independent all the same: everybody is in each batch."""
    return mechanism.sampling_probability in (1.0, None)


def _observations(scenario: Scenario, looks: list[int], runs: int, first: int, root: RandomRoot) -> np.ndarray:
    """Moves along the canary between looks, in units of what noise alone does in a step; (runs, looks)."""
    lanes = min(LANES, runs) if _shares_batches(scenario.mechanism) else 1
    # Scenarios that differ in the number that training never sees: each has noise of its own.
    group = [replace(scenario, target_delta=0.5 / (1 + lane)) for lane in range(lanes)]
    found = []
    for begin in range(0, -(-runs // lanes), REPEATS_AT_ONCE):
        repeats = range(first + begin, first + min(begin + REPEATS_AT_ONCE, -(-runs // lanes)))
        run = engines.start(group, repeats=repeats, root=root)
        path = [np.zeros((len(repeats), lanes))]
        for look in looks:
            run.advance(look)
            path.append(along_canary(run.params, scenario))
        found.append(np.diff(np.stack(path, axis=-1), axis=-1).reshape(-1, len(looks)))
    moves = np.concatenate(found)[:runs] / _unit(scenario)
    optimizer = scenario.optimizer
    if isinstance(optimizer, DPAdam) and len(looks) == scenario.num_steps:
        return _without_momentum(moves, optimizer.b1)
    return moves


def _without_momentum(moves: np.ndarray, b1: float) -> np.ndarray:
    """What each step's gradient added: the bias-corrected means m_k / (1 - b1^k) taken apart again."""
    sums = moves * (1 - b1 ** np.arange(1, moves.shape[1] + 1))
    return (sums - b1 * np.pad(sums, ((0, 0), (1, 0)))[:, :-1]) / (1 - b1)


def _unit(scenario: Scenario) -> float:
    """What noise alone moves the parameters in a step along the canary, as a standard deviation."""
    rate = scenario.optimizer.learning_rate
    return rate * scenario.mechanism.mean_noise_std if isinstance(scenario.optimizer, DPSGD) else rate


def _shift(scenario: Scenario) -> float:
    """What the canary adds to a step's move, in units of that; of optimizers without sizes, of a coin a column."""
    z = scenario.mechanism.noise_multiplier
    if isinstance(scenario.optimizer, DPSGD):
        return 1 / z
    return math.sqrt(WIDTH) * float(2 * stats.norm.cdf(1 / z / math.sqrt(WIDTH)) - 1)


def _scores(observations: np.ndarray, scenario: Scenario, looks: list[int]) -> np.ndarray:
    """ln of how much likelier the observations are on D than on D', or what grows with it; any score is allowed."""
    if len(looks) == 1 or _shares_batches(scenario.mechanism):
        return observations.sum(axis=1)
    shift, replaces = _shift(scenario), scenario.mechanism.adjacency == Adjacency.REPLACE_ONE
    up = shift * observations - shift**2 / 2
    down = -shift * observations - shift**2 / 2
    return _mixed(up, scenario) - (_mixed(down, scenario) if replaces else 0.0)


def _mixed(log_ratios: np.ndarray, scenario: Scenario) -> np.ndarray:
    """The canary is in each batch with probability q, or in one batch of each epoch; (runs,)."""
    sampler = scenario.mechanism.sampler
    if isinstance(sampler, Shuffled):
        length = sampler.steps_per_epoch
        epochs = [log_ratios[:, i : i + length] for i in range(0, log_ratios.shape[1], length)]
        return np.sum([logsumexp(epoch, axis=1) - math.log(epoch.shape[1]) for epoch in epochs], axis=0)
    q = sampler.sampling_probability
    assert q is not None
    return np.logaddexp(math.log1p(-q), math.log(q) + log_ratios).sum(axis=1)


def _setting(mechanism: SampledGaussian, num_steps: int) -> str:
    sampler = mechanism.sampler
    q = f", q = {mechanism.sampling_probability:.3g}" if mechanism.sampling_probability is not None else ""
    adjacency = "replace one" if mechanism.adjacency == Adjacency.REPLACE_ONE else "add/remove"
    steps = f"{num_steps} step" + ("s" if num_steps > 1 else "")
    return f"{type(sampler).__name__}{q}, {adjacency}, {steps}"
