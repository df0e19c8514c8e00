"""Goal: the folder that ./start --bundle makes is small, and is all that a machine with the C
library needs.  The server starts there, a training script with the Python package is recorded, and
the command answers.
Method: deploy/bundle.sh on the programs of this build; what its files ask the loader for, read
from the files; then the real programs where every other system library is hidden.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bare_machine import GLIBC, BareMachine, glibc_files, python_files
from bellwether_process import BIN, ROOT, Server

SIZE_MAX = 46 << 20  # bytes, without cuSOLVER; 45.06 MiB today
PROGRAMS = ("bellwetherd", "bellwether", "bellwether-lab", "bellwether-sender")
TRAINER_LIBRARIES = ("libbellwether_client.so", "libbellwether_kernels.so")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "bellwether"
    subprocess.run([ROOT / "deploy/bundle.sh", BIN, folder], check=True, capture_output=True)
    return folder


def dynamic(file: Path, tag: str) -> list[str]:
    """The values of one tag of a file's dynamic section."""
    told = subprocess.check_output(["readelf", "-dW", file], text=True)
    return re.findall(rf"\({tag}\).*\[(.*)\]", told)


def test_bundle_size_is_bounded(bundle: Path) -> None:
    assert sum(path.lstat().st_size for path in bundle.rglob("*")) <= SIZE_MAX


def test_bundle_needs_only_the_c_library(bundle: Path) -> None:
    brought = {path.name for path in (bundle / "lib").iterdir()}
    for file in [*(bundle / "bin" / name for name in PROGRAMS), *(bundle / "lib").iterdir()]:
        outside = {name for name in dynamic(file, "NEEDED") if not GLIBC.fullmatch(name)}
        assert outside <= brought, file.name


def test_trainer_libraries_bring_no_second_libstdcxx(bundle: Path) -> None:
    # One that was loaded before PyTorch's would be taken by PyTorch too, too old or not.
    for name in TRAINER_LIBRARIES:
        assert all(GLIBC.fullmatch(needed) for needed in dynamic(bundle / "bin" / name, "NEEDED")), name
        assert dynamic(bundle / "bin" / name, "RPATH") == [], name


def test_programs_look_beside_themselves_first(bundle: Path) -> None:
    # RPATH comes before LD_LIBRARY_PATH, RUNPATH after it.
    for name in PROGRAMS:
        assert dynamic(bundle / "bin" / name, "RPATH") == ["$ORIGIN:$ORIGIN/../lib"], name


def test_only_an_earlier_bundle_is_replaced(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    refused = subprocess.run([ROOT / "deploy/bundle.sh", BIN, tmp_path], capture_output=True, text=True, check=False)
    assert refused.returncode == 1 and str(tmp_path) in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    (bundle / "lib/libstale.so").touch()
    subprocess.run([ROOT / "deploy/bundle.sh", BIN, bundle], check=True, capture_output=True)
    assert not (bundle / "lib/libstale.so").exists()


class BundledServer(Server):
    """The bundle's bellwetherd and bellwether on a machine with the C library alone."""

    def __init__(self, folder: Path, bundle: Path, machine: BareMachine) -> None:
        super().__init__(folder)
        self.bundle, self.machine = bundle, machine

    def program(self, name: str) -> list[str]:
        return self.machine.command(self.bundle / "bin" / name)


@pytest.fixture
def server(bundle: Path, tmp_path: Path) -> Iterator[Server]:
    machine = BareMachine(tmp_path / "libraries", glibc_files())
    if not machine.works():
        pytest.skip("this user may not make a mount namespace (unshare --mount)")
    with BundledServer(tmp_path, bundle, machine) as running:
        yield running


def test_a_training_script_is_recorded_with_nothing_installed(bundle: Path, server: Server, tmp_path: Path) -> None:
    # Our build is out of sight: the script lies elsewhere, and nothing but PYTHONPATH names us.
    script = shutil.copy(ROOT / "examples/tiny_transformer.py", tmp_path / "train.py")
    machine = BareMachine(tmp_path / "python_libraries", glibc_files() | python_files(Path(sys.executable)))
    with pytest.raises(subprocess.CalledProcessError):  # The hiding hides.
        subprocess.run(machine.command(BIN / "bellwether", "--version"), check=True, capture_output=True)
    trained = subprocess.run(
        machine.command(sys.executable, script, "--server", server.grpc, "--run", "bare", "--steps", "50"),
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(bundle / "python")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    server.await_end("bare")

    (run,) = server.json("run", "list")["runs"]
    assert (run["description"]["name"], run["steps_recorded"], run["frames_dropped"]) == ("bare", "50", "0")
    (loss,) = server.json("series", "get", "bare", "loss")["series"]
    assert list(map(int, loss["step"])) == list(range(50))
