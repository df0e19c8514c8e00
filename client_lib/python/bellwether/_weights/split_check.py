"""Whether the rows of a projection are those of the heads that they are taken for.

While the attention module runs for the first time, some tokens of what its projections return are
held for a moment.  At the call of attention they are compared to the queries and keys that it is
given.  Rotary positions keep the length of each head's vector, and a scale is the same for all
heads.  So the lengths must agree up to one factor a token, for all heads, in the right order.  That
also finds the projections of a module whose names are not known.  Of queries that
are normalised head by head before the call, what their norm was given is compared instead.
Where the same vector is added for all tokens, what differs between tokens still agrees.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .._util.guard import harmless
from . import names
from .location import Location, Rows
from .projection import is_pointwise, resolve

TOKENS = 16  # That are compared.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_TOLERANCE_16_BITS = 0.02
_VARIES = 4  # Lengths that vary by less than so many tolerances tell no head from another.


class Listening:
    """Hooks on some modules while the attention module runs forward."""

    def __init__(
        self, modules: dict[str, nn.Module], norms: dict[str, nn.Module],
        beside: Optional[dict[str, nn.Module]] = None,
    ) -> None:  # fmt: skip
        """beside  norms that run behind the module, each heard once"""
        # How many tokens a projection has returned, and some of them: [tokens, rows].
        self.outputs: dict[str, tuple[int, Tensor]] = {}
        # "q" or "k" -> what its norm was given: so many tokens, some of them [tokens, heads, dim].
        self.normalised: dict[str, list[tuple[int, Tensor]]] = {}
        self.active = True
        self._paths = {id(module): path for path, module in modules.items()}
        self._handles: list[Any] = []
        for path, module in modules.items():
            hook = functools.partial(self._returned, path)
            self._handles.append(module.register_forward_hook(hook))
        for which, module in norms.items():
            hook = functools.partial(self._was_given, which)
            self._handles.append(module.register_forward_hook(hook))
        self._beside: dict[str, Any] = {}
        for which, module in (beside or {}).items():
            hook = functools.partial(self._was_given, which)
            self._beside[which] = module.register_forward_hook(hook)

    @harmless("forward of a projection")
    def _returned(self, path: str, module: Any, args: Any, output: Any) -> None:
        item = output[0] if isinstance(output, tuple) and output else output
        if type(item) is Tensor and is_pointwise(module):
            item = item.movedim(-1 - len(module.kernel_size), -1)  # Channels stand before places.
        self.hear(path, item)

    def hear(self, path: str, item: Any) -> None:
        """What the projection with this path returns."""
        if type(item) is Tensor and item.dim() > 1 and item.is_floating_point():
            flat = item.detach().reshape(-1, item.shape[-1])
            self.outputs[path] = len(flat), flat[_chosen(len(flat), flat.device)]

    @harmless("forward of a norm")
    def _was_given(self, which: str, module: nn.Module, args: Any, output: Any) -> None:
        if which in self._beside:
            self._beside.pop(which).remove()
        if args:
            self.hear_norm(which, args[0])

    def hear_norm(self, which: str, given: Any) -> None:
        """What a norm of the queries ("q") or keys ("k") is given."""
        if type(given) is Tensor:
            self.normalised[which] = _by_head(given.detach())

    def end(self) -> None:
        """What was heard stays, for an attention that runs later."""
        self.active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def close(self) -> None:
        """Nothing is heard any more, of what lies beside the module neither."""
        self.end()
        for handle in self._beside.values():
            handle.remove()
        self._beside.clear()

    def take(self, holder: nn.Module, path: str, other: Listening) -> None:
        """What another has heard of the projection that has this path here."""
        theirs = other._paths.get(id(_module_of(holder, path)), "")
        if theirs in other.outputs and path not in self.outputs:
            self.outputs[path] = other.outputs[theirs]
            self.normalised = {**other.normalised, **self.normalised}


def _chosen(count: int, device: torch.device) -> Tensor:
    return torch.arange(0, count, max(1, -(-count // TOKENS)), device=device)


def _by_head(given: Tensor) -> list[tuple[int, Tensor]]:
    """Some tokens of [..., tokens, heads, dim] or [batch, heads, tokens, dim], whichever it is."""
    found = []
    if given.dim() > 2:
        flat = given.flatten(0, -3)
        found.append((len(flat), flat[_chosen(len(flat), given.device)]))
    if given.dim() == 4:
        tokens = given.shape[2]
        count = given.shape[0] * tokens
        chosen = _chosen(count, given.device)
        found.append((count, given[chosen // tokens, :, chosen % tokens]))
    return found


def _module_of(holder: nn.Module, path: str) -> Optional[nn.Module]:
    item = resolve(holder, path)
    plain = isinstance(item, nn.Module) and not isinstance(item, torch.jit.ScriptModule)
    return item if plain else None  # type: ignore[return-value]


def modules_of(holder: nn.Module, paths: Sequence[str]) -> dict[str, nn.Module]:
    found = {path: _module_of(holder, path) for path in paths}
    return {path: m for path, m in found.items() if m is not None}


def listen(
    module: nn.Module, holder: nn.Module, paths: Sequence[str], around: Optional[nn.Module] = None
) -> Optional[Listening]:
    """paths  of the projections that may be those of the attention `module`
    around  the module around it, which may normalise what it returns"""
    modules = modules_of(holder, paths)
    if not modules:
        return None
    own = names.norms(module, holder)
    beside = {} if around is None or around is holder else names.norms(around)
    return Listening(modules, own, {w: norm for w, norm in beside.items() if w not in own})


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


@dataclasses.dataclass(frozen=True)
class _Side:
    """The queries, or the keys, of a call: lengths that a right order of rows must have."""

    count: int  # Tokens, of all sequences.
    # [chosen, heads, dim], with the tokens of a sequence side by side and with those of all
    # sequences side by side; as given, and as their norm was given them.
    vectors: list[Tensor]
    tolerance: float

    def every(self, copies: int) -> _Side:
        """One of so many copies of each head."""
        return dataclasses.replace(self, vectors=[v[:, ::copies] for v in self.vectors])

    def _chosen(self, heard: Listening, path: str) -> Optional[Tensor]:
        count, flat = heard.outputs.get(path, (0, None))
        return flat if count == self.count else None

    def verdict(self, heard: Listening, rows: Rows) -> Optional[bool]:
        flat = self._chosen(heard, rows.path)
        if flat is None or flat.shape[-1] != rows.total:
            return None
        have = flat[:, rows.places(flat.device)].double()
        answers = []
        for vectors in self.vectors:
            if vectors.shape[1] == have.shape[1] and vectors.shape[2] >= rows.dim:
                want = vectors[..., : rows.dim].double()
                answers.append(_agree(have.norm(dim=-1), want.norm(dim=-1), self.tolerance))
                if answers[-1] is False and len(have) > 2:
                    apart = ((x - x.mean(0)).norm(dim=-1) for x in (have, want))
                    answers[-1] = _agree(next(apart), next(apart), self.tolerance)
        return True if True in answers else False if False in answers else None

    def by_search(self, heard: Listening, path: str) -> Optional[Rows]:
        """The rows whose lengths go with those of each head over all tokens, where that is one
        block of rows for each."""
        flat = self._chosen(heard, path)
        for vectors in self.vectors:
            dim = vectors.shape[2]
            if flat is None or flat.shape[-1] % dim or len(flat) < 4:
                continue
            have = flat.reshape(len(flat), -1, dim).double().norm(dim=-1)
            want = vectors.double().norm(dim=-1)
            ratio = want[:, :, None] / have[:, None, :]
            apart = ratio.amax(0) / ratio.amin(0) - 1  # [heads, blocks]
            fits = apart <= self.tolerance
            if bool((fits.sum(1) == 1).all()) and _spread(want, 0) > _VARIES * self.tolerance:
                begins = tuple(int(block) * dim for block in fits.int().argmax(1))
                return Rows(path, int(flat.shape[-1]), begins, dim)
        return None

    def mixed(self, heard: Listening, rows: Rows) -> bool:
        """Whether all rows together have the length of all heads together, over all tokens: then
        they are those of the heads, in another order than was compared."""
        flat = self._chosen(heard, rows.path)
        if flat is None or flat.shape[-1] != rows.total:
            return False
        if rows.total != len(rows.begins) * rows.dim:
            return False
        have = flat.double().norm(dim=-1, keepdim=True)
        together = (v.double().flatten(1).norm(dim=-1, keepdim=True) for v in self.vectors)
        return any(_agree(have, want, self.tolerance) for want in together)


def _before_norm(given: list[tuple[int, Tensor]], shape: torch.Size) -> list[Tensor]:
    """What a norm was given of the chosen tokens, as [chosen, heads, dim].  `shape` is that of the
    call's tensor, whose heads may be repeated behind the norm."""
    batch, heads, tokens, dim = shape
    return [
        some.repeat_interleave(heads // some.shape[1], 1)
        for count, some in given
        if count == batch * tokens and some.shape[2] == dim and heads % max(1, some.shape[1]) == 0
    ]


def _side(x: Tensor, before_norm: list[tuple[int, Tensor]]) -> _Side:
    """x  [batch, heads, tokens, dim]"""
    batch, _, tokens, _ = x.shape
    count = batch * tokens
    chosen = _chosen(count, x.device)
    orders = [(chosen // tokens, chosen % tokens)]
    if batch > 1 and tokens > 1:
        orders.append((chosen % batch, chosen // batch))
    vectors = [x.detach()[sequence, :, token] for sequence, token in orders]
    vectors += _before_norm(before_norm, x.shape)
    return _Side(count, vectors, _TOLERANCE.get(x.dtype, _TOLERANCE_16_BITS))


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What projections have returned, and the queries and keys that were made of it."""

    heard: Listening
    heads: int  # Of the queries; and of the keys, as attention is given them.
    key_heads: int
    query: _Side
    key: _Side


def evidence(heard: Listening, q: Tensor, k: Tensor) -> Evidence:
    """q, k  [batch, heads, tokens, dim]; k may have copies of key heads"""
    sides = _side(q, heard.normalised.get("q", [])), _side(k, heard.normalised.get("k", []))
    return Evidence(heard, q.shape[1], k.shape[1], *sides)


@dataclasses.dataclass(frozen=True)
class Verdict:
    location: Optional[Location]  # None: no order of the rows that is known fits.
    checked: bool


def check(candidates: list[Location], shown: Evidence, kv_heads: int) -> Verdict:
    heard, sides = shown.heard, (shown.query, shown.key.every(shown.key_heads // kv_heads))
    contradicted = False
    for place in candidates:
        rows = place.query, place.key
        answers = [side.verdict(heard, part) for side, part in zip(sides, rows)]
        if True in answers and False not in answers:
            return Verdict(place, True)
        contradicted = contradicted or False in answers
    first = candidates[0]
    if not contradicted:
        return Verdict(first, False)
    query = sides[0].by_search(heard, first.query.path)
    key = sides[1].by_search(heard, first.key.path)
    if query is not None and key is not None:
        return Verdict(by_rows(query, key), True)
    mixed = sides[0].mixed(heard, first.query) or sides[1].mixed(heard, first.key)
    # Where lengths do not go together at all, something between has changed them.
    unlike = query is None and key is None and not mixed
    return Verdict(first if unlike and first.sure else None, False)


def search(shown: Evidence, kv_heads: int) -> tuple[Optional[Rows], Optional[Rows]]:
    """Without a name: where just one projection returns what the queries are made of, and where
    just one what the keys are."""
    found: list[Optional[Rows]] = []
    heard = shown.heard
    for side in (shown.query, shown.key.every(shown.key_heads // kv_heads)):
        rows = [r for path in heard.outputs if (r := side.by_search(heard, path)) is not None]
        found.append(rows[0] if len(rows) == 1 else None)
    return found[0], found[1]


def by_rows(query: Rows, key: Rows) -> Location:
    paths = dict.fromkeys((query.path, key.path))
    return Location(f"by its rows {' '.join(paths)}", query, key)
