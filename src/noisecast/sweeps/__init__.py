"""Sweeps: many questions, computed by many workers, kept in a store that nothing can tear."""

from noisecast.sweeps.run import cells_of, estimate_seconds, run_sweep
from noisecast.sweeps.store import Store

__all__ = ["Store", "cells_of", "estimate_seconds", "run_sweep"]
