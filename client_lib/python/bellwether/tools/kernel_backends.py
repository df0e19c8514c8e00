"""The kernels of attention that doctor tries: PyTorch's, each by itself, and ours in all modes."""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from .._attention.attention_op import machine_lacks
from .._attention.dispatch import attention, unsupported
from .._hook.calls.kernel_choice import kernel_of
from .._hook.calls.known_kernels import Facts, architecture
from .._native.attention_c_api import MODES
from .kernel_cases import Inputs

try:
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:  # torch before 2.3
    SDPBackend = sdpa_kernel = None  # type: ignore[assignment,misc]

# As sdpa_kernel has them, with the name that kernel_of() gives.
TORCHS = {"math": "MATH", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION",
          "cudnn": "CUDNN_ATTENTION"}  # fmt: skip
_ON_CPU = ("math", "flash")
FLEX = "torch flex"
_FLEX_INPUTS_MAX = 256  # That it is compiled for in one process.
_FOR_COMPARISON = ("paper", "hp-nolt", "lt")  # Of our modes.


class NotOffered(Exception):
    """The kernel does not take this input; the text says why."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """run(inputs, q, k, v) is the output; it raises NotOffered."""

    name: str
    run: Callable[[Inputs, Tensor, Tensor, Tensor], Tensor]
    advice: str  # How a job gets it.
    for_comparison: bool = False  # No job should have it.
    slow: bool = False  # It is compiled for each input: tried when all others are done.


def _given(inputs: Inputs, q: Tensor, k: Tensor) -> dict[str, Any]:
    if inputs.sinks is not None:
        raise NotOffered("has no sinks")
    given: dict[str, Any] = {"attn_mask": inputs.mask, "is_causal": inputs.causal}
    if q.shape[1] != k.shape[1]:
        given["enable_gqa"] = True
    return given


def _sdpa(name: str) -> Callable[[Inputs, Tensor, Tensor, Tensor], Tensor]:
    backend = getattr(SDPBackend, TORCHS[name])

    def run(inputs: Inputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = _given(inputs, q, k)
        with warnings.catch_warnings(record=True) as said, sdpa_kernel(backend):
            warnings.simplefilter("always")
            try:
                return functional.scaled_dot_product_attention(q, k, v, **given)
            except RuntimeError as e:
                reasons = [str(w.message).split(" (Triggered")[0] for w in said]
                raise NotOffered("; ".join(reasons[-2:]) or str(e).split("\n")[0]) from e

    return run


def _ours(mode: str) -> Callable[[Inputs, Tensor, Tensor, Tensor], Tensor]:
    def run(inputs: Inputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        reason = unsupported(q, k, v, inputs.mask)
        if reason is not None:
            raise NotOffered(reason)
        return attention(
            q, k, v, causal=inputs.causal, mode=mode, mask=inputs.mask, sinks=inputs.sinks,
            enable_gqa=True,
        )  # fmt: skip

    return run


def _recompiled() -> AbstractContextManager[Any]:
    """Else the ninth input would silently run as it is written, without a kernel."""
    import torch._dynamo

    config: Any = torch._dynamo.config
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    patched: AbstractContextManager[Any] = config.patch({name: _FLEX_INPUTS_MAX})
    return patched


def _flex(inputs: Inputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if q.device.type == "cpu":
        raise NotOffered("has no backward pass on CPUs")
    _given(inputs, q, k)
    mask = inputs.mask
    extra: dict[str, Any] = {}

    def causal(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return row >= key

    def shown(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        assert mask is not None
        return mask[b, 0, row, key]

    def added(score: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        assert mask is not None
        return score + mask[b, 0, row, key]

    if mask is not None and mask.dtype != torch.bool:
        extra["score_mod"] = added
    elif inputs.causal or mask is not None:
        seen = causal if mask is None else shown
        extra["block_mask"] = create_block_mask(
            seen, q.shape[0] if mask is not None else None, None, q.shape[2], k.shape[2], q.device
        )
    try:
        compiled: Any = torch.compile(flex_attention, dynamic=False)
        with _recompiled():
            result: Tensor = compiled(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **extra)
    except Exception as e:  # Of the compiler: whatever it lacks here.
        raise NotOffered(f"does not compile: {str(e).strip().splitlines()[0][:120]}") from e
    return result


def named(place: str) -> Kernel:
    """The function "module:name", with the arguments of scaled_dot_product_attention."""
    module, _, name = place.partition(":")
    if not name:
        raise ValueError(f"--function is {place!r}, but must be module:name")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"--function is {place!r}, which cannot be imported: {e}") from e

    def run(inputs: Inputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = _given(inputs, q, k)
        given = {n: x for n, x in given.items() if x is not None and x is not False}
        result: Tensor = function(q, k, v, **given)
        return result

    return Kernel(place, run, f"call {place}")


def kernels(device: torch.device) -> list[Kernel]:
    """All that this machine has, PyTorch's first."""
    found = []
    if sdpa_kernel is not None:
        for name, backend in TORCHS.items():
            if device.type == "cpu" and name not in _ON_CPU:
                continue
            advice = f"with torch.nn.attention.sdpa_kernel(SDPBackend.{backend}): ..."
            found.append(Kernel(f"torch {name}", _sdpa(name), advice))
    if machine_lacks(device) is None:
        for mode in MODES:
            hp = mode == "hp"
            advice = "bellwether.stabilize(model)" if hp else f'bellwether.attention(mode="{mode}")'
            found.append(Kernel(f"bellwether {mode}", _ours(mode), advice, mode in _FOR_COMPARISON))
    advice = "torch.nn.attention.flex_attention, compiled"
    found.append(Kernel(FLEX, _flex, advice, slow=True))
    return found


def facts(kernel: Kernel, inputs: Inputs) -> Facts:
    """What the table of known kernels asks of a call."""
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask
    flex = kernel.name == FLEX
    name = "flex_attention" if flex else kernel.name.removeprefix("torch ").partition(":")[0]
    if mask is None:
        kind = "causal" if inputs.causal else "none"
    else:
        kind = "function" if flex else "bool" if mask.dtype == torch.bool else "added"
    strided = not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous())
    return Facts(
        name, architecture(q.device), str(q.dtype).removeprefix("torch."), kind, False,
        inputs.sinks is not None, strided, q.shape[0], q.shape[1], k.shape[1], q.shape[2],
        k.shape[2], q.shape[3], v.shape[3],
    )  # fmt: skip


def chosen(inputs: Inputs) -> str:
    """Which of them scaled_dot_product_attention picks for these inputs; "" if it cannot."""
    try:
        given = _given(inputs, inputs.q, inputs.k)
    except NotOffered:
        return ""
    return "torch " + kernel_of(inputs.q, inputs.k, inputs.v, given)
