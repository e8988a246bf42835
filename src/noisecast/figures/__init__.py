"""Figures, one a file: `data(table) -> frame`, `draw(frame) -> Figure`."""
