"""What scaled_dot_product_attention means in a module whose monitor may switch it in flight.

Each attention module of such a monitor carries a word, put there before the model is compiled:
"" (as it is written), a mode, "+" (keys centred before whatever the kernel is), or both.  The
patched forward reads it.  A word is a string: torch.compile guards on its value.  So all layers
that carry the same word share one graph, and a new word compiles each graph once.  A word that was
there before finds its graph again.  In what is not compiled a mode also holds for other functions
whose readers say what ours computes instead (call.Ours).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Optional

from torch import Tensor, nn

from .._util import log
from .calls.call import AttentionCall, Reader

ATTRIBUTE = "_bellwether_word"
CENTRED = "+"


class Serving(NamedTuple):
    """What our attention does with a call that a reader has read."""

    lacks: Callable[[AttentionCall], Optional[str]]  # Why it cannot compute it.
    compute: Callable[[str, AttentionCall], Any]  # In a mode: what the function returns.


# Filled by prepare(): a mode -> the function, CENTRED -> center_keys.
_functions: dict[str, Callable[..., Any]] = {}
_serving: Optional[Serving] = None
_told: set[str] = set()  # Since the last switch.
users = 0  # Modules that carry a word; without one nobody looks.


def word(mode: str, center: bool) -> str:
    """mode  "" = whatever the module itself would call"""
    return mode + (CENTRED if center else "")


def prepare(functions: Mapping[str, Callable[..., Any]], serving: Serving) -> None:
    """functions  what a word can stand for: one of each mode, and center_keys at CENTRED"""
    global _serving
    if not _functions:
        _functions.update(functions)
        _serving = serving


def lacks(call: AttentionCall) -> Optional[str]:
    """Why a mode would leave this call as it is; None also where nothing can be switched."""
    return None if _serving is None else _serving.lacks(call)


def not_held(module: nn.Module, call: AttentionCall) -> Optional[str]:
    """Why a mode that the module carries does not hold for this call; None if it does.  A function
    that was compiled behind the switch is what the graph holds."""
    mode = of(module).removesuffix(CENTRED)
    reason = lacks(call) if mode not in ("", "sdpa") else None
    if reason is None:
        return None
    told = f"attention.mode {mode} does not hold: {reason}"
    if told not in _told:
        _told.add(told)
        log.warning(told)
    return told


def put(module: nn.Module, text: str) -> None:
    """From the next forward pass on the module computes what `text` says."""
    global users
    _told.clear()
    if ATTRIBUTE not in vars(module):
        users += 1
    object.__setattr__(module, ATTRIBUTE, text)


def take(module: Optional[nn.Module]) -> None:
    global users
    if module is not None and ATTRIBUTE in vars(module):
        users -= 1
        object.__delattr__(module, ATTRIBUTE)


def of(module: nn.Module) -> str:
    return str(vars(module).get(ATTRIBUTE, ""))


def call(
    text: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], bool]:
    """(what is called instead of `function`, its arguments, whether its keys are centred).
    Centred before the taps and before any cast: they see what the kernel is fed."""
    mode = text.removesuffix(CENTRED)
    centred = mode != text
    if centred:
        key = args[1] if len(args) > 1 else kwargs["key"]
        if type(key) in (Tensor, nn.Parameter) and key.dim() == 4:
            key = _functions[CENTRED](key)
            if len(args) > 1:
                args = (args[0], key, *args[2:])
            else:
                kwargs = {**kwargs, "key": key}
        else:
            centred = False
    return _functions[mode] if mode else function, args, kwargs, centred


def function_in_mode(
    text: str, function: Callable[..., Any], read: Reader
) -> tuple[Callable[..., Any], Reader]:
    """The same for another function: (what is called instead of it, its reader)."""
    mode, serving = text.removesuffix(CENTRED), _serving
    # A function that is met in its midst has no call of its own.
    if mode in ("", "sdpa") or serving is None or hasattr(read, "between"):
        return function, read

    def reading(_: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = read(function, args, kwargs)
        if not isinstance(call, AttentionCall):
            return call

        def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return serving.compute(mode, dataclasses.replace(call, q=q, k=k, v=v))

        if serving.lacks(call) is not None:  # It stays as it is.
            return dataclasses.replace(call, run=run)
        ours = functools.partial(str, f"bellwether {mode}")
        return dataclasses.replace(call, run=run, kernel=ours)

    def computed(*args: Any, **kwargs: Any) -> Any:
        call = read(function, args, kwargs)
        if not isinstance(call, AttentionCall):
            return function(*args, **kwargs)
        return serving.compute(mode, call)

    return computed, reading
