"""A typed wrapper of libbellwether_client for programs that have numbers of their own.

`attach()` uses it, and so does anything that is not PyTorch: create a `RunClient`, push
frames of named signals, close it.  No torch, no numpy.  Calls for one client must not overlap.
"""

from __future__ import annotations

import array
import ctypes
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Optional, TypeVar, Union, cast

from .._util.integers import step as step_number
from .._util.integers import whole
from . import c_api

# Anything that holds contiguous float32 values: array.array("f"), a numpy array, or numbers.
Values = Union[Sequence[float], "array.array[float]", Any]


_PATHS = frozenset({
    "server", "record_path", "tls_ca", "tls_cert", "tls_key", "token_file", "log_path", "spool_dir",
})  # fmt: skip  # Of RunOptions; the server's may be that of a socket.

_Call = TypeVar("_Call", bound=Callable[..., Any])


_HEADER_BYTES = 24  # Of a block of values.


class ClientError(RuntimeError):
    """The library refused a call; the text names the field, the value and the legal range."""


def _refusing(call: _Call) -> _Call:
    """What is no number, or none that C could hold, is a bad argument like any other."""

    @functools.wraps(call)
    def refusing(*arguments: Any, **named: Any) -> Any:
        try:
            return call(*arguments, **named)
        except (ValueError, TypeError, OverflowError, ctypes.ArgumentError) as e:
            raise ClientError(str(e)) from e

    return cast(_Call, refusing)


def _text_for_c(field: str, text: str) -> bytes:
    """Of a path the very bytes that it has, which need not be UTF-8.  Raises ValueError."""
    raw = os.fsencode(text) if field in _PATHS else text.encode("utf-8", "replace")
    if b"\0" in raw:
        raise ValueError(f"{field} is {text[:60]!r}, must have no zero byte")
    return raw


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What a run is; the fields are those of bw_client_options in client.h."""

    run: str
    layers: int
    heads: int
    kv_heads: int = 0  # 0 = heads
    head_dim: int = 0  # 0 = unknown
    seq_len: int = 0  # tokens; 0 = unknown
    rank: int = 0
    world: int = 1
    reporters: int = 0  # 0 = world
    attempt: int = 0
    ring_frames: int = 0  # 0 = the library's default
    frame_values_max: int = 0
    run_uuid: Optional[str] = None
    server: Optional[str] = None
    record_path: Optional[str] = None
    tls_ca: Optional[str] = None
    tls_cert: Optional[str] = None
    tls_key: Optional[str] = None
    token_file: Optional[str] = None
    framework: Optional[str] = None
    model: Optional[str] = None
    attention_kernel: Optional[str] = None
    score_dtype: Optional[str] = None
    log_path: Optional[str] = None
    weight_decay: float = 0.0
    softcap: float = 0.0
    window: int = 0
    causal: bool = False
    centred: bool = False
    qk_norm: bool = False
    step_from_attach: bool = False
    actions_mask: int = 0  # Bit k: the kind of action with number k can be applied here.
    ranks_agree: bool = False
    spool_dir: Optional[str] = None  # Where frames wait that the memory cannot hold.
    spool_bytes: int = 0  # 0 = 1 GiB
    launch_unix_ms: int = 0  # 0 = not known
    experts: int = 0  # Of a layer; 0 = none


@dataclasses.dataclass(frozen=True)
class Block:
    """One signal of a rectangle of heads, values [layer_count][head_count]; or of a range of rows
    that are no heads (tensors, modules, ranks), which take the place of the layers."""

    signal: str
    values: Values
    layer_begin: int = 0
    layer_count: int = 1
    head_begin: int = 0
    head_count: int = 1


@dataclasses.dataclass(frozen=True)
class OwnValues:
    """Numbers of one signal that the program names itself: bw_own_values of client.h.  The first
    of a name say what it is for the whole run."""

    name: str  # [a-z][a-z0-9_./-]{0,63}, none of the catalogue
    values: Values
    of: str = "run"  # A key of c_api.OWN_GRANULARITIES.
    merge: str = "mean"  # Of ranks: a key of c_api.OWN_MERGES.
    layer: int = 0  # Of the first value, or its rank.
    head: int = 0  # Or the expert.
    unit: str = ""
    help: str = ""
    low: Optional[float] = None  # A value below it, or above `high`, is wrong.
    high: Optional[float] = None


@dataclasses.dataclass(frozen=True)
class Counters:
    """bw_counters of client.h."""

    link: str
    frames_queued: int
    frames_dropped_ring: int
    frames_dropped_window: int
    frames_sent: int
    frames_acked: int
    reconnects: int
    sender_restarts: int
    sender_pid: int
    sampling_period_steps: int
    error: str
    page_url: str
    frames_spooled: int
    spool_bytes: int
    frames_stripped: int


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What the server asks of the samples."""

    period: int  # Steps; 0 = as the client likes.
    deeper: tuple[tuple[int, int], ...]  # (layer, head) that it wants to know more of.


