"""Files of broken calls of attention: q, k, v, mask, dO and what came out, of one sequence.

`python -m bellwether reproduce` makes a script of a file.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Optional, Protocol

import torch
from torch import Tensor

from .. import __version__
from .._kernels.probe import ProbeMask
from .._util import files

FORMAT = 1  # Of the files; a reader takes this one alone.
NAMES = ("q", "k", "v", "o", "d_o", "dq", "dk", "dv")


class Call(Protocol):
    """A call whose backward is over, as GradedCall of _laws/call.py: q, o, d_o, dq [batch, heads,
    q_len, dim]; k, v, dk, dv [batch, kv_heads, k_len, dim]; sinks [heads]."""

    @property
    def q(self) -> Tensor: ...
    @property
    def k(self) -> Tensor: ...
    @property
    def scale(self) -> float: ...
    @property
    def mask(self) -> ProbeMask: ...
    @property
    def softcap(self) -> float: ...
    @property
    def sinks(self) -> Optional[Tensor]: ...


class Refused(Exception):
    """The call cannot be kept; the text says why."""


def tensors_of(call: Call) -> dict[str, Tensor]:
    """All that a file holds of it, with the sequences in the first dimension.  Raises Refused."""
    found = {name: getattr(call, name).detach() for name in NAMES}
    if call.mask.by_sample:
        raise Refused("a mask that is a function")
    if call.mask.tensor is not None:
        mask = call.mask.tensor.detach()
        found["mask"] = mask[(None,) * (4 - mask.dim())]
    if call.mask.ranges is not None:
        found["ranges"] = call.mask.ranges[(None,) * (3 - call.mask.ranges.dim())]
    if call.sinks is not None:
        found["sinks"] = call.sinks.detach()[None]
    return found


def _versions(device: torch.device) -> dict[str, Any]:
    told: dict[str, Any] = {
        "bellwether": __version__, "torch": str(torch.__version__),
        "python": platform.python_version(), "device": device.type,
    }  # fmt: skip
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        told["device"] = properties.name
        told["architecture"] = f"sm_{properties.major}{properties.minor}"
        told["cuda"] = str(torch.version.cuda)
        told["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return told


def about(call: Call, **more: Any) -> dict[str, Any]:
    """What a file says of its call besides the tensors."""
    mask = call.mask
    return {
        "format": FORMAT, "scale": call.scale, "softcap": call.softcap, "causal": mask.causal,
        "top_left": mask.top_left, "window_left": mask.window_left,
        "window_right": mask.window_right, "batch": call.q.shape[0],
        "strides": {name: list(getattr(call, name).stride()) for name in NAMES},
        "versions": _versions(call.q.device), **more,
    }  # fmt: skip


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def write(path: Path, tensors: dict[str, Tensor], told: dict[str, Any]) -> None:
    """A file for torch.load(weights_only=True).  tensors: of one sequence, without that dimension,
    on the CPU.  Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as part, open(part, "wb") as file:
        torch.save({"about": json.dumps(told), **tensors}, file)


def sequence_at(tensors: dict[str, Tensor], at: Tensor) -> dict[str, Tensor]:
    """[1, ...] of each; at [1]: which sequence, on their device."""
    return {n: t if t.shape[0] == 1 else t.index_select(0, at) for n, t in tensors.items()}


def keeper(
    folder: Path, files_max: int, say: Callable[[str], None]
) -> Callable[[Call, int, str, dict[str, Any]], None]:
    """For doctor: writes one sequence of a call at once, as often as files_max.

    It takes the call, the sequence, the file's name without its ending, and what more is to be
    said of it.
    """
    written: list[Path] = []

    def keep(call: Call, sequence: int, name: str, more: dict[str, Any]) -> None:
        if len(written) >= files_max:
            return
        at = torch.tensor([sequence], dtype=torch.int64, device=call.q.device)
        path = folder / f"{re.sub(r'[^a-z0-9.-]+', '-', name.lower())}.pt"
        try:
            parts = sequence_at(tensors_of(call), at)
            told = about(call, sequence=sequence, **more)
            write(path, {name: t[0].cpu().contiguous() for name, t in parts.items()}, told)
        except (Refused, OSError) as e:
            say(f"{name} was not captured: {e}")
            return
        written.append(path)
        say(f"captured: python -m bellwether reproduce {path}")

    return keep
