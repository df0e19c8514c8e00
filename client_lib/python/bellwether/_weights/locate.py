"""Finds W_Q and W_K of an attention module: by name, believed only if the shape fits."""

from __future__ import annotations

import dataclasses
from typing import Optional

import torch
from torch import nn

from . import location, names
from .location import Location
from .projection import is_pointwise, resolve, shape_of, stored

_UNROTATED = ("qk_nope_head_dim", "qk_head_dim")  # What models call the rows without a position.
MATRICES_MAX = 64  # Of one attention module without a name that is known.
_LEVELS = 2  # Modules around the attention that may hold its projections.


def holder_of(module: nn.Module, name: str, root: Optional[nn.Module]) -> tuple[nn.Module, str]:
    """(the module that holds the projections of the attention `module`, what their names begin
    with).  Some models have them beside it, or around it.  `name`: of the attention in `root`."""
    if root is None or names.named(module) or module not in root.modules():
        return module, ""
    for _ in range(_LEVELS):
        if not name:
            break
        name = name.rpartition(".")[0]
        around = root.get_submodule(name) if name else root
        if names.named(around):
            return around, ""
        beside = [n for n, child in around.named_children() if names.named(child)]
        if len(beside) == 1:
            return around, beside[0] + "."
    return module, ""


def around(name: str, root: Optional[nn.Module]) -> Optional[nn.Module]:
    """The module around the one that is called so in `root`."""
    if root is None or not name:
        return None
    outer = name.rpartition(".")[0]
    try:
        return root.get_submodule(outer) if outer else root
    except AttributeError:  # Names of another model than this one.
        return None


def has_all(holder: nn.Module, paths: tuple[str, str]) -> bool:
    """Whether the paths lead to projections from here on."""
    return all(_rows(holder, path) is not None for path in paths)


def projection_paths(holder: nn.Module, prefix: str, paths: Optional[tuple[str, str]]) -> list[str]:
    """Of all that may hold W_Q or W_K."""
    if paths is not None:
        return list(dict.fromkeys(paths))
    inner = holder.get_submodule(prefix.rstrip(".")) if prefix else holder
    found = (*names.projections(inner), *names.latent(inner))
    return list(dict.fromkeys(prefix + name for name in found if name is not None))


def matrices_in(holder: nn.Module) -> list[str]:
    """Paths of all modules that may be projections, of those in each other the outer one."""
    found: list[str] = []
    for path, module in holder.named_modules():
        inside = any(path.startswith(outer + ".") for outer in found)
        if path and not inside and shape_of(module) is not None:
            found.append(path)
    return found[:MATRICES_MAX]


def device_of(holder: nn.Module, place: Location) -> torch.device:
    weight = stored(resolve(holder, place.query.path))
    assert weight is not None  # Its shape has been read.
    return weight.device


def _rows(holder: nn.Module, path: str) -> Optional[int]:
    shape = shape_of(resolve(holder, path))
    return None if shape is None else shape[0]


def _unrotated(module: nn.Module, rows: int) -> Optional[int]:
    dim = _number((module, _asked(module, "config")), _UNROTATED)
    return dim if dim is not None and dim <= rows else None


def _two(
    holder: nn.Module, paths: tuple[str, str], heads: int, kv_heads: int, dim: int, v_dim: int
) -> list[Location]:
    """Of a projection for queries and one for keys."""
    q, k = _rows(holder, paths[0]), _rows(holder, paths[1])
    if q is None or k is None:
        return []
    if k == kv_heads * dim and q == heads * dim:
        return [location.separate(paths, heads, kv_heads, dim)]
    if k == kv_heads * dim and q == 2 * heads * dim:
        return location.gated(paths, heads, kv_heads, dim)
    unrotated = _unrotated(holder, dim)
    if unrotated is None and v_dim and 0 < k // heads - v_dim <= dim:
        unrotated = k // heads - v_dim  # Behind the rows of a head's key are those of its value.
    if unrotated is not None and q == heads * dim and k % heads == 0 and k // heads >= unrotated:
        return [location.latent(paths, (q, k), heads, unrotated)]
    return []


def _one(holder: nn.Module, path: str, heads: int, kv_heads: int, dim: int) -> list[Location]:
    """Of a fused projection, the likelier order of its rows first."""
    if _rows(holder, path) != (heads + 2 * kv_heads) * dim:
        return []
    parts = path.removesuffix(".weight").split(".")
    name = names.plain(parts[-1])
    found = [make(path, heads, kv_heads, dim) for make in (location.fused, location.grouped)]
    if name in names.AMBIGUOUS or is_pointwise(resolve(holder, path)):
        found = [dataclasses.replace(place, sure=False) for place in found]
    if name in names.GROUPED:
        found.reverse()
    return found + [location.interleaved(path, heads, dim)] * (heads == kv_heads)


