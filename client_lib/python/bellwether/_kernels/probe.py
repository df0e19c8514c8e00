"""The kernels library on torch tensors: shapes and strides in, sums added to a Memory.

No tensor is kept and none is changed.  A call runs where its tensors are: on the CPU it is done on
return, on a GPU it is enqueued on the current stream.
"""

from __future__ import annotations

import array
import ctypes
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from .._native import c_api
from .._util.integers import whole
from .memory import Copy, Memory, floats

DTYPES = {torch.float32: c_api.F32, torch.bfloat16: c_api.BF16, torch.float16: c_api.F16}
MASK_DTYPES = {**DTYPES, torch.bool: c_api.BOOL}
_WINDOW_MAX = (1 << 31) - 2
HIDDEN = -10000.0  # An additive mask hides a key from here down.
_SPECTRA_BYTES_MAX = 1 << 28  # Of weights that wait: some are copies.
_CHUNK = 1 << 24  # Elements of a mask that are looked at at once.


# There an AMD GPU is called cuda, too.
NO_ROCM = "PyTorch is built for ROCm, and libbellwether_kernels has no kernels for AMD GPUs"


class KernelError(RuntimeError):
    """The kernels library refused a call; the text is its own."""


class Unsupported(KernelError):
    """Legal, but not built for this shape, type or device."""


def call(name: str, params: ctypes.Structure) -> None:
    """Calls one function of the kernels library.  Raises KernelError."""
    library = c_api.kernels()
    status = getattr(library, name)(ctypes.byref(params))
    if status != 0:
        unsupported = status in (c_api.KERNEL_UNSUPPORTED, c_api.KERNEL_UNAVAILABLE)
        text = f"{name}: {c_api.text(library.bw_kernels_last_error())}"
        raise Unsupported(text) if unsupported else KernelError(text)


def tensor4(tensor: Tensor, group: int = 1) -> tuple[c_api.Tensor4, Tensor]:
    """The view for C, every group-th head of it, and the tensor that must outlive it."""
    if tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    view = c_api.Tensor4(
        tensor.data_ptr(), tensor.stride(0), tensor.stride(1) * group, tensor.stride(2)
    )
    return view, tensor


class Sums:
    """What one layer adds up during a sampled step; the layouts are those of c_api.h."""

    def __init__(self, memory: Memory, heads: int, kv_heads: int) -> None:
        self.memory, self.heads, self.kv_heads = memory, heads, kv_heads
        # One row of each signal, [heads] or [kv_heads].
        self._places: dict[str, tuple[int, int]] = {}
        initial = floats(0)
        for names, count in (
            (c_api.PROBE_STATS, heads),
            (c_api.PROBE_KV_STATS, kv_heads),
            (("key_leak_sum", "key_gradient_sum"), kv_heads),
            (c_api.LAW_STATS, heads),
            (c_api.LAW_KV_STATS, kv_heads),
            (c_api.SHADOW_STATS, heads),
            (c_api.SHADOW_KV_STATS, kv_heads),
            (c_api.FACTOR_STATS, heads),
            (c_api.FACTOR_KV_STATS, kv_heads),
        ):
            for name in names:
                self._places[name] = len(initial), count
                initial.extend(floats(count, -math.inf if name == "logit_max" else 0.0))
        self._begin = memory.take(initial)
        # What a CUDA graph adds whenever it runs in a sampled step.
        self.graph_probes = self.graph_has_delta = self.graph_leaks = False
        self.begin_sample()

    def begin_sample(self) -> None:
        """After the memory was collected."""
        self.probed = 0  # Calls that were added.
        self.with_delta = 0
        self.leaked = 0
        # Calls that were added by add_laws(), by the law; and by add_shadow(), by the tensor.
        self.lawful = dict.fromkeys(("a1", "a2", "a3", "a4", "sums"), 0)
        self.shadowed = dict.fromkeys(("o", "dq", "dk", "dv"), 0)

    def address(self, signal: str) -> int:
        return self.memory.address(self._begin + self._places[signal][0])

    def row(self, copy: Copy, signal: str) -> array.array[float]:
        """The values of one signal, one for each (key) head."""
        at, count = self._places[signal]
        return copy.read(self._begin + at, count)


