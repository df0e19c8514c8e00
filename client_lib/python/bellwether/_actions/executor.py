"""What the server asks of this training job: checked, applied at a step boundary, answered.

An action is handed down as JSON, more than once if need be; the first answer to an id is given
again.  It waits for the boundary before step apply_at_step (0: the next one).  It is refused when
that has passed, when its time is over, or when anything is not as it must be.  Nothing is applied
that attach(allow=...) does not name.  Where the job's ranks agree (agreement.py) all of them apply
it at one boundary, the first common one at or behind apply_at_step.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import time
from typing import Optional, Union

from torch.optim.optimizer import Optimizer

from .. import actions
from .._step.status import ActionsStatus
from .._util import log
from .._util.ranks import rank_and_world
from ..actions import ADVICE, KINDS, UNDOABLE, Action, Malformed, Refused
from .agreement import OFFER_BYTES_MAX, Agreement
from .applier import Applier
from .attention_mode import AttentionSwitch
from .callbacks import Callbacks
from .host import ActionHost
from .qk_clip import QKClip
from .rates import Deepen, RateScale

WAITING_MAX = 64
ANSWERS_MAX = 1024  # Ids whose answer is kept; the server gives up on them long before.
_REASON_BYTES_MAX = 256
# What one rank of several can do while the others do not: the weights stay the same everywhere,
# and no collective of the job's is entered.
_HARMLESS_ALONE = frozenset({"attention.mode", "attention.center_k", "sampling.deepen", ADVICE})


@dataclasses.dataclass(frozen=True)
class Answer:
    applied: bool
    step: int
    reason: str


class Actions:
    """Of one monitor.  Called on the training thread."""

    def __init__(self, host: ActionHost) -> None:
        self._host = host
        self._allowed = host.settings.allow
        self._attention = AttentionSwitch(host)
        self._rates = RateScale(host)
        self.callbacks = Callbacks(host)
        self._appliers: dict[str, Applier] = {
            "attention.mode": self._attention,
            "attention.center_k": self._attention,
            "qk.clip": QKClip(host),
            "lr.scale": self._rates,
            "sampling.deepen": Deepen(host),
        }
        self.agreement: Optional[Agreement] = None
        self._count = 0  # Step boundaries since attach().
        self._waiting: collections.deque[Action] = collections.deque()
        self._answers: collections.OrderedDict[str, Answer] = collections.OrderedDict()
        self._unsent: collections.deque[str] = collections.deque()  # Ids; the ring was full.
        self._applied: dict[str, Action] = {}  # What can be undone.
        self._undone: Optional[tuple[str, Action]] = None  # The newest undo, what it took back.

    def install(self, patched: bool, agree: bool) -> None:
        """`patched`: the forward pass goes through us.  `agree`: all ranks attach with it."""
        if patched and self._allowed & {"attention.mode", "attention.center_k"}:
            self._attention.prepare()
        if agree and self._allowed:
            host = self._host
            self.agreement = Agreement(self._allowed, not host.silent, host.settings.run)

    def end(self) -> None:
        """The monitor detaches: what can be taken back is."""
        if self.agreement is not None:
            self.agreement.end()
        for applier in {id(a): a for a in self._appliers.values()}.values():
            applier.end()

    # ---- what the run says it can do ----

    @property
    def attempt(self) -> int:
        """Its number as this rank was told it."""
        return self._host.settings.attempt

    def ranks_agree(self) -> bool:
        return self.agreement is not None and self.agreement.stands()

    def kinds(self) -> list[str]:
        """Allowed, and to be had in this process."""
        return [kind for kind in KINDS if self._impossible(kind) is None]

    def rate_factor(self) -> float:
        return self._rates.factor

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        self._rates.before_step(optimizer)

    def optimizer_stepped(self) -> None:
        self._rates.after_step()

    def mask(self) -> int:
        """Bit k: the kind with number k."""
        return sum(1 << KINDS[kind] for kind in self.kinds())

    def _applier(self, kind: str) -> Applier:
        if self.callbacks.of(kind) is not None:
            return self.callbacks
        return self._appliers.get(kind, self.callbacks)

    def _impossible(self, kind: str) -> Optional[str]:
        allowed = self._allowed
        if self.ranks_agree():
            assert self.agreement is not None
            allowed = self.agreement.allowed
        if kind not in allowed and (kind != ADVICE or not self._allowed):
            return "not allowed: attach(allow=...)"
        if kind not in _HARMLESS_ALONE and rank_and_world()[1] > 1 and not self.ranks_agree():
            why = self.agreement.why_off if self.agreement is not None else "no group of ours"
            return f"the ranks cannot agree on it: {why}"
        if kind == ADVICE and self.callbacks.of(kind) is None:
            return None
        return self._applier(kind).impossible(kind)

    # ---- what comes in ----

    def take(self, payload: Union[bytes, str]) -> None:
        """One action, as JSON.  It waits for its boundary, or is answered at once."""
        try:
            action = actions.decode(payload)
        except Malformed as e:
            log.warning(f"an action that cannot be read: {e}")
            if e.id and e.id not in self._answers:
                self._settle(e.id, Answer(False, self._host.current_step(), str(e)))
            return
        if action.id in self._answers:
            self._send(action.id)
            return
        if self.agreement is not None and self.agreement.stood and not self.agreement.root:
            return  # The lowest rank is handed it as well, and answers for all.
        running = self.agreement is not None and self.agreement.busy_with(action.id)
        if running or any(waiting.id == action.id for waiting in self._waiting):
            return
        step = self._host.current_step()
        why = self._unacceptable(action)
        if why is None and len(self._waiting) >= WAITING_MAX:
            why = f"{WAITING_MAX} actions wait already"
        if why is None and 0 < action.apply_at_step <= step:
            why = f"late: step {action.apply_at_step} has begun"
        if why is not None:
            self.answer(action, False, step, why)
        else:
            self._waiting.append(action)

    def _unacceptable(self, action: Action) -> Optional[str]:
        """Why it cannot be applied whatever the moment."""
        if action.attempt != self.attempt:
            return f"it is for attempt {action.attempt}, and this is attempt {self.attempt}"
        if action.expires_unix_ns and time.time_ns() >= action.expires_unix_ns:
            return "expired"
        return self._impossible(action.kind) or actions.out_of_range(action)

    def refusal(self, action: Action, step: int) -> Optional[str]:
        """Why it cannot be applied at the boundary before `step`; None if it can."""
        why = self._unacceptable(action)
        if why is not None:
            return why
        if action.undoes:
            first = self._applied.get(action.undoes)
            if first is None:
                return f"{action.undoes} is not in force here: there is nothing to undo"
            if first.kind != action.kind:
                return f"{action.undoes} is {first.kind}, not {action.kind}"
        if action.kind == ADVICE and self.callbacks.of(ADVICE) is None:
            return None
        return self._applier(action.kind).refusal(action)

    # ---- step boundaries ----

    def boundary(self, step: int) -> None:
        """Between two steps; the next one is `step`."""
        self._count += 1
        while self._unsent and self._push(self._unsent[0]):
            self._unsent.popleft()
        if self.agreement is not None and self.agreement.stands():
            self.agreement.boundary(self._count, step, self)
        if self.agreement is None or not self.agreement.stood:
            self._alone(step)
        elif self.agreement.why_off:
            while self._waiting:
                self.answer(self._waiting.popleft(), False, step, self.agreement.why_off)

    def _alone(self, step: int) -> None:
        for action in list(self._waiting):
            if action.apply_at_step > step:
                continue
            self._waiting.remove(action)
            if 0 < action.apply_at_step < step:
                self.answer(action, False, step, f"late: step {action.apply_at_step} has begun")
                continue
            why = self.refusal(action, step)
            note = ""
            if why is None:
                why, note = self.carry_out(action, step)
            self.answer(action, why is None, step, note if why is None else why)

    def next_offer(self, step: int) -> bytes:
        """What the ranks are to agree on, to be applied before step `step`: the oldest action
        that is due then and that this rank can apply; b"" if there is none."""
        for action in list(self._waiting):
            if action.apply_at_step > step:
                continue
            self._waiting.remove(action)
            why, payload = self.refusal(action, step), _encode(action)
            if why is None and len(payload) > OFFER_BYTES_MAX:
                why = f"{len(payload)} bytes, and {OFFER_BYTES_MAX} are passed on at most"
            if why is None:
                return payload
            self.answer(action, False, step, why)
        return b""

    def carry_out(self, action: Action, step: int) -> tuple[Optional[str], str]:
        """Applies it: (why it failed or None, a word about it).  Never raises."""
        try:
            if action.kind == ADVICE and self.callbacks.of(ADVICE) is None:
                log.warning(f"the server advises to go back to an earlier checkpoint ({action.id})")
                return None, "logged"
            applier = self._applier(action.kind)
            if action.undoes:
                first = self._applied[action.undoes]
                applier.undo(first, step)
                del self._applied[action.undoes]
                self._undone = (action.id, first)
                return None, f"{action.undoes} is undone"
            note = applier.apply(action, step)
            if action.kind in UNDOABLE:
                self._applied[action.id] = action
            return None, note
        except Refused as e:
            return str(e), ""
        except Exception as e:
            log.warning(f"action {action.id} {action.kind}: {type(e).__name__}: {e}")
            return f"it failed: {type(e).__name__}: {e}", ""

    def take_back(self, action: Action, step: int) -> None:
        """Another rank could not: what this one has applied is undone, where that can be."""
        try:
            if action.id in self._applied:
                self._applier(action.kind).undo(self._applied.pop(action.id), step)
            elif self._undone is not None and self._undone[0] == action.id:
                first, self._undone = self._undone[1], None
                self._applier(action.kind).apply(first, step)
                self._applied[first.id] = first
            elif action.kind not in UNDOABLE:
                log.warning(f"action {action.id} {action.kind} failed on another rank, not here")
        except Exception as e:
            log.warning(f"action {action.id} {action.kind} is not undone: {type(e).__name__}: {e}")

    # ---- answers ----

    def answer(self, action: Action, applied: bool, step: int, reason: str) -> None:
        """Final.  One line for people, one record for the server."""
        if applied:
            what = f"{action.mode} " if action.mode else ""
            more = f" ({reason})" if reason else ""
            log.info(
                f"action {action.id} {action.kind} {what}on {action.scope()}: "
                f"applied from step {step} on{more}"
            )
        else:
            log.warning(f"action {action.id} {action.kind}: refused: {reason}")
        self._settle(action.id, Answer(applied, step, reason))

    def _settle(self, id: str, answer: Answer) -> None:
        self._answers[id] = answer
        while len(self._answers) > ANSWERS_MAX:
            self._answers.popitem(last=False)
        self._send(id)

    def _send(self, id: str) -> None:
        if not self._push(id) and id not in self._unsent and len(self._unsent) < ANSWERS_MAX:
            self._unsent.append(id)

    def _push(self, id: str) -> bool:
        """False if it is to be tried again."""
        answer, client = self._answers.get(id), self._host.client()
        if answer is None or client is None:
            return True
        reason = answer.reason.encode()[:_REASON_BYTES_MAX].decode("utf-8", "ignore")
        return client.push_action_result(id, answer.step, answer.applied, reason)

    # ---- for people ----

    def status(self) -> ActionsStatus:
        settled = self.agreement is None or self.agreement.settled()
        kinds = sorted(self._allowed) if settled else []
        return {
            "allowed": sorted(self._allowed),
            "possible": {kind: self._impossible(kind) for kind in kinds},
            "ranks_agree": self.agreement is not None and not self.agreement.why_off,
            "waiting": [action.id for action in self._waiting],
            "in_force": [
                id
                for id, action in list(self._applied.items())
                if self._applier(action.kind).holds(action)
            ],
            "answers": {
                id: {"applied": a.applied, "step": a.step, "reason": a.reason}
                for id, a in list(self._answers.items())
            },
        }


def _encode(action: Action) -> bytes:
    """What decode() reads, without what has been decided already."""
    fields = dataclasses.asdict(action)
    kind = next(k for k, name in actions.JSON_KINDS.items() if name == action.kind)
    heads = [{"layer": layer, "head": head} for layer, head in action.heads]
    fields["kind"], fields["scope"] = kind, {"layers": list(action.layers), "heads": heads}
    del fields["layers"], fields["heads"], fields["step"]
    return json.dumps(fields).encode()
