"""A part imports only from those above it, and the light parts stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "noisecast"

# From the top: a part may import from the parts above it and from itself.
LAYERS = [
    "theory",
    "files",
    "worker_process",
    "table",
    "compiled",
    "privacy",
    "problems",
    "optimizers",
    "scenario",
    "engines",
    "runners",
    "question",
    "forecasting",
    "statement",
    "ledger",
    "checkpoint",
    "release",
    "model_dir",
    "figures",
    "sweeps",
    "protocols",
    "advice",
    "estimators",
    "audit",
    "report",
    "optax",
    "opacus",
    "reproduction",
    "scenario_file",
    "cli",
    "__main__",
]


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively: {ast.unparse(node)}"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("noisecast.") and name.count(".")}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_part_imports_only_from_those_above(path):
    part = part_of(path)
    assert part in LAYERS, f"{part} has no place in LAYERS; give it one."
    below = {name for name in imported_parts(path) if name in LAYERS and LAYERS.index(name) > LAYERS.index(part)}
    assert not below, f"{path.relative_to(PACKAGE)} imports {sorted(below)}, which lie below {part}."


@pytest.mark.parametrize(
    "name", ["noisecast", "noisecast.theory", "noisecast.table", "noisecast.privacy", "noisecast.cli"]
)
def test_light_parts_import_neither_jax_nor_numba(name):
    code = f"import sys, {name}; print([m for m in ('jax', 'numba', 'matplotlib', 'sklearn') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_importing_the_package_changes_no_global_state():
    code = (
        "import noisecast, noisecast.release, noisecast.runners, jax, logging;"
        "print(jax.config.jax_enable_x64, logging.getLogger().handlers)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False []"
