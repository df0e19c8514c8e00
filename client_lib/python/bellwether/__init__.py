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
    from .attaching import attach
    from .monitor import Monitor

__all__ = ["Monitor", "__version__", "attach"]


def __getattr__(name: str) -> Any:
    if name == "attach":
        from .attaching import attach

        return attach
    if name == "Monitor":
        from .monitor import Monitor

        return Monitor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
