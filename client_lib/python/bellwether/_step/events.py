"""What happened in the running step and is told with its frame: attach, a restore, a new rate."""

from __future__ import annotations

Event = tuple[str, str, float]  # One of c_api.EVENT_KINDS, a text, a value.


class Events:
    def __init__(self) -> None:
        self.of_step: list[Event] = []
        self._of_next: list[Event] = []

    def add(self, kind: str, text: str = "", value: float = 0.0, next_step: bool = False) -> None:
        (self._of_next if next_step else self.of_step).append((kind, text, value))

    def step_ends(self) -> None:
        """Those of the next step are now of the running one."""
        if self._of_next:
            self.of_step, self._of_next = self.of_step + self._of_next, []
