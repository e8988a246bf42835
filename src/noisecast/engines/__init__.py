"""Engines: how training is computed. The problem and the scenario choose one, never a user's flag."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from noisecast.engines import dense, row_sparse, simulate
from noisecast.optimizers import DPSGD, DPSignSGD
from noisecast.privacy.aes_noise import AES
from noisecast.privacy.noise import RandomRoot
from noisecast.privacy.public_grid import on_public_grid
from noisecast.scenario import Scenario

# Fastest first: the first that supports a scenario computes it.
_ENGINES: tuple[tuple[ModuleType, Any], ...] = (
    (row_sparse, row_sparse.RowSparseRun),
    (simulate, simulate.SimulatedRun),
    (dense, dense.DenseRun),
)


def noise_source() -> str:
    """Which generator makes the row-sparse engine's fast noise on this machine: of one key each makes its own."""
    return "AES" if AES else "Threefry"


def start(scenarios: Sequence[Scenario], *, repeats: Sequence[int], root: RandomRoot) -> Any:
    """A run of a group of scenarios (equal `group_key`): `advance` it, `evaluate` it, take its `params`.

    Args:
      repeats: numbers of the runs of each scenario; one root and number give the same batches and noise again.
      root: all randomness comes from it: `RandomRoot.from_os_entropy()`.
    Raises: ValueError for arguments of another kind, if nothing is asked for, of scenarios that are not of one group,
      or that no engine can train.
    """
    _check_kinds(scenarios)
    if not isinstance(root, RandomRoot):
        raise ValueError(f"Expected root to be a RandomRoot, as RandomRoot.from_os_entropy(), got {root!r}.")
    if not scenarios or not len(repeats):
        raise ValueError(
            f"Expected a scenario and a repeat at least, got {len(scenarios)} scenarios and {len(repeats)} repeats."
        )
    numbers = [repeat for repeat in repeats if isinstance(repeat, (int, np.integer)) and repeat >= 0]
    if len(set(numbers)) < len(repeats):  # the same number twice would be the same run twice
        raise ValueError(f"Expected repeats to be different whole numbers >= 0, got {list(repeats)}.")
    if (reason := why_unsupported(scenarios[0])) is not None:
        raise ValueError(reason)
    if len({group_key(scenario) for scenario in scenarios}) > 1:
        raise ValueError(
            "Expected scenarios of one group, alike in all but learning rate, clip norm, noise and delta; start others "
            "by themselves (`group_key` tells them apart)."
        )
    return _engine_of(scenarios[0])[1](scenarios, repeats=repeats, root=root)


def group_key(scenario: Scenario) -> tuple:
    """Scenarios with equal keys may be run in one group."""
    return (_engine_of(scenario)[0].__name__, *dense.group_key(scenario))


def runs_of_a_call(scenario: Scenario) -> tuple[int, int]:
    """(scenarios, repeats) of this kind that one call takes side by side with profit; more are as fast apart."""
    return _engine_of(scenario)[0].runs_of_a_call(scenario)


def why_unsupported(scenario: Scenario) -> str | None:
    """None, or the sentence that says why no engine can train this scenario."""
    return dense.why_unsupported(scenario)


def why_not_for_release(scenario: Scenario) -> str | None:
    """None, or the sentence that says why the engine's rounding would break the guarantee of this scenario."""
    return row_sparse.why_not_for_release(scenario) if _engine_of(scenario)[0] is row_sparse else None


def released_params(run: Any, scenario: Scenario) -> np.ndarray:
    """A run's parameters as they may be released, (d,) float32: without what their last bits tell (`public_grid`).

    Those of DP-SignSGD are sums of steps of one length, and stay them.   run: of this scenario alone, once.
    """
    params, mechanism = run.params[0, 0], scenario.mechanism
    if isinstance(scenario.optimizer, DPSignSGD) or mechanism.noise_multiplier == 0 or not np.isfinite(params).all():
        return params
    stretches = scenario.schedule.stretches(0, scenario.num_steps)
    walked = sum((stop - begin) * scenario.schedule.at(begin) ** 2 for begin, stop, _ in stretches) ** 0.5
    each = mechanism.mean_noise_std if isinstance(scenario.optimizer, DPSGD) else 1.0  # others' directions are about 1
    return on_public_grid(params, scenario.optimizer.learning_rate * walked * each)


def explain(scenario: Scenario) -> str:
    """Which engine computes this scenario, and why not a faster one; or that none does."""
    _check_kinds([scenario])
    if (reason := why_unsupported(scenario)) is not None:
        return f"No engine can train this: {reason}"
    reasons = []
    for module, _ in _ENGINES:
        reason = module.why_unsupported(scenario)
        name = module.__name__.rsplit(".", 1)[-1]
        if reason is None:
            return " ".join([f"Computed by the engine {name}.", *reasons])
        reasons.append(f"Not by {name}: {reason}")
    raise AssertionError("the dense engine computes what can be trained")


def _check_kinds(scenarios: Sequence[Scenario]) -> None:
    """A call in Python with the wrong thing gets a sentence."""
    if isinstance(scenarios, Scenario):
        raise ValueError("Expected a list of scenarios, got one scenario; put it into a list.")
    other = next((each for each in scenarios if not isinstance(each, Scenario)), None)
    if other is not None:
        raise ValueError(f"Expected a Scenario, got {type(other).__name__}.")


def _engine_of(scenario: Scenario) -> tuple[ModuleType, Any]:
    return next((engine for engine in _ENGINES if engine[0].why_unsupported(scenario) is None), _ENGINES[-1])
