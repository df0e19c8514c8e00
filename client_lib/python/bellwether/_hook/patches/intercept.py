"""Gets between a model and scaled_dot_product_attention without touching any instance or name.

`forward` of the classes of the attention modules is patched (class_patches.py, patched_forward.py);
a call inside it is met (met_calls.py).  A monitor wants the layer (`install`), stabilize() another
function (`install_function`), and one module may have both.  What a monitor switches in flight is
in attention_switch.py.  What installs also uninstalls, and the last one leaves nothing behind.

torch.compile traces functions of ours where it meets attention inside such a forward
(dynamo_calls.py).  The one thing that hangs on an instance is what its taps need
(compiled_taps.py).
"""

from __future__ import annotations

import sysconfig
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import nn

from ..._util.torch_version import TORCH_MIN, dotted
from ..calls.kernel_choice import SDPA
from ..compiled import compiled_taps, dynamo_calls
from ..hosts import PatchedLayer, Seeker
from . import class_patches, met_calls, registry


def unsupported() -> Optional[str]:
    """Why this Python or this torch is none to be used.  Taps count on one thread at a time.  A
    torch before 2.8 does not tell whether a region is checkpointed, and a tap that a recomputation
    does not find would end the backward."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "this Python is free-threaded: one with the global interpreter lock is needed"
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version >= TORCH_MIN:
        return None
    return f"torch {torch.__version__} is here: {dotted(TORCH_MIN)} or newer is needed"


def unavailable() -> Optional[str]:
    """Why calls cannot be seen in this process; None if they can."""
    return unsupported() or met_calls.sdpa.why_not()


def _can_see() -> None:
    reason = unavailable()
    if reason is not None:
        raise RuntimeError(reason)


# ---- the layers of a monitor ----


def install(layers: Sequence[PatchedLayer]) -> None:
    """Patches for one monitor.  `layers` are those of its modules.  If it raises, nothing is."""
    done: list[PatchedLayer] = []
    _can_see()
    with registry.lock:
        try:
            for layer in layers:
                module = layer.module()
                if module is None:
                    continue
                class_patches.patch(type(module))
                done.append(layer)
                registry.layers[id(module)] = layer
                compiled_taps.put(module, layer)
            dynamo_calls.forget()
        except Exception:
            uninstall(done)
            raise


def uninstall(layers: Sequence[PatchedLayer]) -> None:
    """Takes one monitor's patches back; with the last user nothing of ours is left."""
    with registry.lock:
        for layer in layers:
            for key in [k for k, value in registry.layers.items() if value is layer]:
                del registry.layers[key]
            compiled_taps.take(layer.module(), layer)
            class_patches.restore(layer.module_class)
            layer.ends()


def watched_in(model: nn.Module) -> list[PatchedLayer]:
    """Layers of live monitors whose modules are in the model."""
    found = (registry.layer_of(module) for module in model.modules())
    return [x for x in found if x is not None and x.watched and x.host.live()]


# ---- modules that no layer is known of ----


def seek(seeker: Seeker, roots: Sequence[nn.Module]) -> None:
    """From now on it is asked for the layer of a call that no known module makes, while one of the
    roots runs."""
    with registry.lock:
        for module in roots:
            class_patches.patch(type(module))
            registry.roots[id(module)] = weakref.ref(module)
        registry.seekers.append(seeker)


def seek_no_more(seeker: Seeker) -> None:
    """The patches stay, since torch.compile may have seen them."""
    with registry.lock:
        if seeker in registry.seekers:
            registry.seekers.remove(seeker)


def forget_roots(modules: Sequence[nn.Module], classes: Sequence[type]) -> None:
    with registry.lock:
        roots = registry.roots
        for key in [key for key, of in roots.items() if of() is None or of() in modules]:
            del roots[key]
        for cls in classes:
            class_patches.restore(cls)


# ---- another function in the place of attention ----


def is_plain(module: nn.Module) -> bool:
    """Whether no other function was put in the place of the module's attention."""
    return registry.function_in(module) is SDPA


def install_function(modules: list[nn.Module], function: Callable[..., Any]) -> Callable[[], None]:
    """From now on scaled_dot_product_attention means `function` inside these modules.

    Returns what takes it back; to be called once.  Raises RuntimeError if calls cannot be seen.
    """
    _can_see()
    with registry.lock:
        for module in modules:
            registry.functions[id(module)] = (weakref.ref(module), function)
            class_patches.patch(type(module))
        dynamo_calls.forget()
    keys, classes = [id(m) for m in modules], [type(m) for m in modules]

    def uninstall_function() -> None:
        with registry.lock:
            for key, cls in zip(keys, classes):
                if key in registry.functions and registry.functions[key][1] is function:
                    del registry.functions[key]
                class_patches.restore(cls)

    return uninstall_function
