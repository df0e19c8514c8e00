"""The inputs on which doctor tries kernels of attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from .._kernels.probe import ProbeMask

# Scores of a case, over all its heads: the fp64 reference holds a few of each.
SCORES_MAX = {"cpu": 1 << 20, "cuda": 1 << 26}
TOKENS = {"cpu": 160, "cuda": 1024}  # Of the default list.


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a model asks of its attention."""

    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    tokens: int = 160
    causal: bool = True


@dataclasses.dataclass(frozen=True)
class Case:
    """One input.

    values   "normal"; "broad": rows see all keys alike, values and gradients have one sign.
             "peaked": rows see few keys.  "common-mode": keys share a large part.  "negative":
             all scores of key head 0 are near -120, so that exp(-logsumexp) is beyond fp32.
             Nothing changes by that in exact arithmetic; a kernel that scores the unused part of
             its last tile with 0 makes NaN of it.
    mask     None.  "causal": as a bool tensor.  "rows": some rows see no key, bool.  "minimum":
             the same, where the least number of the type is added to the scores.
    strided  q, k, v and the gradient of the output are views of packed tensors.
    """

    name: str
    shape: Shape
    batch: int = 1
    more_keys: int = 0
    values: str = "normal"
    mask: Optional[str] = None
    strided: bool = False
    sinks: bool = False

    @property
    def k_len(self) -> int:
        return self.shape.tokens + self.more_keys

    def __str__(self) -> str:
        s = self.shape
        kv = "" if s.kv_heads == s.heads else f" ({s.kv_heads} of keys)"
        dtype = str(s.dtype).removeprefix("torch.")
        causal = ", causal" if s.causal and self.mask is None else ""
        tokens = f"{s.tokens}" + (f" x {self.k_len} keys" if self.more_keys else " tokens")
        return (
            f"{self.name} ({dtype}, {self.batch} x {s.heads} heads{kv} of {s.head_dim}, "
            f"{tokens}{causal})"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """What a kernel is given, [batch, heads or kv_heads, tokens, head_dim]."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_o: Tensor
    scale: float
    causal: bool  # Without a mask, and with as many keys as queries.
    mask: Optional[Tensor]
    sinks: Optional[Tensor]

    def seen(self) -> ProbeMask:
        """The same mask in the words of the laws."""
        return ProbeMask(causal=self.causal, tensor=self.mask)


def _mask(case: Case, device: torch.device) -> Optional[Tensor]:
    """[batch, 1, q_len, k_len]: causal; but for "causal" with padding at the end of the first
    sequence, and rows of several tiles that see nothing."""
    if case.mask is None:
        return None
    q_len, k_len = case.shape.tokens, case.k_len
    shown = torch.ones(case.batch, 1, q_len, k_len, dtype=torch.bool, device=device)
    if case.shape.causal:
        shown = shown.tril(k_len - q_len)
    if case.mask == "causal":
        return shown
    shown[0, :, :, k_len - k_len // 5 :] = False
    shown[0, :, : q_len // 10] = False
    shown[-1, :, q_len // 2 : q_len // 2 + 3] = False
    if case.mask == "rows":
        return shown
    added = torch.zeros(shown.shape, dtype=case.shape.dtype, device=device)
    return added.masked_fill(~shown, torch.finfo(case.shape.dtype).min)


def make(case: Case, device: torch.device, seed: int = 1) -> Inputs:
    """The same numbers on every device and in every run."""
    s, chance = case.shape, torch.Generator().manual_seed(seed)

    def drawn(heads: int, tokens: int) -> Tensor:
        shape = (case.batch, heads, tokens, s.head_dim)
        return torch.randn(shape, generator=chance, dtype=torch.float32)

    q, d_o = drawn(s.heads, s.tokens), drawn(s.heads, s.tokens)
    k, v = drawn(s.kv_heads, case.k_len), drawn(s.kv_heads, case.k_len)
    if case.values == "broad":
        q, v, d_o = q * 0.1, v.abs() * 0.5 + 0.5, d_o.abs() * 0.1 + 0.1
    elif case.values == "peaked":
        q, k = q * 3, k * 3
    elif case.values == "common-mode":
        q, k = q * 0.3, k + 8 * drawn(s.kv_heads, 1)[:1]
    elif case.values == "negative":
        q[:, : s.heads // s.kv_heads, :, 0] = 1
        k[:, 0, :, 0] = -120 * s.head_dim**0.5
    q, k, v, d_o = (t.to(device, s.dtype) for t in (q, k, v, d_o))
    if case.strided:  # Heads lie beside each other, as a projection writes them.
        q, k, v, d_o = (
            torch.cat((t.transpose(1, 2), t.transpose(1, 2)), -1)[..., : s.head_dim].transpose(1, 2)
            for t in (q, k, v, d_o)
        )
    sinks = torch.linspace(-1, 2, s.heads, device=device) if case.sinks else None
    causal = s.causal and case.mask is None and not case.more_keys
    return Inputs(q, k, v, d_o, s.head_dim**-0.5, causal, _mask(case, device), sinks)


def of_shape(shape: Shape) -> list[Case]:
    """All kinds of input, in one shape."""
    grouped = dataclasses.replace(shape, heads=2 * shape.heads)
    full = dataclasses.replace(shape, causal=False)
    tail = dataclasses.replace(shape, tokens=shape.tokens - shape.tokens // 5 + 1)
    half = dataclasses.replace(shape, tokens=max(64, (shape.tokens - 64) // 128 * 128 + 64))
    return [
        Case("normal", shape),
        Case("fully masked rows", shape, batch=2, mask="rows"),
        Case("broad", shape, values="broad"),
        Case("peaked", shape, values="peaked"),
        Case("common-mode keys", full, values="common-mode"),
        Case("rows at the type's minimum", shape, batch=2, mask="minimum"),
        Case("tail of a tile", tail),
        Case("scores of a head near -120", half, values="negative", mask="causal"),
        Case("more keys than queries", dataclasses.replace(tail, causal=False), more_keys=37),
        Case("batch", tail, batch=3),
        Case("strided", shape, batch=2, strided=True),
        Case("grouped", grouped),
        Case("sinks", full, sinks=True),
    ]


def default_cases(device: torch.device) -> list[Case]:
    """Without a model: all kinds in bf16 and 64 elements a head, and other types and sizes."""
    shape = Shape(tokens=TOKENS[device.type])
    cases = of_shape(shape)
    for dim in (32, 80, 128, 256):
        cases.append(Case("normal", dataclasses.replace(shape, head_dim=dim)))
    half = dataclasses.replace(shape, dtype=torch.float16)
    cases += [Case("normal", half), Case("peaked", half, values="peaked"),
              Case("broad", half, values="broad"),
              Case("normal", dataclasses.replace(shape, dtype=torch.float32))]  # fmt: skip
    return cases


def shortened(shape: Shape, device: torch.device) -> Shape:
    """With so many tokens that the reference has time."""
    most = int((SCORES_MAX[device.type] / max(1, shape.heads)) ** 0.5)
    return dataclasses.replace(shape, tokens=max(32, min(shape.tokens, most)))


def cases_of(shapes: Sequence[Shape], device: torch.device) -> list[Case]:
    """Of a model's layers: each kind of input for all shapes, before the next kind."""
    distinct = list(dict.fromkeys(shortened(shape, device) for shape in shapes))
    by_kind = zip(*(of_shape(shape) for shape in distinct))
    return [case for kind in by_kind for case in kind]
