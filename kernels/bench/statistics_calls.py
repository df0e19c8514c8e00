"""The statistics called from PyTorch through their C interface, by ctypes.

A call runs where its tensors are: on the CPU it is done on return, on a GPU it is
enqueued on the current stream.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from typing import Any

import torch

from attention_calls import Tensor4, check, view

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.bool: 3}
# Rows of the probe's output, as in probe.h.
PROBE_STATS = ("rows", "common_mode", "spread", "tied_bf16", "tied_eps", "tied_paper", "saturated",
               "logit_max", "entropy", "sink", "nonfinite", "bias", "bias_sq", "delta_abs",
               "error_abs")
KV_STATS = ("sequences", "coherence")
# Rows of the laws' outputs, as in attention_laws.h.
LAW_HEAD_STATS = (*(f"{t}_{of}" for t in ("do", "dq") for of in ("sum", "abs", "sumsq", "nonfinite")),
                  "left_out")
LAW_KV_STATS = (
    *(f"{law}_{i}" for law in ("a1", "a2") for i in range(8)), "a3", "a4",
    *(f"a{i}_{of}" for of in ("variance", "alike") for i in range(1, 5)),
    *(f"{t}_{of}" for t in ("dk", "dv") for of in ("sum", "abs", "sumsq", "nonfinite")))
SHADOW_STATS = ("dot", "got", "ref", "rest", "variance", "variance_sq")  # of each of two tensors
FACTOR_STATS = ("factor", "factor_variance", "factor_alike")  # likewise
Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_CALL: list[tuple[str, Any]] = [("struct_size", ctypes.c_uint32), ("backend", ctypes.c_uint32),
         ("dtype", ctypes.c_uint32), ("threads", ctypes.c_uint32), ("stream", ctypes.c_void_p)]


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class ProbeParams(ctypes.Structure):
    _fields_ = [
        *_CALL, *_fields("batch heads kv_heads q_len k_len head_dim v_dim", ctypes.c_int64),
        *_fields("q k v o d_o", Tensor4), *_fields("scale softcap", ctypes.c_float),
        ("causal", ctypes.c_uint8), ("drift_only", ctypes.c_uint8),
        ("reserved", ctypes.c_uint8 * 2), ("window", ctypes.c_int32),
        ("rows_per_head", ctypes.c_uint32), ("seed", ctypes.c_uint64),
        ("head_offset", ctypes.c_int64), ("stat_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p), ("kv_stat_stride", ctypes.c_int64), ("kv_out", ctypes.c_void_p),
        ("gate", ctypes.c_void_p), ("top_left", ctypes.c_uint8), ("mask_by_sample", ctypes.c_uint8),
        ("reserved2", ctypes.c_uint8 * 2), ("window_right", ctypes.c_int32),
        ("ranges", ctypes.c_void_p), *_fields("range_batch range_row", ctypes.c_int64),
        ("mask", ctypes.c_void_p), *_fields("mask_dtype reserved3", ctypes.c_uint32),
        *_fields("mask_batch mask_head mask_row mask_key", ctypes.c_int64),
        ("visible", ctypes.c_void_p), *_fields("visible_batch visible_head visible_key", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
    ]


class LawsParams(ctypes.Structure):
    _fields_ = [
        *_fields("struct_size arithmetic", ctypes.c_uint32), ("call", ctypes.POINTER(ProbeParams)),
        *_fields("d_q d_k d_v", Tensor4), ("stat_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p), ("kv_stat_stride", ctypes.c_int64), ("kv_out", ctypes.c_void_p),
    ]


class ShadowParams(ctypes.Structure):
    _fields_ = [*LawsParams._fields_, *_fields("keys_per_head reserved", ctypes.c_uint32),
                *_fields("factors kv_factors", ctypes.c_void_p)]


class KeyLeakParams(ctypes.Structure):
    _fields_ = [*_CALL, *_fields("batch kv_heads k_len head_dim", ctypes.c_int64),
                ("d_k", Tensor4), *_fields("leak_sum gradient_sum gate", ctypes.c_void_p)]


class LawOperand(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *_fields("dtype grid", ctypes.c_uint32),
                ("strides", ctypes.c_int64 * 3)]


class LawProduct(ctypes.Structure):
    _fields_ = [("extents", ctypes.c_int64 * 3), ("x", LawOperand), ("y", LawOperand)]


class LawProductsParams(ctypes.Structure):
    _fields_ = [*_fields("struct_size backend threads reserved", ctypes.c_uint32),
                ("stream", ctypes.c_void_p), ("count", ctypes.c_int64),
                ("products", ctypes.POINTER(LawProduct)), ("out", ctypes.c_void_p)]


class SpectralParams(ctypes.Structure):
    _fields_ = [
        *_CALL, *_fields("heads rows columns", ctypes.c_int64), ("weight", ctypes.c_void_p),
        *_fields("head_stride row_stride column_stride", ctypes.c_int64),
        *_fields("sigma residual stable_rank direction overlap gram next", ctypes.c_void_p),
    ]


def call_fields(params: type[ctypes.Structure], t: torch.Tensor) -> dict[str, Any]:
    """The fields that every call begins with."""
    return {"struct_size": ctypes.sizeof(params), "backend": int(t.is_cuda),
            "dtype": DTYPES[t.dtype], "threads": 0 if t.is_cuda else 2,
            "stream": torch.cuda.current_stream().cuda_stream if t.is_cuda else None}


def pointer(t: torch.Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


@dataclasses.dataclass(frozen=True)
class ProbeOptions:
    causal: bool = False
    window: int = 0
    softcap: float = 0.0
    rows: int = 0
    seed: int = 0
    head_offset: int = 0
    drift_only: bool = False
    gate: torch.Tensor | None = None  # [2] int64: open, and what is added to the seed
    top_left: bool = False
    window_right: int = 0
    ranges: torch.Tensor | None = None  # int32 [batch or 1][q_len or 1][3]
    mask: torch.Tensor | None = None  # broadcasts to [batch][heads][q_len or rows][k_len]
    mask_by_sample: bool = False
    visible: torch.Tensor | None = None  # bool [batch or 1][heads or 1][k_len]
    sinks: torch.Tensor | None = None  # float32 [heads]


@dataclasses.dataclass
class Probed:
    """What the probe adds to: [statistic][head] and [statistic][kv head]."""

    out: torch.Tensor
    kv_out: torch.Tensor

    @classmethod
    def fresh(cls, heads: int, kv_heads: int, device: torch.device | str) -> Probed:
        out = torch.zeros(len(PROBE_STATS), heads, device=device)
        out[PROBE_STATS.index("logit_max")] = -math.inf
        return cls(out, torch.zeros(len(KV_STATS), kv_heads, device=device))

    def of(self, name: str) -> torch.Tensor:
        """One statistic of all heads, float64 on the CPU."""
        rows = self.kv_out[KV_STATS.index(name)] if name in KV_STATS else \
            self.out[PROBE_STATS.index(name)]
        return rows.double().cpu()


def probe_params(q: torch.Tensor, k: torch.Tensor, outputs: Outputs | None, options: ProbeOptions,
                 into: Probed | None = None) -> ProbeParams:
    """outputs: v, o, d_o."""
    v, o, d_o = outputs if outputs is not None else (None, None, None)
    batch, heads, q_len, head_dim = q.shape
    rows = options.rows if 0 < options.rows < q_len and options.mask_by_sample else q_len
    places: dict[str, object] = {}
    for name, given, shape, axes in (
            ("range", options.ranges, (batch, q_len, 3), "batch row"),
            ("mask", options.mask, (batch, heads, rows, k.shape[2]), "batch head row key"),
            ("visible", options.visible, (batch, heads, k.shape[2]), "batch head key")):
        if given is None:
            continue
        t = given.expand(shape)
        places["ranges" if name == "range" else name] = t.data_ptr()
        places |= {f"{name}_{axis}": t.stride(i) for i, axis in enumerate(axes.split())}
        if name == "mask":
            places["mask_dtype"] = DTYPES[t.dtype]
    return ProbeParams(
        **call_fields(ProbeParams, q), **places, top_left=int(options.top_left),
        window_right=options.window_right, mask_by_sample=int(options.mask_by_sample),
        sinks=pointer(options.sinks), batch=batch, heads=heads, kv_heads=k.shape[1], q_len=q_len,
        k_len=k.shape[2], head_dim=head_dim, v_dim=0 if v is None else v.shape[3], q=view(q),
        k=view(k), v=view(v), o=view(o), d_o=view(d_o), scale=1 / math.sqrt(head_dim),
        softcap=options.softcap, causal=int(options.causal),
        drift_only=int(options.drift_only), gate=pointer(options.gate), window=options.window,
        rows_per_head=options.rows, seed=options.seed, head_offset=options.head_offset,
        stat_stride=heads, out=into and into.out.data_ptr(), kv_stat_stride=k.shape[1],
        kv_out=into and into.kv_out.data_ptr())


def probe(lib: ctypes.CDLL, q: torch.Tensor, k: torch.Tensor, outputs: Outputs | None,
          options: ProbeOptions, into: Probed) -> None:
    """Adds the statistics of one call; outputs: v, o, d_o."""
    check(lib, lib.bw_probe(ctypes.byref(probe_params(q, k, outputs, options, into))))


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def laws(lib: ctypes.CDLL, q: torch.Tensor, k: torch.Tensor, outputs: Outputs, gradients: Gradients,
         options: ProbeOptions, into: tuple[torch.Tensor, torch.Tensor], arithmetic: int = 0) -> None:
    """Adds to into: [LAW_HEAD_STATS][heads], [LAW_KV_STATS][kv_heads]; gradients: dq, dk, dv."""
    call = probe_params(q, k, outputs, options)
    params = LawsParams(ctypes.sizeof(LawsParams), arithmetic, ctypes.pointer(call),
                        *(view(t) for t in gradients), q.shape[1], into[0].data_ptr(), k.shape[1],
                        into[1].data_ptr())
    check(lib, lib.bw_attention_laws(ctypes.byref(params)))


def shadow(lib: ctypes.CDLL, q: torch.Tensor, k: torch.Tensor, outputs: Outputs,
           gradients: Gradients, options: ProbeOptions, into: tuple[torch.Tensor, torch.Tensor],
           keys: int, arithmetic: int = 0,
           factors: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
    """Adds to into: [SHADOW_STATS][heads] of o and dq, [SHADOW_STATS][kv_heads] of dk and dv; to
    factors: the same of FACTOR_STATS."""
    call = probe_params(q, k, outputs, options)
    params = ShadowParams(ctypes.sizeof(ShadowParams), arithmetic, ctypes.pointer(call),
                          *(view(t) for t in gradients), q.shape[1], into[0].data_ptr(), k.shape[1],
                          into[1].data_ptr(), keys, 0,
                          *(t.data_ptr() for t in factors or ()))
    check(lib, lib.bw_attention_shadow(ctypes.byref(params)))




def key_leak(lib: ctypes.CDLL, d_k: torch.Tensor, into: torch.Tensor,
             gate: torch.Tensor | None = None) -> None:
    """Adds to into [2][kv heads]: leak_sum, gradient_sum."""
    batch, kv_heads, k_len, head_dim = d_k.shape
    params = KeyLeakParams(
        **call_fields(KeyLeakParams, d_k), batch=batch, kv_heads=kv_heads, k_len=k_len,
        head_dim=head_dim, d_k=view(d_k), leak_sum=into[0].data_ptr(),
        gradient_sum=into[1].data_ptr(), gate=pointer(gate))
    check(lib, lib.bw_key_leak(ctypes.byref(params)))


LAW_PRODUCT_STATS = 6
GRIDS = 5  # BW_GRID_NONE to BW_GRID_F16


def law_products(
    lib: Lib, pairs: list[tuple[torch.Tensor, torch.Tensor]], grids: list[tuple[int, int]],
    into: torch.Tensor,
) -> None:
    """Of tensors with up to three dimensions, two of one shape each; into [pairs][6] doubles."""
    products = (LawProduct * len(pairs))()
    for product, pair, of in zip(products, pairs, grids):
        product.extents[:] = [1] * (3 - pair[0].dim()) + list(pair[0].shape)
        for operand, tensor, grid in zip((product.x, product.y), pair, of):
            operand.data, operand.dtype, operand.grid = tensor.data_ptr(), DTYPES[tensor.dtype], grid
            operand.strides[:] = [0] * (3 - tensor.dim()) + list(tensor.stride())
    stream = torch.cuda.current_stream().cuda_stream if into.is_cuda else None
    params = LawProductsParams(
        struct_size=ctypes.sizeof(LawProductsParams), backend=int(into.is_cuda), stream=stream,
        count=len(pairs), products=products, out=into.data_ptr())
    check(lib, lib.bw_law_products(ctypes.byref(params)))


class LawSumsParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32), ("backend", ctypes.c_uint32), ("dtype", ctypes.c_uint32),
        ("threads", ctypes.c_uint32), ("stream", ctypes.c_void_p), ("kept", ctypes.c_int64),
        ("summed", ctypes.c_int64), ("kept_stride", ctypes.c_int64),
        ("summed_stride", ctypes.c_int64), ("data", ctypes.c_void_p), ("out", ctypes.c_void_p)]


LAW_SUM_STATS = 5


def law_sums(lib: ctypes.CDLL, x: torch.Tensor, dim: int, into: torch.Tensor) -> None:
    """Adds to into [size of x's other dimension][LAW_SUM_STATS], float64."""
    params = LawSumsParams(
        **call_fields(LawSumsParams, x), kept=x.shape[1 - dim], summed=x.shape[dim],
        kept_stride=x.stride(1 - dim), summed_stride=x.stride(dim), data=x.data_ptr(),
        out=into.data_ptr())
    check(lib, lib.bw_law_sums(ctypes.byref(params)))


class TensorPart(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_uint32), ("reserved", ctypes.c_uint32)]


