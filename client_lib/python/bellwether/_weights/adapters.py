"""Low-rank adapters of a projection: what a layer of LoRA or DoRA adds to the weight of its base.

Known by the structure of peft's layers, which are not imported here.  An adapter that is not
understood is refused: the base alone is not what the model computes with.
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
        item = holder[name]
    except (KeyError, TypeError, AttributeError):
        return None
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


def split(module: nn.Module) -> tuple[nn.Module, list[LowRank]]:
    """(the module with the base's weight, what is added to that).  Raises Unreadable."""
    saved = getattr(module, "modules_to_save", None)
    original = getattr(module, "original_module", None)
    if isinstance(saved, nn.ModuleDict) and isinstance(original, nn.Module):
        trained = [saved[name] for name in _active(module) if name in saved]
        return trained[-1] if trained else original, []
    base = getattr(module, "base_layer", None)
    if not isinstance(base, nn.Module):
        own = [n for n, _ in (*module.named_children(), *module.named_parameters(recurse=False))]
        if any("lora" in name.lower() for name in own):
            raise Unreadable(f"{type(module).__name__} as an adapter is not known")
        return module, []
    if isinstance(getattr(base, "base_layer", None), nn.Module):
        raise Unreadable("adapters of adapters")
    if not all(hasattr(module, name) for name in ("lora_A", "lora_B", "scaling")):
        raise Unreadable(f"{type(module).__name__} as an adapter is not known")
    if getattr(module, "merged", False):
        return base, []  # The base has them inside.
    found = [name for name in _active(module) if name in module.lora_A]  # type: ignore[operator]
    return base, [_of_adapter(module, name) for name in found]
