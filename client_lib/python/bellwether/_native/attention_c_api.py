"""Mirrors attention_c_api.h field by field; the header is the specification.  Needs no torch."""

from __future__ import annotations

from ctypes import (
    CDLL,
    POINTER,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any, ClassVar

from .c_api import Checked, Tensor4, _declare, kernels

MODES = ("fa", "hp", "hpm", "paper", "sr", "hp-nolt", "lt")  # bw_attention_mode
# Modes that return what rounding O took away, and the one whose backward reads the anchor.
RESIDUAL_MODES = ("hp", "hpm", "hp-nolt")
ANCHORED_MODE = "hpm"


class ForwardParams(Checked):
    _fields_: ClassVar[Any] = [
        ("struct_size", c_uint32),
        ("backend", c_uint32),
        ("dtype", c_uint32),
        ("mode", c_uint32),
        ("stream", c_void_p),
        ("batch", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("q_len", c_int64),
        ("k_len", c_int64),
        ("head_dim", c_int64),
        ("q", Tensor4),
        ("k", Tensor4),
        ("v", Tensor4),
        ("o", Tensor4),
        ("o_lo", Tensor4),
        ("lse", c_void_p),
        ("anchor", c_void_p),
        ("rounded_sum", c_void_p),
        ("lse_batch_stride", c_int64),
        ("lse_head_stride", c_int64),
        ("cu_seqlens_q", c_void_p),
        ("cu_seqlens_k", c_void_p),
        ("sequences", c_int64),
        ("stats", c_void_p),
        ("stat_stride", c_int64),
        ("seed", c_uint64),
        ("scale", c_float),
        ("softcap", c_float),
        ("paper_eps", c_float),
        ("paper_beta", c_float),
        ("window", c_int32),
        ("threads", c_uint32),
        ("causal", c_uint8),
        ("reserved", c_uint8 * 3),
        ("stats_every", c_uint32),
        ("workspace", c_void_p),
        ("workspace_bytes", c_uint64),
        ("v_dim", c_int64),
        ("key_bounds", c_void_p),
        ("mask", c_void_p),
        ("mask_dtype", c_uint32),
        ("reserved2", c_uint32),
        ("mask_batch_stride", c_int64),
        ("mask_head_stride", c_int64),
        ("mask_row_stride", c_int64),
        ("mask_key_stride", c_int64),
        ("sinks", c_void_p),
    ]


class BackwardParams(Checked):
    _fields_: ClassVar[Any] = [
        ("struct_size", c_uint32),
        ("center", c_uint8),
        ("deterministic", c_uint8),
        ("reserved", c_uint8 * 2),
        ("forward", ForwardParams),
        ("d_o", Tensor4),
        ("dq", Tensor4),
        ("dk", Tensor4),
        ("dv", Tensor4),
        ("workspace", c_void_p),
        ("workspace_bytes", c_uint64),
        ("d_sinks", c_void_p),
    ]


def declare(library: CDLL) -> CDLL:
    """Gives the attention functions of `library` their types."""
    forward, backward = POINTER(ForwardParams), POINTER(BackwardParams)
    _declare(library, "bw_attention_forward", c_int, forward)
    _declare(library, "bw_attention_forward_workspace", c_uint64, forward)
    _declare(library, "bw_attention_backward", c_int, backward)
    _declare(library, "bw_attention_backward_workspace", c_uint64, forward)
    return library


_library: CDLL | None = None


def attention() -> CDLL:
    """libbellwether_kernels with its attention.  Raises LibraryError."""
    global _library
    if _library is None:
        _library = declare(kernels())
    return _library
