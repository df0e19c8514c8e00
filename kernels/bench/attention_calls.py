"""The attention kernels called from PyTorch through their C interface, by ctypes.

No torch extension has to be built.  Forward and Backward are prepared calls:
outputs are allocated once, filled with NaN unless told, and run() only enqueues.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math

import torch

MODES = {"fa": 0, "hp": 1, "hpm": 2, "paper": 3, "sr": 4, "hp-nolt": 5, "lt": 6}
RESIDUAL_MODES = ("hp", "hpm", "hp-nolt")
DTYPES = {torch.bfloat16: 1, torch.float16: 2}
MASK_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.bool: 3}
# Rows of the statistics, as in probe.h.
STATS = {"rows": 0, "tied_bf16": 3, "tied_eps": 4, "tied_paper": 5, "saturated": 6,
         "logit_max": 7, "entropy": 8, "sink": 9, "nonfinite": 10, "bias": 11, "bias_sq": 12, "delta_abs": 13,
         "error_abs": 14}
STAT_COUNT = 15
# Forces sm80 or sm90 where a GPU can run both; read at every call.
PATH_VARIABLE = "BELLWETHER_ATTENTION_PATH"


class Tensor4(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("batch_stride", ctypes.c_int64),
                ("head_stride", ctypes.c_int64), ("token_stride", ctypes.c_int64)]


class ForwardParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32), ("backend", ctypes.c_uint32),
        ("dtype", ctypes.c_uint32), ("mode", ctypes.c_uint32), ("stream", ctypes.c_void_p),
        ("batch", ctypes.c_int64), ("heads", ctypes.c_int64), ("kv_heads", ctypes.c_int64),
        ("q_len", ctypes.c_int64), ("k_len", ctypes.c_int64), ("head_dim", ctypes.c_int64),
        ("q", Tensor4), ("k", Tensor4), ("v", Tensor4), ("o", Tensor4), ("o_lo", Tensor4),
        ("lse", ctypes.c_void_p), ("anchor", ctypes.c_void_p), ("rounded_sum", ctypes.c_void_p),
        ("lse_batch_stride", ctypes.c_int64), ("lse_head_stride", ctypes.c_int64),
        ("cu_seqlens_q", ctypes.c_void_p), ("cu_seqlens_k", ctypes.c_void_p),
        ("sequences", ctypes.c_int64), ("stats", ctypes.c_void_p), ("stat_stride", ctypes.c_int64),
        ("seed", ctypes.c_uint64), ("scale", ctypes.c_float), ("softcap", ctypes.c_float),
        ("paper_eps", ctypes.c_float), ("paper_beta", ctypes.c_float), ("window", ctypes.c_int32),
        ("threads", ctypes.c_uint32), ("causal", ctypes.c_uint8), ("reserved", ctypes.c_uint8 * 3),
        ("stats_every", ctypes.c_uint32),
        ("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_uint64),
        ("v_dim", ctypes.c_int64), ("key_bounds", ctypes.c_void_p), ("mask", ctypes.c_void_p),
        ("mask_dtype", ctypes.c_uint32), ("reserved2", ctypes.c_uint32),
        ("mask_strides", ctypes.c_int64 * 4), ("sinks", ctypes.c_void_p),
    ]


class BackwardParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32), ("center", ctypes.c_uint8),
        ("deterministic", ctypes.c_uint8), ("reserved", ctypes.c_uint8 * 2),
        ("forward", ForwardParams), ("d_o", Tensor4), ("dq", Tensor4), ("dk", Tensor4),
        ("dv", Tensor4), ("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_uint64),
        ("d_sinks", ctypes.c_void_p),
    ]


@dataclasses.dataclass(frozen=True)
class Options:
    """What a call does beside Q, K and V."""

    mode: str = "hp"
    causal: bool = False
    window: int = 0
    softcap: float = 0.0
    seed: int = 0
    paper_beta: float = 2.0
    paper_eps: float = 1e-3
    stats: bool = False
    stats_every: int = 1  # 0: the default
    center: bool = False
    deterministic: bool = False


@dataclasses.dataclass(frozen=True)
class Seen:
    """What hides keys beside Options, and the sinks."""

    mask: torch.Tensor | None = None  # bool or floating, [batch][heads][q_len][k_len] or 1
    bounds: torch.Tensor | None = None  # int32 [batch][2]
    sinks: torch.Tensor | None = None  # float32 [heads]


def view(t: torch.Tensor | None) -> Tensor4:
    if t is None:
        return Tensor4(None, 0, 0, 0)
    assert t.stride(3) == 1
    return Tensor4(t.data_ptr(), t.stride(0), t.stride(1), t.stride(2))


def load(path: str) -> ctypes.CDLL:
    lib = ctypes.CDLL(path)
    lib.bw_kernels_last_error.restype = ctypes.c_char_p
    lib.bw_attention_backward_workspace.restype = ctypes.c_uint64
    return lib


def check(lib: ctypes.CDLL, status: int) -> None:
    if status != 0:
        raise RuntimeError(f"status {status}: {lib.bw_kernels_last_error().decode()}")


def new(t: torch.Tensor, fill: bool) -> torch.Tensor:
    """An output; NaN shows what was not written."""
    return t.fill_(math.nan) if fill else t


class Forward:
    """q [batch][heads][tokens][head_dim]; packed: batch 1 and cu = (cu_q, cu_k) on the GPU."""

    def __init__(self, lib: ctypes.CDLL, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                 options: Options, cu: tuple[torch.Tensor, torch.Tensor] | None = None,
                 counter: bool = True, fill: bool = True, seen: Seen = Seen()) -> None:
        self.lib, self.options, self.keep, self.cu, self.seen = lib, options, (q, k, v), cu, seen
        batch, heads, n, d = q.shape
        mode, v_dim = options.mode, v.shape[3]

        def like_lse() -> torch.Tensor:
            return new(torch.empty((batch, heads, n), device=q.device), fill)

        like_o = q if v_dim == d else q.new_empty(batch, heads, n, v_dim)
        self.o = new(torch.empty_like(like_o), fill)
        self.o_lo = (new(torch.empty_like(like_o, dtype=torch.bfloat16), fill)
                     if mode in RESIDUAL_MODES else None)
        self.lse = like_lse()
        self.anchor = like_lse() if mode == "hpm" else None
        self.rounded_sum = like_lse() if mode == "hpm" else None
        self.stats = (torch.empty(STAT_COUNT, heads, device=q.device)
                      if options.stats else None)
        self.forget()
        self.workspace = torch.empty(64, dtype=torch.int32, device=q.device)

        def pointer(t: torch.Tensor | None) -> int | None:
            return None if t is None else t.data_ptr()

        self.params = ForwardParams(
            struct_size=ctypes.sizeof(ForwardParams), backend=1, dtype=DTYPES[q.dtype],
            mode=MODES[mode], batch=batch, heads=heads, kv_heads=k.shape[1], q_len=n,
            k_len=k.shape[2], head_dim=d, q=view(q), k=view(k), v=view(v), o=view(self.o),
            o_lo=view(self.o_lo), lse=self.lse.data_ptr(), anchor=pointer(self.anchor),
            rounded_sum=pointer(self.rounded_sum), lse_batch_stride=heads * n, lse_head_stride=n,
            cu_seqlens_q=pointer(cu[0]) if cu else None,
            cu_seqlens_k=pointer(cu[1]) if cu else None,
            sequences=cu[0].numel() - 1 if cu else 0, stats=pointer(self.stats),
            stat_stride=heads, seed=options.seed, scale=1 / math.sqrt(d),
            softcap=options.softcap, paper_eps=options.paper_eps, paper_beta=options.paper_beta,
            window=options.window, causal=int(options.causal),
            stats_every=options.stats_every if options.stats else 0,
            workspace=self.workspace.data_ptr() if counter else None, workspace_bytes=256,
            v_dim=v_dim, key_bounds=pointer(seen.bounds), sinks=pointer(seen.sinks))
        if seen.mask is not None:
            mask = seen.mask.expand(batch, heads, n, k.shape[2])
            self.params.mask, self.params.mask_dtype = mask.data_ptr(), MASK_DTYPES[mask.dtype]
            self.params.mask_strides = (ctypes.c_int64 * 4)(*mask.stride())

    def forget(self) -> None:
        """Empties the statistics."""
        if self.stats is not None:
            self.stats.zero_()
            self.stats[STATS["logit_max"]] = -math.inf

    def run(self) -> torch.Tensor:
        self.params.stream = torch.cuda.current_stream().cuda_stream
        check(self.lib, self.lib.bw_attention_forward(ctypes.byref(self.params)))
        return self.o


class Backward:
    """The gradient of a Forward that has run, for one dO."""

    def __init__(self, forward: Forward, d_o: torch.Tensor, fill: bool = True) -> None:
        self.forward, self.d_o = forward, d_o
        q, k, v = forward.keep
        self.dq, self.dk, self.dv = (new(torch.empty_like(t), fill) for t in (q, k, v))
        sinks = forward.seen.sinks
        self.d_sinks = None if sinks is None else new(torch.empty_like(sinks), fill)
        size = forward.lib.bw_attention_backward_workspace(ctypes.byref(forward.params))
        self.workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
        if fill:
            self.workspace.fill_(255)
        self.params = BackwardParams(
            struct_size=ctypes.sizeof(BackwardParams), forward=forward.params, d_o=view(d_o),
            dq=view(self.dq), dk=view(self.dk), dv=view(self.dv),
            center=int(forward.options.center),
            deterministic=int(forward.options.deterministic),
            workspace=self.workspace.data_ptr(), workspace_bytes=size,
            d_sinks=None if self.d_sinks is None else self.d_sinks.data_ptr())

    def run(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.params.forward.stream = torch.cuda.current_stream().cuda_stream
        check(self.forward.lib,
              self.forward.lib.bw_attention_backward(ctypes.byref(self.params)))
        return self.dq, self.dk, self.dv
