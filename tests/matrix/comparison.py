"""What one training left behind, and how what was recorded of it is judged."""

from __future__ import annotations

import dataclasses
import hashlib
import traceback
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor, nn

import definitions
from definitions import Call

# The twelve groups of signals, and what belongs to each.
GROUPS: dict[str, tuple[str, ...]] = {
    "rows": ("rows", "sequences"),
    "common_mode": ("common_mode_sum", "key_coherence_sum"),
    "spread": ("spread_sum",),
    "ties": ("tied_rows_bf16", "tied_rows_eps", "tied_rows_eps_paper"),
    "saturated": ("saturated_rows",),
    "logit_max": ("logit_max",),
    "entropy": ("entropy_sum",),
    "sink": ("sink_sum",),
    "nonfinite": ("nonfinite_rows",),
    "delta": ("delta_bias_sum", "delta_bias_sumsq", "delta_abs_sum", "delta_error_abs_sum"),
    "leak": ("key_leak_sum", "key_gradient_sum"),
    "sigma": ("wq_sigma", "wk_sigma"),
}
_GROUP_OF = {signal: group for group, signals in GROUPS.items() for signal in signals}
# What only the kernel's own rounding tells, which another run need not repeat.
_ROUNDING = ("delta_bias_sum", "delta_bias_sumsq", "delta_error_abs_sum", "key_leak_sum")


@dataclasses.dataclass
class Result:
    cell: str
    outcome: str = "full"  # full, partly, wrong, crashed; invalid: not trained even without us
    missing: dict[str, str] = dataclasses.field(default_factory=dict)  # group -> where, or why
    wrong: list[str] = dataclasses.field(default_factory=list)
    said: list[str] = dataclasses.field(default_factory=list)  # By the layers' notes.
    seconds: float = 0.0


@dataclasses.dataclass
class Run:
    """What one training left behind."""

    losses: list[float] = dataclasses.field(default_factory=list)
    digest: str = ""
    calls: list[list[list[Call]]] = dataclasses.field(default_factory=list)  # [step][part]
    weights: list[dict[str, tuple[Tensor, Tensor]]] = dataclasses.field(default_factory=list)
    graphs: dict[str, int] = dataclasses.field(default_factory=dict)

    def same(self, other: Run) -> bool:
        return self.losses == other.losses and self.digest == other.digest


def in_words(error: Exception) -> str:
    lines = traceback.extract_tb(error.__traceback__)
    where = f"{Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else ""
    return f"{type(error).__name__}: {str(error).strip()[:300]} ({where})"


def digest(model: nn.Module) -> str:
    state = hashlib.sha256()
    for _, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            whole = value.detach().cpu().contiguous().flatten()
            state.update(whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b"")
    return state.hexdigest()


Steps = dict[int, dict[str, np.ndarray]]  # step -> signal -> [layers, heads]


def recorded(path: Path) -> Steps:
    """What a recording holds, or nothing where none was begun."""
    if not path.exists() or path.stat().st_size <= 8:
        return {}
    from recording import Recording

    return Recording(path, ended=True).steps()


def judge(
    known: Run, exact: bool, status: Any, flushed: bool, steps: Steps, result: Result
) -> None:
    """Fills the result.  `exact`: the watched run had the very bits of the captured one."""
    notes = {note for layer in status["layers"] for note in layer["notes"]}
    result.said = sorted(notes)[:6]
    if status["errors"]:
        result.wrong.append(f"{status['errors']} errors: {status['last_error'][:300]}")
    if not flushed or status["why_off"]:
        result.wrong.append(f"the watching ended: {status['why_off'] or 'nothing arrived'}")
    _compare(known, exact, status, steps, result)
    if not result.wrong and not result.missing:
        from bellwether.tools.doctor import layer_findings

        failed = [str(found) for found in layer_findings(status) if found.ok is False]
        result.wrong += [f"all is there, and doctor says: {text[:200]}" for text in failed[:2]]
    result.wrong = list(dict.fromkeys(result.wrong))[:12]
    if result.wrong:
        result.outcome = "wrong"
    elif result.missing:
        result.outcome = "partly"