def candidates(
    holder: nn.Module, prefix: str, heads: int, kv_heads: int, dim: int,
    paths: Optional[tuple[str, str]] = None, v_dim: int = 0,
) -> list[Location]:  # fmt: skip
    """Where the weights of `heads` heads of `dim` rows may be, the likeliest first; none if no name
    and shape fit.  What the attention is given tells which (split_check.py).

    v_dim  of a head's values, 0 where that is not known
    """
    if heads % kv_heads:
        return []
    if paths is not None:
        if paths[0] == paths[1]:
            return _one(holder, paths[0], heads, kv_heads, dim)
        return _two(holder, paths, heads, kv_heads, dim, v_dim)
    inner = holder.get_submodule(prefix.rstrip(".")) if prefix else holder
    fused, query, key = names.projections(inner)
    found: list[Location] = []
    for pair in ((query, key), names.latent(inner)):
        if pair[0] is not None and pair[1] is not None and not found:
            pair_paths = prefix + pair[0], prefix + pair[1]
            found = _two(holder, pair_paths, heads, kv_heads, dim, v_dim)
    if fused is not None:
        found += _one(holder, prefix + fused, heads, kv_heads, dim)
    return found


def kv_heads_of(module: nn.Module, heads: int, dim: int) -> Optional[int]:
    """Key heads by the size of the weights, else as the module says them; fewer than the scores
    show if keys are repeated."""
    fused, _, key = names.projections(module)
    if fused is not None:
        rest = (_rows(module, fused) or 0) - heads * dim
        if rest > 0 and rest % (2 * dim) == 0 and heads % (rest // (2 * dim)) == 0:
            return rest // (2 * dim)
    if key is not None:
        rows = _rows(module, key) or 0
        if rows % dim == 0 and 0 < rows // dim <= heads and heads % (rows // dim) == 0:
            return rows // dim
    told = _number((module, _asked(module, "config")), _KV_HEADS)
    return told if told is not None and heads % told == 0 else None


def one_head(module: nn.Module, dim: int) -> bool:
    """Whether its projections, by names that are known, give queries and keys of one head of
    `dim`."""
    fused, query, key = names.projections(module)
    if query is not None and key is not None:
        return _rows(module, query) == dim == _rows(module, key)
    return fused is not None and _rows(module, fused) == 3 * dim


def has_side(module: nn.Module, size: int) -> bool:
    """Whether some matrix in the module has so many rows or columns."""
    shapes = (shape_of(resolve(module, path)) for path in matrices_in(module))
    return any(shape is not None and size in shape for shape in shapes)


# ---- without a call, by what the module says ----


@dataclasses.dataclass(frozen=True)
class Layout:
    heads: int
    kv_heads: int
    dim: int
    told: bool  # By the module itself; else all is taken as one head.


_HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "nhead", "heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
_WHOLE_DIM_MAX = 4096  # A bigger matrix is too much to measure as one head.


def _asked(owner: object, name: str) -> object:
    """None where there is none: a host's own __getattr__ may raise anything."""
    try:
        return getattr(owner, name, None)
    except Exception:
        return None


def _number(owners: tuple[object, ...], names: tuple[str, ...]) -> Optional[int]:
    for owner in owners:
        for name in names:
            value = _asked(owner, name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def layout_of(
    module: nn.Module, holder: nn.Module, prefix: str, paths: Optional[tuple[str, str]] = None
) -> Optional[Layout]:
    """Heads by the attributes of a module, or of its `config`; None if no weight fits them."""
    inner = holder.get_submodule(prefix.rstrip(".")) if prefix else holder
    owners = (module, holder, inner, _asked(module, "config"))
    heads = _number(owners, _HEADS)
    fused, query, _ = names.projections(inner)
    two_steps = names.latent(inner)[0]
    path = paths[0] if paths is not None else next(
        (prefix + name for name in (two_steps, query, fused) if name is not None), None
    )  # fmt: skip
    rows = _rows(holder, path) if path is not None else None
    if rows is None:
        return None
    kv_heads = _number(owners, _KV_HEADS) or heads
    if heads is not None and kv_heads is not None:
        # Queries alone; fused; with a gate; with a key of each head, as latent attention has it.
        for parts, keys in ((heads, kv_heads), (heads + 2 * kv_heads, kv_heads),
                            (2 * heads, kv_heads), (heads, heads)):  # fmt: skip
            if rows % parts == 0 and candidates(holder, prefix, heads, keys, rows // parts, paths):
                return Layout(heads, keys, rows // parts, True)
    for parts in (1, 3):
        dim = rows // parts
        fits = dim <= _WHOLE_DIM_MAX and rows % parts == 0
        if fits and candidates(holder, prefix, 1, 1, dim, paths):
            return Layout(1, 1, dim, False)
    return None
