"""By what the ranks' gradients are divided when they are added up.

A rank's backward pass has the gradient of its own loss.  Of the whole batch's, which is the mean of
the ranks', that is as many times too large as there are ranks.
"""

from __future__ import annotations

import sys
from typing import Any, Optional

import torch
from torch import nn

# Hooks of DDP after which all ranks have the same gradients, the mean of theirs.
EQUAL_HOOKS = ("allreduce", "fp16_compress", "bf16_compress", "powerSGD", "quantization")


def ddp_around(model: nn.Module) -> Optional[Any]:
    """The DistributedDataParallel that a model is.  One around it shows while it runs."""
    kind = torch.nn.parallel.DistributedDataParallel
    return model if isinstance(model, kind) else getattr(kind, "_active_ddp_module", None)


def unequal_hook(wrapper: Any) -> Optional[str]:
    """The name of a communication hook of DDP that is none of EQUAL_HOOKS."""
    hooks = [getattr(hook, "__name__", "?") for hook, _ in getattr(wrapper, "_comm_hooks", ())]
    return next((h for h in hooks if not h.startswith(EQUAL_HOOKS) or "wrapper" in h), None)


def divided_by(model: nn.Module, wrapper: Optional[Any]) -> Optional[float]:
    """None where it is not known: an all-reduce of the job's own, FSDP1, hooks of the job's own.

    wrapper  the DDP around the model, if there is one
    """
    factors = {_of_fsdp(group) for group in fsdp_groups(model)}
    if wrapper is not None and unequal_hook(wrapper) is not None:
        return None
    if wrapper is not None:
        factors.add(float(torch.distributed.get_world_size(wrapper.process_group)))
    return factors.pop() if len(factors) == 1 else None


def fsdp_groups(model: nn.Module) -> list[Any]:
    """The groups of parameters that FSDP2 reduces together."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None:
        return []
    groups: list[Any] = []
    for module in model.modules():
        state = module._get_fsdp_state() if isinstance(module, kind) else None
        several = getattr(state, "_fsdp_param_groups", None)
        groups += several if several is not None else [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def adds_up_alike(group: Any) -> bool:
    """Whether a group's gradients come to all copies alike."""
    hook = getattr(group, "_all_reduce_hook", None)
    return hook is None and bool(getattr(group, "all_reduce_grads", True))


def _of_fsdp(group: Any) -> Optional[float]:
    if getattr(group, "_all_reduce_hook", None) is not None:
        return None
    factor = getattr(group, "gradient_divide_factor", None)
    if factor is None:
        mesh = group.mesh_info
        factor = getattr(mesh, "shard_mesh_size", 1) * getattr(mesh, "replicate_mesh_size", 1)
    return float(factor)
