"""The training engines for hours, and what memory they hold meanwhile: `python tests/trust/soak.py MINUTES`.

One process, for 10 minutes or more. A long run of each engine and optimizer goes on and on; in turn with them, short
ones are trained for release, each a new scenario with a checkpoint of its own. Once a minute a line: what was done, and
the resident memory. Ends with 1 if that grew in the second half of the time by more than MOST_GROWTH.
"""

import dataclasses
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from train_to_be_killed import NUM_STEPS, OPTIMIZERS, scenario

from noisecast import engines, release
from noisecast.privacy.noise import RandomRoot

MOST_GROWTH = 10.0  # MiB in the second half of the time
SHORT = 200  # steps of a short run
STRETCH = 0.5  # seconds of a long run at a time


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def long_runs(root: RandomRoot) -> list:
    kinds = [(engine, optimizer) for engine in NUM_STEPS for optimizer in OPTIMIZERS]
    asked = [dataclasses.replace(scenario(*kind), num_steps=2**31 - 1) for kind in kinds]
    return [engines.start([one], repeats=[0], root=root) for one in asked]


def go_on(run) -> None:
    """Steps for about STRETCH seconds."""
    until, stretch = time.monotonic() + STRETCH, 64
    while time.monotonic() < until:
        run.advance(run.step + stretch)
        run.block_until_ready()


def short_run(number: int, folder: Path) -> None:
    """A scenario nobody has asked before: what is kept for each scenario would add up."""
    engine, name = list(NUM_STEPS)[number % 2], list(OPTIMIZERS)[number // 2 % 3]
    asked = scenario(engine, name)
    optimizer = dataclasses.replace(asked.optimizer, learning_rate=0.01 / (1 + 1e-4 * number))
    asked = dataclasses.replace(asked, optimizer=optimizer, num_steps=SHORT)
    release.train(asked, checkpoint=folder / "run.checkpoint", watch=lambda moment: None, num_evaluations=2)


def growth(minutes: np.ndarray, mib: np.ndarray) -> tuple[float, float]:
    """MiB gained from the third quarter's median to the last quarter's, and the slope of the last half in MiB/hour."""
    late = minutes >= minutes[-1] / 2
    third, last = late & (minutes < 0.75 * minutes[-1]), minutes >= 0.75 * minutes[-1]
    slope = np.polyfit(minutes[late], mib[late], 1)[0] * 60
    return float(np.median(mib[last]) - np.median(mib[third])), float(slope)


def main(minutes: float) -> int:
    runs, began, told, number = long_runs(RandomRoot.from_insecure_seed(0)), time.monotonic(), -1.0, 0
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        while (now := (time.monotonic() - began) / 60) < minutes:
            go_on(runs[number % len(runs)])
            short_run(number, Path(folder))
            number += 1
            if now - told >= 1 or told < 0:
                told = now
                steps, descriptors = sum(run.step for run in runs), len(os.listdir("/proc/self/fd"))
                lines.append((now, resident_mib()))
                print(
                    f"{now:6.1f} min  {resident_mib():7.1f} MiB  {steps:12,} steps  {number:6,} short runs  "
                    f"{descriptors} descriptors  {threading.active_count()} threads  {time.process_time():.0f} s",
                    flush=True,
                )
    gained, slope = growth(*np.array(lines).T)
    print(f"Second half: {gained:+.1f} MiB from its first quarter to its last, slope {slope:+.2f} MiB an hour.")
    return int(gained > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
