"""Numbers as people read them, in tables and on pages."""

import math


def number(value: float | None, digits: int = 4) -> str:
    """A number to read; a dash for none.

    >>> number(0.123456), number(25000), number(math.inf), number(None)
    ('0.1235', '25,000', 'inf', '–')
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isfinite(value) and value == int(value) and abs(value) < 1e12:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.{digits}g}"


def counted(count: int, name: str) -> str:
    """So many of what has such a name.

    >>> counted(1, "step"), counted(25000, "step")
    ('1 step', '25,000 steps')
    """
    return f"{count:,} {name}" if count == 1 else f"{count:,} {name}s"
