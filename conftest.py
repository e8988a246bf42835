"""For all tests: what is not collected, and the environment in which libraries start."""

import os
from importlib.util import find_spec
from pathlib import Path

# Importing a part whose optional libraries are absent says what to install: no doctests are collected there.
LIBRARIES = {"optax": ("optax",), "opacus": ("torch", "opacus")}

collect_ignore = [f"src/noisecast/{part}" for part, libraries in LIBRARIES.items() if None in map(find_spec, libraries)]

# Two workers, each with linear algebra on its own core: with threads that wait for each other, forecasts take twice the
# time. Workers, and the programs that tests start, inherit it before they import NumPy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Hundreds of tests, some in processes of their own, ask XLA for the same few programs: each is compiled once.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
