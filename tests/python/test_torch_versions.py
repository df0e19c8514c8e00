"""Goal: the package works with the oldest torch that the documents name, and with the newest.
Method: a virtual environment for each under build/, torch from PyPI (gigabytes: ./check --long
only), and in it the tests of what touches torch's inside.  What is printed says which were tried.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bellwether.attach_pid.processes import TORCH_MIN

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "intercept", "invisible", "harmless", "attach", "statistics", "stabilize", "compiled",
    "attention_torch", "optimizer_hooks", "overflow", "steps", "trainers",
)  # fmt: skip
BESIDE = ("numpy<2.4", "pytest", "protobuf>=4.21,<5", "zstandard", "expecttest", "setuptools<81")
OLDEST = ".".join(map(str, TORCH_MIN))

if not os.environ.get("BELLWETHER_LONG"):
    pytest.skip("downloads gigabytes: ./check --long", allow_module_level=True)


def environment(name: str, torch: str) -> Path:
    """The Python of a virtual environment that has this torch."""
    home = ROOT / "build" / "torch" / name
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    upgrade = ["--upgrade"] if torch == "torch" else []
    done = subprocess.run(
        [*install, *upgrade, torch, *BESIDE], capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, f"{torch} cannot be had: {done.stderr[-2000:]}"
    return python


@pytest.mark.parametrize(("name", "torch"), [("oldest", f"torch~={OLDEST}.0"), ("newest", "torch")])
def test_with(name: str, torch: str, capfd: pytest.CaptureFixture[str]) -> None:
    python = environment(name, torch)
    version = subprocess.run(
        [str(python), "-c", "import torch; print(torch.__version__)"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    files = [str(ROOT / "tests" / "python" / f"test_{file}.py") for file in FILES]
    ran = subprocess.run(
        [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--show-capture=no", *files],
        capture_output=True, text=True, env={**os.environ, "BELLWETHER_LONG": ""},
    )  # fmt: skip
    summary = re.findall(r"^=*\s*(\d+ (?:passed|failed).*?)\s*=*$", ran.stdout, re.M)
    with capfd.disabled():
        print(f"\ntorch {version}: {summary[-1] if summary else ran.stdout[-500:]}")
    assert ran.returncode == 0, ran.stdout[-6000:]
