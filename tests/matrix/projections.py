"""Where W_Q and W_K of a head lie in the weights of an attention module, written by hand for each
kind of module: [heads, head_dim, width] and [key heads, head_dim, width], in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor, nn

from definitions import Call

Pair = tuple[Tensor, Tensor]
# (the module, query heads, key heads, dimension of a head)
Reader = Callable[[nn.Module, int, int, int], Optional[Pair]]

_SEPARATE = (
    ("q_proj", "k_proj"),
    ("query", "key"),
    ("q_lin", "k_lin"),
    ("q", "k"),
    ("to_q", "to_k"),
)
_FUSED = ("c_attn", "qkv_proj", "query_key_value", "Wqkv", "qkv")


def _matrix(linear: nn.Module) -> Tensor:
    """[out, in]; Conv1D of GPT-2 keeps it the other way round."""
    weight = linear.weight.detach().double()  # type: ignore[operator,union-attr]
    return weight.mT if type(linear).__name__ == "Conv1D" else weight


def _heads(rows: Tensor, heads: int) -> Tensor:
    return rows.reshape(heads, -1, rows.shape[-1])


def separate(module: nn.Module, heads: int, kv_heads: int, dim: int) -> Optional[Pair]:
    for q, k in _SEPARATE:
        if hasattr(module, q) and hasattr(module, k):
            wq, wk = (_matrix(getattr(module, name)) for name in (q, k))
            return _heads(wq, heads), _heads(wk, kv_heads)
    return None


def _only_fused(module: nn.Module) -> Tensor:
    return _matrix(next(getattr(module, name) for name in _FUSED if hasattr(module, name)))


def fused(module: nn.Module, heads: int, kv_heads: int, dim: int) -> Optional[Pair]:
    """All queries, then all keys, then all values."""
    q, k, _ = _only_fused(module).split([heads * dim, kv_heads * dim, kv_heads * dim])
    return _heads(q, heads), _heads(k, kv_heads)


def by_head(module: nn.Module, heads: int, kv_heads: int, dim: int) -> Optional[Pair]:
    """Query, key and value of head 0, then those of head 1."""
    by = _heads(_only_fused(module), heads)
    return by[:, :dim], by[:, dim : 2 * dim]


def gated(module: nn.Module, heads: int, kv_heads: int, dim: int) -> Optional[Pair]:
    """A head's query, then its gate."""
    found = separate(module, heads, kv_heads, dim)
    return found and (found[0][:, :dim], found[1])


def latent(module: nn.Module, heads: int, kv_heads: int, dim: int) -> Optional[Pair]:
    """The second projections of multi-head latent attention: of queries and keys the rows that
    are not rotated, as keys have no others of their own; of keys and values the keys' part."""
    part: int = module.qk_nope_head_dim  # type: ignore[assignment]
    wq = _heads(_matrix(module.q_b_proj), heads)  # type: ignore[arg-type]
    both = _heads(_matrix(module.kv_b_proj), heads)  # type: ignore[arg-type]
    return wq[:, :part], both[:, :part]


def sigma(weight: Tensor) -> Tensor:
    return torch.linalg.svdvals(weight.cpu())[:, 0]


def sigmas(
    reader: Reader, model: nn.Module, parts: list[list[Call]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each module that called attention the spectral norms of W_Q and W_K, by head."""
    found = {}
    for call in (call for part in parts for call in part):
        if call.module in found:
            continue
        module = model.get_submodule(call.module)
        pair = reader(module, call.q.shape[1], call.kv_heads, call.q.shape[3])
        if pair is not None:
            found[call.module] = sigma(pair[0]), sigma(pair[1])
    return found
