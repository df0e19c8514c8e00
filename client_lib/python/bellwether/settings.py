"""The settings of attach(): by argument, else by `settings=`, environment, file or default.

The file is flat YAML, one `key: value` a line, with the names of `Settings`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Optional, Union

from ._util import files
from ._util.integers import STEP_MAX, decimal, shown, whole
from .actions import allowed

# What `stats` may hold, and the signals of each part.
STATS: dict[str, tuple[str, ...]] = {
    "drift": ("common_mode_sum", "spread_sum", "sequences", "key_coherence_sum"),
    "leak": ("key_leak_sum", "key_gradient_sum"),
    "ties": (
        "tied_rows_bf16",
        "tied_rows_eps",
        "tied_rows_eps_paper",
        "saturated_rows",
        "logit_max",
        "entropy_sum",
        "sink_sum",
    ),
    "delta": ("delta_bias_sum", "delta_bias_sumsq", "delta_abs_sum", "delta_error_abs_sum"),
    "sigma": (
        "wq_sigma",
        "wq_sigma_residual",
        "wq_stable_rank",
        "wq_direction_overlap",
        "wk_sigma",
        "wk_sigma_residual",
        "qk_increment_rank",
    ),
    # Of the gradients in a backward pass of attention: docs/concepts/laws.md.
    "laws": (
        *(f"law_{law}_{projection}" for law in ("a1", "a2") for projection in range(8)),
        "law_a3",
        "law_a4",
        *(
            f"law_{law}_{part}"
            for part in ("variance", "alike")
            for law in ("a1", "a2", "a3", "a4")
        ),
        "law_rows_left_out",
        *(
            f"{tensor}_{part}"
            for tensor in ("do", "dq", "dk", "dv")
            for part in ("sumsq", "nonfinite")
        ),
        *(
            f"shadow_{tensor}_{part}"
            for tensor in ("o", "dq", "dk", "dv")
            for part in (
                "dot",
                "got_sumsq",
                "ref_sumsq",
                "rest",
                "variance",
                "variance_sq",
                "factor",
                "factor_variance",
                "factor_alike",
            )
        ),
    ),
    "linear": (),  # The laws of linear layers.
    "tensors": (),  # Of each parameter, its gradient, moments and change.
    "modules": (),  # Of activations at the boundaries of blocks.
    "experts": (),  # Of routers: loads of their experts, entropy, logits, rows.
    "fp8": (),  # Of tensors that are multiplied in 8 bits: saturated, zeros, scales.
    "steps": (),  # Of the steps between samples, too: maxima, times, memory.
    "rank_norms": (),  # Of this rank's own gradients, before ranks add theirs up.
    "rest": (),  # Whether weights change between an optimizer's step and the next forward.
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of attach(), for `attach(model, settings=Settings(...))`.

    Fields are given by name.  One that is not given, or is None, comes from the environment
    (BELLWETHER_EVERY for `every`), else from the file that BELLWETHER_CONFIG names, else it is the
    default below.  A value that is not legal raises a ValueError that names the field.
    """

    server: Optional[str] = None  # "host:port" or "unix:/path"; None = private server
    run: str = ""  # [a-zA-Z0-9_.:/-]{1,128}
    run_uuid: Optional[str] = None  # 32 hexadecimal digits; None = derived from `run`
    attempt: int = 0
    record: Optional[str] = None  # Write a .bwrun here, instead of or beside a server.
    mode: str = "online"  # "offline" = record only
    every: int = 20  # A sample of the heads every so many steps.
    rows: int = 64  # Sampled query rows per head and sequence; 0 = all.
    sequences: int = 4  # Sampled sequences of a batch, the first ones; 0 = all.
    microbatches: str = "first"  # or "all": which micro-batches of a sampled step
    layers: Optional[str] = None  # Regular expression on module names; None = all.
    stats: frozenset[str] = frozenset(STATS) - {
        "tensors", "modules", "experts", "fp8", "steps", "rank_norms",
    }  # fmt: skip
    # Layers that are asked about the laws of attention in a sample, in turn; None = all of them on
    # CPUs, on GPUs one in eight.
    law_layers: Optional[int] = None
    gram_bytes: int = 68 << 10  # Of Gram matrices, on average a sampled step; 0 = none.
    # A second, of each rank's frames, above it the period grows; 0 = any number.
    byte_budget: int = 4 << 20
    ranks: str = "dp0"  # or "all"
    overhead_budget: float = 0.005  # Share of the step time; above it the period grows.
    allow: frozenset[str] = frozenset()  # Kinds of action that the server may ask for.
    disabled: bool = False
    tls_ca: Optional[str] = None
    tls_cert: Optional[str] = None
    tls_key: Optional[str] = None
    token_file: Optional[str] = None
    log_level: str = "info"
    terminal: bool = True  # Alerts of the run, and how it ended, are told in the log.
    log_path: Optional[str] = None  # The sender's log; None = stderr
    spool_dir: Optional[str] = None  # Frames wait here too while the server is away.
    spool_bytes: int = 1 << 30  # Most bytes there, for each rank.
    capture_dir: Optional[str] = None  # Broken calls of attention are kept here; None = not.
    capture_files: int = 4  # At most, for each rank.
    capture_bytes: int = 256 << 20  # Of all of them, for each rank.

    given = frozenset[str]()  # Names of the fields that the caller gave; not a field itself.

    def __new__(cls, **given: Any) -> Settings:
        self = super().__new__(cls)
        names = frozenset(name for name, value in given.items() if value is not None)
        object.__setattr__(self, "given", names)
        return self

    def __post_init__(self) -> None:
        for name in self.given:
            object.__setattr__(self, name, convert(name, getattr(self, name)))


