"""Ten thousand scenarios, one in twenty of which diverges: time and memory grow with their number, no faster."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("sweep_under_load.py")


def measured(num_scenarios: int, store: Path) -> dict:
    command = [sys.executable, str(SCRIPT), str(num_scenarios), str(store)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["scenarios"] == num_scenarios
    assert found["diverged"] == num_scenarios - found["finite"] == num_scenarios // 20  # none is lost, none hidden
    return found


@pytest.mark.slow
def test_a_diverging_cell_keeps_its_row(tmp_path):
    measured(100, tmp_path / "store")


@pytest.mark.slow
def test_time_and_memory_are_linear(tmp_path):
    small, large = (measured(count, tmp_path / str(count)) for count in (2_000, 10_000))
    # Five times the scenarios; processor time, which other programs disturb little.
    assert large["processor_seconds"] < 1.5 * 5 * small["processor_seconds"]
    grown = [each["mib"] - each["mib_before"] for each in (small, large)]
    assert grown[1] < 1.5 * 5 * max(grown[0], 50)