TENSOR_PARTS = ("grad", "weight", "before", "moment", "second")


class TensorOfStep(ctypes.Structure):
    _fields_ = [
        ("elements", ctypes.c_int64), *((part, TensorPart) for part in TENSOR_PARTS),
        ("beta2", ctypes.c_double), ("eps", ctypes.c_double), ("steps", ctypes.c_double),
        ("steps_at", ctypes.c_void_p)]


class TensorStatsParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32), ("backend", ctypes.c_uint32), ("threads", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32), ("stream", ctypes.c_void_p), ("count", ctypes.c_int64),
        ("tensors", ctypes.POINTER(TensorOfStep)), ("scale", ctypes.c_void_p),
        ("out", ctypes.c_void_p), ("workspace", ctypes.c_void_p)]


# Of each tensor, as in tensor_stats.h.
TENSOR_STATS = (
    "elements", "grad_sumsq", "grad_max", "grad_nonfinite", "grad_zeros", "weight_sumsq",
    "weight_max", "weight_nonfinite", "weight_bits", "change_sumsq", "changed", "lag_sum", "dot",
    "moment_sumsq")
_TENSOR_CHUNK = 32768


def tensor_stats(
    lib: ctypes.CDLL, tensors: list[dict[str, torch.Tensor | None]], into: torch.Tensor,
    scale: torch.Tensor | None = None, beta2: float = 0.95, eps: float = 1e-8, steps: float = 1,
    steps_at: torch.Tensor | None = None,
) -> None:
    """into [tensors][TENSOR_STATS], float64.  A tensor has one or more of TENSOR_PARTS by name."""
    each = (TensorOfStep * len(tensors))()
    chunks = 0
    for of, parts in zip(each, tensors):
        of.elements = next(p.numel() for p in parts.values() if p is not None)
        chunks += max(1, -(-of.elements // _TENSOR_CHUNK))
        of.beta2, of.eps, of.steps, of.steps_at = beta2, eps, steps, pointer(steps_at)
        for name, part in parts.items():
            if part is not None:
                getattr(of, name).data = part.data_ptr()
                getattr(of, name).dtype = DTYPES[part.dtype]
    workspace = torch.empty(chunks * len(TENSOR_STATS), dtype=torch.float64, device=into.device)
    stream = torch.cuda.current_stream().cuda_stream if into.is_cuda else None
    params = TensorStatsParams(
        struct_size=ctypes.sizeof(TensorStatsParams), backend=int(into.is_cuda), stream=stream,
        count=len(tensors), tensors=each, scale=pointer(scale), out=into.data_ptr(),
        workspace=workspace.data_ptr())
    lib.bw_tensor_stats_workspace_bytes.restype = ctypes.c_uint64
    assert lib.bw_tensor_stats_workspace_bytes(ctypes.byref(params)) == 8 * workspace.numel()
    check(lib, lib.bw_tensor_stats(ctypes.byref(params)))


class MomentLagPart(ctypes.Structure):
    _fields_ = [
        *_fields("grad second", ctypes.c_void_p),
        *_fields("grad_dtype second_dtype", ctypes.c_uint32),
        *_fields("count stride", ctypes.c_int64), *_fields("beta2 eps steps", ctypes.c_double),
        ("steps_at", ctypes.c_void_p)]


class MomentLagsParams(ctypes.Structure):
    _fields_ = [
        *_fields("struct_size backend", ctypes.c_uint32), ("stream", ctypes.c_void_p),
        ("count", ctypes.c_int64), ("parts", ctypes.POINTER(MomentLagPart)),
        *_fields("scale skip out", ctypes.c_void_p)]


def moment_lags(
    lib: ctypes.CDLL, parts: list[tuple[torch.Tensor, torch.Tensor]], stride: int,
    into: torch.Tensor, scale: torch.Tensor | None = None, skip: torch.Tensor | None = None,
    beta2: float = 0.95, eps: float = 1e-8, steps: float = 1, steps_at: torch.Tensor | None = None,
) -> None:
    """into [parts][2], float64, updated.  A part is a gradient and a second moment, both dense."""
    each = (MomentLagPart * len(parts))()
    for of, (grad, second) in zip(each, parts):
        of.grad, of.second = grad.data_ptr(), second.data_ptr()
        of.grad_dtype, of.second_dtype = DTYPES[grad.dtype], DTYPES[second.dtype]
        of.count, of.stride = -(-grad.numel() // stride), stride
        of.beta2, of.eps, of.steps, of.steps_at = beta2, eps, steps, pointer(steps_at)
    stream = torch.cuda.current_stream().cuda_stream if into.is_cuda else None
    params = MomentLagsParams(
        struct_size=ctypes.sizeof(MomentLagsParams), backend=int(into.is_cuda), stream=stream,
        count=len(parts), parts=each, scale=pointer(scale), skip=pointer(skip), out=into.data_ptr())
    check(lib, lib.bw_moment_lags(ctypes.byref(params)))


class LawMatrix(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *_fields("dtype reserved", ctypes.c_uint32),
                ("row_stride", ctypes.c_int64)]


def law_matrix(rows: torch.Tensor) -> LawMatrix:
    return LawMatrix(rows.data_ptr(), DTYPES[rows.dtype], 0, rows.stride(0))


def device_fields(params: type[ctypes.Structure], t: torch.Tensor) -> dict[str, Any]:
    """call_fields() of calls whose tensors have types of their own."""
    fields = call_fields(params, t)
    del fields["dtype"]
    return fields


class LawNormsParams(ctypes.Structure):
    _fields_ = [
        *_fields("struct_size backend threads centred", ctypes.c_uint32),
        ("stream", ctypes.c_void_p), *_fields("rows n", ctypes.c_int64),
        *_fields("x y", LawMatrix), *_fields("d_x d_y", LawMatrix * 4),
        *_fields("d_x_parts d_y_parts", ctypes.c_uint32), *_fields("gain shift", ctypes.c_void_p),
        *_fields("eps inside", ctypes.c_double),
        *_fields("row_stats feature_stats rest", ctypes.c_void_p)]


LAW_NORM_ROWS, LAW_NORM_FEATURES = 7, 4


def law_norms(
    lib: ctypes.CDLL, x: torch.Tensor, y: torch.Tensor, d_x: list[torch.Tensor],
    d_y: list[torch.Tensor], gain: torch.Tensor, shift: torch.Tensor, centred: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row [LAW_NORM_ROWS][rows], of each feature [LAW_NORM_FEATURES][n], and the rest."""
    rows, n = x.shape
    found = tuple(torch.zeros(*shape, dtype=torch.float64, device=x.device)
                  for shape in ((LAW_NORM_ROWS, rows), (LAW_NORM_FEATURES, n), (2,)))
    parts = [(LawMatrix * 4)(*map(law_matrix, of)) for of in (d_x, d_y)]
    params = LawNormsParams(
        **device_fields(LawNormsParams, x), centred=int(centred), rows=rows, n=n, x=law_matrix(x),
        y=law_matrix(y), d_x=parts[0], d_y=parts[1], d_x_parts=len(d_x), d_y_parts=len(d_y),
        gain=gain.data_ptr(), shift=shift.data_ptr(), eps=1e-5, inside=2.0**-20,
        row_stats=found[0].data_ptr(), feature_stats=found[1].data_ptr(), rest=found[2].data_ptr())
    check(lib, lib.bw_law_norms(ctypes.byref(params)))
    return found


class LawLogitsParams(ctypes.Structure):
    _fields_ = [
        *_fields("struct_size backend threads reserved", ctypes.c_uint32),
        ("stream", ctypes.c_void_p), *_fields("rows classes", ctypes.c_int64), ("z", LawMatrix),
        ("out", ctypes.c_void_p)]


def law_logits(lib: ctypes.CDLL, z: torch.Tensor) -> torch.Tensor:
    """[2][rows], float64."""
    out = torch.zeros(2, len(z), dtype=torch.float64, device=z.device)
    params = LawLogitsParams(
        **device_fields(LawLogitsParams, z), rows=z.shape[0], classes=z.shape[1], z=law_matrix(z),
        out=out.data_ptr())
    check(lib, lib.bw_law_logits(ctypes.byref(params)))
    return out


class LawEqualRowsParams(ctypes.Structure):
    _fields_ = [
        *_CALL, *_fields("rows width row_stride column_stride", ctypes.c_int64),
        *_fields("data scratch", ctypes.c_void_p), ("scratch_bytes", ctypes.c_int64),
        ("out", ctypes.c_void_p)]


def law_equal_rows(lib: ctypes.CDLL, x: torch.Tensor) -> torch.Tensor:
    """[4][2], float64."""
    out = torch.zeros(4, 2, dtype=torch.float64, device=x.device)
    lib.bw_law_equal_rows_scratch_bytes.restype = ctypes.c_int64
    lib.bw_law_equal_rows_scratch_bytes.argtypes = (ctypes.c_int64,)
    size = lib.bw_law_equal_rows_scratch_bytes(len(x))
    scratch = torch.empty(size, dtype=torch.uint8, device=x.device)
    params = LawEqualRowsParams(
        **call_fields(LawEqualRowsParams, x), rows=x.shape[0], width=x.shape[1],
        row_stride=x.stride(0), column_stride=x.stride(1), data=x.data_ptr(),
        scratch=scratch.data_ptr(), scratch_bytes=size, out=out.data_ptr())
    check(lib, lib.bw_law_equal_rows(ctypes.byref(params)))
    return out


class ModuleStatsParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32), ("backend", ctypes.c_uint32), ("dtype", ctypes.c_uint32),
        ("threads", ctypes.c_uint32), ("stream", ctypes.c_void_p), ("data", ctypes.c_void_p),
        ("rows", ctypes.c_int64), ("channels", ctypes.c_int64), ("row_stride", ctypes.c_int64),
        ("channel_sumsq", ctypes.c_void_p), ("out", ctypes.c_void_p), ("workspace", ctypes.c_void_p)]


# Of each activation, as in module_stats.h.
MODULE_STATS = ("elements", "sumsq", "largest", "nonfinite", "fourths", "top_sumsq", "top")


def module_stats(
    lib: ctypes.CDLL, x: torch.Tensor, into: torch.Tensor, channels: torch.Tensor | None
) -> None:
    """x [rows, channels]; adds to into [MODULE_STATS] and channels, float64."""
    stream = torch.cuda.current_stream().cuda_stream if into.is_cuda else None
    params = ModuleStatsParams(
        struct_size=ctypes.sizeof(ModuleStatsParams), backend=int(into.is_cuda), stream=stream,
        dtype=DTYPES[x.dtype], data=x.data_ptr(), rows=x.shape[0], channels=x.shape[1],
        row_stride=x.stride(0), channel_sumsq=pointer(channels), out=into.data_ptr())
    lib.bw_module_stats_workspace_bytes.restype = ctypes.c_uint64
    size = lib.bw_module_stats_workspace_bytes(ctypes.byref(params))
    workspace = torch.empty(size // 8, dtype=torch.float64, device=into.device)
    params.workspace = workspace.data_ptr()
    check(lib, lib.bw_module_stats(ctypes.byref(params)))


@dataclasses.dataclass
class Spectrum:
    """Outputs of the spectral norms; direction is read, too."""

    sigma: torch.Tensor
    residual: torch.Tensor
    stable_rank: torch.Tensor
    direction: torch.Tensor
    overlap: torch.Tensor
    gram: torch.Tensor | None

    @classmethod
    def fresh(cls, heads: int, rows: int, device: torch.device | str, gram: bool) -> Spectrum:
        def nan(*shape: int) -> torch.Tensor:
            return torch.full(shape, math.nan, device=device)

        return cls(nan(heads), nan(heads), nan(heads), torch.zeros(heads, rows, device=device),
                   nan(heads), nan(heads, rows, rows) if gram else None)


def spectral_norms(lib: ctypes.CDLL, weight: torch.Tensor, into: Spectrum) -> None:
    """weight [heads][rows][columns], any strides."""
    spectral_norms_of(lib, [(weight, into)])


def spectral_norms_of(lib: ctypes.CDLL, each: list[tuple[torch.Tensor, Spectrum]]) -> None:
    """Several weights in one call."""
    chain = []
    for weight, into in each:
        heads, rows, columns = weight.shape
        chain.append(SpectralParams(
            **call_fields(SpectralParams, weight), heads=heads, rows=rows, columns=columns,
            weight=weight.data_ptr(), head_stride=weight.stride(0), row_stride=weight.stride(1),
            column_stride=weight.stride(2), sigma=pointer(into.sigma),
            residual=pointer(into.residual), stable_rank=pointer(into.stable_rank),
            direction=pointer(into.direction), overlap=pointer(into.overlap),
            gram=pointer(into.gram)))
    for params, behind in zip(chain, chain[1:]):
        params.next = ctypes.addressof(behind)
    check(lib, lib.bw_spectral_norms(ctypes.byref(chain[0])))
