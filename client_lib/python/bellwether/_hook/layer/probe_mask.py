"""A call's mask in the words of the probe, made in the backward on the device of its tensors.

Nothing here waits for a GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Optional

import torch
from torch import Tensor

from ..._kernels.probe import ProbeMask, Unsupported, sampled_rows, visible_keys
from ..calls.call import Mask
from . import mask_parts

SCORES_MAX = 1 << 28  # That a function is asked for at most, to find the keys that are seen.
_BLOCK = 1 << 24  # Of them at a time.
_POSITIONS = {"begins", "ends", "q_offsets", "k_offsets", "documents"}
_OF_EACH_SEQUENCE = ("begins", "ends", "documents", "tensor", "visible")


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Which rows the probe will take, and how it makes their scores."""

    scale: float
    rows: int
    seed: int


def first_sequences(mask: Mask, count: int, batch: int) -> Mask:
    """The mask of the first sequences of a call with `batch` of them."""
    cut: dict[str, Any] = {}
    for name, t in mask.tensors().items():
        whole = name != "tensor" or t.dim() == 4
        if name in _OF_EACH_SEQUENCE and whole and t.shape[0] == batch:
            cut[name] = t[:count]
    return dataclasses.replace(mask, **cut) if cut else mask


def probe_mask(
    mask: Mask, q: Tensor, k: Tensor, sampled: Sampled, cast: Optional[torch.dtype] = None,
    shared: bool = False,
) -> ProbeMask:  # fmt: skip
    """q, k  [batch, heads, tokens, dim], k with the heads that the function is given
    cast    what autocast makes of a floating mask
    shared  the next layers may have the same mask, and autograd knows what is written to it

    Raises Unsupported.
    """
    tensor = mask.tensor
    if tensor is not None:
        tensor = tensor[(None,) * (4 - tensor.dim())]
        if tensor.is_floating_point() and cast is not None:
            tensor = tensor.to(cast)
    found = ProbeMask(
        causal=mask.causal,
        top_left=mask.top_left,
        window_left=mask.left,
        window_right=mask.right,
        tensor=tensor,
        visible=mask.visible,
    )
    if mask.function is None:

        def parts() -> mask_parts.Parts:
            whole = _with_ranges(found, mask, q, k)
            return whole.ranges, _visible(whole, q, k)

        ranges, visible = mask_parts.of(mask, q, k.shape[2], cast, parts) if shared else parts()
        return _narrowed(found, ranges, visible)
    found = _with_ranges(found, mask, q, k)
    visible = mask.visible
    if visible is None and mask.hides:
        visible = _seen(mask, found, q, k)
    elif visible is None:
        visible = visible_keys(found, q, k.shape[2])
    added = _of_samples(mask.function, tensor, q, k, sampled)
    return dataclasses.replace(found, tensor=added, by_sample=True, visible=visible)


def _with_ranges(found: ProbeMask, mask: Mask, q: Tensor, k: Tensor) -> ProbeMask:
    if _POSITIONS.isdisjoint(mask.tensors()) and mask.chunk is None:
        return found
    return _narrowed(found, _ranges(mask, q.shape[2], k.shape[2], q.device), found.visible)


def _narrowed(found: ProbeMask, ranges: Optional[Tensor], visible: Optional[Tensor]) -> ProbeMask:
    top_left = found.top_left and ranges is None  # Ranges say where the diagonal is.
    return dataclasses.replace(found, top_left=top_left, ranges=ranges, visible=visible)


def _visible(found: ProbeMask, q: Tensor, k: Tensor) -> Optional[Tensor]:
    if found.visible is not None or (found.ranges is None and found.tensor is None):
        return found.visible  # The kernel knows V of the plain forms.
    return visible_keys(found, q, k.shape[2])


