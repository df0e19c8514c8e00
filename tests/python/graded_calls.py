"""Calls of attention with their gradients, and what the kernels library says of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from bellwether._attention.composed import composed
from bellwether._kernels.laws import Graded, add_laws, add_shadow
from bellwether._kernels.memory import HostMemory
from bellwether._kernels.probe import Sums
from bellwether._laws.call import GradedCall
from bellwether._native import c_api
from bellwether.tools.kernel_backends import Kernel, kernels
from bellwether.tools.kernel_cases import Inputs

from planted_kernels import planted

# How a kernel rounds, if not as fused ones do.  PyTorch's math computes halves in fp32.
ARITHMETICS = {"written out": "composed", "torch flash": "accumulated"}

SMALLEST = torch.finfo(torch.float32).tiny


def planted_kernel(fault: str) -> Kernel:
    function = planted(fault)

    def run(inputs: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = function(q, k, v, inputs.mask, inputs.causal)
        return result

    return Kernel(fault or "sound", run, "")


def written_out() -> Kernel:
    """Attention out of matrix products in the tensors' type."""

    def run(inputs: Inputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = inputs.mask
        if inputs.causal:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return composed(q, k, v, scale=inputs.scale, mask=mask)

    return Kernel("written out", run, "")


def sound_kernels() -> list[Kernel]:
    """Of PyTorch, ours, and others that are known to be right, for CPUs."""
    names = ("torch math", "torch flash", "bellwether fa", "bellwether hp")
    found = [kernel for kernel in kernels(torch.device("cpu")) if kernel.name in names]
    return [*found, written_out(), planted_kernel("")]


def given(call: GradedCall, arithmetic: str = "fused") -> Graded:
    return Graded(
        call.q, call.k, call.v, call.o, call.d_o, call.dq, call.dk, call.dv, call.scale, call.mask,
        softcap=call.softcap, sinks=call.sinks, arithmetic=arithmetic,
    )  # fmt: skip


def laws_rows(of: Graded, kv_heads: int, rows: int, seed: int = 3) -> dict[str, Tensor]:
    """Each row that add_laws() writes, in fp64."""
    memory = HostMemory()
    sums = Sums(memory, of.q.shape[1], kv_heads)
    add_laws(sums, of, rows=rows, seed=seed)
    copy = memory.collect(False)
    names = (*c_api.LAW_STATS, *c_api.LAW_KV_STATS)
    return {name: torch.tensor(sums.row(copy, name)).double() for name in names}


def shadow_rows(of: Graded, kv_heads: int, rows: int, keys: int) -> dict[str, Tensor]:
    """Each row that add_shadow() writes, in fp64."""
    memory = HostMemory()
    sums = Sums(memory, of.q.shape[1], kv_heads)
    add_shadow(sums, of, rows=rows, keys=keys, seed=3)
    copy = memory.collect(False)
    names = (*c_api.SHADOW_STATS, *c_api.SHADOW_KV_STATS,
             *c_api.FACTOR_STATS, *c_api.FACTOR_KV_STATS)  # fmt: skip
    return {name: torch.tensor(sums.row(copy, name)).double() for name in names}


def difference(of: dict[str, Tensor], law: str) -> Tensor:
    """[kv_heads, projections or 1]"""
    projected = law in ("a1", "a2")
    names = [f"law_{law}_{i}" for i in range(8)] if projected else [f"law_{law}"]
    return torch.stack([of[name] for name in names], -1)


def beyond(of: dict[str, Tensor], law: str) -> float:
    """The largest z of a law beyond roundings that are all alike."""
    rest = difference(of, law).abs() - of[f"law_{law}_alike"][:, None]
    variance = of[f"law_{law}_variance"].clamp(min=SMALLEST)  # As the server has it.
    return float((rest.clamp(min=0) / variance.sqrt()[:, None]).nan_to_num(0).max())


def with_scores(inputs: Inputs, largest: float) -> Inputs:
    """The same, with queries and keys so long that scores come to about that."""
    scores = (inputs.q.double() @ inputs.k.double().mT).abs().amax() * inputs.scale
    by = float((largest / scores).sqrt())
    q, k = ((t.double() * by).to(t.dtype) for t in (inputs.q, inputs.k))
    return dataclasses.replace(inputs, q=q, k=k)
