"""Finds and loads libbellwether_client and libbellwether_kernels, and mirrors their headers.

The mirrors follow client.h and c_api.h field by field; the headers are the specification.
Nothing is loaded before the first call of `client()` or `kernels()`, so `import bellwether`
works on a machine that has neither library.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import threading
from ctypes import (
    CDLL,
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any, ClassVar, Optional

from .._util.integers import LAUNCH_MS_MAX, STEP_MAX, whole

CLIENT_LIBRARY = "libbellwether_client.so"
KERNELS_LIBRARY = "libbellwether_kernels.so"
SENDER = "bellwether-sender"
SERVER = "bellwetherd"

# The major versions of the headers that the structures below are of, and the least minors that
# have all of them.  Each library has a version of its own.
CLIENT_ABI = (1, 9)
KERNELS_ABI = (1, 12)


class LibraryError(RuntimeError):
    """A library is missing, does not load, or speaks another ABI; the text says what to do."""


# ---- where things are ----


def _checkout_folders() -> list[Path]:
    """`build/*/bin` of the source tree that this file lies in, newest first; often empty."""
    here = Path(__file__).resolve()
    if len(here.parents) < 5:
        return []
    root = here.parents[4]  # client_lib/python/bellwether/_native/c_api.py
    if not (root / "client_lib" / "include" / "bellwether" / "client.h").exists():
        return []
    folders = [p for p in (root / "build").glob("*/bin") if p.is_dir()]
    # Sanitizer builds need their runtime loaded first: never pick one by itself.
    folders = [p for p in folders if p.parent.name not in ("asan", "tsan")]

    def age(folder: Path) -> float:
        library = folder / CLIENT_LIBRARY
        return -library.stat().st_mtime if library.exists() else 0.0

    return sorted(folders, key=age)


def search_folders() -> list[Path]:
    """Folders that are searched for libraries and programs, in this order."""
    folders: list[Path] = []
    from_environment = os.environ.get("BELLWETHER_LIB_DIR")
    if from_environment:
        for given in (Path(p) for p in from_environment.split(os.pathsep) if p):
            # Programs are beside the libraries, or where an installation has them.
            folders += [given, given / "../bin", given / "../../bin"]
    package = Path(__file__).resolve().parents[1]
    folders += [package / "lib", package / "bin", package.parent / "lib", package.parent / "bin"]
    folders += [package.parents[1] / "lib", package.parents[1] / "bin"]
    folders += _checkout_folders()
    return folders


def find(name: str) -> Optional[Path]:
    """Full path of a library or program, or None; programs are also looked up in $PATH."""
    for folder in search_folders():
        candidate = folder / name
        if candidate.is_file():
            return candidate
    if not name.endswith(".so"):
        on_path = shutil.which(name)
        if on_path:
            return Path(on_path)
    return None


def found(name: str) -> Path:
    """As find(); raises LibraryError where there is none."""
    path = find(name)
    if path is not None:
        return path
    looked = ", ".join(str(p) for p in search_folders() if p.exists()) or "no existing folder"
    raise LibraryError(
        f"{name} was not found (looked in: {looked}). Build it with ./start --build-only, "
        "or set BELLWETHER_LIB_DIR to the folder that holds it."
    )


def _load(name: str) -> CDLL:
    path = found(name)
    try:
        # Local: the trainer may hold another library with a symbol of the same name.
        return CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    except OSError as e:
        raise LibraryError(f"{path} does not load: {e}") from e


def _check_abi(name: str, version: int, needed: tuple[int, int]) -> None:
    major, minor = version >> 16, version & 0xFFFF
    if major != needed[0] or minor < needed[1]:
        raise LibraryError(
            f"{name} speaks ABI {major}.{minor}, this package needs {needed[0]}.{needed[1]} "
            "or a later one of the same major version: install both from one build."
        )


# ---- client.h ----

OK = 0
INVALID_ARGUMENT = 1
DROPPED = 2
UNAVAILABLE = 3
INTERNAL = 4
TIMEOUT = 5

LINK_NAMES = ("idle", "starting", "connecting", "streaming", "recording", "failed")

COMMAND_NONE = 0
COMMAND_SAMPLING = 1
COMMAND_ACTION = 2

BLOCKS_MAX = 256
EXPERTS_MAX = 4096
WORLD_MAX = 4096
OWN_MAX = 512
OWN_VALUES_MAX = 1024
OWN_GRANULARITIES = {"run": 1, "head": 2, "layer": 4, "expert": 5, "rank": 6}
OWN_MERGES = {"sum": 1, "max": 2, "mean": 3}
FLOAT_MAX = 3.4028234663852886e38
# What a frame has in the place of a value that nobody measured: a NaN of its own (ingest.proto).
NOT_MEASURED_BITS = 0x7FC0BE11
NOT_MEASURED = c_float.from_buffer(ctypes.c_uint32(NOT_MEASURED_BITS)).value
LAYERS_MAX = 512
HEADS_MAX = 1024
EVENT_TEXT_MAX = 256
SPECTRUM_ROWS_MAX = 512
NAMED_ROWS_MAX = 16384
ROW_NAME_MAX = 256
NAMES_BYTES_MAX = 1 << 18

# Granularity of signals.proto: those of rows that have names.
TENSOR = 7
MODULE = 8
UINT32_MAX = 0xFFFFFFFF

# SpectrumKind of ingest.proto.
SPECTRUM_WQ_GRAM = 1
SPECTRUM_INCREMENT_A = 2
SPECTRUM_INCREMENT_B = 3

# EventKind of runs.proto.
EVENT_KINDS = {
    "learning_rate": 1,
    "restore": 2,
    "checkpoint_saved": 3,
    "evaluation": 4,
    "attach": 5,
    "detach": 6,
    "centring_on": 7,
    "centring_off": 8,
    "attention_mode": 9,
    "data": 10,
    "batch_size": 11,
    "sequence_length": 12,
    "annotation": 13,
}


_RANGES: dict[Any, tuple[int, int]] = {
    c_uint8: (0, 0xFF),
    c_int32: (-(1 << 31), (1 << 31) - 1),
    c_uint32: (0, UINT32_MAX),
    c_int64: (-(1 << 63), (1 << 63) - 1),
    c_uint64: (0, (1 << 64) - 1),
}


class Checked(Structure):
    """A struct of C that refuses an integer which its field cannot hold, by a ValueError: ctypes
    would keep the lowest bits without a word."""

    NARROWER: ClassVar[dict[str, tuple[int, int]]] = {}  # Than the field's type.
    _ranges: ClassVar[dict[str, tuple[int, int]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        fields: Any = cls._fields_
        ranges = {name: _RANGES[kind] for name, kind in fields if kind in _RANGES}
        cls._ranges = {**ranges, **cls.NARROWER}

    def __setattr__(self, name: str, value: Any) -> None:
        limits = self._ranges.get(name)
        # Most are plain integers; this is on the way of every sample.
        if limits is not None and not (type(value) is int and limits[0] <= value <= limits[1]):
            value = whole(name, int(value) if isinstance(value, bool) else value, *limits)
        _set(self, name, value)


_set = Structure.__setattr__


class SignalInfo(Checked):
    _fields_ = [
        ("struct_size", c_uint32),
        ("id", c_uint32),
        ("granularity", c_uint32),
        ("merge", c_uint32),
        ("name", c_char_p),
        ("unit", c_char_p),
    ]


class ClientOptions(Checked):
    NARROWER: ClassVar[dict[str, tuple[int, int]]] = {"launch_unix_ms": (0, LAUNCH_MS_MAX)}
    _fields_ = [
        ("struct_size", c_uint32),
        ("rank", c_uint32),
        ("world", c_uint32),
        ("reporters", c_uint32),
        ("attempt", c_uint32),
        ("layers", c_uint32),
        ("heads", c_uint32),
        ("kv_heads", c_uint32),
        ("head_dim", c_uint32),
        ("seq_len", c_uint32),
        ("ring_frames", c_uint32),
        ("frame_values_max", c_uint32),
        ("run", c_char_p),
        ("run_uuid", c_char_p),
        ("server", c_char_p),
        ("record_path", c_char_p),
        ("sender_path", c_char_p),
        ("tls_ca", c_char_p),
        ("tls_cert", c_char_p),
        ("tls_key", c_char_p),
        ("token_file", c_char_p),
        ("framework", c_char_p),
        ("model", c_char_p),
        ("attention_kernel", c_char_p),
        ("score_dtype", c_char_p),
        ("log_path", c_char_p),
        ("weight_decay", c_double),
        ("softcap", c_float),
        ("window", c_uint32),
        ("causal", c_uint8),
        ("centred", c_uint8),
        ("qk_norm", c_uint8),
        ("step_from_attach", c_uint8),
        ("actions_mask", c_uint32),
        ("ranks_agree", c_uint32),
        ("spool_dir", c_char_p),
        ("spool_bytes", c_uint64),
        ("launch_unix_ms", c_int64),
        ("experts", c_uint32),
        ("reserved", c_uint32),
    ]


class Block(Checked):
    _fields_ = [
        ("signal", c_uint32),
        ("reserved", c_uint32),
        ("layer_begin", c_uint32),
        ("layer_count", c_uint32),
        ("head_begin", c_uint32),
        ("head_count", c_uint32),
        ("values", c_void_p),
    ]


class OwnValues(Checked):
    _fields_ = [
        ("name", c_char_p),
        ("unit", c_char_p),
        ("help", c_char_p),
        ("granularity", c_uint32),
        ("merge", c_uint32),
        ("layer", c_uint32),
        ("head", c_uint32),
        ("count", c_uint32),
        ("limits", c_uint32),
        ("low", c_double),
        ("high", c_double),
        ("values", c_void_p),
    ]


class Frame(Checked):
    NARROWER: ClassVar[dict[str, tuple[int, int]]] = {
        "step": (0, STEP_MAX),
        "time_unix_ns": (0, (1 << 63) - 1),
    }
    _fields_ = [
        ("struct_size", c_uint32),
        ("block_count", c_uint32),
        ("step", c_int64),
        ("time_unix_ns", c_int64),
        ("blocks", POINTER(Block)),
        ("partial_rows", c_uint32),
        ("reserved", c_uint32),
        ("own_count", c_uint32),
        ("reserved2", c_uint32),
        ("own", POINTER(OwnValues)),
    ]


class Command(Checked):
    _fields_ = [
        ("struct_size", c_uint32),
        ("type", c_uint32),
        ("value", c_double),
        ("payload_bytes", c_uint32),
        ("payload", c_uint8 * 4092),
    ]


class Counters(Checked):
    _fields_ = [
        ("struct_size", c_uint32),
        ("link", c_uint32),
        ("frames_queued", c_uint64),
        ("frames_dropped_ring", c_uint64),
        ("frames_dropped_window", c_uint64),
        ("frames_sent", c_uint64),
        ("frames_acked", c_uint64),
        ("reconnects", c_uint64),
        ("sender_restarts", c_uint64),
        ("sender_pid", c_uint32),
        ("sampling_period_steps", c_uint32),
        ("error", c_char * 256),
        ("page_url", c_char * 256),
        ("frames_spooled", c_uint64),
        ("spool_bytes", c_uint64),
        ("frames_stripped", c_uint64),
    ]


# ---- c_api.h of the kernels ----

F32 = 0
BF16 = 1
F16 = 2
BOOL = 3
CPU = 0
CUDA = 1
KERNEL_UNSUPPORTED = 2
KERNEL_UNAVAILABLE = 3

# Rows of bw_probe_params.out in their order, by the catalogue's names.
PROBE_STATS = (
    "rows",
    "common_mode_sum",
    "spread_sum",
    "tied_rows_bf16",
    "tied_rows_eps",
    "tied_rows_eps_paper",
    "saturated_rows",
    "logit_max",
    "entropy_sum",
    "sink_sum",
    "nonfinite_rows",
    "delta_bias_sum",
    "delta_bias_sumsq",
    "delta_abs_sum",
    "delta_error_abs_sum",
)
PROBE_KV_STATS = ("sequences", "key_coherence_sum")

_SUMS = ("sum", "abs_sum", "sumsq", "nonfinite")
# Rows of bw_attention_laws_params.out and .kv_out.
LAW_STATS = (
    *(f"{tensor}_{what}" for tensor in ("do", "dq") for what in _SUMS),
    "law_rows_left_out",
)
LAW_PROJECTIONS = 8
LAW_KV_STATS = (
    *(f"law_{law}_{i}" for law in ("a1", "a2") for i in range(LAW_PROJECTIONS)),
    "law_a3",
    "law_a4",
    *(f"law_a{i}_{what}" for what in ("variance", "alike") for i in range(1, 5)),
    *(f"{tensor}_{what}" for tensor in ("dk", "dv") for what in _SUMS),
)
LAW_FUSED = 0
LAW_COMPOSED = 1
LAW_ACCUMULATED = 2

_BESIDE = ("dot", "got_sumsq", "ref_sumsq", "rest", "variance", "variance_sq")
# Rows of bw_attention_shadow_params.out and .kv_out.
SHADOW_STATS = tuple(f"shadow_{tensor}_{what}" for tensor in ("o", "dq") for what in _BESIDE)
SHADOW_KV_STATS = tuple(f"shadow_{tensor}_{what}" for tensor in ("dk", "dv") for what in _BESIDE)
_FACTOR = ("factor", "factor_variance", "factor_alike")
# Rows of its .factors and .kv_factors.
FACTOR_STATS = tuple(f"shadow_{tensor}_{what}" for tensor in ("o", "dq") for what in _FACTOR)
FACTOR_KV_STATS = tuple(f"shadow_{tensor}_{what}" for tensor in ("dk", "dv") for what in _FACTOR)


# bw_grid.
GRID_NONE, GRID_F32, GRID_TF32, GRID_BF16, GRID_F16 = range(5)
# bw_law_product_stat.
LAW_PRODUCT_STATS = (
    "sum",
    "abs_sum",
    "x_variance",
    "y_variance",
    "x_nonfinite",
    "y_nonfinite",
)

# bw_law_sum_stat.
LAW_PARTS_MAX = 4
# Doubles of a norm's row, and of its features.
LAW_NORM_ROWS = (
    "scale_difference",
    "scale_variance",
    "scale_alike",
    "mean_difference",
    "mean_variance",
    "mean_alike",
    "off",
)
LAW_NORM_FEATURES = ("sum", "variance", "alike", "abs_sum")
LAW_LOGIT_STATS = ("unsure", "roundings")
EQUAL_GROUPS = 4
LAW_EQUAL_STATS = ("there", "alike")
LAW_SUM_STATS = ("sum", "abs_sum", "ulp_sum", "variance", "low_bits")

# bw_tensor_stat.
TENSOR_STATS = (
    "elements",
    "grad_sumsq",
    "grad_max",
    "grad_nonfinite",
    "grad_zeros",
    "weight_sumsq",
    "weight_max",
    "weight_nonfinite",
    "weight_bits",
    "change_sumsq",
    "changed",
    "lag_sum",
    "dot",
    "moment_sumsq",
)

# bw_module_stat.
MODULE_STATS = ("elements", "sumsq", "largest", "nonfinite", "fourths", "top_sumsq", "top")


class Tensor4(Checked):
    _fields_ = [
        ("data", c_void_p),
        ("batch_stride", c_int64),
        ("head_stride", c_int64),
        ("token_stride", c_int64),
    ]


class ProbeParams(Checked):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_uint32),
        ("dtype", c_uint32),
        ("threads", c_uint32),
        ("stream", c_void_p),
        ("batch", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("q_len", c_int64),
        ("k_len", c_int64),
        ("head_dim", c_int64),
        ("v_dim", c_int64),
        ("q", Tensor4),
        ("k", Tensor4),
        ("v", Tensor4),
        ("o", Tensor4),
        ("d_o", Tensor4),
        ("scale", c_float),
        ("softcap", c_float),
        ("causal", c_uint8),
        ("drift_only", c_uint8),
        ("reserved", c_uint8 * 2),
        ("window", c_int32),
        ("rows_per_head", c_uint32),
        ("seed", c_uint64),
        ("head_offset", c_int64),
        ("stat_stride", c_int64),
        ("out", c_void_p),
        ("kv_stat_stride", c_int64),
        ("kv_out", c_void_p),
        ("gate", c_void_p),
        ("top_left", c_uint8),
        ("mask_by_sample", c_uint8),
        ("reserved2", c_uint8 * 2),
        ("window_right", c_int32),
        ("ranges", c_void_p),
        ("range_batch_stride", c_int64),
        ("range_row_stride", c_int64),
        ("mask", c_void_p),
        ("mask_dtype", c_uint32),
        ("reserved3", c_uint32),
        ("mask_batch_stride", c_int64),
        ("mask_head_stride", c_int64),
        ("mask_row_stride", c_int64),
        ("mask_key_stride", c_int64),
        ("visible", c_void_p),
        ("visible_batch_stride", c_int64),
        ("visible_head_stride", c_int64),
        ("visible_key_stride", c_int64),
        ("sinks", c_void_p),
    ]


# What the laws and the shadow check are told of a call; each of their structures begins with it.
_GRADED_CALL: list[tuple[str, Any]] = [
    ("struct_size", c_uint32),
    ("arithmetic", c_uint32),
    ("call", POINTER(ProbeParams)),
    ("d_q", Tensor4),
    ("d_k", Tensor4),
    ("d_v", Tensor4),
    ("stat_stride", c_int64),
    ("out", c_void_p),
    ("kv_stat_stride", c_int64),
    ("kv_out", c_void_p),
]


class AttentionLawsParams(Checked):
    _fields_ = _GRADED_CALL


class AttentionShadowParams(Checked):
    _fields_ = [
        *_GRADED_CALL,
        ("keys_per_head", c_uint32),
        ("reserved", c_uint32),
        ("factors", c_void_p),
        ("kv_factors", c_void_p),
    ]


class KeyLeakParams(Checked):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_uint32),
        ("dtype", c_uint32),
        ("threads", c_uint32),
        ("stream", c_void_p),
        ("batch", c_int64),
        ("kv_heads", c_int64),
        ("k_len", c_int64),
        ("head_dim", c_int64),
        ("d_k", Tensor4),
        ("leak_sum", c_void_p),
        ("gradient_sum", c_void_p),
        ("gate", c_void_p),
    ]


class LawOperand(Checked):
    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_uint32),
        ("grid", c_uint32),
        ("strides", c_int64 * 3),
    ]


class LawProduct(Checked):
    _fields_ = [
        ("extents", c_int64 * 3),
        ("x", LawOperand),
        ("y", LawOperand),
    ]


class LawProductsParams(Checked):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_uint32),
        ("threads", c_uint32),
        ("reserved", c_uint32),
        ("stream", c_void_p),
        ("count", c_int64),
        ("products", POINTER(LawProduct)),
        ("out", c_void_p),
    ]


class LawSumsParams(Checked):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_uint32),
        ("dtype", c_uint32),
        ("threads", c_uint32),
        ("stream", c_void_p),
        ("kept", c_int64),
        ("summed", c_int64),
        ("kept_stride", c_int64),
        ("summed_stride", c_int64),
        ("data", c_void_p),
        ("out", c_void_p),
    ]


class LawMatrix(Checked):
    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_uint32),
        ("reserved", c_uint32),
        ("row_stride", c_int64),
    ]


class LawNormsParams(Checked):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_uint32),
        ("threads", c_uint32),
        ("centred", c_uint32),
        ("stream", c_void_p),
        ("rows", c_int64),
        ("n", c_int64),
        ("x", LawMatrix),
        ("y", LawMatrix),
        ("d_x", LawMatrix * LAW_PARTS_MAX),
        ("d_y", LawMatrix * LAW_PARTS_MAX),
        ("d_x_parts", c_uint32),
        ("d_y_parts", c_uint32),
        ("gain", c_void_p),
        ("shift", c_void_p),
        ("eps", c_double),
        ("inside", c_double),
        ("row_stats", c_void_p),
        ("feature_stats", c_void_p),
        ("rest", c_void_p),
    ]


class LawLogitsParams(Checked):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_uint32),
        ("threads", c_uint32),
        ("reserved", c_uint32),
        ("stream", c_void_p),
        ("rows", c_int64),
        ("classes", c_int64),
        ("z", LawMatrix),
        ("out", c_void_p),
    ]


class LawEqualRowsParams(Checked):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_uint32),
        ("dtype", c_uint32),
        ("threads", c_uint32),
        ("stream", c_void_p),
        ("rows", c_int64),
        ("width", c_int64),
        ("row_stride", c_int64),
        ("column_stride", c_int64),
        ("data", c_void_p),
        ("scratch", c_void_p),
        ("scratch_bytes", c_int64),
        ("out", c_void_p),
    ]


class TensorPart(Checked):
    _fields_ = [("data", c_void_p), ("dtype", c_uint32), ("reserved", c_uint32)]


class TensorOfStep(Checked):
    _fields_ = [
        ("elements", c_int64),
        ("grad", TensorPart),
        ("weight", TensorPart),
        ("before", TensorPart),
        ("moment", TensorPart),
        ("second", TensorPart),
        ("beta2", c_double),
        ("eps", c_double),
        ("steps", c_double),
        ("steps_at", c_void_p),
    ]


class TensorStatsParams(Checked):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_uint32),
        ("threads", c_uint32),
        ("reserved", c_uint32),
        ("stream", c_void_p),
        ("count", c_int64),
        ("tensors", POINTER(TensorOfStep)),
        ("scale", c_void_p),
        ("out", c_void_p),
        ("workspace", c_void_p),
    ]


class MomentLagPart(Checked):
    _fields_ = [
        ("grad", c_void_p),
        ("second", c_void_p),
        ("grad_dtype", c_uint32),
        ("second_dtype", c_uint32),
        ("count", c_int64),
        ("stride", c_int64),
        ("beta2", c_double),
        ("eps", c_double),
        ("steps", c_double),
        ("steps_at", c_void_p),
    ]


class MomentLagsParams(Checked):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_uint32),
        ("stream", c_void_p),
        ("count", c_int64),
        ("parts", POINTER(MomentLagPart)),
        ("scale", c_void_p),
        ("skip", c_void_p),
        ("out", c_void_p),
    ]


class ModuleStatsParams(Checked):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_uint32),
        ("dtype", c_uint32),
        ("threads", c_uint32),
        ("stream", c_void_p),
        ("data", c_void_p),
        ("rows", c_int64),
        ("channels", c_int64),
        ("row_stride", c_int64),
        ("channel_sumsq", c_void_p),
        ("out", c_void_p),
        ("workspace", c_void_p),
    ]


class SpectralParams(Checked):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_uint32),
        ("dtype", c_uint32),
        ("threads", c_uint32),
        ("stream", c_void_p),
        ("heads", c_int64),
        ("rows", c_int64),
        ("columns", c_int64),
        ("weight", c_void_p),
        ("head_stride", c_int64),
        ("row_stride", c_int64),
        ("column_stride", c_int64),
        ("sigma", c_void_p),
        ("residual", c_void_p),
        ("stable_rank", c_void_p),
        ("direction", c_void_p),
        ("overlap", c_void_p),
        ("gram", c_void_p),
        ("next", c_void_p),
    ]


class IncrementRankParams(Checked):
    _fields_ = [
        ("struct_size", c_uint32),
        ("threads", c_uint32),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("rows", c_int64),
        ("columns", c_int64),
        ("wq", c_void_p),
        ("wq_before", c_void_p),
        ("wk", c_void_p),
        ("wk_before", c_void_p),
        ("q_head_stride", c_int64),
        ("q_row_stride", c_int64),
        ("k_head_stride", c_int64),
        ("k_row_stride", c_int64),
        ("effective_rank", c_void_p),
    ]


class CenterKeysParams(Checked):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backend", c_uint32),
        ("dtype", c_uint32),
        ("threads", c_uint32),
        ("stream", c_void_p),
        ("batch", c_int64),
        ("kv_heads", c_int64),
        ("k_len", c_int64),
        ("head_dim", c_int64),
        ("k", Tensor4),
        ("out", Tensor4),
        ("cu_seqlens", c_void_p),
        ("sequences", c_int64),
        ("visible", c_void_p),
        ("visible_batch_stride", c_int64),
        ("visible_head_stride", c_int64),
        ("visible_key_stride", c_int64),
    ]


# ---- loading, once ----

_lock = threading.Lock()
_client: Optional[CDLL] = None
_kernels: Optional[CDLL] = None


def _declare(library: CDLL, name: str, result: Any, *arguments: Any) -> None:
    try:
        function = getattr(library, name)
    except AttributeError as e:
        raise LibraryError(f"{library._name} has no {name}: it is from another build.") from e
    function.restype = result
    function.argtypes = arguments


def client() -> CDLL:
    """libbellwether_client, loaded and checked.  Raises LibraryError."""
    global _client
    with _lock:
        if _client is not None:
            return _client
        library = _load(CLIENT_LIBRARY)
        handle = c_void_p
        _declare(library, "bw_abi_version", c_uint32)
        _check_abi(CLIENT_LIBRARY, library.bw_abi_version(), CLIENT_ABI)
        _declare(library, "bw_last_error", c_char_p)
        _declare(library, "bw_signal_by_name", c_uint32, c_char_p)
        _declare(library, "bw_signal_at", c_int, c_uint32, POINTER(SignalInfo))
        _declare(library, "bw_client_create", c_int, POINTER(ClientOptions), POINTER(handle))
        _declare(library, "bw_client_destroy", None, handle)
        _declare(library, "bw_client_push", c_int, handle, POINTER(Frame))
        _declare(
            library, "bw_client_push_names", c_int, handle, c_uint32, c_uint32, c_uint32,
            POINTER(c_char_p),
        )  # fmt: skip
        _declare(
            library, "bw_client_push_event", c_int, handle, c_int64, c_uint32, c_double, c_char_p
        )
        _declare(
            library,
            "bw_client_push_spectrum",
            c_int,
            handle,
            c_int64,
            c_uint32,
            c_uint32,
            c_uint32,
            c_uint32,
            c_float,
            c_void_p,
        )
        _declare(library, "bw_client_poll", c_int, handle, POINTER(Command))
        _declare(
            library,
            "bw_client_push_action_result",
            c_int,
            handle,
            c_char_p,
            c_int64,
            c_uint32,
            c_char_p,
        )
        _declare(library, "bw_client_get_counters", c_int, handle, POINTER(Counters))
        _declare(library, "bw_client_flush", c_int, handle, c_uint32)
        _client = library
        return library


def signal_names() -> list[str]:
    """Of the catalogue, derived ones too.  Raises LibraryError."""
    library = client()
    names: list[str] = []
    info = struct(SignalInfo)
    while library.bw_signal_at(len(names), ctypes.byref(info)) == OK:
        names.append(text(info.name))
    return names


def python_calls() -> ctypes.PyDLL:
    """What diverts functions of Python (client_lib/src/python_call.cc), called with the
    interpreter locked.  Raises LibraryError."""
    library = client()
    locked = ctypes.PyDLL(library._name, handle=library._handle)
    for name, arguments in (
        ("functions", 2), ("frames", 4), ("function_to", 2), ("function_left", 1),
        ("plainly", 1), ("see", 0), ("leave", 0),
    ):  # fmt: skip
        _declare(locked, f"bw_python_{name}", None, *[c_void_p] * arguments)
    return locked


def kernels() -> CDLL:
    """libbellwether_kernels, loaded and checked.  Raises LibraryError."""
    global _kernels
    with _lock:
        if _kernels is not None:
            return _kernels
        library = _load(KERNELS_LIBRARY)
        _declare(library, "bw_kernels_abi_version", c_uint32)
        _check_abi(KERNELS_LIBRARY, library.bw_kernels_abi_version(), KERNELS_ABI)
        _declare(library, "bw_kernels_last_error", c_char_p)
        _declare(library, "bw_kernels_available", c_int, c_uint32)
        _declare(library, "bw_probe", c_int, POINTER(ProbeParams))
        _declare(library, "bw_attention_laws", c_int, POINTER(AttentionLawsParams))
        _declare(library, "bw_attention_shadow", c_int, POINTER(AttentionShadowParams))
        _declare(library, "bw_key_leak", c_int, POINTER(KeyLeakParams))
        _declare(library, "bw_law_products", c_int, POINTER(LawProductsParams))
        _declare(library, "bw_law_sums", c_int, POINTER(LawSumsParams))
        _declare(library, "bw_law_norms", c_int, POINTER(LawNormsParams))
        _declare(library, "bw_law_logits", c_int, POINTER(LawLogitsParams))
        _declare(library, "bw_law_equal_rows_scratch_bytes", c_int64, c_int64)
        _declare(library, "bw_law_equal_rows", c_int, POINTER(LawEqualRowsParams))
        _declare(library, "bw_tensor_stats", c_int, POINTER(TensorStatsParams))
        _declare(library, "bw_tensor_stats_workspace_bytes", c_uint64, POINTER(TensorStatsParams))
        _declare(library, "bw_moment_lags", c_int, POINTER(MomentLagsParams))
        _declare(library, "bw_module_stats", c_int, POINTER(ModuleStatsParams))
        _declare(library, "bw_module_stats_workspace_bytes", c_uint64, POINTER(ModuleStatsParams))
        _declare(library, "bw_spectral_norms", c_int, POINTER(SpectralParams))
        _declare(library, "bw_increment_rank", c_int, POINTER(IncrementRankParams))
        _declare(library, "bw_center_keys", c_int, POINTER(CenterKeysParams))
        _kernels = library
        return library


def text(raw: Optional[bytes]) -> str:
    return (raw or b"").decode("utf-8", "replace")


def struct(kind: Any, **fields: Any) -> Any:
    """A `kind` with struct_size set and the rest zero but for `fields`."""
    value = kind()
    value.struct_size = ctypes.sizeof(kind)
    ranges = getattr(kind, "_ranges", {})
    for name, field in fields.items():
        limits = ranges.get(name)
        # As Checked does, without a call of Python for each field.
        if limits is None or (type(field) is int and limits[0] <= field <= limits[1]):
            _set(value, name, field)
        else:
            setattr(value, name, field)
    return value
