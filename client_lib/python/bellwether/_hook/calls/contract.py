"""What wrap_attention() was told: how the forward of a module that is attention is to be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Optional, Union

from torch import Tensor, nn

from .call import (
    COMPOSED,
    FUSED,
    NOT_TOLD,
    VIEWS,
    AttentionCall,
    Mask,
    first_of,
    output_view,
    with_first,
)

ATTRIBUTE = "_bellwether_contract"
LAYOUTS = ("bhtd", "bthd", "sbhd", "thd")
ARITHMETIC = (FUSED, COMPOSED)
_NAMES = (("query", "key", "value"), ("q", "k", "v"),
          ("query_layer", "key_layer", "value_layer"), ("xq", "xk", "xv"))  # fmt: skip
# What packed sequences call the places where documents begin: of the queries, of the keys.
_OFFSETS = (("cu_seqlens_q", "cu_seqlens_k"), ("cu_seqlens_q", "cu_seqlens_kv"),
            ("cu_seq_q", "cu_seq_k"), ("cu_seqlens", "cu_seqlens"))  # fmt: skip


def _offsets(given: dict[str, Any]) -> Optional[tuple[Tensor, Tensor]]:
    packed = given.get("packed_seq_params")
    for names in _OFFSETS:
        of_q, of_k = (given.get(name, getattr(packed, name, None)) for name in names)
        if isinstance(of_q, Tensor) and isinstance(of_k, Tensor):
            return of_q, of_k
    return None


@dataclasses.dataclass(frozen=True)
class Contract:
    """How to read a module whose forward takes q, k, v first and returns the attention's output."""

    layout: str
    causal: bool
    masked: bool
    scale: Optional[float]
    dropout_p: float
    kernel: str
    arithmetic: Optional[str] = None  # Of ARITHMETIC; None: not known, whatever its name is.

    def __deepcopy__(self, memo: Any) -> Contract:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()  # A pickled model must open without this package.

    def read(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Union[AttentionCall, str]:
        """A Reader (call.py)."""
        rest = dict(kwargs)
        found: list[Any] = list(args[:3])
        for names in _NAMES:
            if len(found) < 3 and all(name in rest for name in names[len(found) :]):
                found += [rest.pop(name) for name in names[len(found) :]]
        dims = len(self.layout)
        if len(found) < 3 or not all(isinstance(t, Tensor) and t.dim() == dims for t in found):
            return f"q, k and v are not three tensors of {dims} dimensions: not measured"
        q, k, v = found
        view = VIEWS[self.layout]
        tokens = self.layout.index("t" if "t" in self.layout else "s")
        mask, unread = Mask(causal=self.causal), "another mask" if self.masked else None
        if self.layout == "thd":
            offsets = _offsets(rest)
            if offsets is None:
                unread = "packed sequences without cu_seqlens"
            else:
                mask = Mask(causal=self.causal, q_offsets=offsets[0], k_offsets=offsets[1])
        elif self.causal and q.shape[tokens] != k.shape[tokens]:
            unread = "causal with other keys than queries"
        return AttentionCall(
            q, k, v, view, view, view, output_view(self.layout, q),
            lambda query, key, value: function(query, key, value, *args[3:], **rest),
            q.shape[-1] ** -0.5 if self.scale is None else self.scale,
            mask,
            dropout=self.dropout_p,
            kernel=lambda: self.kernel,
            arithmetic=self.arithmetic or NOT_TOLD,
            unread=unread,
            output=first_of,
            with_output=with_first,
        )  # fmt: skip


def contract_of(module: nn.Module) -> Optional[Contract]:
    return vars(module).get(ATTRIBUTE)
