"""Doctests of a part whose optional libraries are absent are not collected: importing it says what to install."""

import os
from importlib.util import find_spec
from pathlib import Path

LIBRARIES = {"optax": ("optax",), "opacus": ("torch", "opacus")}

collect_ignore = [f"src/noisecast/{part}" for part, libraries in LIBRARIES.items() if None in map(find_spec, libraries)]

# Hundreds of tests, some in processes of their own, ask XLA for the same few programs: each is compiled once.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
