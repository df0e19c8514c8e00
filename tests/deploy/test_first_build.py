"""Goal: a machine that has what deploy/packages-build.txt lists, and nothing else of ours, builds
with every mode of ./start.
Method: this machine over again without the packages that only tests need: every mode configures
there, and every target that it builds exists; what would compile is replaced by a record of it.
With BELLWETHER_LONG a Debian with nothing installed, where ./start does all of it, from the
packages to the bundle and the wheel, and prints what each step took.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRESETS = ("cpu", "cuda")
LONG = bool(os.environ.get("BELLWETHER_LONG"))

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may change what a machine has")

# Stands before the true cmake: it configures, and says what it was asked to build.
RECORDING_CMAKE = """#!/bin/sh
[ "$1" = --build ] || exec {cmake} "$@"
for target in "$@"; do case $target in
  -*|/*) ;;
  *) ninja -C "$2" -t query "$target" >/dev/null || exit 1; echo "TARGET $target" ;;
esac; done
echo "ASKED TO BUILD"
exit 3
"""


def listed(name: str) -> list[str]:
    lines = (ROOT / "deploy" / name).read_text().splitlines()
    return [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]


def with_what_they_need(packages: list[str]) -> set[str]:
    told = subprocess.check_output(
        ["apt-cache", "depends", "--recurse", "--installed", "--no-suggests", "--no-recommends", "--no-enhances",
         "--no-conflicts", "--no-breaks", "--no-replaces", *packages],
        text=True,
    )
    return set(re.findall(r"^(\S+)", told, re.MULTILINE))


def only_for_tests() -> list[Path]:
    """The files of the development packages that tests need and a build does not."""
    extra = with_what_they_need(listed("packages-test.txt")) - with_what_they_need(listed("packages-build.txt"))
    files: list[Path] = []
    for package in sorted(extra):
        if package.endswith("-dev"):
            owned = subprocess.run(["dpkg", "-L", package], capture_output=True, text=True, check=False).stdout
            files += [path for path in map(Path, owned.splitlines()) if path.is_file() or path.is_symlink()]
    return files


def copy_of_the_checkout(to: Path) -> None:
    names = subprocess.check_output(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"], text=True
    )
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


class Machine:
    """A root of its own; what is written there is lost at the end."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.checkout = folder / "srv/bellwether"

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BELLWETHER_")}
        environment["PATH"] = "/srv/first:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return subprocess.run(
            ["chroot", self.root, "sh", "-c", f"cd /srv/bellwether && {command}"],
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False,
        )


CLONE_NEWNS = 0x20000  # <linux/sched.h>


@pytest.fixture(autouse=True, scope="module")
def mounts_of_our_own() -> None:
    """They go with this process, however it ends: a cleanup does not delete through them."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    mount("--make-rprivate", "/")


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True)


def unmount_all_below(folder: Path) -> None:
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for point in sorted((p for p in points if Path(p).is_relative_to(folder)), reverse=True):
        subprocess.run(["umount", "--lazy", point], check=True)


@pytest.fixture
def without_test_packages(tmp_path: Path) -> Iterator[Machine]:
    """This machine, with the files of the test packages removed."""
    mount("-t", "tmpfs", "tmpfs", tmp_path)
    try:
        for name in ("changed", "work", "root"):
            (tmp_path / name).mkdir()
        layers = f"lowerdir=/,upperdir={tmp_path}/changed,workdir={tmp_path}/work"
        mount("-t", "overlay", "overlay", "-o", layers, tmp_path / "root")
        machine = Machine(tmp_path / "root")
        for name in ("dev", "proc"):
            mount("--bind", f"/{name}", machine.root / name)
        hidden = only_for_tests()
        assert hidden, "no package that only tests need is installed"
        for path in hidden:
            (machine.root / path.relative_to("/")).unlink(missing_ok=True)
        copy_of_the_checkout(machine.checkout)
        first = machine.root / "srv/first/cmake"
        first.parent.mkdir()
        first.write_text(RECORDING_CMAKE.format(cmake=shutil.which("cmake")))
        first.chmod(0o755)
        yield machine
    finally:
        unmount_all_below(tmp_path)


def modes() -> list[str]:
    """Every way to call ./start that builds, as its own help lists them."""
    told = subprocess.check_output([ROOT / "start", "--help"], text=True)
    found = re.findall(r"^\./start( --[a-z-]+(?: DIR)?)?  ", told, re.MULTILINE)
    return [mode.replace("DIR", "/srv/out").strip() for mode in found]


def test_every_mode_configures_without_the_test_packages(without_test_packages: Machine) -> None:
    machine = without_test_packages
    assert "--bundle /srv/out" in modes() and "" in modes()
    for preset in PRESETS:
        for mode in modes():
            ran = machine.run(f"./start {mode} {'--cuda' if preset == 'cuda' else ''}")
            assert "ASKED TO BUILD" in ran.stdout, f"./start {mode}, preset {preset}:\n{ran.stdout}"
            targets = set(re.findall(r"^TARGET (\S+)", ran.stdout, re.MULTILINE))
            assert {"bellwetherd", "bellwether", "bellwether-lab", "bellwether-sender"} <= targets
            assert ("bellwether_bank" in targets) == (preset == "cuda")


def test_the_check_notices_a_package_that_is_missing(without_test_packages: Machine) -> None:
    configured = without_test_packages.run("cmake --preset cpu -DBELLWETHER_TESTS=ON")
    assert configured.returncode != 0 and "GTest" in configured.stdout


@pytest.fixture
def bare_debian(tmp_path: Path) -> Iterator[Machine]:
    """A Debian 12 with nothing installed, and this machine's own settings for packages."""
    machine = Machine(tmp_path / "root")
    try:
        subprocess.run(["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", machine.root],
                       check=True, stdout=subprocess.DEVNULL)
        for name in ("dev", "proc"):
            mount("--bind", f"/{name}", machine.root / name)
        # How this machine reaches its registries is nothing that a first build is about.
        settings = ["/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/xdg/pip", "/etc/ssl/certs", "/root/.config/pip",
                    "/etc/apt/apt.conf.d", *os.environ.get("PIP_FIND_LINKS", "").split()]
        for path in map(Path, settings):
            if path.exists():
                there = machine.root / path.relative_to("/")
                if path.is_dir():
                    there.mkdir(parents=True, exist_ok=True)
                else:
                    there.parent.mkdir(parents=True, exist_ok=True)
                    there.touch()
                mount("--bind", "-o", "ro", path, there)
        copy_of_the_checkout(machine.checkout)
        yield machine
    finally:
        unmount_all_below(tmp_path)
        shutil.rmtree(machine.root, ignore_errors=True)


@pytest.mark.skipif(not LONG, reason="compiles everything from nothing: BELLWETHER_LONG")
@pytest.mark.parametrize("preset", PRESETS)
def test_everything_is_built_from_nothing(bare_debian: Machine, preset: str) -> None:
    machine, cuda = bare_debian, "--cuda" if preset == "cuda" else ""
    for mode in ("--build-only", "--bundle /srv/bundle", "--wheel /srv/wheel"):
        ran = machine.run(f"CCACHE_DISABLE=1 ./start {mode} {cuda}")
        assert ran.returncode == 0, ran.stdout[-8000:]
        took = "\n".join(re.findall(r"^   \(.*since the start\)$", ran.stdout, re.MULTILINE))
        print(f"./start {mode} {cuda}\n{took}")
    assert machine.run("/srv/bundle/bin/bellwetherd --version").returncode == 0
    assert (machine.root / "srv/bundle/bin/libbellwether_bank.so").exists() == (preset == "cuda")
    assert list((machine.root / "srv/wheel").glob("bellwether-*.whl"))
