"""The handles of the models that are watched in this process, one a model.

A caller may drop its handle: it lives as long as the model does.  At the end of the process each
is detached; in a forked child none watches, and the model may be watched anew.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Generic, Optional, Protocol, TypeVar

from torch import nn

from .._util.guard import harmless


class Handle(Protocol):
    def live(self) -> bool: ...

    def model(self) -> Optional[nn.Module]: ...

    def forked(self) -> None:
        """This process is the child of the one that watches."""

    def detach(self) -> None: ...


H = TypeVar("H", bound=Handle)


class Handles(Generic[H]):
    def __init__(self) -> None:
        self._of: weakref.WeakValueDictionary[int, H] = weakref.WeakValueDictionary()
        self._kept: dict[int, H] = {}
        os.register_at_fork(after_in_child=self._after_fork_in_child)
        atexit.register(self._at_exit)

    def __len__(self) -> int:
        """Of those that are kept alive."""
        return len(self._kept)

    def all(self) -> list[H]:
        return list(self._of.values())

    def of(self, model: nn.Module) -> Optional[H]:
        known = self._of.get(id(model))
        # An id may be that of another model by now.
        return known if known is not None and known.model() is model else None

    def keep(self, model: nn.Module, handle: H) -> None:
        key = id(model)
        self._of[key] = self._kept[key] = handle
        weakref.finalize(model, self._gone, key).atexit = False

    def forget(self, model: nn.Module, handle: H) -> None:
        if self._of.get(id(model)) is handle:
            del self._of[id(model)]
            self._kept.pop(id(model), None)

    @harmless("end of a model")
    def _gone(self, key: int) -> None:
        held = self._kept.pop(key, None)
        if held is not None:
            held.detach()

    @harmless("fork()")
    def _after_fork_in_child(self) -> None:
        for handle in self.all():
            handle.forked()
        self._of.clear()
        self._kept.clear()

    @harmless("end of the process")
    def _at_exit(self) -> None:
        """Says goodbye for handles that were not detached.  Waits for nothing."""
        for handle in self.all():
            if handle.live():
                handle.detach()
