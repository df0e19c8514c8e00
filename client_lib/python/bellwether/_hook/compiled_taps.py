"""The taps inside what torch.compile makes of a model that was attached before.

While it traces, an attention module is known by a tensor that hangs on it, its mark.  A tensor is
an input of the graph, so all layers of one class share one graph.  A number or an object would
compile each of them anew until the limit of recompilations ends the run.  The backward calls an
operator with the mark, q, k, v, o, dO and the tensors of the mask.  At the other end is Python
again, which decides there whether the step is sampled.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from .._kernels.memory import capturing
from .._util.guard import harmless
from .call import VIEWS, AttentionCall, Mask, output_view
from .hosts import PatchedLayer
from .kernel_choice import kernel_of

ATTRIBUTE = "_bellwether_mark"
# What is traced here goes to the edge of what dynamo can: with an older one, where nobody has
# tried it, compiled modules are not watched.
TORCH_MIN = (2, 11)

# Of a mask that may be tensors.
_NAMES = ("begins", "ends", "q_offsets", "k_offsets", "documents", "tensor", "visible")

_numbers = itertools.count(1)
_layers: weakref.WeakValueDictionary[int, PatchedLayer] = weakref.WeakValueDictionary()
_addresses: dict[int, int] = {}  # Of marks on GPUs -> number: reading one would wait for the GPU.


class Mark:
    """Hangs on a watched module; copies and pickles of the module have None in its place."""

    def __init__(self, layer: PatchedLayer, device: torch.device) -> None:
        self.number = next(_numbers)
        # Where the model is: a CPU tensor among its inputs keeps a graph from CUDA's graphs.
        device = device if device.type == "cuda" else torch.device("cpu")
        self.tensor = torch.tensor([self.number], dtype=torch.int64, device=device)
        _layers[self.number] = layer
        if device.type == "cuda":
            _addresses[self.tensor.data_ptr()] = self.number

    def forget(self) -> None:
        _layers.pop(self.number, None)
        _addresses.pop(self.tensor.data_ptr(), None)

    def __reduce__(self) -> Any:
        return type(None), ()


def put(module: nn.Module, layer: PatchedLayer) -> None:
    """From now on a compiled `module` tells `layer` what it sees."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < TORCH_MIN:
        return
    first = next(module.parameters(), None)
    device = first.device if first is not None else torch.device("cpu")
    object.__setattr__(module, ATTRIBUTE, Mark(layer, device))


def take(module: Optional[nn.Module], layer: PatchedLayer) -> None:
    mark = vars(module).get(ATTRIBUTE) if module is not None else None
    if module is not None and mark is not None and _layers.get(mark.number) is layer:
        object.__delattr__(module, ATTRIBUTE)
        mark.forget()


# ---- the operators ----

_library: Any = torch.library.Library("bellwether", "FRAGMENT")  # type: ignore[no-untyped-call]
# The mark counts as changed: an operator without an effect would be left out of the graph.
_library.define(
    "observe(Tensor q, Tensor k, Tensor v, Tensor o, Tensor d_o, Tensor(a!) mark, Tensor[] given, "
    "str[] names, float scale, bool causal, bool top_left, int[] window, str[] words, "
    "float dropout, int site) -> ()"
)
_library.define("observe_keys(Tensor d_k, Tensor(a!) mark, str layout, int site) -> ()")


def _layer_of(mark: Tensor) -> Optional[PatchedLayer]:
    number = _addresses.get(mark.data_ptr()) if mark.device.type == "cuda" else None
    if number is None:
        number = 0 if capturing() else int(mark[0])
    return _layers.get(number)


@harmless("backward of a compiled attention")
def _observe(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, d_o: Tensor, mark: Tensor, given: list[Tensor],
    names: list[str], scale: float, causal: bool, top_left: bool, window: list[int],
    words: list[str], dropout: float, site: int,
) -> None:  # fmt: skip
    layer = _layer_of(mark)
    if layer is None:
        return
    layout, kernel, unread = words
    left, right = (None if keys < 0 else keys for keys in window)
    tensors: dict[str, Any] = dict(zip(names, given))
    sinks = tensors.pop("sinks", None)
    view = VIEWS[layout]
    of_torch = {"attn_mask": tensors.get("tensor"), "is_causal": causal, "dropout_p": dropout}
    call = AttentionCall(
        q, k, v, view, view, view, output_view(layout, q), _not_run, scale,
        Mask(causal=causal, top_left=top_left, left=left, right=right, **tensors),
        sinks=sinks, dropout=dropout, unread=unread or None,
        kernel=lambda: kernel or kernel_of(q, k, v, of_torch),
    )  # fmt: skip
    layer.compiled_backward(call, o, d_o, site)


def _not_run(q: Tensor, k: Tensor, v: Tensor) -> Any:
    raise RuntimeError("it ran before")


