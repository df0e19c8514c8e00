"""What the server may ask of a training job: one action as it arrives, and what is legal in it.

The fields are those of Action in actions.proto, as protobuf prints them in JSON.  Nothing in an
action is code.  Needs no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any, Optional, Union

# Names, and the numbers of ActionKind in actions.proto.
KINDS: dict[str, int] = {
    "attention.mode": 1,
    "attention.center_k": 2,
    "qk.clip": 3,
    "lr.scale": 4,
    "checkpoint.now": 5,
    "batch.skip": 6,
    "sampling.deepen": 7,
    "stop": 8,
    "rollback.suggest": 9,
}
ADVICE = "rollback.suggest"  # Never applied by us: there is nothing to allow.
ALLOWABLE = frozenset(KINDS) - {ADVICE}
UNDOABLE = frozenset({"attention.mode", "attention.center_k", "lr.scale", "sampling.deepen"})
MODES = ("fa", "paper", "sr", "hp", "hpm", "sdpa")

ID_BYTES_MAX = 64
LAYERS_MAX = 512
HEADS_MAX = 64
LR_SCALE_MAX = 10.0
BATCHES_MAX = 1000
PERIOD_MAX = 1_000_000  # steps

JSON_KINDS = {
    "ACTION_KIND_ATTENTION_MODE": "attention.mode",
    "ACTION_KIND_CENTER_K": "attention.center_k",
    "ACTION_KIND_QK_CLIP": "qk.clip",
    "ACTION_KIND_LR_SCALE": "lr.scale",
    "ACTION_KIND_CHECKPOINT_NOW": "checkpoint.now",
    "ACTION_KIND_BATCH_SKIP": "batch.skip",
    "ACTION_KIND_SAMPLING_DEEPEN": "sampling.deepen",
    "ACTION_KIND_STOP": "stop",
    "ACTION_KIND_ROLLBACK_SUGGEST": ADVICE,
}


class Refused(Exception):
    """An action that is not applied; the text says why, in at most 256 bytes or so."""


class Malformed(Exception):
    """Bytes that are no action; `id` is its id, "" where that cannot be read either."""

    def __init__(self, text: str, id: str = "") -> None:
        super().__init__(text)
        self.id = id


@dataclasses.dataclass(frozen=True)
class Action:
    """What the server asks for, and what the callbacks of on_action() get."""

    id: str
    kind: str  # A key of KINDS.
    attempt: int = 0
    layers: tuple[int, ...] = ()  # Both empty: the whole model.
    heads: tuple[tuple[int, int], ...] = ()  # (layer, head)
    mode: str = ""
    value: float = 0.0
    apply_at_step: int = 0  # 0 = the next step boundary
    expires_unix_ns: int = 0  # 0 = never
    undoes: str = ""  # The action that this one takes back.
    step: int = 0  # For callbacks: the next one.

    def scope(self) -> str:
        """For people."""
        layers = sorted({*self.layers, *(layer for layer, _ in self.heads)})
        if not layers:
            return "all layers"
        if self.heads and not self.layers:
            return "heads " + ", ".join(f"{layer}.{head}" for layer, head in self.heads)
        return f"layer{'s' if len(layers) > 1 else ''} " + ", ".join(map(str, layers))


def allowed(value: Union[str, Iterable[str]]) -> frozenset[str]:
    """The kinds of `allow`: names, or words with commas between them.  Raises ValueError."""
    if isinstance(value, str):
        value = value.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    chosen = frozenset(str(name).strip("\"'") for name in value)
    unknown = chosen - ALLOWABLE
    if unknown:
        raise ValueError(f"{sorted(unknown)} unknown, legal are {sorted(ALLOWABLE)}")
    return chosen


def _integer(fields: dict[str, Any], name: str, low: int, high: int) -> int:
    given = fields.get(name, 0)
    # 64-bit integers are strings in protobuf's JSON.
    if isinstance(given, bool) or not isinstance(given, (int, str)):
        raise ValueError(f"{name} = {given!r}: a whole number is legal")
    number = int(given)
    if not low <= number <= high:
        raise ValueError(f"{name} = {number}: {low} to {high} is legal")
    return number


def _text(fields: dict[str, Any], name: str, bytes_max: int) -> str:
    given = fields.get(name, "")
    if not isinstance(given, str) or len(given.encode()) > bytes_max:
        raise ValueError(f"{name}: a text of at most {bytes_max} bytes is legal")
    return given


def _scope(given: Any) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    if not isinstance(given, dict):
        raise ValueError("scope: an object is legal")
    layers, heads = given.get("layers", []), given.get("heads", [])
    if not isinstance(layers, list) or len(layers) > LAYERS_MAX:
        raise ValueError(f"scope.layers: a list of at most {LAYERS_MAX} is legal")
    if not isinstance(heads, list) or len(heads) > HEADS_MAX:
        raise ValueError(f"scope.heads: a list of at most {HEADS_MAX} is legal")
    found = tuple(_integer({"scope.layers": n}, "scope.layers", 0, 1 << 20) for n in layers)
    if not all(isinstance(head, dict) for head in heads):
        raise ValueError("scope.heads: objects with layer and head are legal")
    places = tuple(
        (_integer(head, "layer", 0, 1 << 20), _integer(head, "head", 0, 1 << 20)) for head in heads
    )
    return tuple(sorted(set(found))), tuple(dict.fromkeys(places))


def decode(payload: Union[bytes, str]) -> Action:
    """The action that `payload` is the JSON of; values are checked for form only.  Raises
    Malformed."""
    try:
        fields = json.loads(payload)
    except (ValueError, RecursionError) as e:
        raise Malformed(f"no JSON: {e}") from e
    if not isinstance(fields, dict):
        raise Malformed("no JSON object")
    try:
        id = _text(fields, "id", ID_BYTES_MAX)
    except ValueError as e:
        raise Malformed(str(e)) from e
    if not id:
        raise Malformed("id is missing")
    try:
        kind = JSON_KINDS.get(fields.get("kind", ""))
        if kind is None:
            raise ValueError(f"kind = {str(fields.get('kind'))[:64]!r} is not known here")
        value = fields.get("value", 0.0)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"value = {str(value)[:32]!r}: a number is legal")
        layers, heads = _scope(fields.get("scope", {}))
        return Action(
            id=id,
            kind=kind,
            attempt=_integer(fields, "attempt", 0, (1 << 32) - 1),
            layers=layers,
            heads=heads,
            mode=_text(fields, "mode", 32),
            value=float(value),
            apply_at_step=_integer(fields, "apply_at_step", 0, (1 << 63) - 1),
            expires_unix_ns=_integer(fields, "expires_unix_ns", 0, (1 << 63) - 1),
            undoes=_text(fields, "undoes", ID_BYTES_MAX),
        )
    except (ValueError, TypeError, OverflowError) as e:
        raise Malformed(str(e), id) from e


def out_of_range(action: Action) -> Optional[str]:
    """Why no action of this kind may have these values; None if it may."""
    kind, value = action.kind, action.value
    if action.undoes:
        return None if kind in UNDOABLE else f"{kind} cannot be undone"
    if not math.isfinite(value):
        return f"value = {value}: a finite number is legal"
    whole = value == math.floor(value)
    if kind == "attention.mode" and action.mode not in MODES:
        return f"mode = {action.mode!r}: {', '.join(MODES)} are legal"
    if kind == "attention.center_k" and value not in (0.0, 1.0):
        return f"value = {value:g}: 0 (off) and 1 (on) are legal"
    if kind == "qk.clip" and not 0 <= value <= 1:
        return f"value = {value:g}: a gamma in (0, 1], or 0 = the other heads' median, is legal"
    if kind == "lr.scale" and not 0 < value <= LR_SCALE_MAX:
        return f"value = {value:g}: a factor in (0, {LR_SCALE_MAX:g}] is legal"
    if kind == "batch.skip" and not (whole and 1 <= value <= BATCHES_MAX):
        return f"value = {value:g}: 1 to {BATCHES_MAX} batches are legal"
    if kind == "sampling.deepen" and not (whole and 1 <= value <= PERIOD_MAX):
        return f"value = {value:g}: a period of 1 to {PERIOD_MAX} steps is legal"
    return None
