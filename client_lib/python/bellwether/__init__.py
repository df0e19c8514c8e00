"""Bellwether watches the numerics of attention inside a training job.

    import bellwether
    mon = bellwether.attach(model)              # before the loop
    mon.step(loss=loss, grad_norm=grad_norm)    # optional, after optimizer.step()

Importing this package loads no library, starts no thread and needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .monitor import Monitor, attach

__all__ = ["Monitor", "__version__", "attach"]


def __getattr__(name: str) -> Any:
    if name in ("attach", "Monitor"):
        from . import monitor

        return getattr(monitor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
