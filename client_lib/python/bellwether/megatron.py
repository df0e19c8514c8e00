"""Megatron-Core, by its documented interface.

    monitor = bellwether.attach(model, parallel=bellwether.megatron.parallel(model))

Its own DotProductAttention and that of Transformer Engine are read by themselves.  Before attach(),
wrap(model) tells of core attention of other classes that takes q [tokens, batch, heads, dim], k and
v with one head for each group, and returns [tokens, batch, heads * dim].
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ._adapters import functions
from ._hook.model.parallel import Parallel
from ._hook.patches.class_patches import own_forward
from ._hook.patches.wrap_attention import wrap_attention

_CLASSES = ("DotProductAttention", "TEDotProductAttention")
_LAYOUTS = {"sbhd": "sbhd", "bshd": "bthd"}


def _dropout(module: nn.Module) -> float:
    told = getattr(module, "attention_dropout", None)
    probability = told.p if isinstance(told, nn.Dropout) else told
    return float(probability) if isinstance(probability, (int, float)) else 0.0


def _mask(module: nn.Module) -> str:
    told: Any = getattr(module, "attn_mask_type", "causal")
    return str(getattr(told, "name", told))  # An enumeration there, a word in TransformerEngine.


def wrap(model: nn.Module) -> list[str]:
    """Wraps every core attention of the model that is not read by itself, and returns their names;
    packed ones ("thd") and unknown formats are left alone."""
    found: list[str] = []
    read = {function for function, _ in functions()}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] != "core_attention" and type(module).__name__ not in _CLASSES:
            continue
        if any(name.startswith(outer + ".") for outer in found):
            continue  # The kernel inside one that is wrapped.
        if any(own_forward(cls) in read for cls in type(module).__mro__):
            continue
        layout = _LAYOUTS.get(str(getattr(module, "qkv_format", "sbhd")))
        if layout is None:
            continue
        mask = _mask(module)
        scale = getattr(module, "softmax_scale", None)
        wrap_attention(
            module, layout=layout, causal=mask == "causal",
            masked=mask not in ("causal", "no_mask"),
            scale=float(scale) if isinstance(scale, (int, float)) else None,
            dropout=_dropout(module), kernel=type(module).__name__,
        )  # fmt: skip
        found.append(name)
    return found


def parallel(model: nn.Module) -> Parallel:
    """Where this process is, by megatron.core.parallel_state and the layers' own numbers."""
    from megatron.core import parallel_state as state

    numbers = [
        module.layer_number
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "core_attention" and hasattr(module, "layer_number")
    ]
    config = getattr(model, "config", None)
    layers = int(getattr(config, "num_layers", 0) or 0)
    return Parallel(
        tensor=(
            state.get_tensor_model_parallel_rank(),
            state.get_tensor_model_parallel_world_size(),
        ),
        pipeline=(
            state.get_pipeline_model_parallel_rank(),
            state.get_pipeline_model_parallel_world_size(),
        ),
        context=(
            state.get_context_parallel_rank(),
            state.get_context_parallel_world_size(),
        ),
        data=(state.get_data_parallel_rank(), state.get_data_parallel_world_size()),
        first_layer=min(numbers) - 1 if numbers else 0,  # They count all stages, from 1.
        layers=layers or len(numbers),
    )
