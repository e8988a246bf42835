"""Learning rates that are none, and what is said of them."""

import math

import numpy as np
import pytest

from noisecast.optimizers import OPTIMIZERS


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "rate, said",
    [
        (0, "Expected 0 < learning_rate < inf, got 0."),
        (-0.1, "Expected 0 < learning_rate < inf, got -0.1."),
        (math.nan, "Expected 0 < learning_rate < inf, got nan."),
        (math.inf, "Expected 0 < learning_rate < inf, got inf."),
        (np.float32(0.1), "Expected learning_rate as an int or a float, got np.float32(0.1)."),
        ("0.1", "Expected learning_rate as an int or a float, got '0.1'."),
        (True, "Expected learning_rate as an int or a float, got True."),
    ],
)
def test_what_is_no_learning_rate_is_refused(optimizer, rate, said):
    with pytest.raises(ValueError) as refused:
        optimizer(learning_rate=rate)
    assert str(refused.value) == said


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_numpys_double_and_whole_numbers_are_learning_rates(optimizer):
    assert optimizer(learning_rate=np.float64(0.1)) == optimizer(learning_rate=0.1)
    assert optimizer(learning_rate=1).learning_rate == 1
