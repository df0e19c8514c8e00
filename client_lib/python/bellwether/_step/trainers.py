"""The optimizers that train a model, and which of them ends the model's step.

A model may be trained by several: by one for each kind of weight in every step, by one after
another, in turns.  One of them is the step's owner, so that a step is told once; it changes when
another goes on without it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Optional

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from .._hook.model import already_compiled


class _Seen:
    def __init__(self, optimizer: Optimizer) -> None:
        self.known = weakref.ref(optimizer)
        self.trains = self.stepped = False
        self.of_copies = False  # It holds copies of the parameters, which are written back later.
        self.heard = False  # A stranger that has stepped since strangers were asked for.
        self.asked = 0  # How often, until it was found to train the model.
        self.groups = 0


class Trainers:
    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        """`parameters` gives those that the model has now: what shards or fills a model replaces
        them (fully_shard, FullyShardedDataParallel, to_empty)."""
        self._parameters = parameters
        self._seen: dict[int, _Seen] = {}  # By the optimizer's id.
        self._owner: Optional[weakref.ref[Optimizer]] = None
        self._owner_steps = 0
        self._silent = False  # The owner has not stepped since the last forward pass.
        self._without_owner: set[int] = set()  # Trainers that have stepped since it did.

    def __len__(self) -> int:
        """Optimizers that are remembered, strangers included."""
        return len(self._seen)

    def known(self) -> list[Optimizer]:
        """Those that were seen to train the model and are still there."""
        found = [seen.known() for seen in self._seen.values() if seen.trains]
        return [optimizer for optimizer in found if optimizer is not None]

    def owned(self) -> bool:
        """Whether a step was ever seen to end."""
        return self._owner is not None

    def forward(self) -> None:
        self._silent = True

    def trains(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer that steps has parameters of the model."""
        seen = self._seen.get(id(optimizer))
        if seen is None or seen.known() is not optimizer:
            self._seen = {k: s for k, s in self._seen.items() if s.known() is not None}
            self._without_owner &= self._seen.keys() - {id(optimizer)}
            seen = self._seen[id(optimizer)] = _Seen(optimizer)
        if not seen.trains:
            seen.asked += 1
            groups = len(optimizer.param_groups)
            # A stranger may become a trainer; one of another model is not looked at each time.
            if groups != seen.groups or seen.asked & (seen.asked - 1) == 0:
                seen.groups = groups
                own = {id(p) for p in self._parameters()}
                seen.trains = any(id(p) in own for g in optimizer.param_groups for p in g["params"])
            seen.heard = not seen.trains
        return seen.trains

    def stepped_strangers(self) -> list[Optimizer]:
        """Those that have stepped since this was asked last."""
        heard = [seen for seen in self._seen.values() if seen.heard and not seen.trains]
        for seen in heard:
            seen.heard = False
        return [optimizer for seen in heard if (optimizer := seen.known()) is not None]

    def adopt(self, strangers: list[Optimizer]) -> bool:
        """The model's parameters have changed after these stepped: what they hold are copies of
        them, unless that is another model's.  Whether one was taken for the model's."""
        adopted = False
        count = sum(p.numel() for p in self._parameters() if p.requires_grad)
        for optimizer in strangers:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            of_module = bool(held) and all(isinstance(p, nn.Parameter) for p in held)
            if not of_module or sum(p.numel() for p in held) == count:
                seen = self._seen[id(optimizer)]
                seen.trains = seen.of_copies = adopted = True
        return adopted

    def one_has_not_stepped(self) -> bool:
        """Whether an optimizer of this process holds parameters of the model and has no state: it
        has never stepped.  Looks at all objects of the process: to be asked once."""
        own = {id(p) for p in self._parameters()}
        kinds = _kinds(Optimizer)
        return any(
            any(id(p) in own for g in found.param_groups for p in g["params"])
            and _has_no_state(found)  # It looks at all objects, too.
            for found in gc.get_objects()
            if type(found) in kinds
        )

    def of_copies(self, optimizer: Optimizer) -> bool:
        """Whether the model has the step's result only later."""
        return self._seen[id(optimizer)].of_copies

    def ends_step(self, optimizer: Optimizer) -> bool:
        """Whether the step of `optimizer`, which trains the model, ends the model's step."""
        owner = self._owner() if self._owner is not None else None
        seen = self._seen[id(optimizer)]
        if seen.of_copies and owner is optimizer and not self._silent:
            return False  # It steps once for each part of the copies.
        new, seen.stepped = not seen.stepped, True
        if owner is not optimizer:
            # It goes on without the owner: a new one in a forward pass of its own, after the owner
            # had some, or any that steps twice meanwhile.  In turns, one of them stays.
            alone = new and self._silent and self._owner_steps > 1
            if owner is not None and not alone and id(optimizer) not in self._without_owner:
                self._without_owner.add(id(optimizer))
                return False
            self._owner, self._owner_steps = weakref.ref(optimizer), 0
        self._owner_steps += 1
        self._silent = False
        self._without_owner.clear()
        return True


def _kinds(of: type[Optimizer]) -> set[type]:
    """It and all classes below it."""
    found: set[type] = {of}
    return found.union(*(_kinds(kind) for kind in of.__subclasses__()))


def _has_no_state(optimizer: Optimizer) -> bool:
    """SGD without momentum never has any.  Its step is seen, unless it is compiled."""
    if optimizer.state:
        return False
    momentum = any(group.get("momentum", True) for group in optimizer.param_groups)
    return momentum or not already_compiled.optimizer_step()
