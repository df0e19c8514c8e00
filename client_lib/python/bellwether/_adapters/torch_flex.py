"""PyTorch's flex_attention, and transformers' way to it.

What a block mask and a change of the scores mean is asked of their own functions, at the rows that
are sampled.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .._hook.calls.call import VIEWS, AttentionCall, CallRead, Mask, Reader, first_of, with_first
from .arguments import Arguments, are_tensors, reader, scale_of
from .imported import compiled, imported

NAME = "flex_attention"
TRIED = ("torch 2.11.0", "torch 2.13.0", "transformers 5.17.0", "transformers 5.23.0")

_READ = (
    "query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse",
    "return_aux", "kernel_options",
)  # fmt: skip
_OPERATOR = "torch._higher_order_ops.flex_attention"
_TORCH = "torch.nn.attention.flex_attention"
_TRANSFORMERS = "transformers.integrations.flex_attention"


def functions() -> Iterator[tuple[Callable[..., Any], Reader]]:
    for function, its_reader in (
        (imported(_TORCH, "flex_attention"), read),
        (imported(_TRANSFORMERS, "flex_attention_forward"), read_transformers),
        (imported(_OPERATOR, "flex_attention"), read_operator),
    ):
        if function is not None:
            yield function, its_reader
    for around in compiled(imported(_TORCH, "flex_attention")):
        yield around, read


def _indexing() -> Any:
    """In it tensors can be indexed by tensors that vmap runs over."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def _at(mod: Callable[..., Tensor], rows: Tensor, keys: int, scores: Optional[Tensor]) -> Tensor:
    """A function of (score, batch, head, row, key), or of the last four, as [batch, heads, rows,
    keys]; rows [batch, heads, rows]."""
    score = () if scores is None else (scores,)
    first = (0,) * len(score)
    for places in ((None, None, None, 0), (None, None, 0, None), (None, 0, 0, None),
                   (0, None, 0, None)):  # fmt: skip
        mod = torch.vmap(mod, in_dims=(*first, *places))
    batch, heads, device = rows.shape[0], rows.shape[1], rows.device
    counted = (torch.arange(n, device=device, dtype=torch.int32) for n in (batch, heads, keys))
    b, h, k = counted
    with _indexing():
        return mod(*score, b, h, rows.to(torch.int32), k)


def _blocks(count: Tensor, index: Tensor, blocks: int) -> Tensor:
    """[batch, heads, blocks of rows, blocks of keys]: those that are listed."""
    listed = torch.arange(index.shape[-1], device=index.device) < count[..., None]
    dense = torch.zeros(*index.shape[:-1], blocks + 1, dtype=torch.bool, device=index.device)
    place = torch.where(listed, index, blocks).long()
    return dense.scatter_(-1, place, True)[..., :-1]


