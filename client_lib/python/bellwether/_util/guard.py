"""What keeps an error of ours out of the job.

Every function of ours that the host calls is `harmless`: what it raises ends the watching, is told
in `why_off` and in one line of the log, and goes no further.  Where the host's own code runs
between two parts of ours, each part is such a function, so that the host's exceptions stay its own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional, TypeVar

from . import log

if TYPE_CHECKING:
    from typing import ParamSpec

    P = ParamSpec("P")
_TEXT_MAX = 300  # Of an error, on a line of the log
T = TypeVar("T")


class Entry:
    """One function that the host calls.  Called through here, so that a test finds them all and
    puts one that fails in its place."""

    __slots__ = ("function", "guarded", "told", "where")

    def __init__(self, function: Callable[..., Any], where: str) -> None:
        self.function, self.where = function, where
        self.guarded: Callable[..., Any] = function  # What the host calls.
        self.told = False  # What comes when nobody watches any more is not told again.


ENTRIES: dict[str, Entry] = {}
_watchers: weakref.WeakSet[Any] = weakref.WeakSet()  # Of them each has live() and trouble().


def watched_by(owner: Any) -> None:
    """From now on errors that concern no owner alone are reported to this one, too."""
    _watchers.add(owner)


def _owners(arguments: tuple[Any, ...]) -> list[Any]:
    """Those that an error concerns: the object's own, else all that watch."""
    first = arguments[0] if arguments else None
    for owner in (first, getattr(first, "host", None), getattr(first, "monitor", None)):
        if hasattr(type(owner), "trouble"):
            return [owner]
    return [owner for owner in list(_watchers) if owner.live()]


def in_words(error: BaseException) -> str:
    """An error on one line, however much it has to say."""
    first = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {first[:_TEXT_MAX]}"


def _tell(entry: Entry, error: Exception, arguments: tuple[Any, ...]) -> None:
    try:
        owners = _owners(arguments)
        for owner in owners:
            owner.trouble(error, entry.where)
        if not owners and not entry.told:
            log.warning(f"{entry.where}: {in_words(error)} (training is not affected)")
        entry.told = True
    except Exception:
        pass  # Neither its text nor a logger of the host may raise.


def harmless(
    where: str,
    instead: Optional[Callable[..., Any]] = None,
    *,
    answer: Optional[Callable[[Exception], Any]] = None,
    passes: tuple[type[Exception], ...] = (),
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """where    for people
    instead  called with the same arguments after an error, for what is returned; default: None
    answer   makes what is returned from the error, and tells it
    passes   errors that the caller is promised: a bad argument"""

    def wrap(function: Callable[P, T]) -> Callable[P, T]:
        entry = ENTRIES[f"{function.__module__}.{function.__qualname__}"] = Entry(function, where)

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return entry.function(*args, **kwargs)
            except Exception as e:
                if isinstance(e, passes):
                    raise
                if answer is not None:
                    return answer(e)
                _tell(entry, e, args)
                return None if instead is None else instead(*args, **kwargs)

        entry.guarded = guarded
        return guarded

    return wrap


# That of all functions which harmless() has made: in them nothing of the host runs.
CODE = harmless("")(in_words).__code__
del ENTRIES[f"{__name__}.{in_words.__name__}"]
