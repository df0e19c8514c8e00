"""Queries and keys that no projection makes: parameters, as attention pooling has them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_NODES_MAX = 32
# What only moves, copies or scales elements, by the names of autograd's nodes.
_MOVES = ("Expand", "View", "UnsafeView", "Transpose", "Permute", "Unsqueeze", "Squeeze", "Repeat",
          "Clone", "Copy", "ToCopy", "Mul", "Div", "Slice", "Select", "T", "Alias")  # fmt: skip


def of_parameters(x: Tensor) -> bool:
    """Whether a tensor is a parameter, or parameters in another place or shape."""
    if x.grad_fn is None:
        return isinstance(x, nn.Parameter)
    nodes, leaves = [x.grad_fn], 0
    for _ in range(_NODES_MAX):
        if not nodes:
            return leaves > 0
        node: Any = nodes.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            leaves += 1
            if not isinstance(node.variable, nn.Parameter):
                return False
        elif node.name().partition("Backward")[0] not in _MOVES:
            return False
        nodes += [before for before, _ in node.next_functions if before is not None]
    return False
