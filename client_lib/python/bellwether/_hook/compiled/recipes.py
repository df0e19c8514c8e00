"""How a call that torch.compile has traced is read when it runs.

While it is traced its arguments have no values.  What they are is written down once a graph: which
of them are tensors that the graph hands over, which is the module, and all that is constant.  The
graph knows the number of this recipe.  In the backward an adapter reads the call from it as it
reads one of eager mode, with the tensors of that pass.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..._weights.split_check import Evidence
from ..calls.call import NOT_TOLD, AttentionCall, CallRead, Reader
from ..calls.kernel_choice import NAMES

RECIPES_MAX = 4096  # Of a process: each graph of torch.compile has some.
LOST = "compiled in another process: not measured"
# What a graph runs for a call, besides kernels of PyTorch: matrix products, or several of all that.
PRODUCTS, SEVERAL = "products", "several"
FIXED = "its call is compiled, and compiled ones of scaled_dot_product_attention are served"


@dataclasses.dataclass(frozen=True)
class Slot:
    """One of the tensors that the graph hands over."""

    place: int


@dataclasses.dataclass(frozen=True)
class Submodule:
    """The layer's module, or one inside it."""

    path: str


@dataclasses.dataclass(frozen=True, eq=False)
class Bound:
    """A function that was traced into the graph, and the tensors that it has from around it."""

    graph: Any
    more: tuple[Slot, ...]

    def __repr__(self) -> str:
        return f"Bound({id(self.graph)}, {self.more})"


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """The same when it runs."""

    graph: Any
    more: tuple[Tensor, ...]

    def __call__(self, *args: Tensor) -> Any:
        result = self.graph(*args, *self.more)
        return result[0] if isinstance(result, (tuple, list)) else result


class Unknown:
    """A value that nothing is known of."""

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = Unknown()


def _filled(spec: Any, tensors: Sequence[Tensor], module: nn.Module) -> Any:
    if isinstance(spec, Slot):
        return tensors[spec.place]
    if isinstance(spec, Submodule):
        return module.get_submodule(spec.path)
    if isinstance(spec, Bound):
        return Traced(spec.graph, tuple(tensors[slot.place] for slot in spec.more))
    if isinstance(spec, (tuple, list)):
        return type(spec)(_filled(item, tensors, module) for item in spec)
    return spec


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One call of a graph; or, with a `reason`, why it is not measured."""

    function: Any = None
    reader: Optional[Reader] = None
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    # As they were while the call was traced: the backward may find others in force.
    cast: Optional[torch.dtype] = None
    narrowed: Optional[torch.dtype] = None
    dropout: float = 0.0
    trains: str = "qkv"
    shown: Optional[Evidence] = None
    kernel: str = ""  # Of scaled_dot_product_attention, that PyTorch chose for it then.
    reason: str = ""
    mask_trains: bool = False

    def read(self, tensors: Sequence[Tensor], module: nn.Module, ran: str = "") -> CallRead:
        """ran  what the graph runs, of PRODUCTS, SEVERAL and kernel_choice.NAMES; "" = nothing that
        the reader does not say"""
        if self.reader is None:
            return self.reason
        args = _filled(self.args, tensors, module)
        kwargs = {name: _filled(spec, tensors, module) for name, spec in self.kwargs}
        call = self.reader(self.function, args, kwargs)
        if isinstance(call, AttentionCall):
            untold = call.arithmetic == NOT_TOLD
            call = dataclasses.replace(
                call,
                cast=self.cast,
                narrowed=self.narrowed,
                dropout=self.dropout,
                trains=self.trains,
                mask_trains=self.mask_trains,
                shown=self.shown,
                ours=FIXED,
                kernel=self._kernel(call, ran),
                # A kernel of PyTorch in the graph rounds as its name says.
                arithmetic=None if untold and ran in NAMES else call.arithmetic,
            )
        return call

    def _kernel(self, call: AttentionCall, ran: str) -> Callable[[], str]:
        """What runs, where the graph or the compiler has told it, else what the reader says."""
        name = ran or self.kernel
        if ran == SEVERAL:
            name = "custom"
        elif ran == PRODUCTS:
            name = "math" if call.kernel() in NAMES else ""
        return functools.partial(str, name) if name else call.kernel


_lock = threading.Lock()
_recipes: list[Recipe] = [Recipe(reason="more compiled calls than are kept: not measured")]
_numbers: dict[Any, int] = {}


def number_of(recipe: Recipe) -> int:
    """A recipe that was there before keeps its number: graphs are cached by it."""
    told = (
        recipe.args,
        recipe.kwargs,
        recipe.cast,
        recipe.narrowed,
        recipe.dropout,
        recipe.trains,
        recipe.mask_trains,
        recipe.kernel,
        recipe.reason,
    )
    key = (*map(id, (recipe.function, recipe.reader, recipe.shown)), repr(told))
    with _lock:
        found = _numbers.get(key)
        if found is None:
            if len(_recipes) >= RECIPES_MAX:
                return 0
            found = _numbers[key] = len(_recipes)
            _recipes.append(recipe)
        return found


def recipe(number: int) -> Recipe:
    with _lock:
        return _recipes[number] if 0 <= number < len(_recipes) else Recipe(reason=LOST)
