"""Which modules of a model are attention, as far as their names, weights and code say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..calls.contract import contract_of
from ..calls.kernel_choice import SDPA
from .own_code import functions_of, mentions
from .softmax_code import has_softmax, writes_attention


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's model inside the wrappers of torch."""
    while True:
        held = vars(model).get("_modules", {})  # What the model itself finds may raise.
        inner = held.get("_orig_mod")
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = held.get("module")
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _is_function(name: str, value: Any, own: bool) -> bool:
    return name == SDPA.__name__ or value is SDPA


def calls_attention(module: nn.Module) -> bool:
    """Whether the module's code names the function, or somebody has said that it is attention."""
    if contract_of(module) is not None:
        return True
    return any(
        function is SDPA or mentions(function, _is_function) for function in functions_of([module])
    )


def is_attention(module: nn.Module) -> bool:
    """Whether a candidate is more than called like one: linear attention and recurrent layers have
    such names, too."""
    return calls_attention(module) or has_softmax(module)


def find_candidates(
    model: nn.Module, named: Callable[[str, nn.Module], bool]
) -> list[tuple[str, nn.Module]]:
    """Modules that stand for one attention layer each, in the model's order.

    A module qualifies because it holds query and key projections (`named`) or because its code
    calls the function or writes it out.  Of two that lie inside each other, the one with the
    weights stands.
    """
    with_weights: list[tuple[str, nn.Module]] = []
    by_code: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        if isinstance(module, nn.MultiheadAttention) or named(name, module):
            with_weights.append((name, module))
        elif calls_attention(module) or writes_attention(module):
            by_code.append((name, module))

    def inside(inner: str, outer: str) -> bool:
        return outer == "" or inner == outer or inner.startswith(outer + ".")

    kept = set(id(m) for _, m in with_weights)
    for name, module in by_code:
        others = [n for n, _ in with_weights + by_code if n != name]
        if any(inside(other, name) for other in others):
            continue  # Holds another candidate: it is a block or the model.
        if any(inside(name, outer) for outer, _ in with_weights):
            continue  # The core inside a module that holds the weights.
        kept.add(id(module))
    return [(n, m) for n, m in model.named_modules() if id(m) in kept]
