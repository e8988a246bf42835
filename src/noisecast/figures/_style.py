"""Colour is the optimizer, line is the runner: fixed here for every figure."""

# Okabe and Ito's colours, told apart by readers who see few of them.
OPTIMIZER_COLOURS = {"DP-SGD": "#0072B2", "DP-SignSGD": "#D55E00", "DP-Adam": "#009E73"}
OTHER_COLOUR = "#666666"

# Runner: (line style, marker).
RUNNER_LINES = {
    "training": ("none", "o"),
    "sde": ("-", ""),
    "moments": ("-.", ""),
    "closed_form": ("--", ""),
}
RUNNER_LABELS = {
    "training": "training (dots)",
    "sde": "SDE (solid)",
    "moments": "forecast (dash-dot)",
    "closed_form": "closed form (dashed)",
}

RC = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "figure.dpi": 150,
}
