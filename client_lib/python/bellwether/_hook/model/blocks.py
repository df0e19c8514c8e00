"""The transformer blocks of a model, by the attention modules that are known."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Optional

from torch import nn

_NUMBERED = re.compile(r"\d$")
_MLP = re.compile(
    r"mlp|ffn?|feed_?forward|fc_?\d|c_fc|linear_?\d|(up|down)_proj|w[123]|moe|experts"
)


def _is_list(module: Optional[nn.Module]) -> bool:
    """Of a ModuleDict: one whose keys are numbers or end in them, as torchtitan's."""
    if isinstance(module, nn.ModuleDict):
        return len(module) > 0 and all(_NUMBERED.search(key) for key in module)
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def _around(
    modules: dict[str, nn.Module], name: str, whole: set[str]
) -> Iterator[tuple[str, list[str]]]:
    """Lists around a module, from the inside: the element of each that holds it, and the names of
    all its elements.  A module that is itself an element is held by it if it is a whole block."""
    inside = name in whole
    while inside or "." in name:
        name = name if inside else name.rpartition(".")[0]
        inside = False
        outer = name.rpartition(".")[0]
        if _is_list(modules.get(outer)):
            prefix = outer + "." if outer else ""
            yield name, [prefix + key for key in modules[outer]._modules]


def _is_whole(module: nn.Module) -> bool:
    """Whether a module that calls attention is a whole block: it has a norm and an MLP, too."""
    norm = mlp = False
    for name, inner in module.named_modules():
        own = name.rpartition(".")[2].lower()
        if "norm" in type(inner).__name__.lower():
            norm = norm or not re.search(r"^[qk]|query|key|_[qk]$", own)
        elif own and any(p is not None for m in inner.modules() for p in m._parameters.values()):
            linears = sum(isinstance(child, nn.Linear) for child in inner.children())
            mlp = mlp or (linears > 1 and isinstance(inner, nn.Sequential))
            mlp = mlp or _MLP.fullmatch(own) is not None
    return norm and mlp


def find_blocks(model: nn.Module, attention: Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
    """By their names, in the model's order.

    A block is an element of the innermost nn.ModuleList, nn.Sequential or numbered nn.ModuleDict
    around an attention module whose elements all hold attention.  Where there is no such list the
    innermost one counts: all of a ModuleList or ModuleDict, whose other elements are blocks of
    another kind, and of a Sequential those that hold attention.  An element that calls attention
    itself is a block if it has a norm and an MLP, too.
    """
    modules = dict(model.named_modules())
    names = {id(module): name for name, module in modules.items()}
    known = [names[id(module)] for module in attention if id(module) in names]
    whole = {name for name in known if _is_whole(modules[name])}
    # What an element's name begins with if it holds attention.
    held = [name + "." if name in whole else name for name in known]
    found: set[str] = set()
    for name in known:
        innermost: list[str] = []
        for element, elements in _around(modules, name, whole):
            holding = [e for e in elements if any(other.startswith(e + ".") for other in held)]
            if len(holding) == len(elements):
                innermost = elements
                break
            if not innermost:
                one_by_one = isinstance(modules[element.rpartition(".")[0]], nn.Sequential)
                innermost = holding if one_by_one else elements
        found.update(innermost)
    return [(name, module) for name, module in modules.items() if name in found]
