"""Arguments of a call by their names, and the same call with other tensors in some places."""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Optional

from torch import Tensor

from .._hook.calls.call import CallRead, Reader
from .._util.guard import in_words

_PLAIN = (bool, int, float, str, tuple)  # Of a value that tells by itself what it is.
_Parameters = tuple[tuple[str, ...], dict[str, Any], Optional[str], bool]
_known: weakref.WeakKeyDictionary[Callable[..., Any], _Parameters] = weakref.WeakKeyDictionary()


def _parameters(function: Callable[..., Any]) -> _Parameters:
    """(names of those that may be given by position, the defaults of all, the name of **kwargs,
    whether there is an *args)."""
    found = _known.get(function)
    if found is None:
        kinds = inspect.Parameter
        all_of = inspect.signature(function).parameters.values()
        by_position = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        found = _known[function] = (
            tuple(p.name for p in all_of if p.kind in by_position),
            {
                p.name: p.default
                for p in all_of
                if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
            },
            next((p.name for p in all_of if p.kind is kinds.VAR_KEYWORD), None),
            any(p.kind is kinds.VAR_POSITIONAL for p in all_of),
        )
    return found


class Arguments:
    """Of one call.  Raises TypeError where the function itself would."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        names, self._defaults, more, open_ended = _parameters(function)
        if len(args) > len(names) and not open_ended:
            raise TypeError("too many arguments")
        self.function = function
        self._names, self._args, self._kwargs = names, args, kwargs
        self.given: dict[str, Any] = dict(zip(names, args))
        self.others: dict[str, Any] = {}  # What goes into **kwargs.
        for name, value in kwargs.items():
            if name in self.given:
                raise TypeError(f"{name} is given twice")
            if name in self._defaults:
                self.given[name] = value
            elif more is None:
                raise TypeError(f"{name} is unknown")
            else:
                self.others[name] = value

    def __contains__(self, name: str) -> bool:
        """Whether the function has such a parameter, given or not."""
        return name in self._defaults or name in self.others

    def get(self, name: str, otherwise: Any = None) -> Any:
        """As the function gets it, by the name that is given or by its default; `otherwise` where
        there is no such parameter."""
        for values in (self.given, self._defaults, self.others):
            if name in values:
                value = values[name]
                return otherwise if value is inspect.Parameter.empty else value
        return otherwise

    def first(self, *names: str) -> Any:
        """By the first of these names that the function has."""
        return next((self.get(name) for name in names if name in self), None)

    def unusual(self, known: Iterable[str]) -> Optional[str]:
        """The first one that is given, is none of the `known`, and has another value than by
        default; None if there is none."""
        usual = set(known)
        for name, value in self.given.items():
            default = self._defaults[name]
            if name in usual or value is default or value is None:
                continue
            if (
                type(value) is not type(default)
                or not isinstance(value, _PLAIN)
                or value != default
            ):
                return name
        return None

    def run(self, *names: str) -> Callable[..., Any]:
        """The call as a function of these arguments, which are given; each stays where it was."""

        def call(*values: Any) -> Any:
            args, kwargs = list(self._args), dict(self._kwargs)
            for name, value in zip(names, values):
                if name in kwargs:
                    kwargs[name] = value
                else:
                    args[self._names.index(name)] = value
            return self.function(*args, **kwargs)

        return call


def reader(read: Callable[[Arguments], CallRead]) -> Reader:
    """A Reader (_hook/calls/call.py) of what `read` makes of the arguments.  Another version of a
    package may have what it does not expect: that call is left out."""

    @functools.wraps(read)
    def reading(
        function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallRead:
        try:
            given = Arguments(function, args, kwargs)
        except TypeError:
            return None
        try:
            return read(given)
        except Exception as e:
            return f"a call of {function.__name__} cannot be read ({in_words(e)}): not measured"

    return reading


def are_tensors(dims: int, *values: Any) -> bool:
    """Whether these are all tensors of so many dimensions."""
    return all(isinstance(value, Tensor) and value.dim() == dims for value in values)


def scale_of(told: Any, dim: int) -> tuple[float, Optional[str]]:
    """(the scale of the scores, why it is none)."""
    scale = dim**-0.5 if told is None else told
    if isinstance(scale, (int, float)) and 0 < scale < math.inf:
        return float(scale), None
    return 1.0, "the scale is no number above 0"
