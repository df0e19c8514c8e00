"""Kernels of attention that are known to be wrong, and the calls that may meet them.

The table is known_kernels.json.  Each entry has a source that names versions.  Most were only
reported; `measured` ones were seen by `doctor --kernels`.  An entry is a hint and no verdict: some
depend on values, which nothing here looks at.  `doctor --kernels` tells.

An entry of the table:

  id             for people and programs; it stays
  kernels        names as calls have them ("cudnn", "flash_attn.cute*"); * stands for anything
  libraries      {name: [[first version, first version that is right again], ...]}; all must fit
  architectures  "sm_90" of a GPU, or "cpu"; none = any GPU
  dtypes         of the tensors in the kernel; none = any
  when           {fact of the call: what it must be}, see Facts: a list of values; or {"least": n},
                 {"modulo": n, "is": m}, {"modulo": n, "is_not": m}, {"none_of": [...]}
  wrong          the tensors
  what, instead  in words: what is wrong, what to do
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import importlib.metadata
import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .call import AttentionCall
from .kernel_choice import kernel_of, unseen

TABLE = Path(__file__).with_name("known_kernels.json")
SHAPES_MAX = 64  # Of one layer's calls that are looked up; what comes later is not.
_VERSION = re.compile(r"v?(\d+(?:\.\d+)*)(?:\.?(dev|a|b|rc)(\d+))?")
_STAGES = {"dev": 0, "a": 1, "b": 2, "rc": 3, None: 4}


class Facts(NamedTuple):
    """What an entry may ask of a call."""

    kernel: str
    architecture: str  # "sm_90", "cpu"
    dtype: str  # "bfloat16"
    mask: str  # "none", "causal", "bool", "added" to the scores, or "function" that changes them
    documents: bool  # Several, laid end to end.
    sinks: bool
    strided: bool  # q, k or v is a view of something larger.
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    head_dim: int
    v_dim: int

    @property
    def scores(self) -> int:
        """Of one head and sequence."""
        return self.q_len * self.k_len

    def __str__(self) -> str:
        return (
            f"{self.kernel}, {self.dtype}, {self.batch} x {self.heads} heads of {self.head_dim}, "
            f"{self.q_len} x {self.k_len}, mask: {self.mask}, {self.architecture}"
        )


_ASKED = frozenset(Facts._fields) | {"scores"}


def version_key(version: str) -> tuple[Any, ...]:
    """Orders versions as Python packages do; without what follows a "+".  () for no version."""
    match = _VERSION.match(version)
    if match is None:
        return ()
    numbers = [int(part) for part in match.group(1).split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), _STAGES[match.group(2)], int(match.group(3) or 0)


def _cudnn() -> Optional[str]:
    number: Optional[int] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if number is None:
        return None
    major = 10_000 if number >= 90_000 else 1_000
    return f"{number // major}.{number % major // 100}.{number % 100}"


@functools.cache
def installed(library: str) -> Optional[str]:
    """The version that runs here, None without it."""
    if library == "torch":
        return str(torch.__version__)
    if library == "cudnn":
        return _cudnn()
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def architecture(device: torch.device) -> str:
    """ "sm_90", "cpu"; "" where entries of neither kind can be meant."""
    if device.type != "cuda":
        return device.type if device.type == "cpu" else ""
    if torch.version.hip is not None:
        return ""  # Its numbers look like compute capabilities.
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _holds(asked: Any, value: Any) -> bool:
    if isinstance(asked, list):
        return value in asked
    if "least" in asked:
        return bool(value >= asked["least"])
    if "none_of" in asked:
        return value not in asked["none_of"]
    rest = value % asked["modulo"]
    return bool(rest == asked["is"] if "is" in asked else rest != asked["is_not"])


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row of the table."""

    id: str
    kernels: tuple[str, ...]
    libraries: Mapping[str, Any]
    architectures: tuple[str, ...]
    dtypes: tuple[str, ...]
    when: Mapping[str, Any]
    wrong: tuple[str, ...]
    what: str
    instead: str
    measured: bool
    source: str

    def possible(
        self, on: str, version: Callable[[str], Optional[str]] = installed
    ) -> Optional[str]:
        """The versions that make it possible on this architecture, in words; None if it is not."""
        if not (on in self.architectures if self.architectures else on.startswith("sm_")):
            return None
        found = []
        for library, ranges in self.libraries.items():
            here = version(library)
            key = version_key(here or "")
            if not any(version_key(first) <= key < version_key(right) for first, right in ranges):
                return None
            found.append(f"{library} {here}")
        return ", ".join(found)

    def fits(self, facts: Facts) -> bool:
        """Whether a call is one of those that are meant, whatever the versions."""
        return (
            any(fnmatch.fnmatchcase(facts.kernel, name) for name in self.kernels)
            and (not self.dtypes or facts.dtype in self.dtypes)
            and all(_holds(asked, getattr(facts, name)) for name, asked in self.when.items())
        )

    def __str__(self) -> str:
        seen = "measured" if self.measured else "reported, not measured by us"
        return (
            f"{'/'.join(self.kernels)} may return wrong {', '.join(self.wrong)}: {self.what} "
            f"({seen}: {self.source}). Instead: {self.instead}"
        )


