"""Numbers as people read them."""

from __future__ import annotations

import math

from cabs.probe.intervals import Interval


def number(x: float) -> str:
    """Three digits that count, and no powers of ten where a few zeros do."""
    if math.isinf(x):
        return "∞"
    if x == 0 or 1e-4 <= abs(x) < 1e7:
        digits = 0 if x == 0 else max(0, 2 - math.floor(math.log10(abs(x))))
        return f"{x:,.{digits}f}"
    return f"{x:.2e}"


def size(m: float) -> str:
    """A batch size that a formula gave."""
    return "∞" if math.isinf(m) else f"{m:,.0f}" if m >= 10 else number(m)


def between(found: Interval, form: object = number) -> str:
    """The interval in words."""
    assert callable(form)
    if math.isinf(found.high):
        return f"above {form(found.low)}"
    return f"{form(found.low)} to {form(found.high)}"


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}" if share >= 0.001 else "below 0.1%"


def seconds(t: float) -> str:
    """A time in the unit that suits it."""
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if t >= length:
            return f"{number(t / length)} {unit}"
    return f"{number(t / 1e-6)} µs"
