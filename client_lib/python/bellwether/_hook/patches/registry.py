"""Whose calls are met: the modules that a monitor or stabilize() has named, by id()."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Optional

from torch import nn

from ..calls.kernel_choice import SDPA
from ..hosts import PatchedLayer, Seeker

lock = threading.RLock()  # Held while any of these is changed.
layers: dict[int, PatchedLayer] = {}
# What scaled_dot_product_attention means inside.
functions: dict[int, tuple[weakref.ref[nn.Module], Callable[..., Any]]] = {}
seekers: list[Seeker] = []  # They find whose a call is, ...
roots: dict[int, weakref.ref[nn.Module]] = {}  # ... while one of these runs.


def layer_of(module: nn.Module) -> Optional[PatchedLayer]:
    layer = layers.get(id(module))
    # An id may be that of another module by now, or of a copy's original.
    return layer if layer is not None and layer.module() is module else None


def function_in(module: nn.Module) -> Callable[..., Any]:
    known = functions.get(id(module)) if functions else None
    return known[1] if known is not None and known[0]() is module else SDPA


def is_root(module: nn.Module) -> bool:
    known = roots.get(id(module))
    return known is not None and known() is module
