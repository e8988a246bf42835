"""Seeds of the checks that planted bugs must fail: one number, so that they can be tried with others."""

import os
import sys
from pathlib import Path

import pytest

from noisecast.privacy.noise import RandomRoot

sys.path.append(str(Path(__file__).parent))

# Written down before any result. `python -m mutants --clean-runs 20` sets others.
SEED = int(os.environ.get("NOISECAST_AUDIT_SEED", "20261120"))


@pytest.fixture
def root() -> RandomRoot:
    return RandomRoot.from_insecure_seed(SEED)
