"""Functions that stand in the place of another package's."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def stands_for(theirs: Any) -> Callable[[F], F]:
    """Gives a function the name and the file of `theirs`.  By the file torch.compile decides
    whether it runs a function's frames itself: it then does with ours what it did with theirs."""

    def named(ours: F) -> F:
        code, their_code = ours.__code__, getattr(theirs, "__code__", None)
        if isinstance(their_code, types.CodeType):
            ours.__code__ = code.replace(
                co_filename=their_code.co_filename, co_firstlineno=their_code.co_firstlineno
            )
        return cast(F, functools.wraps(theirs)(ours))

    return named