_ENVIRONMENT = {
    "server": "BELLWETHER_SERVER",
    "run": "BELLWETHER_RUN",
    "run_uuid": "BELLWETHER_RUN_UUID",
    "attempt": "BELLWETHER_ATTEMPT",
    "record": "BELLWETHER_RECORD",
    "mode": "BELLWETHER_MODE",
    "every": "BELLWETHER_EVERY",
    "rows": "BELLWETHER_ROWS",
    "sequences": "BELLWETHER_SEQUENCES",
    "microbatches": "BELLWETHER_MICROBATCHES",
    "layers": "BELLWETHER_LAYERS",
    "stats": "BELLWETHER_STATS",
    "law_layers": "BELLWETHER_LAW_LAYERS",
    "gram_bytes": "BELLWETHER_GRAM_BYTES",
    "byte_budget": "BELLWETHER_BYTE_BUDGET",
    "ranks": "BELLWETHER_RANKS",
    "overhead_budget": "BELLWETHER_OVERHEAD_BUDGET",
    "allow": "BELLWETHER_ALLOW",
    "disabled": "BELLWETHER_DISABLED",
    "tls_ca": "BELLWETHER_TLS_CA",
    "tls_cert": "BELLWETHER_TLS_CERT",
    "tls_key": "BELLWETHER_TLS_KEY",
    "token_file": "BELLWETHER_TOKEN_FILE",
    "log_level": "BELLWETHER_LOG_LEVEL",
    "terminal": "BELLWETHER_TERMINAL",
    "log_path": "BELLWETHER_LOG_PATH",
    "spool_dir": "BELLWETHER_SPOOL_DIR",
    "spool_bytes": "BELLWETHER_SPOOL_BYTES",
    "capture_dir": "BELLWETHER_CAPTURE_DIR",
    "capture_files": "BELLWETHER_CAPTURE_FILES",
    "capture_bytes": "BELLWETHER_CAPTURE_BYTES",
}


def _flag(text: Any) -> bool:
    said = str(text).strip().lower()
    if said not in ("1", "true", "yes", "on", "0", "false", "no", "off", ""):
        raise ValueError(f"{shown(text)} must be true or false")
    return said in ("1", "true", "yes", "on")


def _stats(value: Union[str, Iterable[str]]) -> frozenset[str]:
    if isinstance(value, str):
        value = [part for part in re.split(r"[\s,\[\]]+", value) if part]
    chosen = frozenset(value)
    unknown = chosen - set(STATS)
    if unknown or not chosen:
        raise ValueError(f"stats: {sorted(unknown)} unknown, legal are {sorted(STATS)}")
    return chosen


def _at_least(low: int, high: int) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        number = decimal(value) if isinstance(value, str) else int(value)
        if number < low:
            raise ValueError(f"{shown(number)} is below {low}")
        if number > high:
            raise ValueError(f"{shown(number)} is above {high}")
        return number

    return convert


def _one_of(*choices: str) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"{value!r} is not one of {', '.join(choices)}")
        return str(value)

    return convert


def _share(value: Any) -> float:
    share = float(value)
    if not share > 0:
        raise ValueError(f"{share} is not above 0")
    return share


def _pattern(value: Any) -> str:
    re.compile(value)
    return str(value)


SPOOL_BYTES = (1 << 20, 1 << 44)  # Least and most.
ATTEMPT_MAX = 1 << 30  # The server takes no more.
_COUNT_MAX = (1 << 31) - 1

