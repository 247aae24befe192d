"""Numbers of examples as people write them: 32, 100k, 1.5M."""

from __future__ import annotations

import re

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}


def examples_of(amount: int | float | str, what: str = "examples") -> int:
    """A number of examples from a number or a string such as ``"100k"`` or ``"1.5M"``.

    Raises:
        ValueError: it is not a whole number of examples, or negative.
    """
    if isinstance(amount, str):
        match = re.fullmatch(r"\s*(\d[\d_]*(?:\.\d+)?)\s*([kmgbt]?)\s*", amount, re.IGNORECASE)
        if match is None:
            raise ValueError(f"{what} is {amount!r}: write a number of examples, such as 5000, 100k or 1.5M")
        number = float(match[1].replace("_", "")) * _SUFFIXES[match[2].lower()]
    elif isinstance(amount, bool) or not isinstance(amount, int | float):
        raise ValueError(f"{what} is {amount!r}: it must be a number of examples")
    else:
        number = float(amount)
    if number < 0 or abs(number - round(number)) > 1e-6 * max(1.0, number):
        raise ValueError(f"{what} is {amount!r}: it must be a whole number of examples, not negative")
    return round(number)


def some_examples_of(amount: int | float | str, what: str = "examples") -> int:
    """The same, and at least one."""
    number = examples_of(amount, what)
    if number == 0:
        raise ValueError(f"{what} is 0: it must be at least one example")
    return number
