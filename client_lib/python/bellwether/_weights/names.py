"""What people call the projections of attention; a name is believed only if it is a matrix's."""

from __future__ import annotations

import re
from typing import Optional

from torch import nn

from .projection import shape_of

# Compared without case and underscores.
_QUERY = ("qproj", "wq", "query", "toq", "qlin", "linearq", "qlinear", "queryproj", "q",
          "qprojweight", "qhead", "projectq")  # fmt: skip
_KEY = (
    "kproj",
    "wk",
    "key",
    "tok",
    "klin",
    "lineark",
    "klinear",
    "keyproj",
    "k",
    "kprojweight",
    "khead",
    "projectk",
)
_FUSED = ("cattn", "qkv", "qkvproj", "wqkv", "toqkv", "inproj", "inprojweight", "attnqkv",
          "linearqkv", "querykeyvalue")  # fmt: skip
# Of two steps, as latent attention has them: the second, from the latent to the heads.
_SECOND_QUERY = ("qbproj", "wqb", "linearqupproj", "qb", "qup", "qupproj", "wuq")
_SECOND_KEY = ("kvbproj", "wkvb", "linearkvupproj", "kvb", "kvup", "kvupproj", "wukv")
# Rows by group: the queries of a key head, its key, its value, then the next group.
GROUPED = ("querykeyvalue", "linearqkv")
# Whole blocks of q, k and v in some models, by group in others.
AMBIGUOUS = ("wqkv",)
_QUERY_NORMS = frozenset({"qnorm", "querynorm", "qln", "qlayernorm", "normq"})
_KEY_NORMS = frozenset({"knorm", "keynorm", "kln", "klayernorm", "normk"})


def norms(*owners: nn.Module) -> dict[str, nn.Module]:
    """Their children that are norms of queries ("q") and of keys ("k"), the first of each."""
    found: dict[str, nn.Module] = {}
    for owner in owners:
        for name, child in owner.named_children():
            for which, known in (("q", _QUERY_NORMS), ("k", _KEY_NORMS)):
                if plain(name) in known:
                    found.setdefault(which, child)
    return found


def plain(name: str) -> str:
    return name.replace("_", "").lower()


def is_projection(name: str) -> bool:
    """Whether a weight is called like one that holds W_Q or W_K."""
    return plain(name) in (*_QUERY, *_KEY, *_FUSED)


def _first(module: nn.Module, names: tuple[str, ...]) -> Optional[str]:
    own = {plain(n): n for n, _ in module.named_children()}
    own.update({plain(n): n for n, _ in module.named_parameters(recurse=False)})
    for name in names:
        if name in own and shape_of(getattr(module, own[name], None)) is not None:
            return own[name]
    return None


def projections(module: nn.Module) -> tuple[Optional[str], Optional[str], Optional[str]]:
    """What the module calls its fused projection, its W_Q and its W_K; None = it has none."""
    return _first(module, _FUSED), _first(module, _QUERY), _first(module, _KEY)


def latent(module: nn.Module) -> tuple[Optional[str], Optional[str]]:
    """What the module calls the projections of latent attention that give queries, which may be in
    one step, and keys with values."""
    key = _first(module, _SECOND_KEY)
    return (_first(module, _SECOND_QUERY) or _first(module, _QUERY), key) if key else (None, None)


def named(module: nn.Module) -> bool:
    """Whether the module itself holds something called like the projections of attention."""
    fused, query, key = projections(module)
    separate = query is not None and key is not None
    return fused is not None or separate or None not in latent(module)


def override_for(overrides: dict[str, tuple[str, str]], name: str) -> Optional[tuple[str, str]]:
    """The paths that the user gave for the module called `name`: the first pattern that fits."""
    for pattern, paths in overrides.items():
        if re.fullmatch(pattern, name):
            return paths
    return None
