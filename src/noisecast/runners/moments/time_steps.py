"""The time steps of a forecast: where fields are found anew, and in what detail that can be afforded."""

import numpy as np

# Of so few numbers in the block and covariances between its columns a field and a time step are nearly free.
FEW_NUMBERS, HARDLY_ANY_COVARIANCES = 1_000_000, 10_000


def is_nearly_free(num_numbers: int, num_covariances: int) -> bool:
    """Whether a time step is: then steps are shorter, and the first ones single.

    Elsewhere too few of them were seen to cost up to 5 % of a loss that falls within few steps, or is far above its
    best.
    """
    return num_numbers <= FEW_NUMBERS and num_covariances <= HARDLY_ANY_COVARIANCES


def time_grid(num_steps: int, time_steps: int) -> list[int]:
    """T (k/n)^2.5: the loss falls early, but variances grow to the end, where a geometric grid is too coarse.

    >>> time_grid(3000, 4)
    [94, 530, 1461, 3000]
    """
    shares = (np.arange(1, time_steps + 1) / time_steps) ** 2.5
    return sorted(set(np.rint(num_steps * shares).astype(int).clip(1).tolist()))


def with_first(grid: list[int], end: int, growth: float) -> list[int]:
    """The grid from 0 on, and up to `end` no step longer than `growth` times the steps before: at first single ones.

    >>> with_first([12, 30, 60], 15, 0.2)
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15, 30, 60]
    """
    first, end = [0], min(end, grid[-1])
    while first[-1] < end:
        first.append(min(end, first[-1] + max(1, int(growth * first[-1]))))
    return first + [stop for stop in grid if stop > first[-1]]