@harmless("backward of a compiled attention")
def _observe_keys(d_k: Tensor, mark: Tensor, layout: str, site: int) -> None:
    layer = _layer_of(mark)
    if layer is not None:
        layer.compiled_key_gradient(VIEWS[layout](d_k), site)


for _device in ("CPU", "CUDA"):
    _library.impl("observe", _observe, _device)
    _library.impl("observe_keys", _observe_keys, _device)
for _name in ("observe", "observe_keys"):
    torch.library.register_fake(f"bellwether::{_name}", lambda *_: None, lib=_library)


# ---- what is traced ----


def exporting() -> bool:
    """torch.compiler.is_exporting(), which torch.compile took for true before torch 2.13."""
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def unseen(function: Callable[..., Any], *args: Any) -> None:
    """Traces a call that leaves nothing behind: dynamo refuses effects that are visible outside of
    a checkpointed region, and what comes and goes within one is not."""
    utils: Any = torch._dynamo.utils
    utils._disable_side_effect_safety_checks_for_current_subtracer(function, *args)


class _OutputTap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, o: Tensor, q: Tensor, k: Tensor, v: Tensor, mark: Tensor, names: list[str],
        told: tuple[Any, ...], *given: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(o, q, k, v, *given)
        ctx.mark, ctx.names, ctx.told = mark, names, told
        return o.detach()  # No view to autograd: the output may be changed in place.

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> Any:
        o, q, k, v, *given = ctx.saved_tensors
        torch.ops.bellwether.observe(q, k, v, o, d_o, ctx.mark, given, ctx.names, *ctx.told)
        return d_o, *([None] * (6 + len(given)))


class _KeyTap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, mark: Tensor, layout: str, site: int) -> Tensor:
        ctx.mark, ctx.told = mark, (layout, site)
        return k.view_as(k)

    @staticmethod
    def backward(ctx: Any, d_k: Tensor) -> Any:
        torch.ops.bellwether.observe_keys(d_k, ctx.mark, *ctx.told)
        return d_k, None, None, None


def same_place(a: Tensor, b: Tensor) -> bool:
    """Whether their gradients are added to each other where they come from.  With a tap on one of
    them they would be added in another order, and be rounded differently."""
    return a is b or (
        a.grad_fn is not None and a.grad_fn is b.grad_fn and a.output_nr == b.output_nr
    )


def attention(
    read: Callable[[], Union[AttentionCall, str, None]], bare: Callable[[], Any], mark: Tensor,
    calls: list[None],
) -> Any:  # fmt: skip
    """What Layer.attention is in eager mode.  Traced: whatever it asks is asked once a graph.

    calls  one item for each earlier call of the same forward
    """
    site = len(calls)
    unseen(calls.append, None)
    try:
        call = _prepare(read())
    except Exception:
        untraceable()
        call = None
    if call is None:
        return bare()
    q, k, v, layout = call.q, call.k, call.v, call.layout
    if call.cast is not None:
        q, k, v = q.to(call.cast), k.to(call.cast), v.to(call.cast)
    tapped = k
    if k.requires_grad and call.cancels and call.sinks is None:
        tapped = _KeyTap.apply(k, mark, layout, site)  # type: ignore[no-untyped-call]
    result = call.run(q, tapped, v)
    names, given = _tensors(call)
    mask = call.mask
    window = [-1 if keys is None else keys for keys in (mask.left, mask.right)]
    told = (
        call.scale, mask.causal, mask.top_left, window,
        [layout, call.kernel(), call.unread or ""], call.dropout, site,
    )  # fmt: skip
    output = _OutputTap.apply(  # type: ignore[no-untyped-call]
        call.output(result), q, tapped, v, mark, names, told, *given
    )
    return call.with_output(result, output)


def _tensors(call: AttentionCall) -> tuple[list[str], list[Tensor]]:
    names, given = [], []
    for name in _NAMES:
        t = getattr(call.mask, name)
        if t is not None:
            names.append(name)
            given.append(t if call.cast is None or not t.is_floating_point() else t.to(call.cast))
    if call.sinks is not None:
        names.append("sinks")
        given.append(call.sinks)
    return names, given


def _prepare(call: Union[AttentionCall, str, None]) -> Optional[AttentionCall]:
    """The call, if a tap can be put around it."""
    if call is None or isinstance(call, str) or not torch.is_grad_enabled():
        return None
    q, k, v = call.q, call.k, call.v
    if not (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    if q is k or q is v or k is v or q.shape[-1] == 0:
        return None  # A tap takes no tensor twice, and adds up no gradients in another order.
    if not call.layout or call.mask.chunk is not None or call.mask.function is not None:
        return None
    if call.softcap:  # The operator has no place for it.
        return None
    return call


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def untraceable() -> None:
    """Called once, while torch.compile traces."""
    _refuse()


@harmless("torch.compile of the attention")
def _refuse() -> None:
    raise RuntimeError("its calls could not be prepared")
