"""Goal: a broken call of attention becomes a file, and the file a script that needs torch alone and
shows the fault against fp64.
Method: doctor on a planted kernel; the script's reference beside that of the laws, for each kind of
mask; the script run by a Python that does not find the package.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_laws import CPU, SOUND, a_planted, mask_for

from bellwether._hook.capture import keeper
from bellwether._laws.call import GradedCall
from bellwether._laws.reference import reference
from bellwether.tools import doctor, reproduce, reproduced
from bellwether.tools.kernel_cases import Case, Shape, make
from bellwether.tools.kernel_check import graded

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
    assert "dk 0.9999" in lines["MATH"] and "No viable backend" in lines["CUDNN_ATTENTION"]


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
