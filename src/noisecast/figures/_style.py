"""Colour is the optimizer, line is the runner: fixed here for every figure."""

import math
from pathlib import Path
from typing import Any

import numpy as np

# Okabe and Ito's colours, told apart by readers who see few of them.
OPTIMIZER_COLOURS = {"DP-SGD": "#0072B2", "DP-SignSGD": "#D55E00", "DP-Adam": "#009E73"}
OTHER_COLOUR = "#666666"

# Runner: (line style, marker).
RUNNER_LINES: dict[str, tuple[Any, str]] = {
    "training": ("none", "o"),
    "sde": ("-", ""),
    "sde_phases": (":", ""),
    "moments": ("-.", ""),
    "closed_form": ("--", ""),
}
RUNNER_LABELS = {
    "training": "training (dots)",
    "sde": "SDE (solid)",
    "sde_phases": "SDE, the paper's phases (dotted)",
    "moments": "forecast (dash-dot)",
    "closed_form": "closed form (dashed)",
}

RC: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "figure.dpi": 150,
}


def low_ends(means: Any, low: Any) -> np.ndarray:
    """Lower ends of bands and bars: not below 0 where no mean is, as losses, norms and shares never are.

    >>> low_ends([0.1, 0.2], [-0.3, 0.1]).tolist(), low_ends([-0.1, 0.2], [-0.3, 0.1]).tolist()
    ([0.0, 0.1], [-0.3, 0.1])
    """
    least = -np.inf if (np.asarray(means, np.float64) < 0).any() else 0.0
    return np.maximum(np.asarray(low, np.float64), least)


# Numbers of a decade that a logarithmic axis shows, by how far it reaches (its end over its beginning, at most).
_NUMBERED = {math.inf: (1,), 1000: (1, 3), 60: (1, 2, 5), 10: (1, 2, 3, 5), 3: tuple(range(1, 10))}
_FEWEST = 3  # with fewer, the next finer ones


def save(figure: Any, path: str | Path) -> None:
    """As .png, .pdf or .svg, by the path's name."""
    figure.savefig(path, bbox_inches="tight")


def plain_numbers(axis: Any) -> None:
    """Number a logarithmic axis, once its range is known, as people write: 0.2, 0.5, 1; as many as find room."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    low, high = axis.get_view_interval()
    decades = 10.0 ** np.arange(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    roomy = sum(high / low < most for most in _NUMBERED)
    finer = list(_NUMBERED.values())[roomy - 1 :]
    places = (np.outer(decades, numbers) for numbers in finer)
    between = next((n for n, at in zip(finer, places) if ((low <= at) & (at <= high)).sum() >= _FEWEST), finer[-1])
    axis.set_major_locator(LogLocator(subs=between, numticks=20))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
