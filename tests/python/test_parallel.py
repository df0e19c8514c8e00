"""Goal: in each kind of parallel training the right layers and heads are told, once, with the
norms of whole heads, and every process trains bit by bit as it would without the hook.
Method: two processes with gloo, and with NCCL where there are two GPUs; what they record is merged
as the server does and compared with the weights of the whole model.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_jobs import run_ranks

from bellwether import Parallel
from bellwether._hook.model import parallel
from bellwether._step import law_rows

import parallel_job
from conftest import ROOT
from recording import Recording

MODES = ("ddp", "fsdp", "tp", "pp", "cp")


REQUIRED = os.environ.get("BELLWETHER_REQUIRE_GPU") == "2"  # That many GPUs.
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2 and not REQUIRED, reason="no two GPUs")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=TWO_GPUS)])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Where two processes have trained in every way, on CPUs or GPUs."""
    folder = tmp_path_factory.mktemp("parallel")
    script = ROOT / "tests" / "python" / "parallel_job.py"
    run_ranks(script, request.param, str(folder), *MODES, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    return folder


class Trained:
    """What both processes came to in one way, with the hook and without."""

    def __init__(self, mode: str, folder: Path) -> None:
        self.folder = folder / mode
        for rank in range(2):
            plain = torch.load(self.folder / f"p{rank}.pt")["results"]
            hooked = torch.load(self.folder / f"h{rank}.pt")["results"]
            assert len(plain) > 3
            assert all(torch.equal(a, b) for a, b in zip(plain, hooked)), rank
        self.whole = torch.load(self.folder / "p0.pt")["whole"]  # [layer][q, k] at first.

    def recording(self, rank: int) -> Recording:
        name = "p.bwrun" if rank == 0 else f"p-rank{rank}.bwrun"
        return Recording(self.folder / name, ended=True)

    def norms(self, which: int) -> np.ndarray:
        dim = parallel_job.SHAPE.dim
        norms = [
            torch.linalg.matrix_norm(layer[which].unflatten(0, (-1, dim)), ord=2).numpy()
            for layer in self.whole
        ]
        return np.stack(norms)


def merged(recordings: list[Recording], step: int) -> dict[str, np.ndarray]:
    """Signal -> [layers, heads] of all processes; sums add, the others must not meet."""
    layout = recordings[0].hello.run.layout
    found: dict[str, np.ndarray] = {}
    for recorded in recordings:
        for frame in recorded.frames:
            for block in frame.blocks if frame.step == step else ():
                name = recorded.names[block.signal]
                if name in law_rows.SIGNALS:
                    continue  # Their rows are modules.
                whole = found.setdefault(name, np.full((layout.layers, layout.heads), np.nan))
                place = np.s_[
                    block.layer_begin : block.layer_begin + block.layer_count,
                    block.head_begin : block.head_begin + block.head_count,
                ]
                values = np.array(block.values).reshape(block.layer_count, -1)
                before = whole[place]
                whole[place] = np.where(np.isnan(before), values, before + values)
    return found


def test_data_parallel(folder: Path) -> None:
    trained = Trained("ddp", folder)
    assert not (trained.folder / "p-rank1.bwrun").exists()  # One copy reports.
    hello = trained.recording(0).hello.run
    assert (hello.world, hello.reporters) == (2, 1)
    step = merged([trained.recording(0)], 1)
    assert (step["rows"] == 3 * 40).all() and np.isfinite(step["wq_sigma"]).all()


def test_fully_sharded(folder: Path) -> None:
    trained = Trained("fsdp", folder)
    assert not (trained.folder / "p-rank1.bwrun").exists()
    steps = trained.recording(0).steps()
    assert np.allclose(steps[0]["wq_sigma"], trained.norms(0), rtol=1e-5)  # While gathered.
    assert np.allclose(steps[0]["wk_sigma"], trained.norms(1), rtol=1e-5)
    assert all((steps[step]["rows"] == 3 * 40).all() for step in range(parallel_job.STEPS))


def test_sharded_numbers_are_read_only_where_complete(folder: Path) -> None:
    trained = Trained("fsdp", folder)
    saved = torch.load(trained.folder / "h0.pt")
    norms = saved["results"][1::3][: parallel_job.STEPS]  # loss, grad_norm, tokens of each step
    for step, norm in enumerate(norms):
        signals = trained.recording(0).steps()[step]
        assert signals["grad_norm"][0, 0] == norm.item() > 0
        assert "tokens" not in signals
    ((reason, times),) = saved["left_out"].items()
    assert reason.startswith("tokens: ") and "full_tensor" in reason
    assert times == parallel_job.STEPS


def test_tensor_parallel(folder: Path) -> None:
    trained = Trained("tp", folder)
    recordings = [trained.recording(rank) for rank in range(2)]
    for rank, recorded in enumerate(recordings):
        hello = recorded.hello
        assert (hello.rank, hello.run.world, hello.run.reporters) == (rank, 2, 2)
        assert (hello.run.layout.heads, hello.run.layout.kv_heads) == (4, 2)
    parts = {
        (block.head_begin, block.head_count)
        for recorded in recordings
        for block in recorded.frames[0].blocks
        if recorded.names[block.signal] == "wq_sigma"
    }
    assert parts == {(0, 2), (2, 2)}
    after_one_step = merged(recordings, 0)
    assert (after_one_step["rows"] == 3 * 40).all()
    # The step was small: each head's norm is still nearest to its own.
    distance = np.abs(after_one_step["wq_sigma"][..., None] - trained.norms(0)[:, None, :])
    assert (distance.argmin(-1) == np.arange(4)).all()


def test_pipeline_stages(folder: Path) -> None:
    trained = Trained("pp", folder)
    recordings = [trained.recording(rank) for rank in range(2)]
    for rank, recorded in enumerate(recordings):
        hello = recorded.hello.run
        assert (hello.layout.layers, hello.reporters) == (2, 2)
        layers = {
            (block.layer_begin, block.layer_count)
            for block in recorded.frames[0].blocks
            if recorded.names[block.signal] == "wq_sigma"
        }
        assert layers == {(rank, 1)}
    step = merged(recordings, 0)
    assert (step["rows"] == 3 * 40).all() and step["rows"].shape == (2, 4)
    distance = np.abs(step["wq_sigma"][..., None] - trained.norms(0)[:, None, :])
    assert (distance.argmin(-1) == np.arange(4)).all()


def test_context_parallel_rows_are_marked(folder: Path) -> None:
    trained = Trained("cp", folder)
    for rank in range(2):
        assert all(frame.partial_rows for frame in trained.recording(rank).frames)
        assert trained.recording(rank).hello.run.reporters == 2


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (dict(tensor=(2, 2)), "parallel.tensor: rank 2 is outside of 0 to 1"),
        (dict(pipeline=(0, 2)), "parallel.layers: with pipeline stages, all layers must be told"),
        (dict(first_layer=-1), "parallel.first_layer, layers: -1, 0 are below 0"),
    ],
)
def test_a_bad_place_names_itself(told: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Parallel(**told)


def test_unsplit_modules_are_not_detected_as_parallel() -> None:
    assert parallel.detect(torch.nn.MultiheadAttention(8, 2)) is None
