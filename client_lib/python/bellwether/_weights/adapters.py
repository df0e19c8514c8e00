"""Low-rank adapters of a projection: what a layer of LoRA or DoRA adds to the weight of its base.

Known by the structure of peft's layers, and of those with a single adapter (loralib's, LitGPT's,
torchtune's); none is imported here.  An adapter that is not understood is refused: the base alone
is not what the model computes with.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Optional

from torch import Tensor, nn

from .parametrized import attribute


class Unreadable(Exception):
    """A matrix cannot be read now; the text says why."""


class NotWhole(Unreadable):
    """It is, or parts of it are, elsewhere at this time."""


@dataclasses.dataclass(frozen=True)
class LowRank:
    """scale * up @ down, added to the base.  With a magnitude the rows of the sum of both are
    brought to that length: what is added then is what the sum differs from the base by."""

    down: Tensor  # [rank, width]
    up: Tensor  # [rows, rank]
    scale: float
    magnitude: Optional[Tensor]  # [rows]


def _matrix(holder: Any, name: str, dims: int) -> Optional[Tensor]:
    try:
        return _whole(holder[name], dims)
    except (KeyError, TypeError, AttributeError):
        return None


def _whole(item: Any, dims: int) -> Optional[Tensor]:
    weight = item if isinstance(item, Tensor) else attribute(item, "weight")
    if not isinstance(weight, Tensor):
        return None
    local = getattr(weight, "to_local", None)
    weight = weight.detach() if local is None else local().detach()
    return weight if weight.dim() == dims else None


def _of_adapter(layer: Any, name: str) -> LowRank:
    kind = type(layer).__name__
    down, up = _matrix(layer.lora_A, name, 2), _matrix(layer.lora_B, name, 2)
    scale = layer.scaling.get(name)
    if down is None or up is None or not isinstance(scale, (int, float)):
        raise Unreadable(
            f"the adapter {name} of a {kind} has no matrices of low rank that are whole"
        )
    variant = getattr(layer, "lora_variant", {}).get(name)
    with_magnitude = variant is not None or bool(getattr(layer, "use_dora", {}).get(name))
    if not with_magnitude:
        return LowRank(down, up, float(scale), None)
    if variant is not None and not type(variant).__name__.startswith("DoraLinear"):
        raise Unreadable(f"{type(variant).__name__} as an adapter is not known")
    magnitude = _matrix(layer.lora_magnitude_vector, name, 1)
    if magnitude is None:
        raise Unreadable(f"the adapter {name} of a {kind} has no magnitude that is whole")
    return LowRank(down, up, float(scale), magnitude)


def _active(layer: Any) -> list[str]:
    if getattr(layer, "disable_adapters", False):
        return []
    names = getattr(layer, "active_adapters", ())
    return [names] if isinstance(names, str) else list(names)


_SINGLE = frozenset({"lora_a", "lora_b", "lora_dropout"})


def _number(module: nn.Module, name: str) -> Optional[float]:
    value = getattr(module, name, None)
    return float(value) if isinstance(value, (int, float)) else None


def _single(module: nn.Module, own: dict[str, Any]) -> Optional[tuple[nn.Module, list[LowRank]]]:
    """Of a projection with one adapter beside its weight, or beside the projection that it holds.
    own  its children and parameters by their names, in small letters"""
    others = own.keys() - _SINGLE
    if any("lora" in name or "magnitude" in name for name in others):
        return None
    inner = [own[n] for n in others if isinstance(getattr(own[n], "weight", None), Tensor)]
    base = module if "weight" in own else inner[0] if len(inner) == 1 else None
    down, up = (_whole(own.get(name), 2) for name in ("lora_a", "lora_b"))
    alpha, rank, scale = (_number(module, name) for name in ("alpha", "rank", "scaling"))
    if scale is None and alpha is not None and rank:
        scale = alpha / rank
    weight = None if base is None else _whole(base, 2)
    if base is None or weight is None or down is None or up is None or scale is None:
        return None
    fits = (up.shape[0], down.shape[1]) == weight.shape and up.shape[1] == down.shape[0]
    if not fits or getattr(module, "fan_in_fan_out", False):
        return None
    without = getattr(module, "merged", False) or getattr(module, "disabled", False)
    return base, [] if without else [LowRank(down, up, scale, None)]


def split(module: nn.Module) -> tuple[nn.Module, list[LowRank]]:
    """(the module with the base's weight, what is added to that).  Raises Unreadable."""
    saved = getattr(module, "modules_to_save", None)
    original = getattr(module, "original_module", None)
    if isinstance(saved, nn.ModuleDict) and isinstance(original, nn.Module):
        trained = [saved[name] for name in _active(module) if name in saved]
        return trained[-1] if trained else original, []
    base = getattr(module, "base_layer", None)
    if not isinstance(base, nn.Module):
        parts = (*module.named_children(), *module.named_parameters(recurse=False))
        own = {name.lower(): part for name, part in parts}
        found = _single(module, own) if "lora_a" in own else None
        if found is not None:
            return found
        if any("lora" in name for name in own):
            raise Unreadable(f"{type(module).__name__} as an adapter is not known")
        return module, []
    if isinstance(getattr(base, "base_layer", None), nn.Module):
        raise Unreadable("adapters of adapters")
    if not all(hasattr(module, name) for name in ("lora_A", "lora_B", "scaling")):
        raise Unreadable(f"{type(module).__name__} as an adapter is not known")
    if getattr(module, "merged", False):
        return base, []  # The base has them inside.
    used = [name for name in _active(module) if name in module.lora_A]  # type: ignore[operator]
    return base, [_of_adapter(module, name) for name in used]
