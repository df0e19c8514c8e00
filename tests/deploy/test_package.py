"""Goal: the Debian packages hold what they should and satisfy lintian; installed on a booted Debian the
service is up, confined, and keeps data and settings over upgrades and removal; a purge leaves nothing.
Method: cpack on the programs of this build; dpkg and systemd themselves on this machine over again
(booted_machine.py), where the package before this one is the same with a lower version and another default.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, wait_for
from booted_machine import BootedMachine

LIFECYCLE = ROOT / "docs/operate/lifecycle.md"
RECORDING = ROOT / "tests/testdata/runs/gpt-flash-s4.bwrun"
SERVICE_FILES = {
    "/etc/bellwether/bellwetherd.yml",
    "/etc/bellwether/policy.yml",
    "/etc/bellwether/rules.yml",
    "/lib/systemd/system/bellwetherd.service",
    "/usr/bin/bellwether",
    "/usr/bin/bellwether-lab",
    "/usr/bin/bellwetherd",
    "/usr/share/bellwether/policy/default.yml",
    "/usr/share/bellwether/postgres/001_tables.sql",
    "/usr/share/bellwether/postgres/002_peers.sql",
    "/usr/share/bellwether/postgres/003_databases.sql",
    "/usr/share/bellwether/postgres/engine_postgresql.sql",
    "/usr/share/bellwether/postgres/roles.sql",
    "/usr/share/bellwether/rules/builtin.yml",
    "/usr/share/bellwether/webhook/slack.json",
    "/usr/share/bellwether/alertmanager/bellwether.tmpl",
    "/usr/share/bellwether/systemd/gpu.conf",
    "/usr/share/doc/bellwether/changelog.gz",
}
CLIENT_FILES = {
    "/usr/bin/bellwether-sender",
    "/usr/include/bellwether/client.h",
    "/usr/include/bellwether/kernels/c_api.h",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages, the service's of a version before, and a recorded run."""
    made = tmp_path_factory.mktemp("packages")
    subprocess.run(["cpack", "-G", "DEB", "-B", made], cwd=BIN.parent, check=True, capture_output=True)
    shutil.rmtree(made / "_CPack_Packages")

    older = made / "older"
    subprocess.run(["dpkg-deb", "-R", package(made, "bellwether"), older], check=True)
    control = older / "DEBIAN/control"
    control.write_text(re.sub(r"(?m)^Version: .*$", "Version: 0.0.1-1", control.read_text()))
    with open(older / "etc/bellwether/rules.yml", "a") as rules:
        rules.write("# As it was before.\n")
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-z1", "-b", older, made / "older.deb"], check=True, capture_output=True
    )
    shutil.rmtree(older)
    shutil.copy(RECORDING, made / "run.bwrun")
    shutil.copy(ROOT / "tests/consumers/c99.c", made)
    return made


def package(folder: Path, name: str) -> Path:
    (found,) = folder.glob(f"{name}_*.deb")
    return found


def contents(folder: Path, name: str) -> dict[str, str]:
    """Path -> mode and owner of every file of a package."""
    listed = subprocess.check_output(["dpkg-deb", "--contents", package(folder, name)], text=True)
    lines = [line.split(maxsplit=5) for line in listed.splitlines()]
    return {fields[5].split(" -> ")[0][1:]: f"{fields[0]} {fields[1]}" for fields in lines if fields[0][0] != "d"}


def test_each_package_holds_what_its_machine_needs(folder: Path) -> None:
    service, client = contents(folder, "bellwether"), contents(folder, "bellwether-client")
    assert service.keys() >= SERVICE_FILES
    assert client.keys() >= CLIENT_FILES
    libraries = {Path(path).name for path in client if path.startswith("/usr/lib/")}
    assert {"libbellwether_client.so.0", "libbellwether_client.so", "libbellwether_kernels.so"} <= libraries
    assert not service.keys() & client.keys()
    for path, who in (service | client).items():
        assert path.startswith(("/etc/bellwether/", "/lib/systemd/system/", "/usr/")), path
        assert who.endswith("root/root"), path


