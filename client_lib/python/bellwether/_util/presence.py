"""A mark that other processes can see: a command that attaches must see it before it attaches."""

from __future__ import annotations

import mmap
import os
from typing import Optional

NAME = "bellwether-monitor"
_PAGE = 4096


class Presence:
    """While it lives /proc/PID/maps of this process has a page called /memfd:<NAME>."""

    def __init__(self) -> None:
        self._page: Optional[mmap.mmap] = None
        try:
            descriptor = os.memfd_create(NAME)
        except (AttributeError, OSError):  # No Linux, or no descriptor left: no mark.
            return
        try:
            os.ftruncate(descriptor, _PAGE)
            self._page = mmap.mmap(descriptor, _PAGE)
        finally:
            os.close(descriptor)

    def end(self) -> None:
        if self._page is not None:
            self._page.close()
            self._page = None
