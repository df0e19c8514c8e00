"""Attention that is no call of scaled_dot_product_attention: one module for each package that has
some.

Each has NAME, TRIED (the versions that it was tried with) and functions(): those of the package
that are imported already, each with its Reader (_hook/calls/call.py).  Nothing is imported for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .._hook.calls.call import Reader
from .._util import log
from .._util.guard import in_words
from . import (
    flash_attention,
    imported,
    megatron,
    own_attention,
    torch_flex,
    torch_multihead,
    torch_varlen,
    transformer_engine,
    transformers_eager,
    xformers,
)

ADAPTERS = (
    transformers_eager, flash_attention, torch_flex, torch_multihead, torch_varlen, xformers,
    transformer_engine, megatron, own_attention,
)  # fmt: skip

_told: set[str] = set()


def functions(first_look: bool = False) -> Iterator[tuple[Callable[..., Any], Reader]]:
    """All that are imported by now; one may come several times, by several names.
    `first_look`: of a watch; those of an earlier one do not count against it."""
    if first_look:
        imported.forget_searches()
    for adapter in ADAPTERS:
        try:
            yield from list(adapter.functions())
        except Exception as e:  # Another version of its package: the others go on.
            if adapter.NAME not in _told:
                _told.add(adapter.NAME)
                log.warning(f"attention of {adapter.NAME} is not seen: {in_words(e)}")
