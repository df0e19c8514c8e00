"""One cell of the matrix: a tiny model trains a few steps without and with Bellwether.

Run as a program it reads cells from its standard input, one a line, and answers each with a line
of JSON: a process that dies takes one cell with it, and not the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Optional
from unittest import mock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "client_lib" / "python"), str(ROOT / "tests" / "python"), str(HERE)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import architectures  # noqa: E402
import definitions  # noqa: E402
import projections  # noqa: E402
from capture import Call, Calls  # noqa: E402

STEPS = 3
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
# What only the kernel's own rounding tells, which another graph need not repeat.
_ROUNDING = ("delta_bias_sum", "delta_bias_sumsq", "delta_error_abs_sum", "key_leak_sum")


class Cell(NamedTuple):
    architecture: str
    implementation: str
    batch: str
    mode: str
    precision: str

    def __str__(self) -> str:
        return " ".join(self)


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


def _digest(model: nn.Module) -> str:
    state = hashlib.sha256()
    for _, value in sorted(model.state_dict().items()):
        state.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


@contextlib.contextmanager
def _as_traced(cell: Cell) -> Iterator[None]:
    """Masks as torch.compile gets them: transformers makes each one while it is traced."""
    if cell.mode != "compile":
        yield
        return
    names = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(
                mock.patch(f"transformers.masking_utils.{name}", lambda *_, **__: False)
            )
        yield


def _build(cell: Cell) -> nn.Module:
    torch.manual_seed(0)
    model = architectures.BY_NAME[cell.architecture].build(
        cell.implementation, cell.batch == "window"
    )
    if cell.precision == "bfloat16":
        model = model.to(torch.bfloat16)
    if cell.mode in ("checkpoint", "reentrant"):
        model.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={"use_reentrant": cell.mode == "reentrant"}
        )
        if cell.mode == "reentrant":
            # As Trainers do: else no gradient enters the first region.
            model.enable_input_require_grads()  # type: ignore[operator]
    return model


def _given(batch: dict[str, Any], precision: str) -> dict[str, Any]:
    if precision != "bfloat16":
        return batch
    return {
        name: x.to(torch.bfloat16) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in batch.items()
    }


def _loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss.float()
    return output[0].float().square().mean()


def train(
    cell: Cell, *, capture: bool = False, compiled: bool = False,
    attach: Optional[Callable[[nn.Module], Any]] = None,
) -> tuple[Run, Any, nn.Module]:  # fmt: skip
    """(what it left, what `attach` returned, the model)."""
    architecture = architectures.BY_NAME[cell.architecture]
    run, model = Run(), _build(cell)
    monitor = attach(model) if attach is not None else None
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.01
    )
    called: Any = model
    if compiled:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        called = torch.compile(model, backend="aot_eager")
    calls = Calls(model)
    for step in range(STEPS):
        parts: list[list[Call]] = []
        for number, batch in enumerate(architectures.microbatches(architecture, cell.batch, step)):
            torch.manual_seed(100 * step + number)
            with contextlib.ExitStack() as stack:
                if capture:
                    stack.enter_context(calls.watching())
                    stack.enter_context(_as_traced(cell))
                with torch.autocast("cpu", torch.bfloat16, enabled=cell.precision == "autocast"):
                    loss = _loss(called(**_given(batch, cell.precision)))
                loss.backward()
            run.losses.append(loss.item())
            parts.append(calls.taken())
        optimizer.step()
        optimizer.zero_grad()
        run.calls.append(parts)
        if capture:
            run.weights.append(_weights(architecture, model, parts))
    run.digest = _digest(model)
    if compiled:
        counters = torch._dynamo.utils.counters
        run.graphs = {
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": sum(counters["graph_break"].values()),
        }
    return run, monitor, model


def _weights(
    architecture: architectures.Architecture, model: nn.Module, parts: list[list[Call]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each module that called attention the spectral norms of W_Q and W_K, by head."""
    found = {}
    for call in (call for part in parts for call in part):
        if call.module in found:
            continue
        module = model.get_submodule(call.module)
        pair = architecture.weights(module, call.q.shape[1], call.kv_heads, call.q.shape[3])
        if pair is not None:
            found[call.module] = projections.sigma(pair[0]), projections.sigma(pair[1])
    return found


def run_cell(cell: Cell) -> Result:
    result, began = Result(str(cell)), time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            _judge(cell, result, Path(folder))
    except Exception as e:
        result.outcome = "invalid"
        result.wrong.append(_in_words(e))
    result.seconds = round(time.monotonic() - began, 2)
    return result


def _in_words(error: Exception) -> str:
    lines = traceback.extract_tb(error.__traceback__)
    where = f"{Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else ""
    return f"{type(error).__name__}: {str(error).strip()[:300]} ({where})"