def _ranges(mask: Mask, q_len: int, k_len: int, device: torch.device) -> Tensor:
    """int32 [batch or 1, rows, 3]: the first key of a row, one behind the last, the diagonal."""
    row = torch.arange(q_len, dtype=torch.int64, device=device)[None]
    begin, end = torch.zeros_like(row), torch.full_like(row, k_len)
    diagonal = row if mask.top_left else row + (k_len - q_len)
    if mask.q_offsets is not None or mask.k_offsets is not None:
        begin, end, diagonal = _documents_at(mask, row)
    if mask.documents is not None:
        if q_len != k_len:
            raise Unsupported("documents of other queries than keys: not measured")
        of = mask.documents.to(device).contiguous()
        begin = torch.maximum(begin, torch.searchsorted(of, of))
        end = torch.minimum(end, torch.searchsorted(of, of, right=True))
    first = torch.zeros_like(row) if mask.begins is None else _column(mask.begins, device)
    last = torch.full_like(row, k_len) if mask.ends is None else _column(mask.ends, device)
    begin, end = torch.maximum(begin, first), torch.minimum(end, last)
    if mask.padded_rows:
        end = torch.where((diagonal >= first) & (diagonal < last), end, begin)
    if mask.chunk is not None:
        chunk = first + (diagonal - first).div(mask.chunk, rounding_mode="floor") * mask.chunk
        begin, end = torch.maximum(begin, chunk), torch.minimum(end, chunk + mask.chunk)
    whole = torch.zeros_like(begin + end)
    return torch.stack([part + whole for part in (begin, end, diagonal)], -1).to(torch.int32)


def _column(of: Tensor, device: torch.device) -> Tensor:
    return of.to(device=device, dtype=torch.int64).reshape(-1, 1)


def _documents_at(mask: Mask, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First key, end and diagonal of each row's document; none behind the last document."""
    in_q = mask.q_offsets if mask.q_offsets is not None else mask.k_offsets
    in_k = mask.k_offsets if mask.k_offsets is not None else mask.q_offsets
    assert in_q is not None and in_k is not None
    in_q, in_k = (x.to(device=row.device, dtype=torch.int64).contiguous() for x in (in_q, in_k))
    document = torch.searchsorted(in_q, row, right=True) - 1
    outside = (document < 0) | (document >= in_q.shape[0] - 1)
    document = document.clamp(0, in_q.shape[0] - 2)
    begin, end = in_k[document], in_k[document + 1]
    beside = begin - in_q[document] if mask.top_left else end - in_q[document + 1]
    return begin, torch.where(outside, begin, end), row + beside


def _seen(mask: Mask, rest: ProbeMask, q: Tensor, k: Tensor) -> Tensor:
    """[batch, heads, keys]: the keys that some row sees, where a function decides it."""
    q = q[:, :1] if mask.heads_alike else q
    batch, heads, q_len = q.shape[:3]
    k_len = k.shape[2]
    if batch * heads * q_len * k_len > SCORES_MAX:
        raise Unsupported(f"a mask's function of more than {SCORES_MAX} scores: not measured")
    assert mask.function is not None
    ranges = _ranges(mask, q_len, k_len, q.device)
    step = max(1, _BLOCK // (batch * heads * k_len))
    parts = []
    for first in range(0, q_len, step):
        last = min(first + step, q_len)
        row = torch.arange(first, last, dtype=torch.int64, device=q.device)
        scores = torch.zeros(
            batch, heads, last - first, k_len, dtype=torch.float32, device=q.device
        )
        added = mask.function(row.expand(batch, heads, -1), scores)
        if rest.tensor is not None:
            whole = rest.tensor.shape[2] == 1
            added = _with(added, rest.tensor if whole else rest.tensor[:, :, first:last])
        part = dataclasses.replace(
            rest, top_left=False, ranges=ranges[:, first:last], tensor=added, visible=None
        )
        parts.append(visible_keys(part, q[:, :, first:last], k_len))
    return torch.stack(parts).any(0)


def _with(added: Tensor, tensor: Tensor) -> Tensor:
    """What both parts of a mask add to the scores."""
    if tensor.dtype == torch.bool:
        return added.masked_fill(~tensor, -torch.inf)
    return added + tensor


def _of_samples(
    function: Any, tensor: Optional[Tensor], q: Tensor, k: Tensor, sampled: Sampled
) -> Tensor:
    """What is added to the scores of the sampled rows [batch, heads, rows, keys]."""
    rows = sampled_rows(q.shape[0], q.shape[1], q.shape[2], sampled.rows, sampled.seed, 0, q.device)
    picked = q.gather(2, rows[..., None].expand(-1, -1, -1, q.shape[3])).float()
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1).float()
    added: Tensor = function(rows, sampled.scale * picked @ keys.mT)
    if tensor is None:
        return added
    whole = tensor.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return _with(added, whole.gather(2, rows[..., None].expand(-1, -1, -1, k.shape[2])))
