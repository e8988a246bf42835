"""Colour is the optimizer, line is the runner: fixed here for every figure."""

from typing import Any

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


def plain_numbers(axis: Any) -> None:
    """Number a logarithmic axis, once its range is known, as people write: 0.2, 0.5, 1; as many as find room."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    low, high = axis.get_view_interval()
    ratio = high / low
    steps = {3: range(1, 10), 10: (1, 2, 3, 5), 60: (1, 2, 5), 1000: (1, 3)}
    between = next((some for most, some in steps.items() if ratio < most), (1,))
    axis.set_major_locator(LogLocator(subs=between, numticks=20))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
