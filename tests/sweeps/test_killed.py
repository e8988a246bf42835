"""Whoever is killed, whenever: the store that comes out is the one of an undisturbed sweep."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from small_sweep import questions

from noisecast.sweeps import Store, run_sweep

SCRIPT = Path(__file__).with_name("small_sweep.py")


def workers_of(driver: subprocess.Popen) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(driver.pid)], capture_output=True, text=True).stdout
    return [int(number) for number in found.split()]


@pytest.mark.parametrize(
    "num_groups, kills",
    [pytest.param(5, 2, marks=pytest.mark.slow), pytest.param(200, 20, marks=pytest.mark.slow)],
)
def test_a_store_that_was_killed_again_and_again_equals_an_undisturbed_one(tmp_path, num_groups, kills):
    rng = random.Random(7)
    undisturbed = run_sweep(questions(num_groups, insecure_seeds=(0, 1)), tmp_path / "undisturbed", workers=0)
    store, command = tmp_path / "store", [sys.executable, str(SCRIPT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    drivers_killed = workers_killed = 0
    driver = None
    for kill, num_written in enumerate(sorted(rng.sample(range(num_groups), kills))):  # from its start to its end
        if driver is None or driver.poll() is not None:
            driver = subprocess.Popen([*command, str(store), str(num_groups)], env=environment)
        deadline = time.monotonic() + 300
        while len(shards(store)) <= num_written and driver.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)  # something new is being written: the moment to be rude
        time.sleep(rng.uniform(0, 0.3))
        if kill % 2 == 0 and (children := workers_of(driver)):
            os.kill(rng.choice(children), signal.SIGKILL)
            workers_killed += 1
        elif driver.poll() is None:
            children = workers_of(driver)
            driver.kill()
            driver.wait()
            drivers_killed += 1
            assert_end(children)
        if (store / "shards").is_dir():
            Store(store).read()  # never half a shard
    if driver is not None and driver.poll() is None:
        driver.wait()
    assert drivers_killed and workers_killed
    subprocess.run([*command, str(store), str(num_groups)], env=environment, check=True)
    pd.testing.assert_frame_equal(Store(store).read(), undisturbed)


def test_a_worker_whose_driver_died_before_it_began_ends():
    """Nothing but its own look tells it: whoever is its parent by then holds its input open."""
    driver = subprocess.Popen([sys.executable, "-c", ""])
    driver.wait()
    command = [sys.executable, "-c", "from noisecast.sweeps.worker import main; main()", str(driver.pid)]
    worker = subprocess.Popen(
        command, stdin=subprocess.PIPE, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert worker.wait(timeout=60) != 0


def shards(store: Path) -> list[Path]:
    return list((store / "shards").glob("[!.]*"))


def assert_end(processes: list[int]) -> None:
    """Workers do not outlive their driver, though one may have to begin before it sees that it has none."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not any(runs(number) for number in processes):
            return
        time.sleep(0.1)
    raise AssertionError("Workers went on without their driver.")


def runs(process: int) -> bool:
    """A zombie, which nobody may have buried in a container, does not run."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False
