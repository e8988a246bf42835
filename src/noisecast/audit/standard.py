"""The audits that `noisecast audit` makes unasked: every sampler, optimizer and engine, and null ones."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial

from noisecast.audit.one_run import one_run_audit
from noisecast.audit.verdict import Verdict
from noisecast.audit.white_box import white_box_audit
from noisecast.optimizers import DPSGD, OPTIMIZERS, Optimizer
from noisecast.privacy.calibration import calibrate_noise_multiplier
from noisecast.privacy.mechanism import Adjacency, SampledGaussian
from noisecast.privacy.noise import RandomRoot
from noisecast.privacy.sampling import FixedSize, Poisson, Sampler, Shuffled, Stream
from noisecast.scenario import Scenario

ADD, REPLACE = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE

# Sampler, neighbours, steps. The first two have the canary in every batch: there an audit has power.
SETTINGS: tuple[tuple[Sampler, Adjacency, int], ...] = (
    (Poisson(1.0, 2), ADD, 2),
    (Shuffled(2, 2), REPLACE, 2),
    (Poisson(0.5, 2), ADD, 1),
    (FixedSize(2, 4), REPLACE, 1),
    (Shuffled(2, 4), ADD, 4),
    (Stream(1), ADD, 1),
)
# An audit of the sampling itself. The others have so much noise for their epsilon that batches with everybody in them
# prove nothing; here a record that is drawn in more than one batch of fifty shows above next to no noise. Of DP-SGD
# alone: the batches are the same code's for all. Its epsilon and delta are its own.
RARE, RARE_EPSILON, RARE_DELTA = Poisson(0.02, 0.2), 1.0, 0.01
NULL_RUNS = 10_000
ONE_RUN_EPSILON = 2.0  # times the epsilon of the others: a canary among a thousand rows is hard to see
ONE_RUN_DELTA = 1e-5  # or less: the bound counts delta once for each of a thousand canaries


def standard_audits(
    *,
    target_epsilon: float,
    target_delta: float,
    root: RandomRoot,
    runs: int | None = None,
    confidence: float = 0.999,
    optimizers: Sequence[type] = OPTIMIZERS,
    engines: Sequence[str] = ("row_sparse", "dense", "simulate"),
) -> Iterator[Callable[[], Verdict]]:
    """Audits yet to be made, each a call: null, white box of every setting and of rare sampling, one run.

    Args:
      target_epsilon, target_delta: every mechanism's noise is the least that keeps to them, but in one run and of rare
        sampling.
      root: of all randomness.   runs, confidence: as in `white_box_audit`.
      optimizers, engines: those to audit.
    """
    common = {"target_delta": target_delta, "root": root, "confidence": confidence}
    for number, (sampler, adjacency, num_steps) in enumerate(SETTINGS):
        for engine in engines:
            if isinstance(sampler, Stream) != (engine == "simulate"):
                continue
            for kind in optimizers:
                optimizer = kind(learning_rate=1.0)
                mechanism = partial(_calibrated, sampler, adjacency, num_steps, target_epsilon, target_delta)
                settings = common | {"engine": engine, "num_steps": num_steps, "runs": runs}
                if number == 0 and kind is optimizers[0]:
                    null = {"runs": runs or NULL_RUNS, "with_canary": False}
                    yield partial(_white_box, mechanism, optimizer, **settings | null)
                yield partial(_white_box, mechanism, optimizer, **settings)
    for engine in engines:
        if DPSGD in optimizers and engine != "simulate":
            mechanism = partial(_calibrated, RARE, ADD, 1, RARE_EPSILON, RARE_DELTA)
            settings = common | {"engine": engine, "num_steps": 1, "runs": runs, "target_delta": RARE_DELTA}
            yield partial(_white_box, mechanism, DPSGD(learning_rate=1.0), **settings)
    for engine in engines:
        for kind in optimizers if engine != "simulate" else ():
            yield partial(
                one_run_audit, kind(learning_rate=1.0), engine=engine, root=root, confidence=confidence,
                target_epsilon=ONE_RUN_EPSILON * target_epsilon, target_delta=min(target_delta, ONE_RUN_DELTA),
            )  # fmt: skip


def audits_of(
    scenario: Scenario, *, root: RandomRoot, runs: int | None = None, confidence: float = 0.999,
    engines: Sequence[str] = ("row_sparse", "dense", "simulate"),
) -> Iterator[Callable[[], Verdict]]:  # fmt: skip
    """The mechanism, optimizer and number of steps of a scenario, on the canary's problem in place of its own."""
    for engine in engines:
        if isinstance(scenario.mechanism.sampler, Stream) == (engine == "simulate"):
            yield partial(
                white_box_audit, scenario.mechanism, scenario.optimizer, engine=engine, num_steps=scenario.num_steps,
                target_delta=scenario.target_delta, root=root, runs=runs, confidence=confidence,
            )  # fmt: skip


def _white_box(mechanism: Callable[[], SampledGaussian], optimizer: Optimizer, **settings) -> Verdict:
    return white_box_audit(mechanism(), optimizer, **settings)


@lru_cache
def _calibrated(
    sampler: Sampler, adjacency: Adjacency, num_steps: int, target_epsilon: float, target_delta: float
) -> SampledGaussian:
    mechanism = SampledGaussian(noise_multiplier=0.0, l2_clip_norm=1.0, sampler=sampler, adjacency=adjacency)
    return calibrate_noise_multiplier(
        mechanism, target_epsilon=target_epsilon, target_delta=target_delta, num_steps=num_steps
    )
