"""Bellwether watches the numerics of attention inside a training job.

    import bellwether
    mon = bellwether.attach(model)              # before the loop
    mon.step(loss=loss, grad_norm=grad_norm)    # optional, after optimizer.step()

Importing this package loads no library, starts no thread and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .acting_callbacks import on_action
    from .attaching import attach
    from .attending import attention
    from .centering import center_keys
    from .monitor import Monitor
    from .parallel import Parallel
    from .query import Client
    from .stabilizing import Stabilizer, stabilize
    from .wrapping import unwrap_attention, wrap_attention

__all__ = [
    "Client",
    "Monitor",
    "Parallel",
    "Stabilizer",
    "__version__",
    "attach",
    "attention",
    "center_keys",
    "on_action",
    "stabilize",
    "unwrap_attention",
    "wrap_attention",
]

# Where each name lives; no module may bear the name of what it holds, or importing it hides that.
_HOMES = {
    "Client": "query",
    "Monitor": "monitor",
    "Parallel": "parallel",
    "Stabilizer": "stabilizing",
    "attach": "attaching",
    "attention": "attending",
    "center_keys": "centering",
    "on_action": "acting_callbacks",
    "stabilize": "stabilizing",
    "unwrap_attention": "wrapping",
    "wrap_attention": "wrapping",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f".{home}", __name__), name)
    except Exception as e:
        # What only watches never ends a training script.  (What computes must not pass silently.)
        if name != "attach":
            raise
        from .unwatched import attach_that_fails

        return attach_that_fails(e)
