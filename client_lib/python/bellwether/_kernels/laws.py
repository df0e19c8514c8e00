"""The laws of attention and its shadow check on torch tensors: attention_laws.h is the
specification.

As in probe.py no tensor is kept and none is changed, and a call runs where its tensors are.
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any, Optional

import torch
from torch import Tensor

from .._native import c_api
from .probe import ProbeMask, Sums, call, call_params, tensor4

ARITHMETICS = {
    "fused": c_api.LAW_FUSED,
    "composed": c_api.LAW_COMPOSED,
    "accumulated": c_api.LAW_ACCUMULATED,
}
LAWS = ("a1", "a2", "a3", "a4")
DEVICES = frozenset({"cpu", "cuda"})


@dataclasses.dataclass(frozen=True, eq=False)
class Graded:
    """One call whose backward is over.

    q, o, d_o, dq [batch, heads, tokens, dim]; k, v, dk, dv [batch, kv_heads, tokens, dim], or with
    `group` every key head repeated that many times.  All of one type.  sinks [heads].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    d_o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    scale: float
    mask: ProbeMask
    group: int = 1
    softcap: float = 0.0
    sinks: Optional[Tensor] = None
    arithmetic: str = "fused"  # How the kernel rounds: a name of ARITHMETICS.


def laws_of(of: Graded, rows: int) -> tuple[str, ...]:
    """Those of LAWS that add_laws() writes for this call."""
    if of.q.dtype == torch.float32:
        return ()
    left_out = {"a1"} if of.softcap else set()
    if of.sinks is not None and 0 < rows < of.q.shape[2]:
        left_out |= {"a1", "a2"}
    return tuple(law for law in LAWS if law not in left_out)


def _of_one_type(of: Graded) -> None:
    for name in ("k", "v", "o", "d_o", "dq", "dk", "dv"):
        dtype = getattr(of, name).dtype
        if dtype != of.q.dtype:
            raise ValueError(f"{name} is {dtype}, must be {of.q.dtype} as q is")


def _added(of_keys: Tensor, group: int) -> Tensor:
    """The gradients of repeated keys belong to one key."""
    if group == 1:
        return of_keys
    batch, heads, tokens, dim = of_keys.shape
    of_group = of_keys.reshape(batch, heads // group, group, tokens, dim)
    return of_group.sum(2, dtype=torch.float32).to(of_keys.dtype)


def _run(name: str, kind: Any, sums: Sums, of: Graded, rows: int, seed: int, **more: Any) -> bool:
    """Whether it was called for this step, not captured into a CUDA graph."""
    _of_one_type(of)
    with sums.memory.running():
        told, kept = call_params(
            sums, of.q, of.k, of.v, of.o, of.d_o, scale=of.scale, mask=of.mask, rows=rows,
            seed=seed, group=of.group, softcap=of.softcap, sinks=of.sinks,
        )  # fmt: skip
        params = c_api.struct(kind, arithmetic=ARITHMETICS[of.arithmetic], **more)
        params.call = ctypes.pointer(told)
        gradients = (of.dq, _added(of.dk, of.group), _added(of.dv, of.group))
        for field, tensor in zip(("d_q", "d_k", "d_v"), gradients):
            view, keep = tensor4(tensor)
            setattr(params, field, view)
            kept.append(keep)
        call(name, params)
    del kept
    return told.gate is None


def add_laws(sums: Sums, of: Graded, *, rows: int, seed: int) -> None:
    """Adds the laws of one call, and the sums of its gradients, to `sums`.

    rows, seed: of the rows that what roundings add is found from, as in add_probe().  Raises
    ValueError for a mask, a type or sinks that do not fit, KernelError for what the library
    refuses, and Unsupported where it has no such kernel.
    """
    counted = _run(
        "bw_attention_laws", c_api.AttentionLawsParams, sums, of, rows, seed,
        stat_stride=sums.heads, out=sums.address(c_api.LAW_STATS[0]),
        kv_stat_stride=sums.kv_heads, kv_out=sums.address(c_api.LAW_KV_STATS[0]),
    )  # fmt: skip
    if counted:
        for law in (*laws_of(of, rows), "sums"):
            sums.lawful[law] += 1


def add_shadow(sums: Sums, of: Graded, *, rows: int, keys: int, seed: int) -> None:
    """Adds what one call returned beside a reference: o and dq at the rows that add_probe()
    samples, dk and dv at `keys` of each key head.  0 keys: not those, which cost as the scores of
    all rows do.  Raises as add_laws()."""
    counted = _run(
        "bw_attention_shadow", c_api.AttentionShadowParams, sums, of, rows, seed,
        stat_stride=sums.heads, out=sums.address(c_api.SHADOW_STATS[0]),
        kv_stat_stride=sums.kv_heads, kv_out=sums.address(c_api.SHADOW_KV_STATS[0]),
        keys_per_head=keys, factors=sums.address(c_api.FACTOR_STATS[0]),
        kv_factors=sums.address(c_api.FACTOR_KV_STATS[0]),
    )  # fmt: skip
    if counted:
        for tensor in ("o", "dq", "dk", "dv") if keys else ("o", "dq"):
            sums.shadowed[tensor] += 1
