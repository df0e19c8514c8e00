"""What wrap_attention() was told: how the forward of a module that is attention is to be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Optional

from torch import Tensor, nn

ATTRIBUTE = "_bellwether_contract"
# Of [batch, heads, tokens, dim]: the permutation that gives the module's own order, and back.
ORDERS = {
    "bhtd": ((0, 1, 2, 3), (0, 1, 2, 3)),
    "bthd": ((0, 2, 1, 3), (0, 2, 1, 3)),
    "sbhd": ((2, 0, 1, 3), (1, 2, 0, 3)),
}
_NAMES = (("query", "key", "value"), ("q", "k", "v"),
          ("query_layer", "key_layer", "value_layer"), ("xq", "xk", "xv"))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Contract:
    """How to read a module whose forward takes q, k, v first and returns the attention's output."""

    layout: str
    causal: bool
    masked: bool
    scale: Optional[float]
    dropout_p: float
    kernel: str

    def __deepcopy__(self, memo: Any) -> Contract:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()  # A pickled model must open without this package.

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Optional[tuple[list[Tensor], tuple[Any, ...], dict[str, Any]]]:
        """(q, k, v as [batch, heads, tokens, dim], the other arguments); None if they are not
        three tensors of four dimensions."""
        rest = dict(kwargs)
        found: list[Any] = list(args[:3])
        for names in _NAMES:
            if len(found) < 3 and all(name in rest for name in names[len(found) :]):
                found += [rest.pop(name) for name in names[len(found) :]]
        if len(found) < 3 or not all(isinstance(t, Tensor) and t.dim() == 4 for t in found):
            return None
        back = ORDERS[self.layout][1]
        return [t.permute(back) for t in found], args[3:], rest

    def told(self) -> dict[str, Any]:
        """In the words of scaled_dot_product_attention."""
        said: dict[str, Any] = {"is_causal": self.causal, "dropout_p": self.dropout_p}
        said["kernel"] = self.kernel
        if self.scale is not None:
            said["scale"] = self.scale
        if self.masked:
            said["attn_mask"] = True
        return said

    def inside(
        self, forward: Callable[..., Any], rest: tuple[Any, ...], named: dict[str, Any],
        extra: list[Any],
    ) -> Callable[..., Tensor]:  # fmt: skip
        """The module's forward as a function of q, k, v [batch, heads, tokens, dim]; `extra` gets
        what has to be put around its output."""
        order, back = ORDERS[self.layout]

        def function(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
            output = forward(*(t.permute(order) for t in (query, key, value)), *rest, **named)
            extra.append(output)
            first: Tensor = output[0] if isinstance(output, tuple) else output
            if first.dim() == 3:  # Its heads lie side by side.
                first = first.view(*first.shape[:2], query.shape[1], -1)
            return first.permute(back)

        return function

    def outside(self, output: Tensor, extra: list[Any]) -> Any:
        """What the module itself would have returned."""
        whole = extra[-1]
        first = whole[0] if isinstance(whole, tuple) else whole
        shaped = output.permute(ORDERS[self.layout][0])
        if first.dim() == 3:
            shaped = shaped.flatten(2)
        return (shaped, *whole[1:]) if isinstance(whole, tuple) else shaped


def contract_of(module: nn.Module) -> Optional[Contract]:
    return vars(module).get(ATTRIBUTE)
