"""Tensors that a compiled graph does not write: how they are made of those that it writes.

A tap is handed the latter.  Where a step is sampled the operations are run once more, here.  They
are those of the joint graph, and the tensors are its inputs and what kernels read and write.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, fx

from ..._kernels.probe import Unsupported
from ..._util.guard import in_words
from ..made_once import made_once

GRAPHS_MAX = 4096  # Of a process.
AS_HANDED = 0


class Recorded(NamedTuple):
    """One tensor.

    graph   the number of what makes it; None: it is handed over itself
    places  of what it is made of, among the tensors that are handed over; below 0 among sizes
    shared  these are inputs of the compiled graph, which other layers may make the same of
    """

    graph: Optional[int]
    places: tuple[int, ...]
    shared: bool = False


_lock = threading.Lock()
_graphs: list[fx.GraphModule] = []
_of_code: dict[str, int] = {}
_tensors: list[tuple[Recorded, ...]] = [()]  # (Of AS_HANDED.)
_of_tensors: dict[tuple[Recorded, ...], int] = {}


def graph_number(graph: fx.Graph) -> Optional[int]:
    """A graph whose code was there before keeps its number; None: there are too many."""
    code = graph.python_code("self").src
    with _lock:
        found = _of_code.get(code)
        if found is None and len(_graphs) < GRAPHS_MAX:
            found = _of_code[code] = len(_graphs)
            _graphs.append(fx.GraphModule({}, graph))
        return found


def number_of(tensors: tuple[Recorded, ...]) -> Optional[int]:
    with _lock:
        found = _of_tensors.get(tensors)
        if found is None and len(_tensors) < GRAPHS_MAX:
            found = _of_tensors[tensors] = len(_tensors)
            _tensors.append(tensors)
        return found


def made_of(number: int, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """The tensors of a tap, from what it was handed.  Raises Unsupported."""
    if number == AS_HANDED:
        return list(tensors)
    try:
        with _lock:
            made = _tensors[number]
        device = tensors[0].device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            return [
                _made(one, [tensors[i] if i >= 0 else sizes[~i] for i in one.places])
                for one in made
            ]
    except Exception as e:
        raise Unsupported(
            f"a tensor of the call cannot be made once more ({in_words(e)}): not measured"
        ) from e


def _made(one: Recorded, of: list[Any]) -> Tensor:
    if one.graph is None:
        return of[0]  # type: ignore[no-any-return]
    graph: Any = _graphs[one.graph]
    if one.shared:
        return made_once(one.graph, of, lambda: graph(*of))
    made: Tensor = graph(*of)
    return made
