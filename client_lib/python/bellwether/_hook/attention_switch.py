"""What scaled_dot_product_attention means in a module whose monitor may switch it in flight.

Each attention module of such a monitor carries a word, put there before the model is compiled:
"" (as it is written), a mode, "+" (keys centred before whatever the kernel is), or both.  The
patched forward reads it.  A word is a string: torch.compile guards on its value.  So all layers
that carry the same word share one graph, and a new word compiles each graph once.  A word that was
there before finds its graph again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Optional

from torch import Tensor, nn

ATTRIBUTE = "_bellwether_word"
CENTRED = "+"

# Filled by prepare(): a mode -> the function, CENTRED -> center_keys.
_functions: dict[str, Callable[..., Any]] = {}
users = 0  # Modules that carry a word; without one nobody looks.


def word(mode: str, center: bool) -> str:
    """mode  "" = whatever the module itself would call"""
    return mode + (CENTRED if center else "")


def prepare(functions: Mapping[str, Callable[..., Any]]) -> None:
    """functions  what a word can stand for: one of each mode, and center_keys at CENTRED"""
    if not _functions:
        _functions.update(functions)


def put(module: nn.Module, text: str) -> None:
    """From the next forward pass on the module computes what `text` says."""
    global users
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
