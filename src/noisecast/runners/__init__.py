"""The runners: ways to answer a scenario, side by side in one table."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from noisecast.privacy.noise import RandomRoot
from noisecast.runners.closed_form import ClosedForm
from noisecast.runners.moments import Moments
from noisecast.runners.runner import Progress, Runner
from noisecast.runners.sde import Sde
from noisecast.runners.training import Training
from noisecast.scenario import Scenario

# Moments reads the examples without noise and takes seconds a scenario: it is asked by name, `runners=[Moments()]`.
RUNNERS: tuple[Runner, ...] = (Training(), Sde(), ClosedForm())

__all__ = ["RUNNERS", "ClosedForm", "Moments", "Runner", "Sde", "Training", "answer", "refusals", "repeats_of"]


def answer(
    scenarios: Sequence[Scenario],
    *,
    runners: Sequence[Runner] = RUNNERS,
    num_seeds: int = 1,
    insecure_seeds: Sequence[int] | None = None,
    record_at: Sequence[int],
    progress: Progress = lambda share: None,
) -> pd.DataFrame:
    """Ask every able runner the same questions; stack the answers.

    Args:
      scenarios: the questions; at least one.
      runners: who is asked; one that cannot answer a scenario is left out of it (`refusals` says why).
      num_seeds: independent repeats of the random runners, from the operating system's entropy; >= 1.
      insecure_seeds: distinct whole numbers in [0, 2^63) to repeat with instead. Reproducible, therefore not private.
      record_at: steps at which metrics are recorded; 0 is the start. The last step is always added.
      progress: told the share of the work that is done.
    Returns: the table (`noisecast.table`).
    Raises:
      ValueError: nothing to answer, repeated seeds, steps out of range.
    """
    repeats, root = repeats_of(num_seeds, insecure_seeds)
    if not scenarios:
        raise ValueError("Expected at least one scenario, got none.")
    if len({scenario.schedule for scenario in scenarios}) > 1:  # a table's rows do not tell them apart
        raise ValueError("Expected scenarios of one schedule of learning rates, got several; ask about one at a time.")
    record_at = sorted({*record_at, *(scenario.num_steps for scenario in scenarios)})
    if record_at[0] < 0 or record_at[-1] > max(scenario.num_steps for scenario in scenarios):
        raise ValueError(f"Expected 0 <= record_at <= num_steps, got {record_at[0]} to {record_at[-1]}.")
    asked = [(runner, [s for s in scenarios if runner.why_unsupported(s) is None]) for runner in runners]
    asked = [(runner, able) for runner, able in asked if able]
    if not asked:
        raise ValueError("No runner can answer. " + " ".join(sorted(set(refusals(scenarios, runners)))))
    tables = [
        runner.answer(
            able,
            repeats=repeats,
            root=root,
            record_at=record_at,
            progress=lambda share, number=number: progress((number + share) / len(asked)),
        )
        for number, (runner, able) in enumerate(asked)
    ]
    return pd.concat(tables, ignore_index=True)


def refusals(scenarios: Sequence[Scenario], runners: Sequence[Runner] = RUNNERS) -> list[str]:
    """Why some runners leave some scenarios out: one sentence each, without repetition."""
    reasons = [runner.why_unsupported(scenario) for runner in runners for scenario in scenarios]
    return list(dict.fromkeys(reason for reason in reasons if reason is not None))


def repeats_of(
    num_seeds: int,
    insecure_seeds: Sequence[int] | None,
    kept_root: RandomRoot | None = None,
    first_seed: int = 0,
) -> tuple[list[int], RandomRoot]:
    """The repeats that are asked for, and where their randomness comes from: `kept_root`, or a new one."""
    if insecure_seeds is None:
        if num_seeds < 1:
            raise ValueError(f"Expected num_seeds >= 1, got {num_seeds}.")
        return list(range(first_seed, first_seed + num_seeds)), kept_root or RandomRoot.from_os_entropy()
    fit = {seed for seed in insecure_seeds if isinstance(seed, int | np.integer) and 0 <= seed < 2**63}
    if not fit or len(fit) < len(insecure_seeds):
        raise ValueError(
            "Expected insecure_seeds to be distinct whole numbers in [0, 2^63), at least one, got "
            f"{list(insecure_seeds)}."
        )
    # One root for all of them: repeat r is the same run whichever other seeds stand beside it.
    return list(insecure_seeds), RandomRoot.from_insecure_seed(0)
