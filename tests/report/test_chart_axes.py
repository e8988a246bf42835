"""The numbers on the charts' axes, as the page's own script finds them."""

import json
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

import noisecast.report

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="no Node.js on this machine")
SCRIPT = Path(noisecast.report.__file__).with_name("chart.js").read_text(encoding="utf-8")


def log_ticks(low: float, high: float) -> list[float]:
    asked = f"{SCRIPT}\nconsole.log(JSON.stringify(logTicks({low}, {high})));"
    return json.loads(subprocess.run([str(NODE), "-e", asked], capture_output=True, check=True, text=True).stdout)


@pytest.mark.parametrize("low, high", [(1.55, 1.95), (0.076, 0.098), (31, 49), (1.01, 1.02), (0.2, 0.9), (0.01, 40)])
def test_a_logarithmic_axis_has_three_numbers_at_least(low, high):
    """Between 1.55 and 1.95, say, there is none of 1, 1.5, 2, 3, 5 and 7."""
    found = log_ticks(low, high)
    assert 3 <= len(found) <= 12 and all(one < other for one, other in pairwise(found))
    assert all(0.999 * low <= value <= 1.001 * high for value in found)
