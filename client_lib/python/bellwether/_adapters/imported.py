"""What packages that are imported already have."""

from __future__ import annotations

import sys
from typing import Any


def imported(place: str, *names: str) -> Any:
    """What module `place` has by the first name, what that has by the next; None where something
    is missing.  Nothing is imported, and no __getattr__ is called."""
    found: Any = sys.modules.get(place)
    for name in names:
        found = getattr(found, "__dict__", {}).get(name)
    return found