def _compare(known: Run, exact: bool, status: Any, steps: Steps, result: Result) -> None:
    indices = {layer["name"]: layer["index"] for layer in status["layers"]}
    for step, parts in enumerate(known.calls):
        by_module: dict[str, list[Call]] = {}
        for call in (call for part in parts for call in part):
            by_module.setdefault(call.module, []).append(call)
        if step not in steps:
            for group in GROUPS:
                result.missing.setdefault(group, f"step {step}")
            continue
        for module, calls in by_module.items():
            index = _index(module, indices)
            if index is None:
                for group in GROUPS:
                    result.missing.setdefault(group, f"{module}: no such layer is reported")
                continue
            total: Optional[definitions.Expected] = None
            for call in calls:
                found = definitions.of_call(call)
                total = found if total is None else total + found
            assert total is not None
            values, slack = dict(total.values), dict(total.slack)
            if any(call.softcap or call.sinks is not None for call in calls):
                # No law says that this sum is zero: it has to be left out.
                del values["key_leak_sum"], values["key_gradient_sum"]
                result.missing.setdefault("leak", "softcap or sinks")
                told = steps[step].get("key_leak_sum")
                if told is not None and (told[index] > 0).any():
                    result.wrong.append(f"key_leak_sum of {module} is told where it is no law")
            sigma = known.weights[step].get(module)
            if sigma is not None:
                values["wq_sigma"], values["wk_sigma"] = sigma
                slack["wq_sigma"], slack["wk_sigma"] = (2e-5 * s for s in sigma)
            if not exact:
                for signal in _ROUNDING:
                    values.pop(signal, None)
            for signal, want in values.items():
                limit = slack[signal] if exact else _loose(signal, want, slack[signal], calls, step)
                where = f"{module} step {step}"
                _compare_one(signal, want, limit, steps[step], index, where, result)


def _loose(signal: str, want: Tensor, slack: Tensor, calls: list[Call], step: int) -> Tensor:
    """For a run that does not repeat its bits, as on a GPU where a kernel is not deterministic.
    Roundings of bfloat16 turn whole rows over.  Where a softmax is sharp they are a large part of
    its gradients.  From the second step on the weights differ, too: then it is only told whether a
    number can be that of this call."""
    share = 1e-4
    if any(call.o.dtype != torch.float32 for call in calls):
        of_backward = signal in ("delta_abs_sum", "key_gradient_sum")
        share = (0.25 if of_backward else 0.05) if step == 0 else (0.5 if of_backward else 0.25)
    rows = sum(call.q.shape[0] * call.q.shape[2] for call in calls)
    few = 1 + share * rows if signal.endswith(("_rows", "_bf16", "_eps", "_paper")) else 0.0
    return slack * 20 + share * want.abs() + few


def _index(module: str, indices: dict[str, int]) -> Optional[int]:
    """The number under which a module is reported, by itself or by one around or in it."""
    for name in sorted(indices, key=len, reverse=True):
        near = name == module or module.startswith(f"{name}.") or name.startswith(f"{module}.")
        if (near or not name) and indices[name] >= 0:
            return indices[name]
    return None


def _compare_one(
    signal: str, want: Tensor, limit: Tensor, step: dict[str, np.ndarray], index: int, where: str,
    result: Result,
) -> None:  # fmt: skip
    group = _GROUP_OF[signal]
    got = step.get(signal)
    if got is None or got.shape[0] <= index:
        result.missing.setdefault(group, where)
        return
    row = torch.from_numpy(got[index].astype(np.float64))[: len(want)]
    if len(row) < len(want):
        result.wrong.append(f"{signal} of {where}: {len(row)} heads instead of {len(want)}")
        return
    if not torch.isfinite(row).all() or (row < -1e30).any():
        result.missing.setdefault(group, where)
        return
    if (row == 0).all() and (step["rows"][index][0] == 0 or (want.abs() > 10 * limit).all()):
        if (want != 0).any() or step["rows"][index][0] == 0:
            result.missing.setdefault(group, where)
        return
    off = (row - want).abs()
    if not (off <= limit + 2.0**-22 * want.abs()).all():
        worst = int((off - limit).argmax())
        result.wrong.append(
            f"{signal} of {where}: head {worst} is {row[worst]:.9g} and should be {want[worst]:.9g}"
            f" (within {limit[worst]:.2g})"
        )
