"""The handle of a model that could not be watched: it takes what a Monitor takes and does nothing.

Needs nothing but Python: also what cannot be imported ends here.
"""

from __future__ import annotations

from typing import Any, Optional

from ._util import log


class Unwatched:
    """As bellwether.Monitor; `why_off` says why."""

    server: Optional[str] = None
    record_path: Optional[str] = None
    page_url = ""
    settings: Any = None

    def __init__(self, why_off: str) -> None:
        self.why_off = why_off
        self.layers: list[Any] = []
        log.warning(f"watching is off: {why_off} (training is not affected)")

    def __enter__(self) -> Unwatched:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.detach()

    def __reduce__(self) -> Any:
        return type(None), ()

    def __copy__(self) -> Unwatched:
        return self

    def __deepcopy__(self, memo: Any) -> Unwatched:
        return self

    def live(self) -> bool:
        return False

    def status(self) -> dict[str, Any]:
        return {
            "live": False, "why_off": self.why_off, "run": "", "errors": 1,
            "last_error": self.why_off, "layers": [], "samples": 0, "numbers_left_out": {},
        }  # fmt: skip

    def flush(self, timeout: float = 5.0) -> bool:
        return True

    def metrics(self) -> dict[str, float]:
        return {}

    def overhead(self) -> float:
        return 0.0

    def known_page_url(self) -> str:
        return ""

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Nothing comes of it."""

    step = log = losses = detach = event = count_from = follow_alerts = on_action = offer_action = (
        _nothing
    )
    capture_calls = log_alike = rollout = numbers = _nothing

    def wrap_router(self, router: Any, **_: Any) -> Any:
        return router


def attach_that_fails(error: Exception) -> Any:
    """What bellwether.attach is where it cannot be imported."""
    why_off = f"import of bellwether: {type(error).__name__}: {error}"

    def attach(model: Any, **_: Any) -> Unwatched:
        return Unwatched(why_off)

    return attach
