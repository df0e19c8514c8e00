"""A bellwetherd that cannot start says in one line what the machine must give it.

Goal: a folder in use, a folder of another user and a full disk each come with what to do. The log
of a good start begins with the line that says it is ready.
Method: the real program over real folders, one of them on a small file system where there is leave
to make one.
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
from bellwether_process import BIN, Server, free_port

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs another user, or a mount")


def refused(folder: Path, user: str = "") -> str:
    command = [
        str(BIN / "bellwetherd"), f"--storage.path={folder}",
        f"--grpc.listen-address=127.0.0.1:{free_port()}", f"--web.listen-address=127.0.0.1:{free_port()}",
    ]  # fmt: skip
    as_user = {"user": user} if user else {}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **as_user)  # type: ignore[call-overload]
    assert done.returncode == 1, done.stderr
    errors = [line for line in done.stderr.splitlines() if "level=warn" not in line]
    assert len(errors) == 1 and "level=error" in errors[0], done.stderr
    return errors[0]


def test_a_folder_in_use(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        assert "is held by another process: one server per directory" in refused(server.storage)


@ROOT_ONLY
@pytest.mark.parametrize("there", [False, True])
def test_a_folder_of_another_user(there: bool) -> None:
    # pytest's folder is closed to others all the way.
    above = Path("/tmp") / f"bellwether-refused-{os.getpid()}"
    folder = above / "data"
    (folder if there else above).mkdir(parents=True)
    try:
        for each in (above, folder) if there else (above,):
            each.chmod(0o755)
        said = refused(folder, "nobody")
        assert "Permission denied" in said and f"user nobody must be able to write {folder}" in said
        assert "chown -R nobody" in said and "--storage.path" in said
    finally:
        shutil.rmtree(above)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("no leave to mount a small file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


@ROOT_ONLY
def test_a_full_disk(small_disk: Path) -> None:
    said = refused(small_disk / "data")
    assert "No space left on device" in said
    assert re.search(r"two segments of 64 MiB ahead .*, and \d+ MiB are free there: make room", said)


def test_a_good_start_says_first_that_it_is_ready(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        lines = [line for line in server.log().splitlines() if "level=warn" not in line]
        assert re.search(r"level=info .*ready, gRPC on \S+, page ", lines[0])
