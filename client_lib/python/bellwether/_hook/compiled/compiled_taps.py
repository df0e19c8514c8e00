"""The taps inside what torch.compile makes of a model that was attached before.

While it traces, an attention module is known by a tensor that hangs on it, its mark.  A tensor is
an input of the graph, so all layers of one class share one graph.  A number or an object would
compile each of them anew until the limit of recompilations ends the run.  The backward calls an
operator with the mark, o, dO and the tensors that the call was given.  At the other end is Python
again, which decides there whether the step is sampled, and reads the call (recipes.py).  Another
operator gets the gradients of q, k and v.  In graphs that inductor makes code of the two are one
(written_anyway.py): it puts other tensors into memory as soon as the graph is done with it.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..._kernels.memory import capturing
from ..._kernels.probe import Unsupported
from ..._util.guard import harmless
from ..calls.call import CallRead, first_of, with_first
from ..hosts import PatchedLayer
from . import recipes, recorded

ATTRIBUTE = "_bellwether_mark"
# What is traced here goes to the edge of what dynamo can: with an older one, where nobody has
# tried it, compiled modules are not watched.
TORCH_MIN = (2, 11)

_numbers = itertools.count(1)
_layers: weakref.WeakValueDictionary[int, PatchedLayer] = weakref.WeakValueDictionary()
_deaf: dict[torch.device, Mark] = {}
_addresses: dict[int, int] = {}  # Of marks on GPUs -> number: reading one would wait for the GPU.


class Mark:
    """Hangs on a watched module; copies and pickles of the module have None in its place.

    layer  None: it stands for no layer
    """

    def __init__(self, layer: Optional[PatchedLayer], device: torch.device) -> None:
        self.number = next(_numbers)
        self.tensor = torch.tensor([self.number], dtype=torch.int64, device=device)
        if layer is not None:
            _layers[self.number] = layer
        if device.type == "cuda":
            _addresses[self.tensor.data_ptr()] = self.number

    def deaf(self) -> Mark:
        """One that stands for no layer, and can be given to a compiled function in its place."""
        return _deaf[self.tensor.device]

    def layer(self) -> Optional[PatchedLayer]:
        return _layers.get(self.number)

    def forget(self) -> None:
        _layers.pop(self.number, None)
        _addresses.pop(self.tensor.data_ptr(), None)

    def __reduce__(self) -> Any:
        return type(None), ()


def supported() -> bool:
    """Whether compiled modules are watched with this torch."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= TORCH_MIN


def put(module: nn.Module, layer: PatchedLayer) -> None:
    """From now on a compiled `module` tells `layer` what it sees."""
    if not supported():
        return
    first = next(module.parameters(), None)
    # Where the model is: a CPU tensor among its inputs keeps a graph from CUDA's graphs.
    on_gpu = first is not None and first.device.type == "cuda"
    device = first.device if first is not None and on_gpu else torch.device("cpu")
    mark = Mark(layer, device)
    if mark.tensor.device not in _deaf:  # Not made when it is wanted, as a graph is captured then.
        _deaf[mark.tensor.device] = Mark(None, device)
    object.__setattr__(module, ATTRIBUTE, mark)


def take(module: Optional[nn.Module], layer: PatchedLayer) -> None:
    mark = vars(module).get(ATTRIBUTE) if module is not None else None
    if module is not None and mark is not None and _layers.get(mark.number) is layer:
        object.__delattr__(module, ATTRIBUTE)
        mark.forget()


# ---- the operators ----

_library: Any = torch.library.Library("bellwether", "FRAGMENT")  # type: ignore[no-untyped-call]
# The mark counts as changed: an operator without an effect would be left out of the graph.  Tensors
# are taken as they lie, so none is copied for us.
for _schema in (
    "observe(Tensor[] tensors, SymInt[] sizes, int made, Tensor(a!) mark, int recipe, str ran,"
    " int site) -> ()",
    "observe_gradients(Tensor[] tensors, SymInt[] sizes, int made, Tensor(a!) mark, str of,"
    " str lost, int site) -> ()",
    "observe_call(Tensor[] tensors, SymInt[] sizes, int made, Tensor(a!) mark, int recipe, str ran,"
    " str of, str lost, int site) -> ()",
):
    _library.define(_schema, tags=(torch.Tag.flexible_layout,))


def _layer_of(mark: Tensor) -> Optional[PatchedLayer]:
    number = _addresses.get(mark.data_ptr()) if mark.device.type == "cuda" else None
    if number is None:
        number = 0 if capturing() else int(mark[0])
    return _layers.get(number)


@harmless("backward of a compiled attention")
def _observe(
    tensors: list[Tensor], sizes: list[int], made: int, mark: Tensor, recipe: int, ran: str,
    site: int,
) -> None:  # fmt: skip
    """tensors, sizes, made  give o, its gradient and what the recipe needs (recorded.py)
    ran  what the graph runs for the call, as Recipe.read() takes it"""
    layer = _layer_of(mark)
    if layer is not None:
        make = functools.partial(recorded.made_of, made, tensors, sizes)
        _tell_call(layer, make, recipe, ran, site, False)


