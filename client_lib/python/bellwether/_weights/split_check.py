"""Whether the rows of a projection are those of the heads that they are taken for.

While the attention module runs for the first time, what its projections return is held for a
moment.  At the call of attention it is compared to the queries and keys that are given.  Rotary
positions keep the length of each head's vector, and a scale is the same for all heads.  So the
lengths must agree up to one factor a token, for all heads, in the right order.  Of queries that
are normalised head by head before the call, what their norm was given is compared instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn

from . import names
from .location import Location, Rows
from .projection import resolve

TOKENS = 16  # That are compared.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_TOLERANCE_16_BITS = 0.02
_VARIES = 4  # Lengths that vary by less than so many tolerances tell no head from another.


class Listening:
    """Hooks on some modules until the attention is called."""

    def __init__(self, modules: dict[str, nn.Module], norms: dict[str, nn.Module]) -> None:
        self.outputs: dict[str, Tensor] = {}
        self.normalised: dict[str, Tensor] = {}  # "q" or "k" -> what its norm was given.
        self._handles: list[Any] = []
        for path, module in modules.items():
            self._hook(module, self.outputs, path, of_output=True)
        for which, module in norms.items():
            self._hook(module, self.normalised, which, of_output=False)

    def _hook(self, module: nn.Module, into: dict[str, Tensor], key: str, of_output: bool) -> None:
        def heard(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            item = output if of_output else (args[0] if args else None)
            item = item[0] if isinstance(item, tuple) and item else item
            if type(item) is Tensor:
                into[key] = item.detach()

        self._handles.append(module.register_forward_hook(heard))

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.outputs.clear()
        self.normalised.clear()


def _module_of(holder: nn.Module, path: str) -> Optional[nn.Module]:
    item = resolve(holder, path)
    plain = isinstance(item, nn.Module) and not isinstance(item, torch.jit.ScriptModule)
    return item if plain else None  # type: ignore[return-value]


def listen(module: nn.Module, holder: nn.Module, paths: Sequence[str]) -> Optional[Listening]:
    """paths  of the projections that may be those of the attention `module`"""
    found = {path: _module_of(holder, path) for path in paths}
    modules = {path: m for path, m in found.items() if m is not None}
    if not modules:
        return None
    norms: dict[str, nn.Module] = {}
    for owner in (module, holder):
        for name, child in owner.named_children():
            for which, known in (("q", names.QUERY_NORMS), ("k", names.KEY_NORMS)):
                if names.plain(name) in known:
                    norms.setdefault(which, child)
    return Listening(modules, norms)


# ---- the comparison ----


def _spread(ratio: Tensor, dim: Optional[int]) -> float:
    """By how much the largest is above the smallest, at worst."""
    if dim is None:
        return float(ratio.max() / ratio.min() - 1)
    return float((ratio.amax(dim) / ratio.amin(dim) - 1).max())


def _agree(have: Tensor, want: Tensor, tolerance: float) -> Optional[bool]:
    """Whether lengths [tokens, heads] are the same up to a factor; None: they cannot tell."""
    if not bool((have > 0).all() & (want > 0).all() & have.isfinite().all()):
        return None
    ratio = want / have
    if have.shape[1] > 1:
        if _spread(have, 1) <= _VARIES * tolerance:
            return None
        return _spread(ratio, 1) <= tolerance
    if _spread(have, None) <= _VARIES * tolerance:
        return None
    return True if _spread(ratio, None) <= tolerance else None


def _tokens(item: Tensor, batch: int, tokens: int, chosen: Tensor) -> list[Tensor]:
    """[chosen tokens, rest] of what a projection returned, for each order that fits."""
    lead = item.shape[:-1]
    found = []
    if lead.numel() == batch * tokens:
        flat = item.flatten(0, -2)
        found.append(flat[chosen])
        if len(lead) == 2 and lead == (tokens, batch) and batch > 1 and tokens > 1:
            found.append(item.transpose(0, 1).flatten(0, 1)[chosen])
    return found


@dataclasses.dataclass(frozen=True)
class _Side:
    """The queries, or the keys, of a call: lengths that a right order of rows must have."""

    batch: int
    tokens: int
    chosen: Tensor
    vectors: list[Tensor]  # [chosen, heads, dim], as given and as their norm was given them.
    tolerance: float

    def verdict(self, outputs: dict[str, Tensor], rows: Rows) -> Optional[bool]:
        item = outputs.get(rows.path)
        if item is None or item.shape[-1] != rows.total:
            return None
        answers = []
        for flat in _tokens(item, self.batch, self.tokens, self.chosen):
            have = flat[:, rows.places(flat.device)].double().norm(dim=-1)
            for vectors in self.vectors:
                if vectors.shape[1] == have.shape[1] and vectors.shape[2] >= rows.dim:
                    want = vectors[..., : rows.dim].double().norm(dim=-1)
                    answers.append(_agree(have, want, self.tolerance))
        return True if True in answers else False if False in answers else None

    def by_search(self, outputs: dict[str, Tensor], path: str) -> Optional[Rows]:
        """The rows whose lengths go with those of each head over all tokens, where that is one
        block of rows for each."""
        item = outputs.get(path)
        if item is None:
            return None
        for flat in _tokens(item, self.batch, self.tokens, self.chosen):
            for vectors in self.vectors:
                dim = vectors.shape[2]
                if flat.shape[-1] % dim or len(flat) < 4:
                    continue
                have = flat.reshape(len(flat), -1, dim).double().norm(dim=-1)
                want = vectors.double().norm(dim=-1)
                ratio = want[:, :, None] / have[:, None, :]
                apart = ratio.amax(0) / ratio.amin(0) - 1  # [heads, blocks]
                fits = apart <= self.tolerance
                if bool((fits.sum(1) == 1).all()):
                    begins = tuple(int(block) * dim for block in fits.int().argmax(1))
                    return Rows(path, int(flat.shape[-1]), begins, dim)
        return None

    def mixed(self, outputs: dict[str, Tensor], rows: Rows) -> bool:
        """Whether all rows together have the length of all heads together, over all tokens: then
        they are those of the heads, in another order than was compared."""
        item = outputs.get(rows.path)
        heads = len(rows.begins)
        if item is None or item.shape[-1] != rows.total or rows.total != heads * rows.dim:
            return False
        for flat in _tokens(item, self.batch, self.tokens, self.chosen):
            have = flat.double().norm(dim=-1, keepdim=True)
            for vectors in self.vectors:
                if _agree(have, vectors.double().flatten(1).norm(dim=-1, keepdim=True),
                          self.tolerance):  # fmt: skip
                    return True
        return False


def _side(x: Tensor, before_norm: Optional[Tensor]) -> _Side:
    """x  [batch, heads, tokens, dim]"""
    batch, heads, tokens, dim = x.shape
    count = batch * tokens
    chosen = torch.arange(0, count, -(-count // TOKENS), device=x.device)
    vectors = [x.detach()[chosen // tokens, :, chosen % tokens]]
    if before_norm is not None and before_norm.numel() == x.numel():
        shape = tuple(before_norm.shape)
        if shape[-2:] == (heads, dim):
            vectors.append(before_norm.reshape(count, heads, dim)[chosen])
        elif shape == tuple(x.shape):
            vectors.append(before_norm[chosen // tokens, :, chosen % tokens])
    tolerance = _TOLERANCE.get(x.dtype, _TOLERANCE_16_BITS)
    return _Side(batch, tokens, chosen, vectors, tolerance)


@dataclasses.dataclass(frozen=True)
class Verdict:
    location: Optional[Location]  # None: no order of the rows that is known fits.
    checked: bool


def check(candidates: list[Location], heard: Listening, q: Tensor, k: Tensor) -> Verdict:
    """q [batch, heads, tokens, dim] and k [batch, kv_heads, tokens, dim] of the call."""
    sides = (
        _side(q, heard.normalised.get("q")),
        _side(k, heard.normalised.get("k")),
    )
    contradicted = False
    for place in candidates:
        answers = [
            side.verdict(heard.outputs, rows) for side, rows in zip(sides, (place.query, place.key))
        ]
        if True in answers and False not in answers:
            return Verdict(place, True)
        contradicted = contradicted or False in answers
    if not contradicted:
        return Verdict(candidates[0], False)
    first = candidates[0]
    query = sides[0].by_search(heard.outputs, first.query.path)
    key = sides[1].by_search(heard.outputs, first.key.path)
    if query is not None and key is not None:
        how = first.how.split(" ", 1)[1]
        return Verdict(Location(f"by its rows {how}", query, key), True)
    mixed = sides[0].mixed(heard.outputs, first.query) or sides[1].mixed(heard.outputs, first.key)
    # Where lengths do not go together at all, something between has changed them.
    unlike = query is None and key is None and not mixed
    return Verdict(first if unlike and first.sure else None, False)