def parsed(text: str) -> tuple[Entry, ...]:
    """Raises ValueError that names the entry."""
    names = {field.name for field in dataclasses.fields(Entry)}
    found: list[Entry] = []
    for row in json.loads(text)["entries"]:
        own = row.get("id", f"entry {len(found) + 1}")
        if set(row) != names:
            raise ValueError(f"{own}: fields {sorted(set(row) ^ names)} are missing or unknown")
        unknown = set(row["when"]) - _ASKED
        if unknown:
            raise ValueError(f"{own}: when: {sorted(unknown)} are no facts of a call")
        versions = [v for ranges in row["libraries"].values() for pair in ranges for v in pair]
        if not versions or not all(map(version_key, versions)):
            raise ValueError(f"{own}: libraries: a version is missing or is none")
        lists = {name: tuple(x) for name, x in row.items() if isinstance(x, list)}
        found.append(Entry(**{**row, **lists}))
    if len({entry.id for entry in found}) < len(found):
        raise ValueError("two entries have one id")
    return tuple(found)


@functools.cache
def entries() -> tuple[Entry, ...]:
    return parsed(TABLE.read_text(encoding="utf-8"))


@functools.cache
def possible(on: str) -> tuple[Entry, ...]:
    """Those that the versions here and the architecture leave, for some call or other."""
    return tuple(entry for entry in entries() if on and entry.possible(on) is not None)


def fitting(facts: Facts) -> list[Entry]:
    """Those that are meant by a call, with the versions here."""
    return [entry for entry in possible(facts.architecture) if entry.fits(facts)]


def _mask(call: AttentionCall) -> str:
    mask = call.mask
    if mask.function is not None:
        return "function"
    if mask.tensor is not None:
        return "bool" if mask.tensor.dtype == torch.bool else "added"
    return "causal" if mask.causal else "none"


def kernel(call: AttentionCall) -> str:
    """The implementation of a call, as the types are that autocast gives it."""
    if call.cast is None or call.options is None:
        return call.kernel()
    given = dict(call.options)
    mask = given.get("attn_mask")
    with unseen():  # Shapes and strides decide, and no value.
        q, k, v = (
            t if t.dtype == call.cast else torch.empty_like(t, dtype=call.cast, requires_grad=True)
            for t in (call.q, call.k, call.v)
        )
        if type(mask) is Tensor and mask.dtype == torch.float32:
            given["attn_mask"] = torch.empty_like(mask, dtype=call.cast)
    return kernel_of(q, k, v, given)


class Met:
    """Of one layer: the entries that its calls fit."""

    def __init__(self) -> None:
        self.found: dict[str, Facts] = {}  # By id: the first call that fits.
        self._seen: set[tuple[Any, ...]] = set()

    def meet(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> list[Entry]:
        """Entries that this call is the first of the layer to fit.

        q, k, v  of the call, as [batch, heads, tokens, dim]"""
        left = possible(architecture(q.device))
        if not left or len(self.found) >= len(left) or len(self._seen) >= SHAPES_MAX:
            return []
        dtype = call.cast or q.dtype
        strided = not (call.q.is_contiguous() and call.k.is_contiguous() and call.v.is_contiguous())
        of_call = (
            str(dtype).removeprefix("torch."), _mask(call), call.mask.q_offsets is not None,
            call.sinks is not None, strided, q.shape[0], q.shape[1], k.shape[1], q.shape[2],
            k.shape[2], q.shape[3], v.shape[3],
        )  # fmt: skip
        if of_call in self._seen:
            return []
        self._seen.add(of_call)
        facts = Facts(kernel(call), architecture(q.device), *of_call)
        new = [entry for entry in fitting(facts) if entry.id not in self.found]
        self.found.update({entry.id: facts for entry in new})
        return new


def named(ids: Collection[str]) -> list[Entry]:
    """The entries with these ids."""
    return [entry for entry in entries() if entry.id in ids]
