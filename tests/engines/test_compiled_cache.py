"""Compiled code is kept until a file that it was compiled from changes; without a folder, nothing is kept."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest
from numba.core.caching import CompileResultCacheImpl

import noisecast
from noisecast.compiled import FAST, njit, source_files

PACKAGE = Path(noisecast.__file__).parent

DRAW = """
from noisecast.privacy import secure_noise
print(secure_noise.standard_normals([bytes(32)], 0, 1, 1).item(), sum(secure_noise._fill.stats.cache_hits.values()))
"""


def test_a_change_in_another_file_compiles_anew(tmp_path: Path) -> None:
    package, cache = tmp_path / "noisecast", tmp_path / "compiled"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))

    def draw() -> tuple[float, int]:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(cache)}
        done = subprocess.run([sys.executable, "-c", DRAW], env=environment, capture_output=True, text=True, check=True)
        normal, hits = done.stdout.split()
        return float(normal), int(hits)

    first, hits = draw()
    assert hits == 0
    assert draw() == (first, 1)

    piece = package / "privacy" / "counter_noise.py"  # `_fill` is in secure_noise.py
    before = piece.read_text()
    piece.write_text(before.replace("_TO_UNIT = f32(2.0**-32)", "_TO_UNIT = f32(2.0**-36)"))
    assert piece.read_text() != before
    changed, hits = draw()
    assert hits == 0
    assert changed != first


def _names_compiled(path: Path) -> set[str]:
    """Every global name that a kernel of this file uses."""
    module = importlib.import_module(".".join(("noisecast", *path.relative_to(PACKAGE).with_suffix("").parts)))
    functions = [value.py_func for value in vars(module).values() if hasattr(value, "py_func")]
    return {name for function in functions for name in function.__code__.co_names}


def _imports(path: Path) -> Iterator[tuple[Path, set[str]]]:
    """Files of ours that this one imports from, each with the names it takes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("noisecast."):
            source = PACKAGE.joinpath(*node.module.split(".")[1:]).with_suffix(".py")
            yield source, {alias.asname or alias.name for alias in node.names}


def test_whatever_is_compiled_lies_in_a_file_that_counts() -> None:
    """Files with kernels, and those from which a kernel takes a constant or another kernel."""
    counted = set(source_files())
    holding = {path for path in PACKAGE.rglob("*.py") if re.search(r"njit\(|intrinsic\(", path.read_text())}
    assert holding and holding <= counted
    for path in holding:
        compiled = _names_compiled(path)
        for source, names in _imports(path):
            if compiled & names and source.exists():
                assert source in counted, f"{path.name} compiles {compiled & names} of {source.name}"


def test_without_a_folder_to_write_to_it_compiles_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompileResultCacheImpl, "_locator_classes", [])
    monkeypatch.setattr(numba.config, "CACHE_LOCATOR_CLASSES", "")
    with pytest.warns(RuntimeWarning, match="set NUMBA_CACHE_DIR to a folder"):
        twice = njit(**FAST)(lambda x: 2 * x)
    assert twice(21) == 42
