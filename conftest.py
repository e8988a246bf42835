"""Doctests of a part whose optional libraries are absent are not collected: importing it says what to install."""

from importlib.util import find_spec

LIBRARIES = {"optax": ("optax",), "opacus": ("torch", "opacus")}

collect_ignore = [f"src/noisecast/{part}" for part, libraries in LIBRARIES.items() if None in map(find_spec, libraries)]
