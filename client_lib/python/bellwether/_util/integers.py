"""Integers of which nothing is lost: C and files have a place of so many bits for each."""

from __future__ import annotations

import operator
import re
from typing import Any, Optional

STEP_MAX = 1 << 53  # Of a step; the library, a recording and the server take no more.
LAUNCH_MS_MAX = 1 << 53  # Of the time of a launch.
_DIGITS_MAX = 20


def shown(value: Any) -> str:
    """What a person is told of a value that was refused; short, on one line, whatever it is."""
    if isinstance(value, int) and abs(value) >= 10**_DIGITS_MAX:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:
        text = f"some {type(value).__name__}"
    text = "".join(c if c.isprintable() else " " for c in text[:200])
    return text if len(text) <= 60 else f"{text[:57]}..."


def _integer(value: Any) -> Optional[int]:
    """None if it is none.  Integers of other libraries are, and floats without a fraction."""
    if isinstance(value, (bool, str, bytes)):
        return None
    try:
        return operator.index(value)
    except Exception:
        pass
    try:
        number = float(value)
        return int(number) if number.is_integer() else None
    except Exception:  # Somebody else's object may raise anything.
        return None


def decimal(text: str) -> int:
    """The number of a text that a person wrote.  Raises ValueError for what is not decimal, and for
    what some readers take for octal."""
    written = text.strip()
    if re.fullmatch(r"[+-]?(0|[1-9][0-9]*)", written, re.ASCII) and len(written) <= _DIGITS_MAX:
        return int(written)
    meant = ""
    if re.fullmatch(r"[+-]?0[0-9]{1,19}", written, re.ASCII):
        meant = f", decimal: write {int(written)}"
    elif re.fullmatch(r"[+-]?0(x[0-9a-f]{1,16}|o[0-7]{1,20})", written, re.ASCII | re.IGNORECASE):
        meant = f", decimal: write {int(written, 0)}"
    raise ValueError(f"{shown(text)} must be a whole number{meant}")


def whole(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an integer of low to high.  Raises ValueError that names field, value, range."""
    number = _integer(value)
    if number is None or not low <= number <= high:
        raise ValueError(f"{name} is {shown(value)}, must be an integer of {low} to {high}")
    return number


def step(value: Any) -> int:
    """`value` as the number of a step.  Raises ValueError."""
    return whole("step", value, 0, STEP_MAX)
