"""W5: the stationary law in two dimensions, 20,000 paths; the contestants of W4."""

from benchmarks.race import Contestant
from benchmarks.w4_simulation import contestants_of

NAME = "W5"


def contestants(data_dir: str | None) -> tuple[str, list[Contestant]]:
    """What is simulated, and who does it."""
    return "d = 2, 20,000 paths", contestants_of(num_params=2, runs=20_000)
