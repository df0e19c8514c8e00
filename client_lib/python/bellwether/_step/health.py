"""Whether a model is watched, and if not, why."""

from __future__ import annotations

from collections.abc import Callable

from .._util import log
from .._util.guard import in_words

DETACHED = "detached"


class Health:
    """stop  ends all measuring; called after the first error of ours"""

    def __init__(self, disabled: bool, stop: Callable[[], None]) -> None:
        self.live = False
        self.why_off = "disabled" if disabled else ""
        self.errors = 0
        self.last_error = ""
        self._stop = stop

    def end(self, why: str) -> None:
        """The first reason stays."""
        self.live = False
        self.why_off = self.why_off or why

    def detached(self) -> None:
        self.end(DETACHED)

    def trouble(self, error: Exception, where: str) -> None:
        """An error of ours ends the watching, which is logged once.  No number is made from what
        the error left half done."""
        self.errors += 1
        self.last_error = f"{where}: {in_words(error)}"
        if self.errors > 1 and not self.live:
            return
        self.live = False
        self.why_off = self.last_error
        log.warning(f"watching is off: {self.last_error} (training is not affected)")
        self._stop()
