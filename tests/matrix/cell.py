"""One cell of the matrix: a tiny model trains a few steps without and with Bellwether.

Run as a program it reads cells from its standard input, one a line, and answers each with a line
of JSON: a process that dies takes one cell with it, and not the run.  Its argument is the device,
cpu or cuda.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext as nothing
from pathlib import Path
from typing import Any, NamedTuple, Optional, TextIO
from unittest import mock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "client_lib" / "python"), str(ROOT / "tests" / "python"), str(HERE)]

import torch  # noqa: E402
from capture_in_graph import CallsInGraph  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import architectures  # noqa: E402
import definitions  # noqa: E402
import projections  # noqa: E402
from capture import Call, Calls  # noqa: E402
from comparison import Result, Run, digest, in_words, judge, recorded  # noqa: E402

STEPS = 3


class Cell(NamedTuple):
    architecture: str
    implementation: str
    batch: str
    mode: str
    precision: str

    def __str__(self) -> str:
        return " ".join(self)


def _as_traced(cell: Cell) -> contextlib.AbstractContextManager[Any]:
    """Masks as torch.compile gets them: none is left out for what is in it."""
    if cell.mode != "compile":
        return nothing()
    return mock.patch("transformers.masking_utils.is_tracing", lambda *_: True)


def _build(cell: Cell, device: str) -> nn.Module:
    torch.manual_seed(0)
    model = architectures.BY_NAME[cell.architecture].build(
        cell.implementation, cell.batch == "window"
    )
    model = model.to(device)
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


def _given(batch: dict[str, Any], precision: str, device: str) -> dict[str, Any]:
    def given(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        narrow = precision == "bfloat16" and x.is_floating_point()
        return x.to(device, torch.bfloat16 if narrow else None)

    return {name: given(x) for name, x in batch.items()}


def _loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss.float()
    return output[0].float().square().mean()


@contextlib.contextmanager
def _captured(cell: Cell, calls: Calls) -> Iterator[None]:
    with calls.watching(), _as_traced(cell):
        yield


def _backward(cell: Cell, model: Any, batch: dict[str, Any], device: str) -> float:
    """The loss of one micro-batch."""
    with torch.autocast(device, torch.bfloat16, enabled=cell.precision == "autocast"):
        loss = _loss(model(**_given(batch, cell.precision, device)))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def train(
    cell: Cell, *, capture: bool = False, compiled: bool = False, like: Optional[Run] = None,
    attach: Optional[Callable[[nn.Module], Any]] = None, device: str = "cpu",
) -> tuple[Run, Any, nn.Module]:  # fmt: skip
    """(what it left, what `attach` returned, the model).

    capture  the calls; of a compiled run they are read as those of an eager one, `like`
    """
    architecture = architectures.BY_NAME[cell.architecture]
    run, model = Run(), _build(cell, device)
    monitor = attach(model) if attach is not None else None
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.01
    )
    called: Any = model
    if compiled:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        called = torch.compile(model, backend="aot_eager")
    calls, in_graph = Calls(model, architecture.written), CallsInGraph()
    with in_graph.watching() if like is not None else nothing():
        for step in range(STEPS):
            parts: list[list[Call]] = []
            batches = architectures.microbatches(architecture, cell.batch, step)
            for number, batch in enumerate(batches):
                torch.manual_seed(100 * step + number)
                with _captured(cell, calls) if capture and like is None else nothing():
                    run.losses.append(_backward(cell, called, batch, device))
                own = calls.taken() if like is None else in_graph.taken(like.calls[step][number])
                parts.append(own)
            optimizer.step()
            optimizer.zero_grad()
            run.calls.append(parts)
            if capture:
                run.weights.append(projections.sigmas(architecture.weights, model, parts))
    run.digest = digest(model)
    if compiled:
        counters = torch._dynamo.utils.counters
        run.graphs = {
            "graphs": counters["stats"]["unique_graphs"],
            "kinds of breaks": len(counters["graph_break"]),
        }
    return run, monitor, model


def run_cell(cell: Cell, device: str = "cpu") -> Result:
    result, began = Result(str(cell)), time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            _judge(cell, result, Path(folder), device)
    except Exception as e:
        result.outcome = "invalid"
        result.wrong.append(in_words(e))
    result.seconds = round(time.monotonic() - began, 2)
    return result


def _judge(cell: Cell, result: Result, folder: Path, device: str) -> None:
    import bellwether

    compiled = cell.mode == "compile"

    def trained() -> Run:
        return train(cell, compiled=compiled, device=device)[0]

    known, _, _ = train(cell, capture=True, device=device)
    plain = known
    if compiled:
        known, _, _ = train(cell, capture=True, compiled=True, like=known, device=device)
        plain = trained()
    for part in (part for step in known.calls for part in step):
        for call in part:
            limit = 1e-3 if call.o.dtype == torch.float32 else 0.05
            off = definitions.mistaken(call)
            if not off <= limit and cell.implementation == "bellwether":
                result.wrong.append(f"our attention does not compute what it is asked: {off:.2g}")
            elif not off <= limit:
                raise AssertionError(f"the test misreads the call of {call.module}: {off:.2g}")
    if not any(part for step in known.calls for part in step):
        raise AssertionError("the test sees no call of attention")
    exact = plain.same(known)
    if not exact and device == "cpu":
        raise AssertionError("the capture changes what the model computes")
    path = folder / "run.bwrun"

    def attach(model: nn.Module) -> Any:
        return bellwether.attach(
            model, record=str(path), run="matrix", every=1, rows=0, sequences=0,
            microbatches="all", overhead_budget=1e9, byte_budget=0,
        )  # fmt: skip

    attached: list[Any] = []
    try:
        watched, monitor, _ = train(
            cell,
            compiled=compiled,
            device=device,
            attach=lambda model: attached.append(attach(model)) or attached[0],
        )
        flushed = monitor.flush(20)
        status = monitor.status()
    except Exception as e:
        result.outcome = "crashed"
        result.wrong.append(in_words(e))
        return
    finally:
        for one in attached:
            with contextlib.suppress(Exception):
                one.detach()
    if not watched.same(plain):
        again = trained()
        exact = exact and not again.same(watched)  # Else it is the capture that changes bits.
        if not again.same(watched) and again.same(trained()):
            result.wrong.append("training is not bitwise what it is without us")
    if watched.graphs != plain.graphs:
        result.wrong.append(f"compiled into {watched.graphs}, without us {plain.graphs}")
    judge(known, exact and watched.same(plain), status, flushed, recorded(path), result)


def prepare(
    folder: Path, setenv: Callable[[str, str], None] = os.environ.__setitem__, device: str = "cpu"
) -> None:
    """What a process needs once before its cells."""
    import protos

    for name, value in {
        "BELLWETHER_LOG_PATH": os.devnull,
        "BELLWETHER_LOG_LEVEL": "error",
        "XDG_STATE_HOME": str(folder / "state"),
        "HF_HUB_OFFLINE": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # Else no product on a GPU repeats its bits.
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
    if device != "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)  # A loss (CTC) cannot be.
        return
    # transformers has inductor and a C++ compiler make the mask of blocks, half a minute on CPUs.
    from transformers import masking_utils

    make: Any = masking_utils.create_block_mask
    masking_utils.create_block_mask = lambda *args, **how: make(*args, **{**how, "_compile": False})
    # PyTorch compiles no backward of it for CPUs, and refuses one; its portable path has one.
    from torch.nn.attention import flex_attention

    flex_attention._validate_device = lambda *_: None  # type: ignore[assignment]
    WrappedFlexAttention._is_flex_compiled = WrappedFlexAttention.training = True
    WrappedFlexAttention._compiled_flex_attention = staticmethod(flex_attention.flex_attention)


def answering() -> TextIO:
    """Standard output, for answers alone: what others print there goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def main(device: str) -> int:
    answers = answering()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), device=device)
        for line in sys.stdin:
            result = run_cell(Cell(*line.split()), device)
            print(json.dumps(dataclasses.asdict(result)), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
