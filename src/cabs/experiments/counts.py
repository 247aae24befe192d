"""Numbers of examples as people write them."""

from __future__ import annotations

import math

from cabs.experiments.errors import UsageError


def parse_count(text: str) -> int:
    """A number of examples as people write it: ``400k``, ``1.5M``, ``60_000``, ``60,000``.

    Raises:
        UsageError: If it is not a whole positive number.
    """
    digits = text.strip().replace("_", "").replace(",", "")
    factor = {"k": 1_000, "m": 1_000_000}.get(digits[-1:].lower(), 1)
    try:
        value = float(digits[:-1] if factor > 1 else digits) * factor
    except ValueError:
        value = math.nan
    if not (1 <= value < 2**53 and value == round(value)):
        raise UsageError(f"{text!r} is not a number of examples; write it like 60000, 400k or 1.5M")
    return round(value)
