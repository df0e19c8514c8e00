"""All ranks of a job apply an action at the same step boundary, or none does.

A gloo group of our own, never the job's.  At every 16th boundary each rank launches one tiny
collective and finishes the one before, which has long arrived by then, so nothing is waited for:

    offer    the root broadcasts the oldest action that it was handed, or nothing
    vote     all_reduce(MIN): does each rank see itself able to apply it?
    confirm  if all do, all apply it at this boundary; all_reduce(MIN): has it worked everywhere?

The root (the lowest rank that reports) answers for all.  A vote that is lost, or a rank on which
applying raised, leaves or puts everything as it was, on all ranks.  A group that fails, or does
not answer in 5 s, ends agreement for good: actions are refused from then on, training goes on.
Boundaries are counted on each rank from attach() on; all ranks must attach at the same point.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import struct
import threading
import time
from typing import Any, Optional, Protocol

import torch
import torch.distributed as dist

from .._util import log
from .._util.launch import launch_unix_ms
from ..actions import KINDS, Action, decode

EVERY = 16  # boundaries
WAIT_SECONDS = 5.0  # At a boundary, for a collective that was launched 16 boundaries ago.
CONNECT_SECONDS = 10.0  # For the other ranks to attach.
_GROUP_SECONDS = 30.0  # gloo's own patience with one collective.
_HEAD = struct.Struct("<qI")  # The root's count of boundaries, bytes of the action.
OFFER_BYTES_MAX = 4096
_CONNECTING, _OFFER, _VOTE, _CONFIRM, _OFF = "connecting", "offer", "vote", "confirm", "off"

_numbers = itertools.count()  # Of the groups of this process: the same on all ranks.

# Destroying a group waits for what it is still doing: those that failed stay.
_abandoned: list[Any] = []


def usable() -> bool:
    """Whether there is a process group, of more than one rank, to make one of our own beside."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class Ballot(Protocol):
    """This rank's actions: what it offers to the others, and what it does with what they agree on.
    `step` is that which the boundary is before."""

    @property
    def attempt(self) -> int: ...

    def next_offer(self, step: int) -> bytes:
        """The action that the ranks are to agree on next; b"" if there is none."""

    def refusal(self, action: Action, step: int) -> Optional[str]: ...

    def carry_out(self, action: Action, step: int) -> tuple[Optional[str], str]:
        """(why it failed or None, a word about it).  Never raises."""

    def take_back(self, action: Action, step: int) -> None: ...

    def answer(self, action: Action, applied: bool, step: int, reason: str) -> None: ...


