"""The examples of the pages about Optax and Opacus do what these say; `tests/docs` runs the pages."""

import importlib.util
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDS = {"optax": ("optax", "sklearn"), "opacus": ("torch", "opacus", "sklearn")}


def need(page: str) -> None:
    for library in NEEDS[page]:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")


@pytest.mark.filterwarnings("ignore")
def test_the_opacus_example_agrees_with_opacus_and_learns():
    need("opacus")
    found = runpy.run_path(str(ROOT / "examples" / "opacus_advice.py"))["main"]()
    assert 0.99 < found["epsilon"] <= 1.0 + 1e-9  # calibrated to 1 and never above
    assert 0.95 < found["epsilon_opacus"] / found["epsilon"] < 1.05
    assert found["accuracy"] > 0.6  # chance is 0.1


@pytest.mark.filterwarnings("ignore")
def test_the_optax_example_learns_with_all_three_at_one_epsilon():
    need("optax")
    found = runpy.run_path(str(ROOT / "examples" / "optax_loop.py"))["main"]()
    assert set(found) == {"DP-SGD", "DP-SignSGD", "DP-Adam"}
    for epsilon, accuracy in found.values():
        assert 0.99 < epsilon <= 1.0 and accuracy > 0.6