def test_the_configuration_is_ours_to_change(folder: Path) -> None:
    kept = subprocess.check_output(["dpkg-deb", "-I", package(folder, "bellwether"), "conffiles"], text=True)
    in_etc = {path for path in contents(folder, "bellwether") if path.startswith("/etc/")}
    assert set(kept.split()) == in_etc
    # What it says is what the server reads.
    checked = subprocess.run(
        [BIN / "bellwetherd", f"--config.file={ROOT / 'deploy/config/bellwetherd.yml'}", "--config.check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


def test_dependencies_are_those_of_the_programs(folder: Path) -> None:
    depends = subprocess.check_output(["dpkg-deb", "-f", package(folder, "bellwether"), "Depends"], text=True)
    names = set(re.findall(r"(?:^|, )([a-z0-9.+-]+)", depends))
    assert {"adduser", "libc6", "libgrpc++1.51", "libprotobuf32", "libzstd1"} <= names
    assert not [name for name in names if name.endswith("-dev")]


def test_the_shells_and_man_find_theirs(folder: Path) -> None:
    listed = subprocess.check_output(["dpkg-deb", "--contents", package(folder, "bellwether")], text=True)
    held = {line.split()[5] for line in listed.splitlines()}
    share = "./usr/share/"
    assert {
        share + "bash-completion/completions/bellwether",
        share + "zsh/vendor-completions/_bellwether",
        share + "fish/vendor_completions.d/bellwether.fish",
        share + "man/man1/bellwether.1.gz",
        share + "man/man1/bellwether-lab.1.gz",
        share + "man/man8/bellwetherd.8.gz",
    } <= held


@pytest.mark.skipif(shutil.which("lintian") is None, reason="lintian is not installed")
def test_lintian_finds_no_error(folder: Path) -> None:
    words = ["lintian", "--no-cfg", "--fail-on=error", "--tag-display-limit=0"]
    told = subprocess.run(
        [*words, package(folder, "bellwether"), package(folder, "bellwether-client")],
        env={**os.environ, "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.fixture
def machine(folder: Path, tmp_path: Path) -> Iterator[BootedMachine]:
    if reason := BootedMachine.missing():
        pytest.skip(reason)
    with BootedMachine(tmp_path / "machine", folder) as booted:
        yield booted


class Host:
    """What an administrator does on it."""

    def __init__(self, machine: BootedMachine) -> None:
        self.run = machine.run

    def dpkg(self, *words: str) -> None:
        self.run("dpkg", *words)

    def state(self) -> str:
        return self.run("systemctl", "is-active", "bellwetherd", check=False).stdout.strip()

    def main_pid(self) -> int:
        return int(self.run("systemctl", "show", "-P", "MainPID", "bellwetherd").stdout)

    def runs(self) -> list[str]:
        listed = json.loads(self.run("bellwether", "run", "list", "-o", "json").stdout)
        return [run["description"]["name"] for run in listed.get("runs", [])]

    def log(self) -> str:
        return self.run("journalctl", "--no-pager", "-u", "bellwetherd").stdout

    def follow(self, heading: str, block: int = 0) -> None:
        """Runs a block of commands below a heading of the page for administrators."""
        section = LIFECYCLE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
        commands = re.findall(r"(?ms)^```sh\n(.*?)^```$", section)[block].splitlines()
        assert commands
        for command in commands:
            self.run("sh", "-c", command)

    def traces(self) -> set[str]:
        told = self.run(
            "find", "/etc", "/lib/systemd", "/opt", "/run", "/usr", "/var", "-xdev", "-name", "*bellwether*"
        )
        return {path for path in told.stdout.split() if not path.startswith(("/var/log/", "/var/lib/systemd/"))}


def test_package_is_installed_upgraded_removed_and_purged(machine: BootedMachine, folder: Path) -> None:
    host = Host(machine)
    newer = f"/srv/shared/{package(folder, 'bellwether').name}"
    before = host.traces()

    # Installed: enabled and up, as nobody who may do anything.
    host.dpkg("-i", "/srv/shared/older.deb")
    assert host.state() == "active", host.log()
    assert host.run("systemctl", "is-enabled", "bellwetherd").stdout.strip() == "enabled"
    assert host.run("curl", "-fsS", "http://127.0.0.1:7071/-/ready").stdout == "ready\n"
    assert host.run("ps", "-o", "user=", "-p", str(host.main_pid())).stdout.strip() == "bellwether"
    assert (
        host.run("stat", "-c", "%A %U:%G", "/var/lib/bellwether/").stdout.strip() == "drwx------ bellwether:bellwether"
    )
    # The detectors' library for GPUs is looked for where a package has libraries.
    refused = host.run("bellwetherd", "--gpu=on", "--storage.path=/tmp/gpu", check=False)
    assert re.search(r"/usr/lib/\S*libbellwether_bank\.so", refused.stdout + refused.stderr)
    # Webhooks' addresses are for the service alone.
    stat = host.run("stat", "-c", "%a %U:%G", "/etc/bellwether/bellwetherd.yml").stdout.strip()
    assert stat == "640 root:bellwether"
    host.run("bellwether", "run", "import", "/srv/shared/run.bwrun")
    recorded = host.runs()
    assert recorded

    # Changed, and reloaded without a restart.
    pid = host.main_pid()
    host.run("sh", "-c", "sed -i 's/^mode: observe/mode: propose/' /etc/bellwether/policy.yml")
    host.run("systemctl", "reload", "bellwetherd")
    wait_for("the policy is read again", lambda: "policy was read again" in host.log())
    assert (host.main_pid(), host.state()) == (pid, "active")

    # Upgraded: the new program, the same runs; what was changed stays, what was not is new.
    host.dpkg("-i", newer)
    assert host.state() == "active", host.log()
    assert host.main_pid() != pid
    assert host.runs() == recorded
    assert "mode: propose" in host.run("cat", "/etc/bellwether/policy.yml").stdout
    assert "As it was before" not in host.run("cat", "/etc/bellwether/rules.yml").stdout
    assert host.run("stat", "-c", "%a", "/etc/bellwether/bellwetherd.yml").stdout.strip() == "640"

    # Who has stopped and disabled it is not overruled by the next upgrade.
    host.run("systemctl", "disable", "--now", "bellwetherd")
    host.dpkg("-i", newer)
    assert host.state() == "inactive"
    assert host.run("systemctl", "is-enabled", "bellwetherd", check=False).stdout.strip() == "disabled"
    host.run("systemctl", "enable", "--now", "bellwetherd")

    # Removed: no service, but settings and runs; installed again it goes on.
    host.dpkg("-r", "bellwether")
    assert host.state() == "inactive"
    assert host.run("ls", "/usr/bin/bellwetherd", check=False).returncode != 0
    assert "mode: propose" in host.run("cat", "/etc/bellwether/policy.yml").stdout
    host.dpkg("-i", newer)
    assert host.state() == "active", host.log()
    assert host.runs() == recorded

    # Backed up, purged as if it had never been there but for the account, and restored.
    host.follow("Back up")
    assert host.state() == "active", host.log()
    host.dpkg("-P", "bellwether")
    assert host.traces() - before == set()
    assert host.run("getent", "passwd", "bellwether").returncode == 0
    host.dpkg("-i", newer)
    assert host.runs() == []
    host.follow("Back up", block=1)
    assert host.state() == "active", host.log()
    assert host.runs() == recorded


def test_c_program_builds_and_records_with_client_package(machine: BootedMachine, folder: Path) -> None:
    machine.run("dpkg", "-i", f"/srv/shared/{package(folder, 'bellwether-client').name}")
    machine.run("sh", "-c", "cc -o /root/c99 /srv/shared/c99.c $(pkg-config --cflags --libs bellwether_client)")
    # It loads the library, finds the sender and records.
    machine.run("sh", "-c", "cd /root && ./c99 && test -s c99.bwrun")
    machine.run("dpkg", "-P", "bellwether-client")
    assert machine.run("/root/c99", check=False).returncode != 0