class Scores:
    """What a block mask, a function of the scores and tensors add to the scores."""

    def __init__(
        self, block_mask: Any, change: Optional[Callable[..., Tensor]], k_len: int
    ) -> None:
        self._block_mask, self._change, self._k_len = block_mask, change, k_len

    def mask(self) -> Mask:
        block_mask = self._block_mask
        if block_mask is None and self._change is None:
            return Mask()
        alike = block_mask is not None and block_mask.kv_num_blocks.shape[1] == 1
        return Mask(function=self, heads_alike=alike and self._change is None)

    def __call__(self, rows: Tensor, scores: Tensor) -> Tensor:
        added = torch.zeros_like(scores)
        if self._change is not None:
            added = _at(self._change, rows, self._k_len, scores) - scores
        if self._block_mask is not None:
            added = added.masked_fill(~self._allowed(rows), -torch.inf)
        return added

    def _allowed(self, rows: Tensor) -> Tensor:
        mask, keys = self._block_mask, self._k_len
        of_rows, of_keys = mask.BLOCK_SIZE
        key = torch.arange(keys, device=rows.device) // of_keys
        count = -(-keys // of_keys)

        def listed(number: Tensor, index: Tensor) -> Tensor:
            dense = _blocks(number, index, count)
            dense = dense[: rows.shape[0]].expand(rows.shape[0], rows.shape[1], -1, -1)
            block = (rows // of_rows)[..., None].expand(-1, -1, -1, count)
            return dense.gather(2, block)[..., key]

        allowed = listed(mask.kv_num_blocks, mask.kv_indices)
        allowed = allowed & _at(mask.mask_mod, rows, keys, None)
        if mask.full_kv_num_blocks is not None:
            allowed = allowed | listed(mask.full_kv_num_blocks, mask.full_kv_indices)
        return allowed


_added: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _is_added(key: Any, change: Any, device: Optional[torch.device] = None) -> bool:
    """Whether it adds the same to a score whatever that is, as far as one row tells.

    key  what stays the same for the same change
    """
    if key not in _added:
        _added[key] = _adds(change, device)
    return _added[key]


def _adds(change: Any, device: Optional[torch.device]) -> bool:
    try:
        row = torch.zeros(1, 1, 1, dtype=torch.int64, device=device)
        score = torch.ones(1, 1, 1, 1, device=device)
        at = [_at(change, row, 1, s * score) - s for s in (-8.0, 0.5, 8.0)]
        return all(torch.allclose(x, at[0], atol=1e-5) for x in at)
    except Exception:  # Its tensors may lie on a GPU.
        return False


@reader
def read(given: Arguments) -> CallRead:
    q, k, v = (given.get(name) for name in ("query", "key", "value"))
    if not are_tensors(4, q, k, v):
        return None
    other = given.unusual(_READ)
    unread = f"{other} given" if other is not None else None
    scale, wrong = scale_of(given.get("scale"), q.shape[-1])
    block_mask, change = given.get("block_mask"), given.get("score_mod")
    mask = Scores(block_mask, change, k.shape[2]).mask()
    view = VIEWS["bhtd"]
    with_lse = bool(given.get("return_lse")) or given.get("return_aux") is not None

    return AttentionCall(
        q, k, v, view, view, view, view, given.run("query", "key", "value"), scale, mask,
        cancels=change is None or _is_added(change, change, q.device),
        laws_lack="a gradient may come through its logsumexp" if with_lse else None,
        kernel=functools.partial(str, NAME),
        unread=unread or wrong,
        output=first_of,
        with_output=with_first,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """What the operator is given of a block mask."""

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Optional[Tensor]
    full_kv_indices: Optional[Tensor]
    BLOCK_SIZE: tuple[int, int]
    mask_mod: Callable[..., Tensor]


def _is_identity(graph: torch.fx.GraphModule) -> bool:
    """Whether it returns its first input."""
    nodes = list(graph.graph.nodes)
    result = nodes[-1].args[0]
    return (result[0] if isinstance(result, (tuple, list)) else result) is nodes[0]


def _uses_its_inputs(graph: torch.fx.GraphModule) -> bool:
    """(Without a mask it is new_ones() of one of them.)"""
    users = [n for node in graph.graph.nodes if node.op == "placeholder" for n in node.users]
    return not all("new_ones" in str(user.target) for user in users)


def read_operator(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CallRead:
    """The operator that torch.compile makes of flex_attention: (q, k, v, what changes the scores,
    block mask, scale)."""
    q, k, v, change, mask, scale = args
    (kv_num, kv, full_num, full), sizes = mask[2:6], mask[-3:-1]
    if not all(isinstance(size, int) for size in sizes) or not isinstance(kv, Tensor):
        return "a block mask that is not known here: not measured"
    scale, unread = scale_of(scale, q.shape[-1])
    view = VIEWS["bhtd"]
    blocks = None
    if min(sizes) < max(q.shape[2], k.shape[2]) or _uses_its_inputs(mask[-1].graph):
        blocks = _Blocks(kv_num, kv, full_num, full, sizes, mask[-1])
    scores = Scores(blocks, None if _is_identity(change.graph) else change, k.shape[2])
    return AttentionCall(
        q, k, v, view, view, view, view, function, scale, scores.mask(),
        cancels=_is_identity(change.graph) or _is_added(change.graph, change, q.device),
        kernel=functools.partial(str, NAME),
        unread=unread,
    )  # fmt: skip


@reader
def read_transformers(given: Arguments) -> CallRead:
    module, q, k, v, bias = (
        given.get(name) for name in ("module", "query", "key", "value", "attention_mask")
    )
    if not are_tensors(4, q, k, v):
        return None
    known = ("module", "query", "key", "value", "attention_mask", "scaling", "softcap", "s_aux",
             "position_bias")  # fmt: skip
    other = given.unusual(known)
    unread = f"{other} given" if other is not None else None
    scale, wrong = scale_of(given.get("scaling"), q.shape[-1])
    mask, sinks = _mask(bias, given.get("position_bias"), k.shape[2]), given.get("s_aux")
    view = VIEWS["bhtd"]

    return AttentionCall(
        q, k, v, view, view, view, VIEWS["bthd"], given.run("query", "key", "value"), scale,
        mask,
        softcap=float(given.get("softcap") or 0.0),
        sinks=sinks.detach().reshape(-1) if isinstance(sinks, Tensor) else None,
        kernel=functools.partial(str, NAME),
        module=module if isinstance(module, nn.Module) else None,
        unread=unread or wrong,
        output=first_of,
        with_output=with_first,
    )  # fmt: skip


def _mask(given: Any, position_bias: Optional[Tensor], k_len: int) -> Mask:
    """given  a block mask, or a tensor of which it takes the first head"""
    block_mask = given if given is not None and not isinstance(given, Tensor) else None
    bias = given[:, :1, :, :k_len].detach() if isinstance(given, Tensor) else None
    if block_mask is None and position_bias is None:
        return Mask() if bias is None else Mask(tensor=bias)
    if block_mask is None and bias is None and position_bias is not None:
        return Mask(tensor=position_bias.detach()[..., :k_len])

    def change(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if bias is not None:
            score = score + bias[b, 0, q, k]
        if position_bias is not None:
            score = score + position_bias[b, h, q, k]
        return score

    return Scores(block_mask, None if position_bias is None else change, k_len).mask()


for _reader in (read, read_transformers):
    _reader.inside_when_traced = True  # type: ignore[attr-defined]