def _judge(cell: Cell, result: Result, folder: Path) -> None:
    import bellwether

    compiled = cell.mode == "compile"
    known, _, _ = train(cell, capture=True)
    plain = train(cell, compiled=True)[0] if compiled else known
    for part in (part for step in known.calls for part in step):
        for call in part:
            limit = 1e-3 if call.o.dtype == torch.float32 else 0.05
            off = definitions.mistaken(call)
            if not off <= limit and cell.implementation == "bellwether":
                result.wrong.append(f"our attention does not compute what it is asked: {off:.2g}")
            elif not off <= limit:
                raise AssertionError(f"the test misreads the call of {call.module}: {off:.2g}")
    seen = any(part for step in known.calls for part in step)
    if seen != architectures.BY_NAME[cell.architecture].calls:
        raise AssertionError(f"calls of attention that the test sees: {seen}")
    exact = plain.same(known)
    path = folder / "run.bwrun"

    def attach(model: nn.Module) -> Any:
        return bellwether.attach(
            model, record=str(path), run="matrix", every=1, rows=0, sequences=0,
            microbatches="all", overhead_budget=1e9,
        )  # fmt: skip

    attached: list[Any] = []
    try:
        watched, monitor, _ = train(
            cell,
            compiled=compiled,
            attach=lambda model: attached.append(attach(model)) or attached[0],
        )
        flushed = monitor.flush(20)
        status = monitor.status()
    except Exception as e:
        result.outcome = "crashed"
        result.wrong.append(_in_words(e))
        return
    finally:
        for one in attached:
            with contextlib.suppress(Exception):
                one.detach()
    notes = {note for layer in status["layers"] for note in layer["notes"]}
    result.said = sorted(notes)[:6]
    if not watched.same(plain) and train(cell, compiled=compiled)[0].same(plain):
        result.wrong.append("training is not bitwise what it is without us")
    if status["errors"]:
        result.wrong.append(f"{status['errors']} errors: {status['last_error'][:300]}")
    if not flushed or status["why_off"]:
        result.wrong.append(f"the watching ended: {status['why_off'] or 'nothing arrived'}")
    if watched.graphs != plain.graphs:
        result.wrong.append(f"compiled into {watched.graphs}, without us {plain.graphs}")
    steps: dict[int, dict[str, np.ndarray]] = {}
    if path.exists() and path.stat().st_size > 8:
        from recording import Recording

        steps = Recording(path, ended=True).steps()
    _compare(known, exact, status, steps, result)
    if not seen:
        result.missing = dict.fromkeys(GROUPS, "no function is called")
    result.wrong = list(dict.fromkeys(result.wrong))[:12]
    if result.wrong:
        result.outcome = "wrong"
    elif result.missing:
        result.outcome = "partly"


def _compare(
    known: Run, exact: bool, status: Any, steps: dict[int, dict[str, np.ndarray]], result: Result
) -> None:
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
            sigma = known.weights[step].get(module)
            if sigma is not None:
                values["wq_sigma"], values["wk_sigma"] = sigma
                slack["wq_sigma"], slack["wk_sigma"] = (2e-5 * s for s in sigma)
            if not exact:
                for signal in _ROUNDING:
                    values.pop(signal, None)
            for signal, want in values.items():
                _compare_one(signal, want, slack[signal], steps[step], index, exact,
                             f"{module} step {step}", result)  # fmt: skip


def _index(module: str, indices: dict[str, int]) -> Optional[int]:
    """The number under which a module is reported, by itself or by one around or in it."""
    for name in sorted(indices, key=len, reverse=True):
        near = name == module or module.startswith(f"{name}.") or name.startswith(f"{module}.")
        if (near or not name) and indices[name] >= 0:
            return indices[name]
    return None


def _compare_one(
    signal: str, want: Tensor, slack: Tensor, step: dict[str, np.ndarray], index: int, exact: bool,
    where: str, result: Result,
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
    if (row == 0).all() and (step["rows"][index][0] == 0 or (want.abs() > 10 * slack).all()):
        if (want != 0).any() or step["rows"][index][0] == 0:
            result.missing.setdefault(group, where)
        return
    off = (row - want).abs()
    limit = slack if exact else slack * 20 + 1e-4 * want.abs() + (
        1.0 if signal.startswith(("tied", "saturated")) else 0.0
    )  # fmt: skip
    if not (off <= limit + 2.0**-22 * want.abs()).all():
        worst = int((off - limit).argmax())
        result.wrong.append(
            f"{signal} of {where}: head {worst} is {row[worst]:.9g} and should be {want[worst]:.9g}"
            f" (within {limit[worst]:.2g})"
        )


def prepare(folder: Path, setenv: Callable[[str, str], None] = os.environ.__setitem__) -> None:
    """What a process needs once before its cells."""
    import protos

    for name, value in {
        "BELLWETHER_LOG_PATH": os.devnull,
        "BELLWETHER_LOG_LEVEL": "error",
        "XDG_STATE_HOME": str(folder / "state"),
        "HF_HUB_OFFLINE": "1",
    }.items():
        setenv(name, value)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    protos.generate(folder)
    import transformers

    transformers.logging.set_verbosity_error()
    from transformers.integrations.flex_attention import WrappedFlexAttention

    import bellwether.hf

    bellwether.hf.register()
    # PyTorch compiles no backward of it for CPUs, and refuses one; its portable path has one.
    from torch.nn.attention import flex_attention

    flex_attention._validate_device = lambda *_: None  # type: ignore[assignment]
    WrappedFlexAttention._is_flex_compiled = WrappedFlexAttention.training = True
    WrappedFlexAttention._compiled_flex_attention = staticmethod(flex_attention.flex_attention)


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What else is printed is no answer.
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for line in sys.stdin:
            print(
                json.dumps(dataclasses.asdict(run_cell(Cell(*line.split())))),
                file=answers,
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
