"""Plants each bug in a copy of the sources and runs the checks there: which check fails, and does any?"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

from mutants.bugs import BUGS, Bug

ROOT = Path(__file__).parents[1]
CHECKS = Path("tests") / "audit" / "test_promises.py"
PASSED, CAUGHT, BROKE = "passed", "caught", "broke"
ASSERTIONS = ("assert", "AssertionError", "Failed:")  # how a report begins that tells of what was checked


class Job(NamedTuple):
    """One build to check: with a bug or without, with a seed of its own or the tests' own, all checks or some."""

    bug: Bug | None = None
    seed: int | None = None
    checks: tuple[str, ...] = ()


class Outcome(NamedTuple):
    """Of one build: check -> PASSED, CAUGHT or BROKE; how long it took; what went wrong beside the checks."""

    checks: dict[str, str]
    seconds: float
    trouble: str | None


class Workplace:
    """A copy of the sources at a place of its own, so that its compiled kernels can be kept between bugs."""

    def __init__(self, folder: Path):
        self._folder = folder
        shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(
            ROOT / "tests" / "audit", folder / "tests" / "audit", ignore=shutil.ignore_patterns("__pycache__")
        )
        shutil.copy(ROOT / "pyproject.toml", folder)

    def run(self, job: Job) -> Outcome:
        """The checks, with the bug planted."""
        bug = job.bug
        changed = plant(bug, self._folder / "src" / "noisecast") if bug is not None else {}
        kernels = self._folder / "kernels"
        if bug is not None and bug.is_compiled:  # its own, so that those of the clean build stay
            kernels = self._folder / "kernels-of-a-bug"
            shutil.rmtree(kernels, ignore_errors=True)
        try:
            return self._check(kernels, job)
        finally:
            for path, (text, times) in changed.items():
                path.write_text(text, encoding="utf-8")
                os.utime(path, ns=times)  # as it was: Numba tells by it whether its kernels are still good

    def _check(self, kernels: Path, job: Job) -> Outcome:
        report, began = self._folder / "report.xml", time.monotonic()
        report.unlink(missing_ok=True)
        environment = os.environ | {
            "PYTHONPATH": str(self._folder / "src"),  # before the installed one
            "PYTHONDONTWRITEBYTECODE": "1",
            "NUMBA_CACHE_DIR": str(kernels),
            "JAX_COMPILATION_CACHE_DIR": str(self._folder / "xla"),  # by content: a changed program is another one
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "OPENBLAS_NUM_THREADS": "1",
            "NUMBA_NUM_THREADS": "1",
        }
        if job.seed is not None:
            environment["NOISECAST_AUDIT_SEED"] = str(job.seed)
        selected = [f"{CHECKS}::{check}" for check in job.checks] or [str(CHECKS)]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *selected]
        done = subprocess.run(command, cwd=self._folder, env=environment, capture_output=True, text=True)
        seconds = time.monotonic() - began
        if done.returncode not in (0, 1) or not report.exists():
            return Outcome({}, seconds, "\n".join(done.stdout.splitlines()[-8:]))
        return Outcome(_read(report), seconds, None)

    def imports_its_own(self) -> bool:
        """Else every bug would survive, planted where nobody looks."""
        command = [sys.executable, "-c", "import noisecast; print(noisecast.__file__)"]
        environment = os.environ | {"PYTHONPATH": str(self._folder / "src")}
        done = subprocess.run(command, cwd=self._folder, env=environment, capture_output=True, text=True, check=True)
        return Path(done.stdout.strip()).is_relative_to(self._folder)


def plant(bug: Bug, package: Path) -> dict[Path, tuple[str, tuple[int, int]]]:
    """Edit the files. Returns what they were, and their times. Raises: ValueError: a text that is not there once."""
    before: dict[Path, tuple[str, tuple[int, int]]] = {}
    for file, old, new in bug.edits:
        path = package / file
        text = path.read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise ValueError(f"{bug.name}: expected {old!r} once in {file}, found it {text.count(old)} times.")
        status = path.stat()
        before.setdefault(path, (text, (status.st_atime_ns, status.st_mtime_ns)))
        path.write_text(text.replace(old, new), encoding="utf-8")
    return before


def _read(report: Path) -> dict[str, str]:
    """Check -> CAUGHT if an assertion of any of its cases failed, else BROKE if one ended in another error.

    A case is `test_name[...]`. A program that the bug merely broke says nothing of whether the check can see it.
    """
    worst = (PASSED, BROKE, CAUGHT)
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            name = (case.get("name") or "").split("[")[0]
            found[name] = max(found.get(name, PASSED), _result(case), key=worst.index)
    return found


def _result(case: ElementTree.Element) -> str:
    failure = case.find("failure")
    if failure is not None and (failure.get("message") or "").startswith(ASSERTIONS):
        return CAUGHT
    return PASSED if failure is None and case.find("error") is None else BROKE


def check_texts() -> None:
    """Every bug can be planted. Raises: ValueError for the first that cannot, SyntaxError if it leaves no program."""
    with tempfile.TemporaryDirectory() as folder:
        for bug in BUGS:
            package = Path(folder) / "noisecast"
            shutil.rmtree(package, ignore_errors=True)
            for file, _, _ in bug.edits:
                (package / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / "src" / "noisecast" / file, package / file)
            for path in plant(bug, package):
                compile(path.read_text(encoding="utf-8"), str(path), "exec")


def run_all(jobs: list[Job], *, workers: int, tell: Callable[[Job, Outcome], None]) -> list[Outcome]:
    """Each job in a workplace that is free; `tell` as they end."""
    with tempfile.TemporaryDirectory(prefix="noisecast-mutants-") as folder:
        free: Queue[Workplace] = Queue()
        for number in range(workers):
            place = Workplace(Path(folder) / str(number))
            if not place.imports_its_own():
                raise RuntimeError("The copy of the sources is not the one that is imported; use the project's .venv.")
            free.put(place)

        def one(job: Job) -> Outcome:
            place = free.get()
            try:
                outcome = place.run(job)
            finally:
                free.put(place)
            tell(job, outcome)
            return outcome

        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(one, jobs))
