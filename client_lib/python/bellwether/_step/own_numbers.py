"""Numbers that the job names itself (mon.log), from the call to the frame of their step.

A number on a device is copied without waiting, as the step's other numbers are.  What a name is (of
what its values are, how they merge) is said by its first values, and stays.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import math
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any, Optional, Protocol, Union

import torch

from .._kernels.memory import capturing
from .._native import c_api
from .._native.run_client import OwnValues
from .._util.integers import whole

SIGNALS_MAX = 256  # Of a run.
NAME_MAX = 64
VALUES_MAX = 16384  # Of one call.
TOLD_MAX = 256  # Calls of one name in a step.
ACROSS = ("head", "expert")  # Of several in each layer.
_EXTENT = {
    "run": (1, 1), "layer": (c_api.LAYERS_MAX, 1), "rank": (c_api.WORLD_MAX, 1),
    "head": (c_api.LAYERS_MAX, c_api.HEADS_MAX), "expert": (c_api.LAYERS_MAX, c_api.EXPERTS_MAX),
}  # fmt: skip
_MERGES: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda told: sum(told) / len(told),
    "sum": sum,
    "max": lambda told: math.nan if any(map(math.isnan, told)) else max(told),
}
_DESCRIBED_EVERY = 100  # Frames with a signal, so that a lost one costs no words for good.
_OTHER = re.compile(r"[^a-z0-9_./-]")


def own_name(name: Any) -> str:
    """As the wire has it: train/KL becomes train/kl.  Raises ValueError."""
    if not isinstance(name, str):
        raise ValueError(f"a name must be a str, and is a {type(name).__name__}")
    plain = _OTHER.sub("_", name.lower())
    if not plain or len(plain) > NAME_MAX or not "a" <= plain[0] <= "z":
        raise ValueError(f"a name must begin with a letter and have 1..{NAME_MAX} characters")
    if plain in _catalogue():
        raise ValueError(
            "a signal of the catalogue has this name (loss, grad_norm and lr are for mon.step())"
        )
    return plain


@functools.cache
def _catalogue() -> frozenset[str]:
    try:
        return frozenset(c_api.signal_names())
    except c_api.LibraryError:  # Nothing is sent then.
        return frozenset()


@dataclasses.dataclass
class OwnSignal:
    """What a name is."""

    name: str
    of: str
    merge: str
    given: str  # The name as the job says it.
    unit: str = ""
    help: str = ""
    low: Optional[float] = None
    high: Optional[float] = None
    frames: int = 0  # That had it.

    def agrees(self, given: str, of: str, merge: str) -> None:
        """Raises ValueError for another name, which would be averaged with this one, or kind."""
        if given != self.given:
            raise ValueError(f"it is stored as {self.name}, and {self.given!r} has that name")
        if (of, merge) != (self.of, self.merge):
            raise ValueError(
                f"of={of}, merge={merge}, and was of={self.of}, merge={self.merge} before"
            )


class _OnDevice:
    """Numbers on their way from a device."""

    def __init__(self, value: torch.Tensor) -> None:
        flat = value.detach().reshape(-1).float()
        self.host = torch.empty(flat.shape, dtype=torch.float32, device="cpu", pin_memory=True)
        self.host.copy_(flat, non_blocking=True)
        self.event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record()

    def ready(self) -> bool:
        return bool(self.event.query())

    def values(self) -> list[float]:
        return [float(v) for v in self.host.tolist()]


@dataclasses.dataclass
class Told:
    """What one call said of one name: values [rows][columns] from (layer, head) on."""

    signal: OwnSignal
    layer: int
    head: int
    shape: tuple[int, int]
    numbers: Union[list[float], _OnDevice]
    carried: bool = False  # Of the step before, whose frame was gone.

    @property
    def name(self) -> str:
        return self.signal.name

    def ready(self) -> bool:
        return isinstance(self.numbers, list) or self.numbers.ready()

    def cells(self) -> Iterable[tuple[tuple[int, int], float]]:
        numbers = self.numbers if isinstance(self.numbers, list) else self.numbers.values()
        columns = self.shape[1]
        for i, number in enumerate(numbers):
            yield (self.layer + i // columns, self.head + i % columns), number


class ToldOnce(Protocol):
    """What one call says, of one name."""

    carried: bool  # Of the step before, whose frame was gone.

    @property
    def name(self) -> str: ...

    def ready(self) -> bool: ...


def _numbers(value: Any) -> tuple[tuple[int, ...], Union[list[float], _OnDevice]]:
    """(its shape, the numbers).  Raises ValueError or TypeError."""
    if isinstance(value, torch.Tensor):
        if value.is_complex():
            raise ValueError("a complex number has no order")
        if value.numel() > VALUES_MAX:
            raise ValueError(f"{value.numel()} values, must be at most {VALUES_MAX}")
        if value.device.type == "cpu":
            return tuple(value.shape), [float(v) for v in value.detach().reshape(-1).tolist()]
        if value.device.type != "cuda":
            raise ValueError(f"a tensor on {value.device.type} cannot be read")
        if capturing():
            raise ValueError("a CUDA graph is being captured")
        return tuple(value.shape), _OnDevice(value)
    if hasattr(value, "tolist") and hasattr(value, "shape"):  # Of numpy and what is like it.
        shape = tuple(int(extent) for extent in value.shape)
        if math.prod(shape) > VALUES_MAX:
            raise ValueError(f"{math.prod(shape)} values, must be at most {VALUES_MAX}")
        flat = value.reshape(-1).tolist() if shape else [value.tolist()]
        return shape, [float(v) for v in flat]
    if isinstance(value, (list, tuple, array.array, range)):
        if len(value) > VALUES_MAX:
            raise ValueError(f"{len(value)} values, must be at most {VALUES_MAX}")
        tensors = [v for v in value if isinstance(v, torch.Tensor)]
        if tensors and len(tensors) == len(value):  # Not one copy of each.
            return _numbers(torch.stack([v.detach().reshape(()) for v in tensors]))
        return (len(value),), [float(v) for v in value]
    if isinstance(value, str):
        raise TypeError("a text is no number")
    return (), [float(value)]


class OwnNumbers:
    def __init__(self, leave_out: Callable[[str, Exception], None]) -> None:
        self._leave_out = leave_out
        self._lock = threading.Lock()  # Any thread may log.
        self._signals: dict[str, OwnSignal] = {}
        self._running: list[ToldOnce] = []
        self._calls: dict[str, int] = {}  # By name, in the running step.

    @property
    def used(self) -> bool:
        return bool(self._signals)

    def read(
        self, name: Any, value: Any, *, layer: Optional[int], head: Optional[int],
        of: Optional[str],
        merge: Optional[str], unit: str, help: str, low: Optional[float], high: Optional[float],
        heads: int,
    ) -> Told:  # fmt: skip
        """One number, or several.  Raises whatever the trainer's values raise.

        heads  how many the model's layers have
        """
        plain = own_name(name)
        shape, numbers = _numbers(value)
        known = self._signals.get(plain)
        if of is None:
            of = known.of if known is not None else self._guess(shape, layer, heads)
        if of not in _EXTENT:
            raise ValueError(f"of={of!r}, must be one of {', '.join(_EXTENT)}")
        if merge is None:
            merge = known.merge if known is not None else "mean"
        if merge not in _MERGES:
            raise ValueError(f"merge={merge!r}, must be one of {', '.join(_MERGES)}")
        if known is not None:
            known.agrees(name, of, merge)
        rows, columns = self._rectangle(of, shape)
        begin = 0 if layer is None else whole("layer", layer, 0, _EXTENT[of][0] - rows)
        first = 0 if head is None else whole("head", head, 0, _EXTENT[of][1] - columns)
        with self._lock:
            signal = self._signals.get(plain)
            limits = _limits(signal, low, high)
            if signal is None:
                if len(self._signals) >= SIGNALS_MAX:
                    raise ValueError(f"a run has at most {SIGNALS_MAX} signals of its own")
                signal = self._signals[plain] = OwnSignal(plain, of, merge, name)
            signal.agrees(name, of, merge)  # Another thread may have been first.
            for field, said in (("unit", _text(unit, 32)), ("help", _text(help, 256))):
                if said and not getattr(signal, field):
                    setattr(signal, field, said)
            signal.low, signal.high = limits
        return Told(signal, begin, first, (rows, columns), numbers)

    @staticmethod
    def _guess(shape: tuple[int, ...], layer: Optional[int], heads: int) -> str:
        if math.prod(shape) == 1 and len(shape) < 2:
            return "run" if layer is None else "layer"
        if layer is None and len(shape) == 1:
            return "layer"
        return "head" if shape[-1] == heads else "expert"

    @staticmethod
    def _rectangle(of: str, shape: tuple[int, ...]) -> tuple[int, int]:
        size = math.prod(shape)
        if size == 0 or len(shape) > 2 or (len(shape) == 2 and of not in ACROSS):
            raise ValueError(f"values of shape {list(shape)} are none of a {of}")
        rows, columns = (shape if len(shape) == 2 else (1, size)) if of in ACROSS else (size, 1)
        if rows > _EXTENT[of][0] or columns > _EXTENT[of][1]:
            raise ValueError(f"{size} values, {of} has at most {max(_EXTENT[of])}")
        return rows, columns

    def add(self, told: ToldOnce) -> None:
        """To the running step.  Raises ValueError beyond TOLD_MAX."""
        with self._lock:
            calls = self._calls.get(told.name, 0)
            if calls >= TOLD_MAX:
                raise ValueError(f"told {TOLD_MAX} times in one step")
            self._calls[told.name] = calls + 1
            self._running.append(told)

    def take(self) -> list[ToldOnce]:
        """What was told in the step that ends."""
        with self._lock:
            running, self._running, self._calls = self._running, [], {}
        return running

    def of_frame(self, told: list[Told]) -> list[OwnValues]:
        """One message for each stretch of cells; what was told several times is merged."""
        cells: dict[str, dict[tuple[int, int], list[float]]] = {}
        signals: dict[str, OwnSignal] = {}
        afresh = {one.signal.name for one in told if not one.carried}
        for one in told:
            if one.carried and one.signal.name in afresh:
                continue
            signals[one.signal.name] = one.signal
            of_name = cells.setdefault(one.signal.name, {})
            for cell, number in one.cells():
                of_name.setdefault(cell, []).append(number)
        found: list[OwnValues] = []
        for name, of_name in cells.items():
            signal = signals[name]
            merge = _MERGES[signal.merge]
            words = signal.frames % _DESCRIBED_EVERY == 0
            signal.frames += 1
            for begin, values in _stretches(of_name, signal.of in ACROSS):
                merged = array.array("f", [_single(merge(several)) for several in values])
                found.append(
                    OwnValues(
                        name, merged, of=signal.of,
                        merge=signal.merge, layer=begin[0], head=begin[1],
                        unit=signal.unit if words else "", help=signal.help if words else "",
                        low=signal.low if words else None, high=signal.high if words else None,
                    )
                )  # fmt: skip
                words = False
        if len(found) > c_api.OWN_MAX:
            self._leave_out(
                "log()",
                ValueError(
                    f"{len(found)} stretches of values in one step, {c_api.OWN_MAX} are sent"
                ),
            )
        return found[: c_api.OWN_MAX]


def _single(number: float) -> float:
    """What a float of C can hold."""
    return math.copysign(math.inf, number) if abs(number) > c_api.FLOAT_MAX else number


def _limits(
    signal: Optional[OwnSignal], low: Any, high: Any
) -> tuple[Optional[float], Optional[float]]:
    """What a name has for low and high from now on: what was said first.  Raises ValueError for
    limits that no value keeps."""
    said = [_limit("low", low), _limit("high", high)]
    kept = [signal.low, signal.high] if signal is not None else [None, None]
    now = [new if old is None else old for old, new in zip(kept, said)]
    for first, last in (said, now):
        if first is not None and last is not None and first > last:
            raise ValueError(f"low={first:g}, must be at most high={last:g}")
    return now[0], now[1]


def _limit(field: str, limit: Any) -> Optional[float]:
    if limit is None:
        return None
    found = float(limit)
    if not math.isfinite(found):
        raise ValueError(f"{field}={found}, must be finite")
    return found


def _text(text: Any, size: int) -> str:
    words = "".join(c if c.isprintable() else " " for c in str(text)).encode("utf-8", "replace")
    return words[:size].decode("utf-8", "ignore")


def _stretches(
    cells: dict[tuple[int, int], list[float]], across: bool
) -> Iterable[tuple[tuple[int, int], list[list[float]]]]:
    begin = (0, 0)
    values: list[list[float]] = []
    last: Optional[tuple[int, int]] = None
    for cell in sorted(cells):
        follows = last is not None and cell == (
            (last[0], last[1] + 1) if across else (last[0] + 1, last[1])
        )
        if not follows or len(values) == c_api.OWN_VALUES_MAX:
            if values:
                yield begin, values
            begin, values = cell, []
        values.append(cells[cell])
        last = cell
    if values:
        yield begin, values
