"""What torch.compile puts in the place of a function while it traces.

It looks functions of torch up in a table of its own, by the object: no name is changed, and
nothing where the entry of ours does not apply.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from .._util import log


class _Inlining(threading.local):
    active = complained = False


_inlining = _Inlining()


def _table() -> Any:
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    return TorchInGraphFunctionVariable._get_handlers()


def _if_possible(function: Callable[..., None]) -> Callable[..., None]:
    """The table is private to torch: with one that has another, eager models are watched."""

    @functools.wraps(function)
    def tried(*arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as e:
            if not _inlining.complained:
                _inlining.complained = True
                reason = f"{type(e).__name__}: {e}"
                log.warning(f"torch.compile takes nothing of ours with this torch: {reason}")

    return tried


@_if_possible
def replace(function: Any, ours: Any, applies: Callable[[Any], bool]) -> None:
    """From now on `ours` is traced instead of `function` where `applies`, which is asked with the
    frames that are being traced, says so; what `ours` itself calls is left alone."""
    from torch._dynamo.variables.functions import UserFunctionVariable

    table = _table()
    theirs = table.get(function)

    def handler(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if _inlining.active or not applies(tx):
            return theirs(variable, tx, *args, **kwargs) if theirs is not None else None
        _inlining.active = True
        try:
            return tx.inline_user_function_return(UserFunctionVariable(ours), [*args], kwargs)
        finally:
            _inlining.active = False

    handler.before = theirs  # type: ignore[attr-defined]
    table[function] = handler


@_if_possible
def put_back(function: Any) -> None:
    table = _table()
    before = getattr(table.pop(function, None), "before", None)
    if before is not None:
        table[function] = before


def frames(tx: Any) -> Any:
    """The codes of the functions that are being traced, the innermost first."""
    while tx is not None:
        yield getattr(tx, "f_code", None)
        tx = getattr(tx, "parent", None)


@_if_possible
def forget() -> None:
    """What was compiled before is compiled anew when it is called next: it holds the modules as
    they were traced, and does not look whether their class has another `forward` now."""
    import torch
    from torch._dynamo import convert_frame

    home, eval_frame = torch.__path__[0], torch._C._dynamo.eval_frame
    for known in list(convert_frame.input_codes.seen):
        code = known()
        if code is not None and not code.co_filename.startswith(home):
            eval_frame.reset_code(code)
