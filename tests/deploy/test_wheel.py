"""Goal: the wheel is all that a laptop with PyTorch needs.  attach() in three lines has a server
and a page of its own, the command is on the path, and pip takes everything away again.
Method: deploy/wheel.sh on the programs of this build; auditwheel for its tag; a fresh virtual
environment that sees PyTorch and transformers, where every other system library, and so any
compiler, is hidden.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bare_machine import BareMachine, glibc_files, python_files
from bellwether_process import BIN, ROOT, wait_for

SIZE_MAX = 18 << 20  # bytes, without CUDA; 17.1 MiB today
TRAIN = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import bellwether

torch.manual_seed(0)
shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **shape))
mon = bellwether.attach(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(50):
    tokens = torch.randint(64, (2, 32))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mon.step(loss=loss)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([ROOT / "deploy/wheel.sh", BIN, folder], check=True, capture_output=True)
    (made,) = folder.glob("*.whl")
    return made


def pip(python: Path, *words: str | Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", f"--python={python}", *words], check=True
    )


def test_wheel_size_is_bounded_and_its_tag_right(wheel: Path) -> None:
    assert wheel.stat().st_size <= SIZE_MAX
    server = subprocess.check_output([BIN / "bellwetherd", "--version"], text=True).split()[1]
    assert re.fullmatch(rf"bellwether-{server}-py3-none-manylinux_2_\d+_x86_64\.whl", wheel.name)


@pytest.mark.skipif("BELLWETHER_LONG" not in os.environ, reason="half a minute of reading ELF files: ./check --long")
def test_auditwheel_agrees_with_the_tag(wheel: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", wheel], capture_output=True, text=True, check=True
    ).stdout
    platform = wheel.stem.rsplit("-", 1)[1]
    assert f'consistent with the following platform tag: "{platform}"' in " ".join(shown.split()), shown


def test_wheel_has_the_licences_of_bundled_libraries(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "bellwether/licenses/bellwether" in names
    assert [name for name in names if name.startswith("bellwether/licenses/libgrpc")]


class Laptop:
    """A virtual environment on a machine without our packages, and its user's state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "venv/bin"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.python = self.bin / "python"
        self.packages = next((folder / "venv/lib").glob("python3*")) / "site-packages"
        # PyTorch and transformers need not be installed again to be there.
        (self.packages / "pytorch.pth").write_text(sysconfig.get_path("purelib"))
        self._machine = BareMachine(folder / "libraries", glibc_files() | python_files(Path(sys.executable)))
        self.works = self._machine.works()
        self.server = folder / "state/bellwether/server.json"

    def run(self, *words: str | Path) -> str:
        done = subprocess.run(
            self._machine.command(*words),
            cwd=self.folder,
            env={
                "PATH": f"{self.bin}:/usr/bin:/bin",
                "HOME": str(self.folder),
                "XDG_STATE_HOME": str(self.folder / "state"),
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Laptop]:
    made = Laptop(tmp_path)
    if not made.works:
        pytest.skip("this user may not make a mount namespace (unshare --mount)")
    yield made
    if made.server.exists():  # It would serve on for minutes.
        os.kill(json.loads(made.server.read_text())["pid"], signal.SIGTERM)
        wait_for("the private server has ended", lambda: not made.server.exists())


def test_installed_wheel_watches_a_run(wheel: Path, laptop: Laptop) -> None:
    before = {path.name for path in [*laptop.packages.iterdir(), *laptop.bin.iterdir()]}
    pip(laptop.python, "install", "--no-index", "--no-deps", wheel)
    (laptop.folder / "train.py").write_text(TRAIN)
    said = laptop.run(laptop.python, "train.py")

    # Its page came up at the address that the job printed, and asks for the token that stands there.
    page = re.search(r"(http://127\.0\.0\.1:\d+/)(\?token=\w+)", said)
    assert page, said
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with browser.open("".join(page.groups()), timeout=30) as answer:
        assert b"<title>Bellwether" in answer.read()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(page.group(1), timeout=30)

    # The command of the wheel finds that server by itself.
    def runs() -> list[dict[str, Any]]:
        return list(json.loads(laptop.run("bellwether", "run", "list", "-o", "json")).get("runs", []))

    # The job's sender outlives it.
    wait_for("the run has ended", lambda: [run for run in runs() if run.get("ended")])
    (run,) = runs()
    name = run["description"]["name"]
    assert int(run["frames_dropped"]) == 0
    (loss,) = json.loads(laptop.run("bellwether", "series", "get", name, "loss", "-o", "json"))["series"]
    assert len(loss["step"]) == 50
    (drift,) = json.loads(laptop.run("bellwether", "series", "get", name, "drift_ratio:1:1", "-o", "json"))["series"]
    assert len(drift["step"]) >= 2
    assert not json.loads(laptop.run("bellwether", "alert", "list", "-o", "json")).get("alerts")
    # What the command leaves to the server's program finds it too.
    laptop.run("bellwether", "check", "config", ROOT / "deploy/config/bellwetherd.yml")

    pip(laptop.python, "uninstall", "-y", "bellwether")
    assert {path.name for path in [*laptop.packages.iterdir(), *laptop.bin.iterdir()]} == before