@dataclasses.dataclass(frozen=True)
class ProbeMask:
    """Which keys a row may see: those that every part allows.

    The diagonal is the key that stands beside a row.  At the bottom right the last row's is the
    last key, with top_left row T's is key T, with ranges it is what they say.
    """

    causal: bool = False  # Keys up to the diagonal.
    top_left: bool = False
    window_left: Optional[int] = None  # At most so many keys before the diagonal.
    window_right: Optional[int] = None  # At most so many after it.
    # int32 [batch or 1, q_len or 1, 3]: the first key of a row, one behind the last, the diagonal.
    ranges: Optional[Tensor] = None
    # Bool, true where a row may see the key, or floating and added to the scores: -10000 and less
    # hides.  Broadcasts to [batch, heads, q_len, k_len].
    tensor: Optional[Tensor] = None
    by_sample: bool = False  # The tensor's rows are those of sampled_rows(), not all.
    # Bool [batch or 1, heads or 1, k_len]: keys that some row sees, sampled or not.  It is found
    # from the other parts where it is None, which by_sample does not allow.
    visible: Optional[Tensor] = None


def expanded(name: str, tensor: Tensor, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A view of it in this shape, into which it must broadcast, dimension by dimension."""
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, must be on {like.device} as q is")
    have = tuple(tensor.shape)
    padded = (1,) * (len(shape) - len(have)) + have
    fits = len(padded) == len(shape) and all(h in (1, w) for h, w in zip(padded, shape))
    if not fits:
        raise ValueError(f"{name} has shape {list(have)}, must broadcast to {list(shape)}")
    return tensor.detach().expand(shape)


def row_ranges(mask: ProbeMask, q: Tensor, k_len: int) -> tuple[Tensor, Tensor]:
    """[batch or 1, q_len or 1] each: which keys a row may see but for the mask's tensor."""
    q_len = q.shape[2]
    if mask.ranges is not None:
        ranges = mask.ranges[(None,) * (3 - mask.ranges.dim())]
        begin, end, diagonal = ranges.long().unbind(-1)
    else:
        shift = 0 if mask.top_left else k_len - q_len
        diagonal = torch.arange(q_len, dtype=torch.int64, device=q.device)[None] + shift
        begin, end = torch.zeros_like(diagonal), torch.full_like(diagonal, k_len)
    if mask.causal:
        end = torch.minimum(end, diagonal + 1)
    if mask.window_right is not None:
        end = torch.minimum(end, diagonal + mask.window_right + 1)
    if mask.window_left is not None:
        begin = torch.maximum(begin, diagonal - mask.window_left)
    end = end.clamp(0, k_len)
    return torch.minimum(begin.clamp(min=0), end), end


def visible_keys(mask: ProbeMask, q: Tensor, k_len: int) -> Tensor:
    """Bool [batch or 1, heads or 1, k_len]: the keys that some row may see."""
    tensor = None if mask.tensor is None else mask.tensor.detach()
    if tensor is not None:
        tensor = tensor[(None,) * (4 - tensor.dim())]
        windows = mask.causal, mask.window_left is not None, mask.window_right is not None
        if mask.ranges is None and not any(windows):  # One pass, which is quick on a GPU.
            alone = tensor.expand(*tensor.shape[:3], k_len)
            return alone.any(2) if tensor.dtype == torch.bool else ~(alone.amax(2) <= HIDDEN)
        tensor = tensor if tensor.dtype == torch.bool else ~(tensor <= HIDDEN)
    begin, end = row_ranges(mask, q, k_len)
    by_row = tensor if tensor is not None and tensor.shape[2] > 1 else None
    keys = torch.arange(k_len, dtype=torch.int64, device=q.device)
    if mask.ranges is None and by_row is None:  # What neighbouring rows see overlaps or adjoins.
        seen = ((keys >= begin[:, :1]) & (keys < end[:, -1:]))[:, None]
    else:
        seen = torch.zeros((), dtype=torch.bool, device=q.device)
        rows, width = begin.shape[1], k_len * begin.shape[0]
        if by_row is not None:
            rows, width = q.shape[2], k_len * max(begin.shape[0], by_row.shape[0] * by_row.shape[1])
        step = max(1, _CHUNK // max(1, width))
        for first in range(0, rows, step):
            some = slice(first, first + step)
            begins, ends = (
                t[:, None, some, None] if t.shape[1] > 1 else t[..., None, None]
                for t in (begin, end)
            )
            part = (keys >= begins) & (keys < ends)
            seen = seen | (part if by_row is None else part & by_row[:, :, some]).any(2)
    return seen if tensor is None or by_row is not None else seen & tensor[:, :, 0]


def _give_mask(params: Any, mask: ProbeMask, q: Tensor) -> list[Tensor]:
    """Fills the mask's fields; returns the tensors that must outlive the call."""
    batch, heads, q_len, k_len = params.batch, params.heads, params.q_len, params.k_len
    kept = []
    params.causal, params.top_left = int(mask.causal), int(mask.top_left)
    for field, name, value in (
        ("window", "window_left", mask.window_left),
        ("window_right", "window_right", mask.window_right),
    ):
        if value is not None:
            setattr(params, field, whole(name, value, 0, _WINDOW_MAX) + 1)
    if mask.ranges is not None:
        if mask.ranges.dtype != torch.int32:
            raise ValueError(f"ranges is {mask.ranges.dtype}, must be torch.int32")
        ranges = expanded("ranges", mask.ranges, q, (batch, q_len, 3))
        if ranges.stride(2) != 1:
            ranges = ranges.contiguous()
        params.ranges = ranges.data_ptr()
        params.range_batch_stride, params.range_row_stride = ranges.stride()[:2]
        kept.append(ranges)
    if mask.tensor is not None:
        given = mask.tensor.float() if mask.tensor.dtype == torch.float64 else mask.tensor
        if given.dtype not in MASK_DTYPES:
            raise ValueError(f"tensor is {given.dtype}, must be torch.bool or floating")
        sampled = params.rows_per_head if 0 < params.rows_per_head < q_len else q_len
        tensor = expanded(
            "tensor", given, q, (batch, heads, sampled if mask.by_sample else q_len, k_len)
        )
        params.mask, params.mask_dtype = tensor.data_ptr(), MASK_DTYPES[tensor.dtype]
        params.mask_by_sample = int(mask.by_sample)
        params.mask_batch_stride, params.mask_head_stride = tensor.stride()[:2]
        params.mask_row_stride, params.mask_key_stride = tensor.stride()[2:]
        kept.append(tensor)
    visible = mask.visible
    if visible is None and (mask.ranges is not None or mask.tensor is not None):
        if mask.by_sample:
            raise ValueError("visible is None, must be given with by_sample")
        visible = visible_keys(mask, q, k_len)
    if visible is not None:
        if visible.dtype != torch.bool:
            raise ValueError(f"visible is {visible.dtype}, must be torch.bool")
        visible = expanded("visible", visible, q, (batch, heads, k_len))
        params.visible = visible.data_ptr()
        params.visible_batch_stride, params.visible_head_stride = visible.stride()[:2]
        params.visible_key_stride = visible.stride(2)
        kept.append(visible)
    return kept


def call_params(
    sums: Sums,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    d_o: Optional[Tensor],
    *,
    scale: float,
    mask: ProbeMask,
    rows: int,
    seed: int,
    group: int = 1,
    drift_only: bool = False,
    softcap: float = 0.0,
    sinks: Optional[Tensor] = None,
) -> tuple[c_api.ProbeParams, list[Tensor]]:
    """One call as C has it, but for where the statistics go; and the tensors that must outlive it.
    The arguments and what it raises are add_probe()'s."""
    params: c_api.ProbeParams = c_api.struct(
        c_api.ProbeParams, dtype=DTYPES[q.dtype], **sums.memory.call_fields()
    )
    params.batch, params.heads, params.q_len, params.head_dim = q.shape
    params.kv_heads, params.k_len, params.v_dim = sums.kv_heads, k.shape[2], v.shape[3]
    params.q, keep_q = tensor4(q)
    params.k, keep_k = tensor4(k, group)
    kept = [keep_q, keep_k]
    if d_o is not None:
        for name, tensor, each in (("v", v, group), ("o", o, 1), ("d_o", d_o, 1)):
            view, keep = tensor4(tensor, each)
            setattr(params, name, view)
            kept.append(keep)
    params.scale, params.softcap, params.drift_only = scale, softcap, int(drift_only)
    params.rows_per_head = rows
    params.seed = seed & 0xFFFFFFFFFFFFFFFF
    kept += _give_mask(params, mask, q)
    if sinks is not None:
        sinks = expanded("sinks", sinks, q, (sums.heads,)).float().contiguous()
        params.sinks = sinks.data_ptr()
        kept.append(sinks)
    params.gate = sums.memory.gate()
    return params, kept


def add_probe(
    sums: Sums,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    d_o: Optional[Tensor],
    *,
    scale: float,
    mask: ProbeMask,
    rows: int,
    seed: int,
    group: int = 1,
    drift_only: bool = False,
    softcap: float = 0.0,
    sinks: Optional[Tensor] = None,
) -> None:
    """Adds the statistics of one call to `sums`.

    q, o, d_o [batch, heads, tokens, dim]; k, v [batch, kv_heads, tokens, dim], or with `group`
    every key head repeated that many times.  sinks [heads].  Without d_o the delta statistics stay
    as they are, with drift_only all but rows, drift and coherence.  Raises ValueError for a mask
    or sinks that do not fit, KernelError for what the library refuses.
    """
    params, kept = call_params(
        sums, q, k, v, o, d_o, scale=scale, mask=mask, rows=rows, seed=seed, group=group,
        drift_only=drift_only, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    params.stat_stride, params.out = sums.heads, sums.address(c_api.PROBE_STATS[0])
    params.kv_stat_stride = sums.kv_heads
    params.kv_out = sums.address(c_api.PROBE_KV_STATS[0])
    with sums.memory.running():
        call("bw_probe", params)
    del kept
    if params.gate is not None:
        sums.graph_probes, sums.graph_has_delta = True, d_o is not None
        return
    sums.probed += 1
    sums.with_delta += d_o is not None


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, as unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def mixed(x: Tensor) -> Tensor:
    """ProbeMix() of probe.h; int64 wraps around as uint64 does."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def sampled_rows(
    batch: int,
    heads: int,
    q_len: int,
    rows: int,
    seed: int,
    head_offset: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The rows that add_probe() samples, int64 [batch, heads, rows]: ascending, and every row if
    `rows` is 0 or at least q_len.  It is SampledRow() of probe.h."""
    if rows == 0 or rows >= q_len:
        every = torch.arange(q_len, dtype=torch.int64, device=device)
        return every.expand(batch, heads, q_len)

    def counted(first: int, count: int, *shape: int) -> Tensor:
        found = torch.arange(first, first + count, dtype=torch.int64, device=device)
        return found.view(shape)

    number = _signed(seed & 0xFFFFFFFFFFFFFFFF)
    seeds = torch.full((1, 1, 1), number, dtype=torch.int64, device=device)
    strata = counted(0, rows, 1, 1, rows)
    hashed = mixed(mixed(seeds) ^ counted(0, batch, batch, 1, 1))
    hashed = mixed(mixed(hashed ^ counted(head_offset, heads, 1, heads, 1)) ^ strata)
    first = strata * q_len // rows
    size = (strata + 1) * q_len // rows - first
    return first + _shifted(_shifted(hashed, 32) * size, 32)


def add_key_leak(sums: Sums, d_k: Tensor, group: int = 1) -> None:
    """Adds one call's key-gradient leak.  d_k [batch, key heads as the kernel saw them, tokens,
    dim]; the gradients of repeated keys belong to one key and are added first, in fp32."""
    with sums.memory.running():
        if group > 1:
            batch, _, tokens, dim = d_k.shape
            d_k = d_k.reshape(batch, sums.kv_heads, group, tokens, dim).sum(2, dtype=torch.float32)
        params = c_api.struct(
            c_api.KeyLeakParams, dtype=DTYPES[d_k.dtype], **sums.memory.call_fields()
        )
        params.batch, params.kv_heads, params.k_len, params.head_dim = d_k.shape
        params.d_k, kept = tensor4(d_k)
        params.leak_sum = sums.address("key_leak_sum")
        params.gradient_sum = sums.address("key_gradient_sum")
        params.gate = sums.memory.gate()
        call("bw_key_leak", params)
    if params.gate is not None:
        sums.graph_leaks = True
    else:
        sums.leaked += 1
    del kept


class Spectrum:
    """Spectral norms of the heads of one weight, warm-started from the last sample."""

    OUTPUTS = ("sigma", "residual", "stable_rank", "overlap")

    def __init__(self, memory: Memory, device: torch.device, heads: int, dim: int) -> None:
        self.memory, self.heads, self.dim = memory, heads, dim
        self._begin = memory.take(floats(len(self.OUTPUTS) * heads, math.nan))
        self._direction = torch.zeros(heads, dim, dtype=torch.float32, device=device)
        self.device = device
        self.samples = 0
        self.begin_sample()

    def begin_sample(self) -> None:
        """After the memory was collected."""
        self.measured = False

    def row(self, copy: Copy, output: str) -> array.array[float]:
        return copy.read(self._begin + self.OUTPUTS.index(output) * self.heads, self.heads)

    def params(self, weight: Tensor) -> c_api.SpectralParams:
        """weight [heads, dim, width], any strides, which must outlive the call."""
        params: c_api.SpectralParams = c_api.struct(
            c_api.SpectralParams, dtype=DTYPES[weight.dtype], **self.memory.call_fields()
        )
        params.heads, params.rows, params.columns = weight.shape
        params.weight = weight.data_ptr()
        params.head_stride, params.row_stride, params.column_stride = weight.stride()
        for i, output in enumerate(self.OUTPUTS):
            setattr(params, output, self.memory.address(self._begin + i * self.heads))
        params.direction = self._direction.data_ptr()
        return params

    def measure(self, weight: Tensor) -> None:
        """weight [heads, dim, width], any strides.  Raises Unsupported."""
        _measure([(self, _readable(weight))])


def _readable(weight: Tensor) -> Tensor:
    weight = weight.detach()
    return weight if weight.dtype in DTYPES else weight.float()


def _measure(each: Sequence[tuple[Spectrum, Tensor]]) -> None:
    """Spectra of one memory, in one call."""
    memory = each[0][0].memory
    with memory.running():
        chain = [spectrum.params(weight) for spectrum, weight in each]
        for params, behind in zip(chain, chain[1:]):
            params.next = ctypes.addressof(behind)
        call("bw_spectral_norms", chain[0])
    for spectrum, _ in each:
        spectrum.samples += 1
        spectrum.measured = True


class Spectra:
    """Measures weights together: those of one layer have too few heads for a GPU."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Spectrum, Tensor, Callable[[str], None]]] = []
        self._bytes = 0

    def add(self, spectrum: Spectrum, weight: Tensor, refused: Callable[[str], None]) -> None:
        """weight   [heads, dim, width], any strides
        refused  told why, if it is not measured"""
        weight = _readable(weight)
        self._waiting.append((spectrum, weight, refused))
        self._bytes += weight.numel() * weight.element_size()
        if self._bytes >= _SPECTRA_BYTES_MAX:
            self.measure()

    def measure(self) -> None:
        """What was added since the last time."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        for memory in dict.fromkeys(spectrum.memory for spectrum, *_ in waiting):
            of_memory = [one for one in waiting if one[0].memory is memory]
            try:
                _measure([(spectrum, weight) for spectrum, weight, _ in of_memory])
            except Unsupported:  # One of them is.
                for spectrum, weight, refused in of_memory:
                    try:
                        _measure([(spectrum, weight)])
                    except Unsupported as e:
                        refused(str(e))


def increment_rank(
    wq: Tensor, wq_before: Tensor, wk: Tensor, wk_before: Tensor
) -> array.array[float]:
    """Effective rank of the change of W_Q^T W_K per query head, NOT_MEASURED without one;
    all float32 and contiguous, [heads, dim, width] and [kv_heads, dim, width]."""
    result = floats(wq.shape[0])
    params = c_api.struct(c_api.IncrementRankParams, threads=torch.get_num_threads())
    params.heads, params.rows, params.columns = wq.shape
    params.kv_heads = wk.shape[0]
    params.wq, params.wq_before = wq.data_ptr(), wq_before.data_ptr()
    params.wk, params.wk_before = wk.data_ptr(), wk_before.data_ptr()
    params.q_head_stride, params.q_row_stride = wq.stride()[:2]
    params.k_head_stride, params.k_row_stride = wk.stride()[:2]
    params.effective_rank = result.buffer_info()[0]
    call("bw_increment_rank", params)
    # NaN: nothing has changed, as in a step that a GradScaler has skipped.
    return array.array("f", [c_api.NOT_MEASURED if math.isnan(x) else x for x in result])


def available(device: str = "cpu") -> Optional[str]:
    """None if the kernels can be used on devices of this type, else why not."""
    try:
        library = c_api.kernels()
    except c_api.LibraryError as e:
        return str(e)
    if device == "cuda" and torch.version.hip is not None:
        return NO_ROCM
    backend = {"cpu": c_api.CPU, "cuda": c_api.CUDA}.get(device)
    if backend is None or not library.bw_kernels_available(backend):
        return f"libbellwether_kernels has no {device} backend on this machine"
    return None