class Agreement:
    """`reports`: this rank has a stream to a server.  `allowed` counts as what all ranks allow,
    once connected.  All but the connecting is called on the training thread."""

    def __init__(self, allowed: frozenset[str], reports: bool, run: str) -> None:
        self.why_off = ""
        self.allowed = allowed
        self.root = False
        self.stood = False  # The run has said that its ranks agree.
        self.launch_seconds = 0.0  # Of the last boundary that launched something.
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._phase = _CONNECTING
        self._group: Any = None
        self._root_rank = 0
        self._work: Any = None
        self._buffer = torch.zeros(_HEAD.size + OFFER_BYTES_MAX, dtype=torch.uint8, device="cpu")
        self._number = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._count = 0  # Boundaries when the running collective was launched.
        self._action: Optional[Action] = None
        self._word = ""  # What this rank has to say of it.
        self._applied_at = 0
        self._deadline = time.monotonic() + CONNECT_SECONDS
        self._connected = threading.Event()
        home: Any = dist.distributed_c10d
        try:
            # A connection of its own: waiting on the job's would hold the job up.
            store = home._get_default_store().clone()
        except Exception as e:
            self._end(f"this process group's store cannot be shared ({type(e).__name__}: {e})")
            return
        threading.Thread(
            target=self._connect, args=(store, reports, f"{next(_numbers)}/{run}"),
            name="bellwether-ranks", daemon=True,
        ).start()  # fmt: skip

    def _connect(self, store: Any, reports: bool, name: str) -> None:
        try:
            patience = datetime.timedelta(seconds=CONNECT_SECONDS)
            store.set_timeout(patience)
            # torchrun's store still has the addresses of the start before this one.
            place = f"bellwether/actions/{launch_unix_ms()}/{name}"
            store = dist.distributed_c10d.PrefixStore(place, store)
            group = dist.ProcessGroupGloo(store, self._rank, self._world, patience)
            told = torch.ones(1 + max(KINDS.values()) + 1, dtype=torch.int64, device="cpu")
            told[0] = self._rank if reports else self._world
            for kind, number in KINDS.items():
                told[1 + number] = kind in self.allowed
            _allreduce_min(group, told).wait(patience)
            group._set_default_timeout(datetime.timedelta(seconds=_GROUP_SECONDS))
            self._root_rank = int(told[0])
            self.root = self._root_rank == self._rank
            self.allowed = frozenset(k for k, number in KINDS.items() if told[1 + number])
            self._group = group
        except Exception as e:
            self.why_off = f"not all ranks have attached with allow= ({_first_line(e)})"
        self._connected.set()

    def stands(self) -> bool:
        """Whether the ranks agree; waits once until all have attached, or for what is left of
        CONNECT_SECONDS since attach()."""
        if self._phase == _CONNECTING:
            if not self._connected.wait(max(0.0, self._deadline - time.monotonic())):
                self.why_off = "not all ranks have attached with allow="
            if self.why_off or self._group is None or self._root_rank >= self._world:
                self._end(self.why_off or "no rank reports")
            else:
                self._phase = _OFFER
                self.stood = True
        return self._phase != _OFF

    def settled(self) -> bool:
        """Whether stands() would answer at once."""
        return self._phase != _CONNECTING or self._connected.is_set()

    def busy_with(self, id: str) -> bool:
        return self._action is not None and self._action.id == id

    # ---- step boundaries ----

    def boundary(self, count: int, step: int, actions: Ballot) -> None:
        """The `count`-th boundary, before step `step`."""
        if count % EVERY or self._phase in (_CONNECTING, _OFF):
            return
        try:
            if self._work is not None:
                self._finish()
                self._next(count, step, actions)
            else:
                self._offer(count, step, actions)
        except Exception as e:
            action, self._action = self._action, None
            self._end(f"the ranks do not agree any more ({_first_line(e)})")
            if action is not None and self.root:
                actions.answer(action, False, step, self.why_off)

    def _finish(self) -> None:
        work, self._work = self._work, None
        if not work.is_completed():
            work.wait(datetime.timedelta(seconds=WAIT_SECONDS))
        else:
            work.wait()  # Raises what went wrong.

    def _next(self, count: int, step: int, actions: Ballot) -> None:
        if self._phase == _OFFER:
            told, size = _HEAD.unpack(bytes(self._buffer[: _HEAD.size].tolist()))
            if not size:
                self._offer(count, step, actions)
                return
            # In this rank's own number: launchers do not tell all of them the same.
            self._action = dataclasses.replace(
                decode(bytes(self._buffer[_HEAD.size :][:size].tolist())), attempt=actions.attempt
            )
            why = actions.refusal(self._action, step)
            if told != self._count:
                why = f"boundary {self._count} here is boundary {told} at the root"
            self._word = why or ""
            if why is not None and not self.root:
                log.warning(
                    f"action {self._action.id} {self._action.kind}: this rank cannot: {why}"
                )
            self._ask(_VOTE, why is None, count)
            return
        action, lowest = self._action, int(self._number)
        assert action is not None
        if self._phase == _VOTE and lowest == self._world:
            why, self._word = actions.carry_out(action, step)
            self._applied_at = step
            self._word = why or self._word
            self._ask(_CONFIRM, why is None, count)
            return
        self._action = None
        if self._phase == _CONFIRM and lowest == self._world:
            if self.root:
                actions.answer(action, True, self._applied_at, self._word)
        else:
            if self._phase == _CONFIRM:
                actions.take_back(action, step)
            if self.root:
                mine = lowest == self._rank
                text = self._word if mine else f"rank {lowest} cannot; its log says why"
                actions.answer(action, False, step, text)
        self._offer(count, step, actions)

    def _offer(self, count: int, step: int, actions: Ballot) -> None:
        self._phase, self._count = _OFFER, count
        if self.root:
            payload = actions.next_offer(step + 2 * EVERY)
            content = _HEAD.pack(count, len(payload)) + payload
            self._buffer[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        began = time.perf_counter()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self._root_rank, 0
        self._work = self._group.broadcast([self._buffer], options)
        self.launch_seconds = time.perf_counter() - began

    def _ask(self, phase: str, yes: bool, count: int) -> None:
        self._phase, self._count = phase, count
        self._number[0] = self._world if yes else self._rank
        began = time.perf_counter()
        self._work = _allreduce_min(self._group, self._number)
        self.launch_seconds = time.perf_counter() - began

    def _end(self, why: str) -> None:
        self.why_off, self._phase = why, _OFF
        if self._group is not None:
            _abandoned.append((self._group, self._work, self._buffer, self._number))
            self._group = self._work = None
        log.warning(f"actions: {why}")

    def end(self) -> None:
        """The monitor detaches."""
        if self._phase != _OFF:
            self._phase, self.why_off = _OFF, "detached"
            _abandoned.append((self._group, self._work, self._buffer, self._number))
            self._group = self._work = None


def _allreduce_min(group: Any, numbers: torch.Tensor) -> Any:
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MIN
    return group.allreduce([numbers], options)


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:120]