_CONVERT: dict[str, Callable[[Any], Any]] = {
    "attempt": _at_least(0, ATTEMPT_MAX),
    "every": _at_least(1, STEP_MAX),
    "rows": _at_least(0, _COUNT_MAX),
    "sequences": _at_least(0, _COUNT_MAX),
    "law_layers": _at_least(1, _COUNT_MAX),
    "gram_bytes": _at_least(0, 1 << 40),
    "byte_budget": _at_least(0, 1 << 40),
    "spool_bytes": _at_least(*SPOOL_BYTES),
    "spool_dir": lambda value: os.path.expanduser(str(value)),
    "capture_dir": lambda value: os.path.expanduser(str(value)),
    "capture_files": _at_least(1, 1000),
    "capture_bytes": _at_least(1 << 20, 1 << 44),
    "mode": _one_of("online", "offline"),
    "microbatches": _one_of("first", "all"),
    "ranks": _one_of("dp0", "all"),
    "log_level": _one_of("error", "warning", "info", "debug"),
    "overhead_budget": _share,
    "disabled": _flag,
    "terminal": _flag,
    "allow": allowed,
    "stats": _stats,
    "layers": _pattern,
    "run": lambda value: re.sub(r"[^a-zA-Z0-9_.:/-]", "-", str(value))[:128],
}


def convert(name: str, value: Any) -> Any:
    """`value` as field `name` wants it.  Raises ValueError that names the field."""
    try:
        return _CONVERT.get(name, str)(value)
    except (ValueError, TypeError, OverflowError, re.error) as e:
        raise ValueError(f"{name}: {e}") from e


def read_file(path: str) -> dict[str, Any]:
    """The settings of a file.  Raises ValueError with file and line, OSError."""
    known = {field.name for field in dataclasses.fields(Settings)}
    found: dict[str, Any] = {}
    begun = False
    for number, line in enumerate(files.read_text(path).split("\n"), 1):
        line = re.sub(r"(^|\s)#.*", "", line).rstrip()
        if not line:
            continue
        if line == "---" and not begun:
            begun = True
            continue
        begun = True
        if line == "---":
            raise ValueError(f"{path}:{number}: a second document: the file must hold one")
        match = re.fullmatch(r"([a-z_]+):\s*(.*)", line)
        if match is None:
            raise ValueError(f"{path}:{number}: expected `key: value`")
        key, value = match.group(1), match.group(2).strip("\"'")
        if key not in known:
            raise ValueError(f"{path}:{number}: unknown key {key!r}, legal are {sorted(known)}")
        if key in found:
            raise ValueError(f"{path}:{number}: {key} stands twice")
        try:
            found[key] = convert(key, value)
        except ValueError as e:
            raise ValueError(f"{path}:{number}: {e}") from e
    return found


def default_run_name(environment: Mapping[str, str]) -> str:
    """The script's name and, so that two runs do not meet, when it started or its job id."""
    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
    script = script.lstrip("-") or "run"
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        job = environment.get(name)
        if job and job != "none":
            return f"{script}-{job}"
    return f"{script}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def launchers_restarts(environment: Mapping[str, str]) -> Optional[int]:
    """A number that rises when a launcher starts the job again; None without one that counts.

    Slurm counts requeues; torchrun counts the restarts of its own and begins again at 0 after
    each requeue, so that its number alone would go back.  Of several nodes each counts the
    failures that it has seen itself: see launch.py for what makes one attempt of them.
    """

    def count(name: str) -> Optional[int]:
        told = environment.get(name, "")
        try:
            return whole(name, int(told), 0, ATTEMPT_MAX)
        except ValueError:
            return None

    requeues, restarts = count("SLURM_RESTART_COUNT"), count("TORCHELASTIC_RESTART_COUNT")
    if requeues is None or restarts is None:
        return restarts if requeues is None else requeues
    return min(requeues * ((count("TORCHELASTIC_MAX_RESTARTS") or 0) + 1) + restarts, ATTEMPT_MAX)


def resolve(
    arguments: Mapping[str, Any],
    config: Optional[str] = None,
    environment: Mapping[str, str] = os.environ,
    complain: Callable[[str], None] = lambda text: None,
    settings: Optional[Settings] = None,
) -> Settings:
    """Merges the five sources.

    A bad argument, or a bad file named by an argument, raises ValueError: the user is at the
    keyboard.  A bad value in the environment is reported to `complain` and left out: a job
    must not die of it.
    """
    merged: dict[str, Any] = {}
    path = config if config is not None else environment.get("BELLWETHER_CONFIG")
    if path:
        try:
            merged.update(read_file(path))
        except (ValueError, OSError) as e:
            if config is not None:
                raise ValueError(f"config: {e}") from e
            complain(f"BELLWETHER_CONFIG is ignored: {e}")
    restarts = launchers_restarts(environment)
    if restarts is not None:
        merged["attempt"] = restarts
    for name, variable in _ENVIRONMENT.items():
        value = environment.get(variable)
        if value:
            try:
                merged[name] = convert(name, value)
            except ValueError as e:
                complain(f"{variable} is ignored: {e}")
    if settings is not None:
        if not isinstance(settings, Settings):
            raise ValueError(f"settings: a bellwether.Settings is legal, not {settings!r:.80}")
        merged.update({name: getattr(settings, name) for name in settings.given})
    for name, value in arguments.items():
        if value is not None:
            merged[name] = convert(name, value)
    merged["run"] = merged.get("run") or convert("run", default_run_name(environment))
    return Settings(**merged)
