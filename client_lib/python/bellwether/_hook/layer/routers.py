"""Which modules route tokens to experts, and what their results say.

Found are transformers' routers and Megatron-Core's, and those that wrap_router() names.  What a
router returns is read by what it looks like: floats that are as wide as there are experts are its
logits, integers are the experts that it has chosen.  A few routers return something else: _OTHERS.
"""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..._util.guard import harmless
from ..._util.integers import whole

EXPERTS_MAX, LAYERS_MAX = 4096, 512
_NAME = re.compile(r"(Router|TopKGating)$")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_router_classes")
_CHOSEN = ("top_k", "topk", "num_experts_per_tok", "moe_top_k")
_WEIGHTS = ("classifier", "gate", "layer", "proj", "out_proj")


@dataclasses.dataclass(frozen=True)
class Routed:
    """What one call of a router says; what is None cannot be seen.

    logits  [..., experts]
    chosen  integers [..., k], experts by their numbers; other numbers are none
    kept    of chosen's shape: 0 where the expert had no room for the token
    loads   integers [experts], where the tokens themselves are not told
    peak    whether the largest of the logits is one of the router's
    """

    logits: Optional[Tensor] = None
    chosen: Optional[Tensor] = None
    kept: Optional[Tensor] = None
    loads: Optional[Any] = None
    peak: bool = True


Read = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Declared:
    """What wrap_router() was told of a module."""

    experts: Optional[int] = None
    top_k: Optional[int] = None
    layer: Optional[int] = None
    read: Optional[Read] = None


_declared: weakref.WeakKeyDictionary[nn.Module, Declared] = weakref.WeakKeyDictionary()


def declared(
    experts: Optional[int], top_k: Optional[int], layer: Optional[int], read: Optional[Read]
) -> Declared:
    """Raises ValueError or TypeError for what the caller got wrong."""
    if experts is not None:
        experts = whole("experts", experts, 1, EXPERTS_MAX)
    if top_k is not None:
        top_k = whole("top_k", top_k, 1, experts or EXPERTS_MAX)
    if layer is not None:
        layer = whole("layer", layer, 0, LAYERS_MAX - 1)
    if read is not None and not callable(read):
        raise TypeError(f"read: a {type(read).__name__} cannot be called")
    return Declared(experts, top_k, layer, read)


@harmless("wrap_router()", lambda module, *_, **__: module, passes=(ValueError, TypeError))
def wrap_router(
    module: nn.Module,
    *,
    experts: Optional[int] = None,
    top_k: Optional[int] = None,
    layer: Optional[int] = None,
    read: Optional[Read] = None,
) -> nn.Module:
    """Says that `module` routes tokens to experts.  To be called before attach().

    experts  how many there are; default: the rows of its weight
    top_k    how many a token gets, where the result does not say which: those of the largest logits
    layer    which one of the run, from 0; default: that of the attention in its block
    read     given what forward() returned, gives (logits, chosen) or (logits, chosen, kept), each
             of them None where there is none: logits [..., experts]; chosen, integers [..., k],
             numbers of experts; kept, of the same shape, 0 where an expert had no room for the
             token.  Default: the result's floats that are as wide as there are experts, and its
             integers.  It must not wait for a GPU.

    Returns the module.  Raises ValueError or TypeError for bad arguments.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: a {type(module).__name__} is no torch.nn.Module")
    _declared[module] = declared(experts, top_k, layer, read)
    return module


class Router:
    """A module that routes, or a function.

    layer  which one of the run, where it was said
    """

    def __init__(
        self, name: str, module: Optional[nn.Module], experts: int, top_k: Optional[int],
        read: Read, layer: Optional[int],
    ) -> None:  # fmt: skip
        self.name, self.experts, self.top_k, self.layer = name, experts, top_k, layer
        self.module = None if module is None else weakref.ref(module)
        self.read = read
        self._weight = _path_of_weight(module, experts) if module is not None else None

    def weight(self) -> Optional[Tensor]:
        """[experts, width]"""
        module = self.module() if self.module is not None else None
        if module is None or self._weight is None:
            return None
        found: Any = module
        for part in self._weight:
            found = getattr(found, part, None)
        return found if isinstance(found, Tensor) else None


def _matrices(module: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in module.named_parameters() if p.dim() == 2}


def _path_of_weight(module: nn.Module, experts: int) -> Optional[list[str]]:
    found = [name for name, p in _matrices(module).items() if p.shape[0] == experts]
    if len(found) > 1:
        named = [n for n in found if n == "weight" or n.split(".")[-2:][0] in _WEIGHTS]
        found = named or found
    return found[0].split(".") if len(found) == 1 else None


def _experts_of(module: nn.Module) -> Optional[int]:
    counts = [c for n in _COUNTS if isinstance(c := getattr(module, n, None), int)]
    rows = {p.shape[0] for p in _matrices(module).values()}
    fitting = [count for count in counts if count in rows]
    if fitting:
        return max(fitting)
    return counts[0] if counts else next(iter(rows)) if len(rows) == 1 else None


def _chosen_of(*modules: Optional[nn.Module]) -> Optional[int]:
    for module in modules:
        for name in _CHOSEN:
            for of in (module, getattr(module, "config", None)):
                count = getattr(of, name, None)
                if isinstance(count, int) and count > 0:
                    return count
    return None


def routes(module: nn.Module) -> bool:
    """Whether it is a router of one of the packages that are known."""
    of = type(module)
    known = of.__module__.startswith(("transformers.", "megatron."))
    return known and _NAME.search(of.__name__) is not None and "forward" not in vars(module)


def routers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Optional[Router]]]:
    """With their names; None: how many experts there are is not known."""
    parents: dict[nn.Module, nn.Module] = {}
    for parent in model.modules():
        for child in parent.children():
            parents.setdefault(child, parent)
    for name, module in model.named_modules():
        said = _declared.get(module)
        if said is None and not routes(module):
            continue
        said = said or Declared()
        experts = said.experts or _experts_of(module)
        if experts is None or not 1 < experts <= EXPERTS_MAX:
            if module in _declared or "Density" not in type(module).__name__:
                yield name, module, None
            continue
        top_k = said.top_k or _chosen_of(module, parents.get(module))
        read = said.read or _OTHERS.get(type(module).__name__)
        router = Router(name or "the model", module, experts, top_k, read or plain, said.layer)
        yield name, module, router


def declared_in(model: nn.Module) -> list[str]:
    """Names of its modules that wrap_router() was given."""
    return [name or "the model" for name, m in model.named_modules() if m in _declared]


# ---- what results say ----


def by_reading(read: Read, output: Any, experts: int, top_k: Optional[int]) -> Optional[Routed]:
    """None where it says nothing.  Raises what a read of the user's raises."""
    found = plain(output, experts) if read is plain else read(output)
    if isinstance(found, (tuple, list)):
        logits, chosen, kept = (*found, None, None)[:3]
        found = Routed(logits, chosen, kept)
    if not isinstance(found, Routed):
        return None
    if found.logits is not None and (
        not found.logits.is_floating_point() or found.logits.shape[-1:] != (experts,)
    ):
        return None
    if found.chosen is not None and (not _integers(found.chosen) or found.chosen.dim() == 0):
        return None
    if found.kept is not None and (found.chosen is None or found.kept.shape != found.chosen.shape):
        return None
    if found.chosen is None and found.loads is None and found.logits is not None:
        if top_k is None or top_k > experts:
            return found
        return dataclasses.replace(found, chosen=found.logits.topk(top_k, dim=-1).indices)
    return found


