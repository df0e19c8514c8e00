"""Goal: programs that begin with PyTorch loaded find what a new interpreter would show them.
Method: the same script by both, and a few ends of one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "support"))
from warm_python import WarmPython

SHOWN = """
import atexit, json, os, random, sys
sys.modules.pop("json.tool", None)
atexit.register(print, "left", __name__)
print(json.dumps({"argv": sys.argv, "path": sys.path, "folder": os.getcwd(), "file": __file__,
                  "environment": dict(os.environ), "main": sys.modules["__main__"].__name__,
                  "stdin": sys.stdin.read()}))
print("an error", file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmPython]:
    made = WarmPython("json.tool")
    yield made
    made.close()


@pytest.mark.parametrize("as_module", [False, True])
def test_programs_see_what_an_interpreter_shows(
    as_module: bool, warm: WarmPython, tmp_path: Path
) -> None:
    (tmp_path / "shown.py").write_text(SHOWN)
    words = ["-m", "shown"] if as_module else [str(tmp_path / "shown.py")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "more"), "OWN": "1"}
    want = subprocess.run(
        [sys.executable, *words, "--told", "a b"], cwd=tmp_path, env=environment,
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    got = warm.run([*words, "--told", "a b"], environment, tmp_path)
    assert (got.returncode, got.stderr) == (want.returncode, want.stderr) == (3, "an error\n")
    shown, left = got.stdout.splitlines()
    expected, _ = want.stdout.splitlines()
    assert json.loads(shown) == json.loads(expected) and left == "left __main__"


def test_a_program_ends_as_it_says(warm: WarmPython, tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text("import os, sys\nprint('x', flush=True)\nexec(sys.argv[1])\n")

    def ended(code: str, **how: float) -> subprocess.CompletedProcess[str]:
        return warm.run([script, code], {}, **how)

    assert ended("pass").returncode == 0
    raised = ended("1 / 0")
    assert raised.returncode == 1 and "ZeroDivisionError" in raised.stderr
    killed = ended("os.kill(os.getpid(), 9)")
    assert killed.returncode == -signal.SIGKILL and killed.stdout == "x\n"
    assert ended("import time; time.sleep(60)", timeout=0.5).returncode == -signal.SIGKILL


def test_errors_may_be_printed_where_all_else_is(warm: WarmPython, tmp_path: Path) -> None:
    script = tmp_path / "both.py"
    script.write_text("import sys\nprint(1, flush=True)\nprint(2, file=sys.stderr)\n")
    done = warm.start([script], {}, together=True).ended(60)
    assert (done.returncode, done.stdout) == (0, "1\n2\n")