def _tell_call(
    layer: PatchedLayer, make: Callable[[], list[Tensor]], recipe: int, ran: str, site: int,
    at_once: bool,
) -> None:  # fmt: skip
    """make  gives o, its gradient and what the recipe needs"""
    module = layer.module()

    def read() -> tuple[CallRead, list[Tensor]]:
        try:
            given = make()
        except Unsupported as e:
            return str(e), []
        assert module is not None
        return recipes.recipe(recipe).read(given[2:], module, ran), given[:2]

    if module is not None:
        layer.compiled_backward(read, site, at_once)


@harmless("backward of a compiled attention")
def _observe_gradients(
    tensors: list[Tensor], sizes: list[int], made: int, mark: Tensor, of: str, lost: str, site: int
) -> None:
    """tensors, sizes, made  give gradients
    of    what they are of, with a comma between: each "q", "k" or "v", of a packed one several
    lost  of the same those that the graph does not write"""
    layer = _layer_of(mark)
    if layer is not None:
        _tell_gradients(layer, lambda: recorded.made_of(made, tensors, sizes), of, lost, site)


def _tell_gradients(
    layer: PatchedLayer, make: Callable[[], list[Tensor]], of: str, lost: str, site: int
) -> None:
    names = of.split(",") if of else []
    layer.compiled_gradients(lambda: dict(zip(names, make())) if names else {}, lost, site)


@harmless("backward of a compiled attention")
def _observe_call(
    tensors: list[Tensor], sizes: list[int], made: int, mark: Tensor, recipe: int, ran: str,
    of: str, lost: str, site: int,
) -> None:  # fmt: skip
    """Both: what is made is that of the call, and then the gradients."""
    layer = _layer_of(mark)
    if layer is None:
        return

    @functools.cache
    def make() -> list[Tensor]:
        return recorded.made_of(made, tensors, sizes)

    count = len(of.split(",")) if of else 0
    _tell_call(layer, lambda: make()[: len(make()) - count], recipe, ran, site, True)
    _tell_gradients(layer, lambda: make()[len(make()) - count :], of, lost, site)


_OPERATORS = {
    "observe": _observe,
    "observe_gradients": _observe_gradients,
    "observe_call": _observe_call,
}
for _name, _function in _OPERATORS.items():
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _function, _device)
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
        ctx: Any, o: Tensor, mark: Tensor, recipe: int, site: int, *tensors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(o, *tensors)
        ctx.mark, ctx.told = mark, (recipe, "", site)
        return o.detach()  # No view to autograd: the output may be changed in place.

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> Any:
        o, *tensors = ctx.saved_tensors
        as_handed = recorded.AS_HANDED
        torch.ops.bellwether.observe([o, d_o, *tensors], [], as_handed, ctx.mark, *ctx.told)
        return d_o, *([None] * (3 + len(tensors)))


class _InputTap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: Tensor, of: str, site: int) -> Tensor:
        ctx.mark, ctx.of, ctx.site = mark, of, site
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        as_handed = recorded.AS_HANDED
        torch.ops.bellwether.observe_gradients(
            [gradient], [], as_handed, ctx.mark, ctx.of, "", ctx.site
        )
        return gradient, None, None, None


def next_site(earlier: list[None]) -> int:
    """Traced: which call of a forward this is, counted from 0.

    earlier  one item for each call before it, and then for this one
    """
    site = len(earlier)
    unseen(earlier.append, None)
    return site


def cast_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Traced: what autocast would do inside the call.  The taps then see what the kernel sees."""
    return x.to(dtype)


def alias(x: Tensor) -> Tensor:
    """Traced."""
    return x.view_as(x)


def tensor_of(mark: Mark) -> Tensor:
    """Traced."""
    return mark.tensor


def tap_input(x: Tensor, mark: Tensor, of: str, site: int) -> Tensor:
    """Traced.  of: which of "q", "k" and "v" the tensor is; a packed one is several."""
    return _InputTap.apply(x, mark, of, site)  # type: ignore[no-untyped-call, no-any-return]


def tap_output(result: Any, mark: Tensor, recipe: int, site: int, *tensors: Tensor) -> Any:
    """Traced: the call's result, its output behind the tap."""
    first = first_of(result)
    if not isinstance(first, Tensor) or not first.requires_grad:
        return result
    o = _OutputTap.apply(first, mark, recipe, site, *tensors)  # type: ignore[no-untyped-call]
    return with_first(result, o)


def tapped(
    reader: Any, function: Callable[..., Any], mark: Mark, earlier: list[None], *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """For what is traced: a call that is to be between taps, which traced_calls.py puts there."""
    return function(*args, **kwargs)