def _integers(t: Tensor) -> bool:
    return not t.is_floating_point() and not t.is_complex()


def plain(output: Any, experts: int = 0) -> Optional[Routed]:
    given = output.values() if isinstance(output, dict) else output
    given = given if isinstance(output, (tuple, list, dict)) else (output,)
    tensors = [t for t in given if isinstance(t, Tensor) and t.dim() > 0]
    logits = next((t for t in tensors if t.is_floating_point() and t.shape[-1] == experts), None)
    chosen = next((t for t in tensors if _integers(t) and t.dtype != torch.bool), None)
    masks = [t for t in tensors if t.dtype == torch.bool and t.shape[-1] == experts]
    if masks:  # Megatron-Core's: what is beside its map are no logits.
        return Routed(loads=masks[0].reshape(-1, experts).sum(0))
    return None if logits is None and chosen is None else Routed(logits, chosen)


def _switch(output: Any) -> Routed:
    """One expert for a token; its mask is 0 where there was no room."""
    mask, _, logits = output[:3]
    got = mask.sum(-1, keepdim=True)
    best = logits.argmax(-1, keepdim=True)
    return Routed(logits, torch.where(got > 0, mask.argmax(-1, keepdim=True), best), got)


def _nllb(output: Any) -> Routed:
    """At most two for a token, and those alone that had room."""
    _, weights, logits = output[:3]
    return Routed(logits, loads=(weights.reshape(-1, weights.shape[-1]) != 0).sum(0))


def _jetmoe(output: Any) -> Routed:
    return Routed(output[4], loads=output[3])


def _llama4(output: Any) -> Routed:
    return Routed(output[1])


def _zaya(output: Any) -> Routed:
    """Its last expert does nothing, and is told as the first one with the weight 0."""
    logits, weights, chosen = output[:3]
    return Routed(logits, torch.where(weights != 0, chosen, logits.shape[-1] - 1))


def _of_probabilities(output: Any) -> Routed:
    return Routed(output[0].log(), output[2], peak=False)


_OTHERS: dict[str, Read] = {
    "SwitchTransformersTop1Router": _switch,
    "NllbMoeTop2Router": _nllb,
    "JetMoeTopKGating": _jetmoe,
    "Llama4Router": _llama4,
    "ZayaRouter": _zaya,
    "Gemma4TextRouter": _of_probabilities,
    "DiffusionGemmaTextRouter": _of_probabilities,
}
