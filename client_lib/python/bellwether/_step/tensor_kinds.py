"""Which parameters tell more than all do: norms' gains, tables of words, and the matrices whose
spectral norm is told often.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Optional

from torch import nn

from .._hook.model.heads import find_heads
from .tensor_rows import Row

OFTEN_MAX = 512  # Matrices whose spectral norm is told often.
# What attention's output projection is called, in a module that is called like attention.
_OUT = re.compile(
    r"att(n|ention)\w*\.(\w+\.)*(o_proj|out_proj|c_proj|proj|dense|wo|out|to_out|linear_proj)(\.0)?"
    r"\.weight$",
    re.IGNORECASE,
)
_SHIFTS = ("bias", "beta", "b")
# A norm whose parameter is its gain less 1.
_LESS_ONE = re.compile(
    r"\b1(\.0)?\s*\+\s*(self\.)?(weight|scale|gamma)|\b(self\.)?(weight|scale|gamma)\s*\+\s*1\b"
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """
    gain      of a norm: what is added to the parameter to make it one
    table     a row of it belongs to a word, or to a position
    often     its spectral norm has more turns than those of others
    """

    gain: Optional[float] = None
    table: bool = False
    often: bool = False


_NONE = Kind()


class Kinds:
    """model  gives the model, None once it is gone"""

    def __init__(self, model: Callable[[], Optional[nn.Module]]) -> None:
        self._model = model
        self._known: dict[str, Kind] = {}  # By the row's name.
        self._less: dict[type[nn.Module], float] = {}  # By the norm: what its gain is less.

    def of(self, rows: Iterable[Row]) -> list[tuple[Row, Kind]]:
        rows = list(rows)
        if any(row.name not in self._known for row in rows):
            self._find(rows)
        return [(row, self._known[row.name]) for row in rows]

    def _find(self, rows: list[Row]) -> None:
        found: dict[int, Kind] = {}
        model = self._model()
        modules = list(model.modules()) if model is not None else []
        heads = {id(m) for _, m in find_heads(model)} if model is not None else set()
        for module in modules:
            head = id(module) in heads
            table = head or type(module).__name__.endswith("Embedding")
            norm = "norm" in type(module).__name__.lower()
            for own, p in module._parameters.items():
                if p is None:
                    continue
                if table and own == "weight" and p.dim() == 2:
                    often = head or (id(p) in found and found[id(p)].often)
                    found[id(p)] = Kind(table=True, often=often)
                elif norm and p.dim() == 1 and own not in _SHIFTS:
                    of = type(module)
                    if of not in self._less:
                        self._less[of] = _less_one(of)
                    found[id(p)] = Kind(gain=self._less[of])
        kept = sum(known.often for known in self._known.values())
        for row in rows:
            if row.name in self._known:
                continue
            kind = found.get(id(row.of), _NONE)
            out = row.weight.dim() == 2 and _OUT.search(row.name) is not None
            often = (kind.often or out) and kept < OFTEN_MAX
            kept += often
            self._known[row.name] = dataclasses.replace(kind, often=often)


def _less_one(norm: type[nn.Module]) -> float:
    try:
        return 1.0 if _LESS_ONE.search(inspect.getsource(norm)) else 0.0
    except Exception:  # It has none, as of C or of a shell, or is being edited.
        return 0.0
