"""Figures, one a file: `data(table) -> frame`, `draw(frame) -> Figure`."""

from noisecast.figures._style import save

__all__ = ["save"]
