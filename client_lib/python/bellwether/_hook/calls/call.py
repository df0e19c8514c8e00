"""One call of attention, as an adapter has read it: all that taps and probe have to know.

An adapter (_adapters/) fills it from the arguments of one function.  A part that it does not
understand it names in `unread`; what depends on that part is then left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from ..._weights.split_check import Evidence

View = Callable[[Tensor], Tensor]


def same(x: Tensor) -> Tensor:
    """The view of a tensor that lies as the probe reads it."""
    return x


def _bthd(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _sbhd(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3)


def _thd(x: Tensor) -> Tensor:
    return x.transpose(0, 1).unsqueeze(0)


def _several_batches(x: Tensor) -> Tensor:
    return x.flatten(0, -4)


def _grouped(x: Tensor) -> Tensor:
    return x.flatten(1, 2)


def _one_head(x: Tensor) -> Tensor:
    return x.unsqueeze(1)


# Views of a tensor as [batch, heads, tokens, dim], by the order that it has.  Of "thd", documents
# laid end to end, it is one sequence; "g" are key heads, each with its own queries' heads; "btd"
# has one head.
VIEWS: dict[str, View] = {
    "bhtd": same, "bthd": _bthd, "sbhd": _sbhd, "thd": _thd, "...htd": _several_batches,
    "bghtd": _grouped, "btd": _one_head,
}  # fmt: skip


def output_view(layout: str, q: Tensor) -> View:
    """That of the output of a call with this q: its heads may lie side by side."""
    view, dims = VIEWS[layout], q.dim()
    heads = q.shape[layout.index("h")] if layout in ("bthd", "sbhd", "thd") else 0

    def of(o: Tensor) -> Tensor:
        apart = heads and o.dim() == dims - 1
        return view(o.view(*o.shape[:-1], heads, -1) if apart else o)

    return of


# How a kernel rounds: names of _kernels/laws.py, or that nobody knows it.
FUSED, COMPOSED, NOT_TOLD = "fused", "composed", "unknown"

# Of a Mask, those that may be tensors.
MASK_TENSORS = ("begins", "ends", "q_offsets", "k_offsets", "documents", "tensor", "visible")


@dataclasses.dataclass(frozen=True, eq=False)
class Mask:
    """Which keys a row may see: those that every part which is given allows.

    Rows and keys are counted from 0 in their sequence.  The diagonal is the key that stands beside
    a row.  At the bottom right the last row's is the last key, at the top left row 0's is key 0.
    With documents that holds in each of them.
    """

    causal: bool = False  # Keys up to the diagonal.
    top_left: bool = False  # Where the diagonal is, for `causal`, `left` and `right`.
    left: Optional[int] = None  # At most so many keys before the diagonal.
    right: Optional[int] = None  # At most so many after it.
    chunk: Optional[int] = None  # Keys of the diagonal's own chunk of so many tokens.
    begins: Optional[Tensor] = None  # [batch] The first key of each sequence that is no padding.
    ends: Optional[Tensor] = None  # [batch] One behind the last.
    padded_rows: bool = False  # Rows outside of begins..ends are none: the kernel skips them, too.
    # [documents + 1] Where documents begin in the queries and in the keys: a row sees its own.
    q_offsets: Optional[Tensor] = None
    k_offsets: Optional[Tensor] = None
    documents: Optional[Tensor] = None  # [batch, tokens] The document of a token, ascending.
    # Bool (true = may see) or added to the scores; broadcasts to [batch, heads, rows, keys].
    tensor: Optional[Tensor] = None
    # For sampled rows [batch, heads, rows] and raw scores [batch, heads, rows, keys] what is to be
    # added to the scores: the functions of flex_attention.
    function: Optional[Callable[[Tensor, Tensor], Tensor]] = None
    hides: bool = True  # Whether the function may hide keys, ...
    heads_alike: bool = False  # ... and hides the same ones for all heads.
    # Bool [batch or 1, heads or 1, keys]: keys that some row sees, where the adapter knows them.
    # Without it a function is asked for all rows, if they are not too many.
    visible: Optional[Tensor] = None

    def tensors(self) -> dict[str, Tensor]:
        """Those that are given, by their names here."""
        given: dict[str, Tensor] = {}
        for name in MASK_TENSORS:
            value = getattr(self, name)
            if value is not None:
                given[name] = value
        return given


@dataclasses.dataclass(frozen=True, eq=False)
class Ours:
    """A call in the words of bellwether.attention, which can be put in its place."""

    arguments: dict[str, Any]  # All but q, k, v and the mode.
    # What the function returns, made of the output [batch, heads, tokens, dim] alone.
    result: Callable[[Tensor], Any]
    mode: str = ""  # That it has, where the function is bellwether.attention itself.


@dataclasses.dataclass
class AttentionCall:
    """The tensors are those of the call, in its own layout; `*_view` give them as [batch, heads,
    tokens, dim], and are called without a graph.  A packed tensor may be q, k and v at once: its
    views then pick, of its gradient, too."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_view: View
    k_view: View
    v_view: View
    o_view: View
    # The function with these tensors in the place of q, k and v.  With those of the call it does
    # what the call does, bit for bit.
    run: Callable[[Tensor, Tensor, Tensor], Any]
    scale: float
    mask: Mask  # Without a default: torch.compile of torch 2.11 cannot make an object of ours one.
    softcap: float = 0.0
    sinks: Optional[Tensor] = None  # [heads] One logit each, in the sum of the softmax.
    dropout: float = 0.0
    # The type that autocast gives q, k, v and a floating mask inside the function.
    cast: Optional[torch.dtype] = None
    # The type that it gives them in matrix products of the function, whose gradients come back
    # widened: they are not cast before, since the function's other operations keep their types.
    narrowed: Optional[torch.dtype] = None
    # Three dimensions, read as those of one head: so it is where the module's weights say that.
    one_head: bool = False
    packed: bool = False  # k is also q or v, and k_view picks a part that is k alone.
    # False: the scores are changed by what is not added to them, so the keys' gradients need not
    # add up to 0.  A softcap and sinks need not be said here.
    cancels: bool = True
    # Which of "q", "k" and "v" a gradient reaches, of a call that was traced; elsewhere they tell.
    trains: Optional[str] = None
    # Of such a call: how q and k are made of what the projections return.
    shown: Optional[Evidence] = None
    # What the tap has that the keys are behind already: it is told what is kept of the call.
    tapped: Optional[list[Any]] = None
    kernel: Callable[[], str] = str  # Which implementation runs, for people; asked once a layer.
    # How it rounds, of FUSED, COMPOSED and NOT_TOLD; None: as one of its name does.
    arithmetic: Optional[str] = None
    module: Optional[nn.Module] = None  # That the function was given, if it was.
    unread: Optional[str] = None  # What of the call is not understood: no statistics.
    # The attention's output in what the function returned, and that with another in its place.
    output: Callable[[Any], Any] = lambda result: result
    with_output: Callable[[Any, Tensor], Any] = lambda result, output: output
    # Why the gradients of q, k and v as they are here are not those that the kernel returns.
    laws_lack: Optional[str] = None
    # The probabilities are returned, too: a gradient may come through them.
    weights_go_on: bool = False
    # What the scores went into besides the softmax, as far as the forward that runs has shown.
    others: Sequence[str] = ()
    # Of scaled_dot_product_attention: its arguments but q, k and v, by their names.
    options: Optional[dict[str, Any]] = None
    # Of another function; or, in words, why none of ours can be put in its place.
    ours: Union[Ours, str, None] = None
    # Whether a gradient reaches the mask, of a call that was traced; elsewhere the mask tells it.
    mask_trains: bool = False

    def trained(self) -> str:
        """Which of "q", "k" and "v" a gradient reaches."""
        if self.trains is not None:
            return self.trains
        return "".join(name for name, t in self.tensors() if t.requires_grad)

    def tensors(self) -> tuple[tuple[str, Tensor], ...]:
        return ("q", self.q), ("k", self.k), ("v", self.v)

    def groups(self) -> dict[str, Tensor]:
        """The tensors that q, k and v are, by the names of those that are in them."""
        found: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in self.tensors():
            names, _ = found.get(id(tensor), ("", tensor))
            found[id(tensor)] = names + name, tensor
        return dict(found.values())

    def without_laws(self) -> Optional[str]:
        """Why the gradients of q, k and v do not obey the laws of attention, or cannot be asked
        for one by one; None where they do."""
        if self.unread is not None:
            return self.unread
        if self.dropout:
            return "dropout in the attention"
        if not self.cancels:
            return "the scores are changed by what is not added to them"
        if self.laws_lack is not None:
            return self.laws_lack
        if self.mask.padded_rows:
            return "rows of padding that the kernel skips"
        trained = self.trained()
        untrained = [name for name, _ in self.tensors() if name not in trained]
        return f"no gradient reaches {' and '.join(untrained)}" if untrained else None

    def key_gradients_cancel(self) -> bool:
        """Whether they add up to 0 in exact arithmetic."""
        return self.cancels and not self.softcap and self.sinks is None


# What is read of a call; or why it is not measured, for people; None = the function itself refuses
# it, and says why.
CallRead = Union[AttentionCall, str, None]
# (the function as it is without us, its arguments)
Reader = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], CallRead]
# Of a call that is made in two parts: q, k and v behind their taps, what its output passes through.
Met = tuple[tuple[Tensor, Tensor, Tensor], Callable[[Tensor], Tensor]]


def first_of(result: Any) -> Any:
    """The output of a function that returns it alone or first in a tuple."""
    return result[0] if isinstance(result, (tuple, list)) else result


def with_first(result: Any, output: Any) -> Any:
    if not isinstance(result, (tuple, list)):
        return output
    if hasattr(result, "_fields"):  # A named tuple.
        return type(result)(output, *result[1:])
    return type(result)([output, *result[1:]])
