"""Where a head's W_Q and W_K are: found by name, believed only if the shape fits.

Every function returns views of the live parameters as [heads, head_dim, width], so that the
spectral kernels read them in place through strides.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Optional

import torch
from torch import Tensor, nn

# Compared without case and underscores.
_QUERY = ("qproj", "wq", "query", "toq", "qlin", "linearq", "qlinear", "queryproj", "q")
_KEY = ("kproj", "wk", "key", "tok", "klin", "lineark", "klinear", "keyproj", "k")
_FUSED = ("cattn", "qkv", "qkvproj", "wqkv", "toqkv", "inproj", "inprojweight", "attnqkv",
          "linearqkv", "querykeyvalue")  # fmt: skip
# Rows by group: the queries of a key head, its key, its value, then the next group.
GROUPED = ("querykeyvalue", "linearqkv")


def plain(name: str) -> str:
    return name.replace("_", "").lower()


def is_projection(name: str) -> bool:
    """Whether a weight is called like one that holds W_Q or W_K."""
    return plain(name) in (*_QUERY, *_KEY, *_FUSED)


def whole_matrix(module: nn.Module, name: str) -> Optional[Tensor]:
    """The 2-D weight that attribute `name` of the module is or has; of DTensors all of it."""
    item = getattr(module, name, None)
    if isinstance(item, nn.Module):
        item = getattr(item, "weight", None)
    return item if isinstance(item, Tensor) and item.dim() == 2 else None


def _matrix(module: nn.Module, name: str) -> Optional[Tensor]:
    """The same, of DTensors the rows that lie in this process."""
    item = whole_matrix(module, name)
    local = getattr(item, "to_local", None)
    return item if local is None else local()


def _by_names(module: nn.Module, names: tuple[str, ...]) -> Optional[str]:
    own = {plain(n): n for n, _ in module.named_children()}
    own.update({plain(n): n for n, p in module.named_parameters(recurse=False)})
    for name in names:
        if name in own and _matrix(module, own[name]) is not None:
            return own[name]
    return None


def projections(module: nn.Module) -> tuple[Optional[str], Optional[str], Optional[str]]:
    """What the module calls its fused projection, its W_Q and its W_K; None = it has none."""
    return _by_names(module, _FUSED), _by_names(module, _QUERY), _by_names(module, _KEY)


def named(module: nn.Module) -> bool:
    """Whether the module itself holds something called like the projections of attention."""
    fused, query, key = projections(module)
    return fused is not None or (query is not None and key is not None)


def _rows_first(module: nn.Module, name: str, rows: int) -> Optional[Tensor]:
    """The weight as [rows, width]; some layers keep it as [width, rows]."""
    weight = _matrix(module, name)
    if weight is None:
        return None
    transposed = type(getattr(module, name)).__name__ == "Conv1D"
    if weight.shape[0] == rows and not (transposed and weight.shape[1] == rows):
        return weight
    if weight.shape[1] == rows and transposed:
        return weight.t()
    return None


def _heads(weight: Optional[Tensor], heads: int, dim: int) -> Optional[Tensor]:
    if weight is None or weight.shape[0] != heads * dim:
        return None
    if weight.is_contiguous():
        return weight.view(heads, dim, -1)
    row, column = weight.stride()
    return weight.as_strided((heads, dim, weight.shape[1]), (dim * row, row, column))


def attribute(module: nn.Module, path: str) -> Optional[Tensor]:
    """The tensor at a dotted path such as "inner.to_query.weight", or None."""
    item: object = module
    for part in path.split("."):
        item = getattr(item, part, None)
    return item if isinstance(item, Tensor) else None


@dataclasses.dataclass(frozen=True)
class Location:
    """How to get at W_Q and W_K of one attention module."""

    heads: int
    kv_heads: int
    dim: int
    how: str  # "separate", "fused", "grouped" or "paths", and the names.

    def views(self, module: nn.Module) -> Optional[tuple[Tensor, Tensor]]:
        """([heads, dim, width], [kv_heads, dim, width]) now, or None if the shape changed."""
        kind, *names = self.how.split(" ")
        h, g, d = self.heads, self.kv_heads, self.dim
        if kind == "paths":
            wq, wk = (attribute(module, n) for n in names)
        elif kind == "separate":
            wq = _rows_first(module, names[0], h * d)
            wk = _rows_first(module, names[1], g * d)
        else:
            fused = _rows_first(module, names[0], (h + 2 * g) * d)
            if fused is None:
                return None
            if kind == "grouped":
                grouped = fused.reshape(g, h // g + 2, d, -1)
                wq = grouped[:, : h // g].reshape(h * d, -1)
                wk = grouped[:, h // g].reshape(g * d, -1)
            else:
                wq, wk = fused[: h * d], fused[h * d : (h + g) * d]
        q, k = _heads(wq, h, d), _heads(wk, g, d)
        return None if q is None or k is None or not (_there(q) and _there(k)) else (q, k)


def _there(tensor: Tensor) -> bool:
    """Whether its memory is: FSDP keeps views of weights whose storage is given back."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return True  # Whoever reads it looks at the type first.
    end = tensor.storage_offset() + 1
    end += sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    return tensor.untyped_storage().nbytes() >= end * tensor.element_size()


