"""A part imports only from those above it, and the light parts stay light; what stands beside imports what there is."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "noisecast"
BESIDE = ["benchmarks", "mutants", "fuzz", "tests"]

# From the top: a part may import from the parts above it and from itself.
LAYERS = [
    "theory",
    "files",
    "locks",
    "worker_process",
    "printed",
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
    "ledger_entries",
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


# --- What stands beside the package: types are not checked there, and some of it runs rarely --------------------------


def defined_in(module: str) -> set[str] | None:
    """The names of a module of the package, by its text; None for one that makes names when asked."""
    place = PACKAGE.joinpath(*module.split(".")[1:])
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    names = {each.stem for each in place.glob("*")} if place.is_dir() else set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return None if "__getattr__" in names else names


@pytest.mark.parametrize("folder", BESIDE)
def test_what_stands_beside_imports_what_there_is(folder):
    missing = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "noisecast":
                names = defined_in(str(node.module))
                lacks = set() if names is None else {alias.name for alias in node.names} - names
                missing += [f"{path.relative_to(ROOT)}:{node.lineno} {node.module}.{name}" for name in sorted(lacks)]
    assert not missing


def test_files_of_tests_have_names_of_their_own():
    """Pytest imports them by name alone: of two with one name it collects the first."""
    counts = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, count in counts.items() if count > 1 and name not in IN_PACKAGES]


# Folders of tests that are packages: their files are imported by their whole name.
IN_PACKAGES = {path.name for init in (ROOT / "tests").rglob("__init__.py") for path in init.parent.glob("test_*.py")}
