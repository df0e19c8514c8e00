"""This machine over again, booted: its own systemd, everything that is installed here, no network
but loopback, and every change lost at the end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import wait_for

# Writes go to a file system in memory. policy-rc.d is how containers forbid packages to start
# services; the units that are enabled here are nothing that a test needs.
BOOT = """
set -e
mount -t tmpfs tmpfs "$1"
mkdir "$1/changed" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/changed,workdir=$1/work" "$1/root"
rm -rf "$1/root/etc/systemd/system" "$1/root/usr/sbin/policy-rc.d"
mkdir "$1/root/etc/systemd/system"
exec systemd-nspawn --quiet --register=no --keep-unit --private-network --bind-ro="$2:/srv/shared" \
  --directory "$1/root" --boot
"""


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # It has just ended.
        return 0


class BootedMachine:
    """`shared` is /srv/shared there, and cannot be changed from there."""

    def __init__(self, folder: Path, shared: Path) -> None:
        folder.mkdir()
        self._log = folder.with_suffix(".log")
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", BOOT, "sh", folder, shared],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._init = 0

    @staticmethod
    def missing() -> str:
        """Why this machine cannot be booted over again; empty if it can."""
        if os.geteuid() != 0:
            return "only root may make the file systems of a second machine"
        if shutil.which("systemd-nspawn") is None:
            return "systemd-nspawn (Debian's systemd-container) is not installed"
        return ""

    def wait_until_up(self) -> None:
        ours = os.readlink("/proc/self/ns/pid")

        def up() -> bool:
            assert self._process.poll() is None, f"it did not boot:\n{self._log.read_text(errors='replace')}"
            for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
                if parent(pid) == self._process.pid and os.readlink(f"/proc/{pid}/ns/pid") != ours:
                    self._init = pid
            if self._init == 0:
                return False
            asked = self.run("systemctl", "is-active", "multi-user.target", check=False)
            return asked.stdout.strip() == "active"

        wait_for("the second machine is up", up, seconds=180)

    def run(self, *words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        within = [
            "nsenter",
            f"--target={self._init}",
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            "--root",
            "--wd=/",
        ]
        done = subprocess.run(
            [*within, *map(str, words)],
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert not check or done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def __enter__(self) -> BootedMachine:
        self.wait_until_up()
        return self

    def __exit__(self, *_: object) -> None:
        if self._init:
            self.run("systemctl", "poweroff", "--no-block", check=False)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)  # Its systemd dies with it.
            self._process.wait()
