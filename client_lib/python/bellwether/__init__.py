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
    from ._actions.callbacks import on_action
    from ._attach import attach
    from ._attention.center_keys import center_keys
    from ._attention.dispatch import attention
    from ._attention.stabilizer import Stabilizer, stabilize
    from ._hook.layer.routers import wrap_router
    from ._hook.model.parallel import Parallel
    from ._hook.patches.wrap_attention import unwrap_attention, wrap_attention
    from ._server.alerts import Alert
    from ._step.status import Status
    from .actions import Action
    from .monitor import Monitor
    from .query import Client
    from .settings import Settings

__all__ = [
    "Action",
    "Alert",
    "Client",
    "Monitor",
    "Parallel",
    "Settings",
    "Stabilizer",
    "Status",
    "__version__",
    "attach",
    "attention",
    "center_keys",
    "on_action",
    "stabilize",
    "unwrap_attention",
    "wrap_attention",
    "wrap_router",
]

# Where each name lives.  No module beside this one may have the name of what it holds: importing it
# would hide that.
_HOMES = {
    "Action": "actions",
    "Alert": "_server.alerts",
    "Client": "query",
    "Monitor": "monitor",
    "Parallel": "_hook.model.parallel",
    "Settings": "settings",
    "Stabilizer": "_attention.stabilizer",
    "Status": "_step.status",
    "attach": "_attach",
    "attention": "_attention.dispatch",
    "center_keys": "_attention.center_keys",
    "on_action": "_actions.callbacks",
    "stabilize": "_attention.stabilizer",
    "unwrap_attention": "_hook.patches.wrap_attention",
    "wrap_attention": "_hook.patches.wrap_attention",
    "wrap_router": "_hook.layer.routers",
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
        from ._unwatched import attach_that_fails

        return attach_that_fails(e)
