"""The transformer blocks of a model, by the attention modules that are known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn


def _around(modules: dict[str, nn.Module], name: str) -> Iterator[tuple[str, list[str]]]:
    """Lists around a module, from the inside: the element of each that holds it, and the names of
    all its elements.  A module that is itself an element is not held by it."""
    while "." in name:
        name = name.rpartition(".")[0]
        outer = name.rpartition(".")[0]
        if isinstance(modules.get(outer), (nn.ModuleList, nn.Sequential)):
            prefix = outer + "." if outer else ""
            yield name, [prefix + key for key in modules[outer]._modules]


def find_blocks(model: nn.Module, attention: Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
    """By their names, in the model's order.

    A block is an element of the innermost nn.ModuleList or nn.Sequential around an attention
    module whose elements all hold attention.  Where there is no such list the innermost one counts:
    all of a ModuleList, whose other elements are blocks of another kind, and of a Sequential those
    that hold attention.
    """
    modules = dict(model.named_modules())
    names = {id(module): name for name, module in modules.items()}
    known = [names[id(module)] for module in attention if id(module) in names]
    found: set[str] = set()
    for name in known:
        innermost: list[str] = []
        for element, elements in _around(modules, name):
            holding = [e for e in elements if any(other.startswith(e + ".") for other in known)]
            if len(holding) == len(elements):
                innermost = elements
                break
            if not innermost:
                several = isinstance(modules[element.rpartition(".")[0]], nn.ModuleList)
                innermost = elements if several else holding
        found.update(innermost)
    return [(name, module) for name, module in modules.items() if name in found]