def signal_number(name: str) -> int:
    """Number of a measured signal of the catalogue.  Raises ClientError for an unknown name."""
    number = int(c_api.client().bw_signal_by_name(name.encode()))
    if number == 0:
        raise ClientError(f"signal {name!r} is not in the catalogue of libbellwether_client")
    return number


class RunClient:
    """One rank of one run.  Nothing starts before the first push."""

    @_refusing
    def __init__(self, options: RunOptions) -> None:
        self._library = c_api.client()
        self._handle = ctypes.c_void_p()
        self._numbers: dict[str, int] = {}
        self.queued_bytes = 0  # Of frames and spectra: 4 for each value, and what says its place.
        native = c_api.struct(c_api.ClientOptions)
        for field in dataclasses.fields(options):
            value = getattr(options, field.name)
            if isinstance(value, str):
                value = _text_for_c(field.name, value)
            setattr(native, field.name, value)
        # Said here: a client without its sender would take everything and send nothing.
        native.sender_path = os.fsencode(c_api.found(c_api.SENDER))
        status = self._library.bw_client_create(ctypes.byref(native), ctypes.byref(self._handle))
        if status != c_api.OK:
            raise ClientError(c_api.text(self._library.bw_last_error()))

    def _check(self, status: int) -> bool:
        if status in (c_api.OK, c_api.DROPPED, c_api.UNAVAILABLE, c_api.TIMEOUT):
            return status == c_api.OK
        raise ClientError(c_api.text(self._library.bw_last_error()))

    def _number(self, signal: str) -> int:
        number = self._numbers.get(signal)
        if number is None:
            number = self._numbers[signal] = signal_number(signal)
        return number

    @_refusing
    def push(
        self,
        step: int,
        blocks: Sequence[Block],
        *,
        time_unix_ns: int = 0,
        partial_rows: bool = False,
        own: Sequence[OwnValues] = (),
    ) -> bool:
        """Queues one frame; False if it was dropped or the client is unavailable (counted).

        partial_rows  the statistics are of the rows of one context-parallel shard

        own           numbers of signals that the program names itself, at most OWN_MAX

        Frames of more than BLOCKS_MAX blocks are refused.  Raises ClientError on bad arguments.
        """
        native = (c_api.Block * len(blocks))()
        kept = []  # Alive until the call has copied the values.
        size = _HEADER_BYTES * len(blocks)
        for slot, block in zip(native, blocks):
            address, owner = _address(block)
            kept.append(owner)
            slot.signal = self._number(block.signal)
            slot.layer_begin, slot.layer_count = block.layer_begin, block.layer_count
            slot.head_begin, slot.head_count = block.head_begin, block.head_count
            slot.values = address
            size += 4 * block.layer_count * block.head_count
        frame = c_api.struct(
            c_api.Frame,
            block_count=len(blocks),
            step=step_number(step),
            time_unix_ns=time_unix_ns,
            blocks=native,
            partial_rows=int(partial_rows),
            own_count=len(own),
        )
        if own:
            named = (c_api.OwnValues * len(own))()
            for to, values in zip(named, own):
                kept.append(_fill_own(to, values))
            frame.own = named
            kept.append(named)
            size += sum(_HEADER_BYTES + 4 * to.count for to in named)
        queued = self._check(self._library.bw_client_push(self._handle, ctypes.byref(frame)))
        self.queued_bytes += size if queued else 0
        return queued

    @_refusing
    def push_names(self, granularity: int, names: Sequence[str], first: int = 0) -> int:
        """Says what rows of tensors (c_api.TENSOR) or modules are, from row `first` on, before
        frames have values of them.  How many of the names were queued: try the rest again."""
        raw = [_text_for_c("a name", name)[: c_api.ROW_NAME_MAX] for name in names]
        done = 0
        while done < len(raw):
            end, size = done, 0
            while end < len(raw) and size + len(raw[end]) < c_api.NAMES_BYTES_MAX:
                size += len(raw[end]) + 1
                end += 1
            piece = (ctypes.c_char_p * (end - done))(*raw[done:end])
            if not self._check(
                self._library.bw_client_push_names(
                    self._handle, granularity, whole("first", first + done, 0, c_api.UINT32_MAX),
                    end - done, piece,
                )
            ):  # fmt: skip
                break
            done = end
        return done

    @_refusing
    def push_event(self, step: int, kind: str, text: str = "", value: float = 0.0) -> bool:
        """Queues an event; `kind` is a key of _native.EVENT_KINDS."""
        if kind not in c_api.EVENT_KINDS:
            raise ClientError(
                f"event kind {kind!r} is not one of {', '.join(sorted(c_api.EVENT_KINDS))}"
            )
        words = "".join(c if c.isprintable() else " " for c in text).encode()
        words = words[: c_api.EVENT_TEXT_MAX].decode("utf-8", "ignore").encode()
        number = c_api.EVENT_KINDS[kind]
        return self._check(
            self._library.bw_client_push_event(
                self._handle, step_number(step), number, float(value), words
            )
        )

    @_refusing
    def push_spectrum(
        self, step: int, layer: int, head: int, kind: int, n: int, scale: float, address: int
    ) -> bool:
        """Queues a Gram matrix of one head; it comes before the frame of the step.

        kind     SPECTRUM_* of _native
        n        rows, 1 to SPECTRUM_ROWS_MAX
        scale    c of the increment's matrices, 1 for others
        address  of the upper triangle by rows, n (n + 1) / 2 float32 in the memory of the CPU
        """
        named = {"layer": layer, "head": head, "kind": kind, "n": n}
        numbers = [whole(name, value, 0, c_api.UINT32_MAX) for name, value in named.items()]
        queued = self._check(
            self._library.bw_client_push_spectrum(
                self._handle, step_number(step), *numbers, scale, address
            )
        )
        self.queued_bytes += _HEADER_BYTES + 2 * n * (n + 1) if queued else 0
        return queued

    @_refusing
    def push_action_result(self, id: str, step: int, applied: bool, reason: str) -> bool:
        """Answers an action, ordered with the frames.  False if the ring is full: try again."""
        words = "".join(c if c.isprintable() else " " for c in reason).encode()
        return self._check(
            self._library.bw_client_push_action_result(
                self._handle, id.encode(), step_number(step), int(applied), words
            )
        )

    def poll_sampling(self) -> Optional[Sampling]:
        """What the server last asked of the samples, if it asked since the last call."""
        return self.poll()[0]

    def poll(self) -> tuple[Optional[Sampling], list[bytes]]:
        """(what poll_sampling() gives, the actions that came since the last call, as JSON)."""
        newest: Optional[Sampling] = None
        actions: list[bytes] = []
        while True:
            command = c_api.struct(c_api.Command)
            self._library.bw_client_poll(self._handle, ctypes.byref(command))
            if command.type == c_api.COMMAND_NONE:
                return newest, actions
            if command.type == c_api.COMMAND_ACTION:
                actions.append(bytes(command.payload[: command.payload_bytes]))
            elif command.type == c_api.COMMAND_SAMPLING:
                payload = bytes(command.payload[: command.payload_bytes])
                newest = Sampling(int(command.value), _deeper_heads(payload))

    def counters(self) -> Counters:
        native = c_api.struct(c_api.Counters)
        self._check(self._library.bw_client_get_counters(self._handle, ctypes.byref(native)))
        values: dict[str, Any] = {}
        for field in dataclasses.fields(Counters):
            value = getattr(native, field.name)
            values[field.name] = c_api.text(value) if isinstance(value, bytes) else value
        link = int(values["link"])
        values["link"] = c_api.LINK_NAMES[link] if link < len(c_api.LINK_NAMES) else str(link)
        return Counters(**values)

    def flush(self, timeout: float = 5.0) -> bool:
        """Waits until everything pushed so far is durable, at most `timeout` seconds."""
        longest = c_api.UINT32_MAX / 1000
        timeout = min(timeout, longest) if timeout > 0 else 0.0  # Not a number: no wait.
        return self._check(self._library.bw_client_flush(self._handle, int(timeout * 1000)))

    def close(self) -> None:
        """Lets go; the sender sends what is left and then ends.  Waits for nothing."""
        if self._handle:
            self._library.bw_client_destroy(self._handle)
            self._handle = ctypes.c_void_p()

    def __enter__(self) -> RunClient:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        value: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of protobuf's wire and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _fields(data: bytes) -> Iterator[tuple[int, Union[int, bytes]]]:
    """Numbers and values of the fields of a message that are integers or bytes.  Raises
    IndexError or ValueError for what is no such message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        size = 0
        if tag & 7 == 0:
            number, at = _varint(data, at)
            yield tag >> 3, number
        elif tag & 7 == 2:
            size, at = _varint(data, at)
            yield tag >> 3, data[at : at + size]
            at += size
        else:
            raise ValueError(f"wire type {tag & 7}")


def _deeper_heads(sampling: bytes) -> tuple[tuple[int, int], ...]:
    """Sampling.deeper of a serialized bellwether.v1.Sampling.  (The trainer may hold any version
    of protobuf, or none.)"""
    heads = []
    try:
        for number, value in _fields(sampling):
            if number == 2 and isinstance(value, bytes):
                place = dict(_fields(value))
                heads.append((int(place.get(1, 0)), int(place.get(2, 0))))
    except (IndexError, ValueError):
        return ()
    return tuple(heads)


def _address(block: Block) -> tuple[int, object]:
    """Address of a block's float32 values, and the object that keeps them alive."""
    values = block.values
    count = block.layer_count * block.head_count
    interface = getattr(values, "__array_interface__", None)
    if interface is not None:
        contiguous = interface.get("strides") is None and interface["typestr"] == "<f4"
        size = 1
        for extent in interface["shape"]:
            size *= extent
        if contiguous and size == count:
            return int(interface["data"][0]), values
    if isinstance(values, array.array) and values.typecode == "f":
        packed = values
    else:
        packed = array.array("f", _flat(values))
    if len(packed) != count:
        raise ClientError(
            f"block {block.signal!r} has {len(packed)} values, its rectangle has {count}"
        )
    return packed.buffer_info()[0], packed