def kv_heads_of(module: nn.Module, heads: int, dim: int) -> Optional[int]:
    """Key heads by the size of the weights; fewer than the scores show if keys are repeated."""
    fused = _by_names(module, _FUSED)
    if fused is not None:
        weight = _matrix(module, fused)
        for rows in weight.shape if weight is not None else ():
            rest = rows - heads * dim
            if rest > 0 and rest % (2 * dim) == 0 and heads % (rest // (2 * dim)) == 0:
                return rest // (2 * dim)
    key = _by_names(module, _KEY)
    if key is not None:
        weight = _matrix(module, key)
        for rows in weight.shape if weight is not None else ():
            if rows % dim == 0 and 0 < rows // dim <= heads and heads % (rows // dim) == 0:
                return rows // dim
    return None


def locate(
    module: nn.Module, heads: int, kv_heads: int, dim: int, paths: Optional[tuple[str, str]] = None
) -> Optional[Location]:
    """Finds the weights of `heads` heads of `dim` rows; None if no name and shape fit."""
    choices: list[str] = []
    if paths is not None:
        choices.append(f"paths {paths[0]} {paths[1]}")
    else:
        query, key = _by_names(module, _QUERY), _by_names(module, _KEY)
        if query is not None and key is not None:
            choices.append(f"separate {query} {key}")
        fused = _by_names(module, _FUSED)
        if fused is not None:
            grouped = plain(fused) in GROUPED
            choices.append(f"{'grouped' if grouped else 'fused'} {fused}")
    for how in choices:
        location = Location(heads, kv_heads, dim, how)
        with torch.no_grad():
            if location.views(module) is not None:
                return location
    return None


@dataclasses.dataclass(frozen=True)
class Layout:
    heads: int
    kv_heads: int
    dim: int
    told: bool  # By the module itself; else all is taken as one head.


_HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "nhead", "heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
_WHOLE_DIM_MAX = 4096  # A bigger matrix is too much to measure as one head.


def _number(owners: tuple[object, ...], names: tuple[str, ...]) -> Optional[int]:
    for owner in owners:
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def layout_of(module: nn.Module, paths: Optional[tuple[str, str]] = None) -> Optional[Layout]:
    """Heads by the attributes of a module, or of its `config`; None if no weight fits them."""
    owners = (module, getattr(module, "config", None))
    heads = _number(owners, _HEADS)
    query = attribute(module, paths[0]) if paths is not None else None
    for name in (_by_names(module, _QUERY), _by_names(module, _FUSED)):
        if query is None and name is not None:
            query = _matrix(module, name)
    if query is None:
        return None
    kv_heads = _number(owners, _KV_HEADS) or heads
    if heads is not None and kv_heads is not None:
        for rows in query.shape:
            for parts in (heads, heads + 2 * kv_heads):
                if rows % parts == 0 and locate(module, heads, kv_heads, rows // parts, paths):
                    return Layout(heads, kv_heads, rows // parts, True)
    for rows in query.shape:
        for parts in (1, 3):
            dim = rows // parts
            if dim <= _WHOLE_DIM_MAX and rows % parts == 0 and locate(module, 1, 1, dim, paths):
                return Layout(1, 1, dim, False)
    return None


def override_for(overrides: dict[str, tuple[str, str]], name: str) -> Optional[tuple[str, str]]:
    """The paths that the user gave for the module called `name`: the first pattern that fits."""
    for pattern, paths in overrides.items():
        if re.fullmatch(pattern, name):
            return paths
    return None
