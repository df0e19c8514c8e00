"""Goal: a broken call of attention becomes a file, and the file a script that needs torch alone and
shows the fault against fp64.
A training keeps broken calls only where it was told to, few of them, and stays the same.
Method: doctor on a planted kernel; the script's reference beside that of the laws, for each kind of
mask; the script run by a Python that does not find the package.  Calls that are offered one by one,
and two trainings with a planted kernel, of which one is watched.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_laws import CPU, SOUND, a_planted, mask_for

import bellwether
from bellwether._hook.capture import NAMES, keeper
from bellwether._hook.capturing import ASKED_FOR, NOT_FINITE, Capture, on_host
from bellwether._laws.call import GradedCall
from bellwether._laws.reference import reference
from bellwether.tools import doctor, reproduce, reproduced
from bellwether.tools.kernel_cases import Case, Shape, make
from bellwether.tools.kernel_check import graded

from gpu import DEVICES
from no_waiting import DEVICE, NoWaiting
from planted_kernels import planted
from recording import Recording

MATH = SOUND[0]


def kept(folder: Path, call: GradedCall, sequence: int = 0) -> Path:
    said: list[str] = []
    keeper(folder, 1, said.append)(call, sequence, "A call", {"kernel": "math", "reason": "asked"})
    (path,) = folder.glob("*.pt")
    assert said == [f"captured: python -m bellwether reproduce {path}"]
    return path


def run(script: Path) -> subprocess.CompletedProcess[str]:
    """By a Python that has torch and not us."""
    command = [sys.executable, "-I", str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/")


def test_doctor_keeps_broken_calls_and_a_script_shows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--kernels", "--function", "planted_kernels:exchanged", "--seconds", "3"]
    assert doctor.main([*given, "--capture", str(tmp_path)]) == 1
    captured = tmp_path / "planted-kernels-exchanged-normal.pt"
    said = capsys.readouterr().out
    assert f"captured: python -m bellwether reproduce {captured}" in said
    assert 1 <= len(list(tmp_path.glob("*.pt"))) <= 4
    assert reproduce.main([str(captured)]) == 0
    assert "planted_kernels:exchanged, dk: cosine" in capsys.readouterr().out
    done = run(captured.with_suffix(".py"))
    lines = {line[:24].strip(): line for line in done.stdout.splitlines()}
    assert done.returncode == 0, done.stdout + done.stderr  # PyTorch's own kernels are right.
    assert "dk 0.0" in lines["in the run"] or "dk -0.0" in lines["in the run"]
    assert "dk 0.9999" in lines["MATH"]
    assert ("No viable backend" in lines["CUDNN_ATTENTION"]) != torch.cuda.is_available()


def check_reference(folder: Path, call: GradedCall, sequence: int = 0) -> None:
    data, about = reproduced.loaded(kept(folder, call, sequence))
    got, known = reproduced.exact(data, about), reference(call)
    assert known.dk is not None and known.dv is not None
    want = {"o": known.o.exact.flatten(1, 2), "dq": known.dq.exact.flatten(1, 2),
            "dk": known.dk.exact, "dv": known.dv.exact}  # fmt: skip
    for name, t in want.items():
        torch.testing.assert_close(got[name], t[sequence], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "case",
    [Case("rows", Shape(tokens=40), batch=2, mask="rows"),
     Case("minimum", Shape(tokens=40), batch=2, mask="minimum"),
     Case("longer", Shape(tokens=30, causal=False), more_keys=7),
     Case("grouped", Shape(heads=8, tokens=33)), Case("strided", Shape(tokens=33), strided=True),
     Case("sinks", Shape(tokens=33, causal=False), sinks=True)],
    ids=lambda case: case.name,
)  # fmt: skip
def test_the_script_has_the_reference_of_the_laws(tmp_path: Path, case: Case) -> None:
    kernel = next(k for k in SOUND if k.name == "bellwether hp") if case.sinks else MATH
    check_reference(tmp_path, graded(kernel, make(case, CPU)), sequence=case.batch - 1)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("kind", ["causal", "window", "ranges", "bool", "added"])
def test_the_script_knows_each_kind_of_mask(tmp_path: Path, kind: str, softcap: float) -> None:
    torch.manual_seed(3)
    q, d_o = torch.randn(2, 4, 20, 8), torch.randn(2, 4, 20, 8)
    k, v = torch.randn(2, 2, 23, 8), torch.randn(2, 2, 23, 8)
    call = GradedCall(q, k, v, 0 * q, d_o, q, k, v, 0.3, mask_for(kind, q, 23), softcap)
    check_reference(tmp_path, call, sequence=1)


def test_nan_is_counted_and_a_kernel_here_is_tried(tmp_path: Path) -> None:
    call = graded(a_planted("nan_in_a_head_of_dq"), make(Case("a", Shape(tokens=40)), CPU))
    capture = kept(tmp_path, call)
    script = tmp_path / "elsewhere" / "vendor.py"
    script.parent.mkdir()
    assert reproduce.main([str(capture), "-o", str(script)]) == 0
    done = run(script)
    assert "1 NAN/INF" in done.stdout and done.returncode == 0, done.stdout + done.stderr
    data, about = reproduced.loaded(capture)
    for backend in ("MATH", "FLASH_ATTENTION"):
        got = reproduced.returned(backend, data, about, "cpu")
        assert isinstance(got, dict)
        found = reproduced.against(got, reproduced.exact(data, about))
        assert all(bad == 0 and cosine > 0.999 for bad, cosine, _ in found.values()), found


def test_a_mask_of_sampled_rows_is_refused(tmp_path: Path) -> None:
    call = graded(MATH, make(Case("a", Shape(tokens=20)), CPU))
    sampled = dataclasses.replace(call, mask=dataclasses.replace(call.mask, by_sample=True))
    said: list[str] = []
    keeper(tmp_path, 1, said.append)(sampled, 0, "A call", {})
    assert said == ["A call was not captured: a mask that is a function"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "there is no such file"), (b"no file of torch", "is no captured call"),
     ({"about": "{}"}, "q, k, v, o, d_o, dq, dk, dv is missing")],
)  # fmt: skip
def test_other_files_are_refused(
    tmp_path: Path, content: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    assert reproduce.main([str(path)]) == 2
    assert words in capsys.readouterr().out and not path.with_suffix(".py").exists()


# ---- of a running job ----

HEALTHY = graded(MATH, make(Case("a", Shape(tokens=20), batch=2), CPU))


def with_nan(name: str, of: GradedCall = HEALTHY) -> GradedCall:
    """In the second sequence."""
    tensor = getattr(of, name).clone()
    tensor[1, 2, 3, 4] = torch.nan
    return dataclasses.replace(of, **{name: tensor})


def keep(folder: Path, steps: list[list[GradedCall]], **limits: int) -> Capture:
    """Of calls of layers 0, 1, ... in these steps."""
    capture = Capture(
        str(folder), limits.get("files", 4), limits.get("bytes", 1 << 30), "a/run", first_layer=10
    )
    capture.ask([12])
    for number, calls in enumerate(steps):
        for layer, call in enumerate(calls):
            capture.offer(lambda layer=layer: layer, call, "a kernel")  # type: ignore[misc]
        capture.step_ends(number)
    capture.close()
    return capture


def test_the_first_broken_call_of_a_step_is_kept(tmp_path: Path) -> None:
    capture = keep(tmp_path, [[HEALTHY, HEALTHY], [HEALTHY, with_nan("dk")]])
    (path,) = capture.written
    assert Path(path).name == "a-run-step1-layer11.pt"
    data, about = reproduced.loaded(Path(path))
    assert (about["layer"], about["step"], about["sequence"]) == (11, 1, 1)
    assert (about["reason"], about["kernel"]) == (NOT_FINITE, "a kernel")
    assert torch.equal(data["q"], HEALTHY.q[1]) and bool(data["dk"].isnan().any())
    assert not capture.refused and not capture.last_error


@pytest.mark.parametrize("device", DEVICES)
def test_a_sequence_is_put_aside_without_waiting_for_its_device(
    tmp_path: Path, device: str
) -> None:
    calls = [
        dataclasses.replace(call, **{name: getattr(call, name).to(device) for name in NAMES})
        for call in (HEALTHY, with_nan("dq"), with_nan("dk"))
    ]
    capture = Capture(str(tmp_path), 4, 1 << 30, "run")
    mode: Any = torch.cuda.set_sync_debug_mode if device == "cuda" else lambda said: None
    try:
        for step in range(2):  # In the first one code is loaded, which may wait.
            mode("error" if step else "default")
            for layer, call in enumerate(calls):
                capture.offer(lambda layer=layer: layer, call, "k")  # type: ignore[misc]
            mode("error")  # It holds for the thread that writes, too.
            capture.step_ends(step)
        capture.close()
    finally:
        mode("default")
    assert not capture.refused and not capture.last_error
    assert [Path(path).name for path in capture.written] == [
        f"run-step{step}-layer1.pt" for step in range(2)
    ]
    data, _ = reproduced.loaded(Path(capture.written[0]))
    assert torch.equal(data["q"], HEALTHY.q[1]) and int(data["dq"].isnan().sum()) == 1


def on_a_gpu(call: GradedCall, kind: str) -> GradedCall:
    """The same shapes, on the device that stands for one."""
    parts = {}
    for name in NAMES:
        t = getattr(call, name)
        parts[name] = torch.empty(t.shape, dtype=t.dtype, device=DEVICE)
    mask, sinks = call.mask, None
    if kind in ("bool", "added"):
        dtype = torch.bool if kind == "bool" else call.q.dtype
        tensor = torch.empty(2, 1, 20, 20, dtype=dtype, device=DEVICE)
        mask = dataclasses.replace(mask, tensor=tensor)
    elif kind == "ranges":
        ranges = torch.empty(2, 20, 2, dtype=torch.int32, device=DEVICE)
        mask = dataclasses.replace(mask, ranges=ranges)
    elif kind == "sinks":
        sinks = torch.empty(4, device=DEVICE)
    return dataclasses.replace(call, mask=mask, sinks=sinks, **parts)


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("kind", ["causal", "bool", "added", "ranges", "sinks"])
def test_no_operation_of_an_offer_waits(tmp_path: Path, kind: str, asked: bool) -> None:
    capture = Capture(str(tmp_path), 4, 1 << 30, "run")
    if asked:
        capture.ask([0, 2])
    call = on_a_gpu(HEALTHY, kind)
    with NoWaiting() as seen:
        for layer in range(3):
            capture.offer(lambda layer=layer: layer, call, "k")  # type: ignore[misc]
    assert not capture.refused and len(seen.operations) > 100, seen.operations


def test_the_writing_thread_waits_for_an_event_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    event = SimpleNamespace(
        record=lambda: done.append("record"), synchronize=lambda: done.append("synchronize")
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    tensors = [torch.empty(1, 3, device=DEVICE), torch.empty(2, device=DEVICE)]
    with NoWaiting() as seen:
        copies = on_host(tensors)
    assert [str(t.device) for t in copies] == ["cpu"] * 2
    assert seen.operations.count("aten::copy_") == 2 and done == ["record", "synchronize"]
    assert [int(t) for t in on_host([torch.tensor([3]), torch.tensor([4])])] == [3, 4]


@pytest.mark.parametrize("name", ["d_o", "q"])
def test_a_call_that_comes_in_broken_is_not_kept(tmp_path: Path, name: str) -> None:
    call = with_nan(name, with_nan("dq"))
    assert keep(tmp_path, [[call]]).written == [] and not list(tmp_path.iterdir())


def test_a_layer_that_was_asked_for_is_kept_once(tmp_path: Path) -> None:
    capture = keep(tmp_path, [[HEALTHY] * 3] * 3)
    (path,) = capture.written
    assert Path(path).name == "a-run-step0-layer12.pt"
    assert reproduced.loaded(Path(path))[1]["reason"] == ASKED_FOR


def test_fp16_that_overflows_is_kept_where_asked_alone(tmp_path: Path) -> None:
    shape = Shape(tokens=20, dtype=torch.float16)
    call = with_nan("dq", graded(MATH, make(Case("a", shape, batch=2), CPU)))
    capture = keep(tmp_path, [[call] * 3])
    assert [Path(path).name for path in capture.written] == ["a-run-step0-layer12.pt"]


def test_files_and_bytes_are_bounded_and_refusals_counted(tmp_path: Path) -> None:
    broken = with_nan("dv")
    assert len(keep(tmp_path / "a", [[broken]] * 9, files=2).written) == 2
    assert len(list((tmp_path / "a").iterdir())) == 2
    small = keep(tmp_path / "b", [[broken]], bytes=1000)
    assert small.written == [] and small.refused == {
        "one sequence is larger than what is left of capture_bytes": 1
    }
    shapes = [graded(MATH, make(Case("a", Shape(tokens=n)), CPU)) for n in range(20, 26)]
    assert keep(tmp_path / "c", [shapes[:2] + shapes[3:]]).refused == {
        "more than 4 shapes of calls in a step": 1
    }


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    capture = keep(tmp_path / "file" / "below", [[with_nan("dq")]])
    assert capture.written == [] and capture.last_error.startswith("NotADirectoryError")


class Attend(torch.nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.attend = planted(fault)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o: torch.Tensor = self.attend(q, k, v, is_causal=True)
        return o


class Block(torch.nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96, bias=False)
        self.kernel = bellwether.wrap_attention(
            Attend(fault), layout="bhtd", causal=True, kernel="planted"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        o: torch.Tensor = self.kernel(q, k, v)
        return x + o.transpose(1, 2).flatten(2)


def trained(fault: str, record: Path, **settings: Any) -> tuple[list[Any], dict[str, Any]]:
    """Gradients of each step, and the status; nothing is watched without settings."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(Block(""), Block(fault), Block("")).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = None
    if settings:
        given = bellwether.Settings(**settings)
        monitor = bellwether.attach(
            model, record=str(record), run="broken", every=1, overhead_budget=1e9, settings=given
        )
    x = torch.randn(2, 12, 32).bfloat16()
    gradients, status = [], dict[str, Any]()
    for number in range(4):
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        if monitor is not None:
            monitor.step(loss=1.0)
            if number == 1:
                monitor.capture_calls([0])
    if monitor is not None:
        monitor.detach()
        status = dict(monitor.status())
        assert status["errors"] == 0, status
    for module in model.modules():
        bellwether.unwrap_attention(module)
    return gradients, status


