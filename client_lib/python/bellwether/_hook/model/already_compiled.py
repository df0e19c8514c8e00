"""What torch.compile has made of a model that runs already.

A compiled block holds the attention as it was traced.  Patching what it was traced from would
compile it anew, with other rounding, so such a model is left as it is.
"""

from __future__ import annotations

import gc
import sys
import types
from typing import Any, Optional

from torch import nn
from torch.optim import optimizer as optimizers

from ..._weights import names
from .candidates import find_candidates


def _functions() -> list[types.FunctionType]:
    """Functions whose code was compiled."""
    frames: Any = sys.modules.get("torch._C._dynamo.eval_frame")
    entries = getattr(frames, "_debug_get_cache_entry_list", None)
    if entries is None:  # No torch.compile in this process.
        return []
    found = []
    for thing in gc.get_objects():
        if type(thing) is types.FunctionType and entries(thing.__code__):
            found.append(thing)
    return found


def anything() -> bool:
    """Whether torch.compile has compiled any function in this process."""
    return bool(_functions())


def optimizer_step() -> bool:
    """Whether the step of an optimizer of torch was compiled."""
    folder = optimizers.__file__.rpartition("/")[0] + "/"
    return any(f.__code__.co_filename.startswith(folder) for f in _functions())


def attention(model: nn.Module) -> Optional[str]:
    """None if the model's attention runs as it is written, else what was compiled."""
    compiled = {f.__code__: f for f in _functions()}
    if not compiled:
        return None
    candidates = {id(module) for _, module in find_candidates(model, lambda _, m: names.named(m))}
    own = set()
    for module in model.modules():
        code = getattr(type(module).forward, "__code__", None)
        own.add(code)
        if code in compiled and any(id(inner) in candidates for inner in module.modules()):
            return f"{type(module).__name__} is compiled"
    for code, function in compiled.items():
        # A function that is no module's: it may have the whole model inside.
        if code not in own and not function.__module__.startswith("torch."):
            return f"{function.__qualname__} is compiled"
    return None
