"""How many of what, in words."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """ "1 step", "2 steps"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
