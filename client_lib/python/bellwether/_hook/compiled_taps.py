"""The taps inside what torch.compile makes of a model that was attached before.

While it traces, an attention module is known by a tensor that hangs on it, its mark.  A tensor is
an input of the graph, so all layers of one class share one graph.  A number or an object would
compile each of them anew until the limit of recompilations ends the run.  The backward calls an
operator with the mark, q, k, v, o and dO.  At the other end is Python again, which decides there
whether the step is sampled.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .._kernels.memory import capturing
from .._util.guard import harmless
from .attention_masks import mask_of
from .hosts import PatchedLayer

ATTRIBUTE = "_bellwether_mark"
# What is traced here goes to the edge of what dynamo can: with an older one, where nobody has
# tried it, compiled modules are not watched.
TORCH_MIN = (2, 11)
PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

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
    "observe(Tensor q, Tensor k, Tensor v, Tensor o, Tensor d_o, Tensor(a!) mark, float scale, "
    "bool causal, bool statistics, bool delta, str kernel) -> ()"
)
_library.define("observe_keys(Tensor d_k, Tensor(a!) mark) -> ()")


def _layer_of(mark: Tensor) -> Optional[PatchedLayer]:
    number = _addresses.get(mark.data_ptr()) if mark.device.type == "cuda" else None
    if number is None:
        number = 0 if capturing() else int(mark[0])
    return _layers.get(number)


@harmless("backward of a compiled attention")
def _observe(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, d_o: Tensor, mark: Tensor,
    scale: float, causal: bool, statistics: bool, delta: bool, kernel: str,
) -> None:  # fmt: skip
    layer = _layer_of(mark)
    if layer is not None:
        layer.compiled_backward((o, q, k, v), d_o, scale, causal, statistics, delta, kernel)


@harmless("backward of a compiled attention")
def _observe_keys(d_k: Tensor, mark: Tensor) -> None:
    layer = _layer_of(mark)
    if layer is not None:
        layer.key_gradient(d_k)


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
        ctx: Any, o: Tensor, q: Tensor, k: Tensor, v: Tensor, mark: Tensor,
        scale: float, causal: bool, statistics: bool, delta: bool, kernel: str,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(o, q, k, v)
        ctx.mark = mark
        ctx.told = scale, causal, statistics, delta, kernel
        return o.detach()  # No view to autograd: the output may be changed in place.

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> Any:
        o, q, k, v = ctx.saved_tensors
        torch.ops.bellwether.observe(q, k, v, o, d_o, ctx.mark, *ctx.told)
        return d_o, *([None] * 9)


class _KeyTap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, mark: Tensor) -> Tensor:
        ctx.mark = mark
        return k.view_as(k)

    @staticmethod
    def backward(ctx: Any, d_k: Tensor) -> Any:
        torch.ops.bellwether.observe_keys(d_k, ctx.mark)
        return d_k, None


def well_formed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether each parameter is given once."""
    return len(args) <= len(PARAMETERS) and not any(
        name in kwargs for name in PARAMETERS[: len(args)]
    )


def same_place(a: Tensor, b: Tensor) -> bool:
    """Whether their gradients are added to each other where they come from.  With a tap on one of
    them they would be added in another order, and be rounded differently."""
    return a is b or (
        a.grad_fn is not None and a.grad_fn is b.grad_fn and a.output_nr == b.output_nr
    )


_Prepared = tuple[Tensor, Tensor, Tensor, dict[str, Any], tuple[float, bool, bool, bool, str]]


def attention(
    function: Callable[..., Any], mark: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What Layer.attention is in eager mode.  Traced: whatever it asks is asked once a graph."""
    try:
        prepared = _prepare(mark, args, kwargs)
    except Exception:
        untraceable()
        prepared = None
    if prepared is None:
        return function(*args, **kwargs)
    q, k, v, rest, told = prepared
    output = function(q, k, v, **rest)
    return _OutputTap.apply(output, q, k, v, mark, *told)  # type: ignore[no-untyped-call]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def untraceable() -> None:
    """Called once, while torch.compile traces."""
    _refuse()


@harmless("torch.compile of the attention")
def _refuse() -> None:
    raise RuntimeError("its calls could not be prepared")


def _prepare(mark: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Optional[_Prepared]:
    """q, k and v for the call, its other arguments, what the tap is told; None without a tap."""
    if not well_formed(args, kwargs):
        return None
    given = {**dict(zip(PARAMETERS, args)), **kwargs}
    q, k, v = given["query"], given["key"], given["value"]
    plain = type(q) is Tensor and type(k) is Tensor and type(v) is Tensor
    if not plain or not torch.is_grad_enabled() or q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        return None
    if not (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    if q is k or q is v or k is v or q.shape[3] == 0:
        return None  # A tap takes no tensor twice, and adds up no gradients in another order.
    device = q.device.type
    own = "kernel" in given  # wrap_attention(): such a module casts itself.
    if q.dtype == torch.float32 and torch.is_autocast_enabled(device) and not own:
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    scale = given.get("scale")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if isinstance(scale, (Tensor, str)):
        return None
    causal, unread = mask_of(given.get("attn_mask"), given.get("is_causal"), q, k)
    measurable = 0 < scale < math.inf
    statistics = unread is None and measurable
    scale = scale if measurable else 1.0
    delta = given.get("dropout_p", 0.0) == 0.0
    if k.requires_grad:
        k = _KeyTap.apply(k, mark)  # type: ignore[no-untyped-call]
    rest = {name: value for name, value in given.items() if name not in PARAMETERS[:3]}
    return q, k, v, rest, (float(scale), causal, statistics, delta, str(given.get("kernel", "")))
