"""What packages that are imported already have."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

_SEARCHES_MAX = 2  # Of some 0.1 s each: in the first forward, and after the next import.
_searches: dict[int, int] = {}  # id(function) -> how often in this watch


def forget_searches() -> None:
    _searches.clear()


def imported(place: str, *names: str) -> Any:
    """What module `place` has by the first name, what that has by the next; None where something
    is missing.  Nothing is imported, and no __getattr__ is called."""
    found: Any = sys.modules.get(place)
    for name in names:
        found = getattr(found, "__dict__", {}).get(name)
    return found


def compiled(function: Any) -> Iterator[Callable[..., Any]]:
    """What torch.compile has made of it: functions that stand around it.  Below them its own code
    is traced, so a call is seen at them."""
    done = _searches.get(id(function), 0)
    if function is None or "torch._dynamo" not in sys.modules or done == _SEARCHES_MAX:
        return
    _searches[id(function)] = done + 1
    for names in gc.get_referrers(function):
        if type(names) is dict and names.get("_torchdynamo_orig_callable") is function:
            for around in gc.get_referrers(names):
                if type(around) is types.FunctionType and around.__dict__ is names:
                    yield around