def test_a_training_keeps_its_broken_call_and_stays_the_same(tmp_path: Path) -> None:
    folder, fault = tmp_path / "kept", "nan_in_a_head_of_dq"
    bare, _ = trained(fault, tmp_path / "a.bwrun")
    watched, status = trained(fault, tmp_path / "b.bwrun", capture_dir=str(folder), capture_files=3)
    for some, others in zip(bare, watched, strict=True):
        assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(some, others, strict=True))
        assert all(
            torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(some, others, strict=True)
        )
    names = [Path(path).name for path in status["capture"]["written"]]
    # From then on the weights are NaN, and what comes in is.
    assert names == ["broken-rank0-step0-layer1.pt", "broken-rank0-step2-layer0.pt"]
    data, about = reproduced.loaded(folder / names[0])
    found = reproduced.against(data, reproduced.exact(data, about))
    assert [bad for bad, _, _ in found.values()] == [0, 1, 0, 0] and about["kernel"] == "planted"
    assert all(cosine > 0.999 for name, (_, cosine, _) in found.items() if name != "dq"), found


def test_a_sound_training_keeps_what_it_is_asked_for(tmp_path: Path) -> None:
    _, status = trained("", tmp_path / "a.bwrun", capture_dir=str(tmp_path / "kept"))
    names = [Path(path).name for path in status["capture"]["written"]]
    assert names == ["broken-rank0-step2-layer0.pt"]


def test_nothing_is_kept_without_a_folder(tmp_path: Path) -> None:
    _, status = trained("nan_in_a_head_of_dq", tmp_path / "a.bwrun", every=1)
    assert status["capture"] is None
    assert Recording(tmp_path / "a.bwrun", ended=True).messages  # The sender wrote all of it.
    assert [path.name for path in tmp_path.iterdir()] == ["a.bwrun"]