def _fill_own(to: c_api.OwnValues, own: OwnValues) -> object:
    """What keeps its values alive."""
    values = own.values
    if not (isinstance(values, array.array) and values.typecode == "f"):
        values = array.array("f", _flat(values))
    if own.of not in c_api.OWN_GRANULARITIES or own.merge not in c_api.OWN_MERGES:
        raise ClientError(
            f"{own.name}: of={own.of!r}, merge={own.merge!r}, must be of "
            f"{', '.join(c_api.OWN_GRANULARITIES)} and one of {', '.join(c_api.OWN_MERGES)}"
        )
    if own.low is not None and own.high is not None and own.low > own.high:
        raise ClientError(f"{own.name}: low={own.low:g}, must be at most high={own.high:g}")
    to.name = _text_for_c("a name", own.name)
    to.unit, to.help = _text_for_c("unit", own.unit), _text_for_c("help", own.help)
    to.granularity, to.merge = c_api.OWN_GRANULARITIES[own.of], c_api.OWN_MERGES[own.merge]
    to.layer, to.head, to.count = own.layer, own.head, len(values)
    to.limits = (own.low is not None) | (own.high is not None) << 1
    to.low, to.high = own.low or 0.0, own.high or 0.0
    to.values = values.buffer_info()[0]
    return values


def _flat(values: Any) -> list[float]:
    if hasattr(values, "ravel"):
        return [float(v) for v in values.ravel()]
    return [float(v) for v in values]


def recording(path: Union[str, Path], options: RunOptions) -> RunClient:
    """A client that writes to a .bwrun file and to no server."""
    return RunClient(dataclasses.replace(options, record_path=str(path), server=None))
