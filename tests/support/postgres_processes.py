"""Real PostgreSQL servers in temporary folders: a primary, and standbys that follow it.

PostgreSQL refuses to run as root.  Started by root they run as the user postgres, or, without such
a user, as `nobody`.  Each has a folder of its own, which goes with it.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Optional

import pytest
from bellwether_process import ROOT, free_port, wait_for

PASSWORD = "not-in-any-log"
ROLE = "bellwether"


def bin_folder() -> Path:
    """Where initdb and postgres lie; Debian keeps them off the PATH."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    folders = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name)
    )
    if not folders:
        pytest.skip("PostgreSQL is needed (apt-get install postgresql)")
    return folders[-1]


def other_user() -> tuple[int, int] | None:
    """The user of PostgreSQL where we are root: uid, gid."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            who = pwd.getpwnam(name)
        except KeyError:
            continue
        return who.pw_uid, who.pw_gid
    raise AssertionError("neither postgres nor nobody is a user here")


class Postgres:
    """One server on a loopback port."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix=f"bellwether-{name}-", dir="/tmp"))
        self.data = self.folder / "data"
        self.process: Optional[subprocess.Popen[bytes]] = None
        self._become: list[str] = []
        if who := other_user():
            os.chown(self.folder, *who)
            # Not subprocess's user=: it forks, which threads of gRPC in here do not survive.
            ids = [f"--reuid={who[0]}", f"--regid={who[1]}", "--clear-groups"]
            self._become = ["setpriv", *ids, "--"]

    def tool(self, *words: str, text: str = "") -> str:
        done = subprocess.run(
            [*self._become, str(bin_folder() / words[0]), *words[1:]],
            input=text,
            capture_output=True,
            text=True,
            cwd=self.folder,
            timeout=60,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self) -> Postgres:
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [*self._become, str(bin_folder() / "postgres"), "-D", str(self.data)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
            )
        wait_for(f"{self.name} takes connections", self.answers, 60)
        return self

    def answers(self) -> bool:
        ready = subprocess.run(
            [str(bin_folder() / "pg_isready"), "-q", "-h", str(self.folder), "-p", str(self.port)]
        )
        return ready.returncode == 0

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """SIGQUIT ends it as a crash would; its children, too."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(how)
            self.process.wait(timeout=30)

    def kill(self) -> None:
        """All of its processes at once."""
        for process in self._stopped():
            os.kill(process, signal.SIGKILL)
        assert self.process is not None
        self.process.wait(timeout=30)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """All of its processes stand still."""
        processes = self._stopped()
        try:
            yield
        finally:
            for process in reversed(processes):
                os.kill(process, signal.SIGCONT)

    def _stopped(self) -> list[int]:
        """Its processes, each stopped: the one that makes them first."""
        assert self.process is not None
        first = self.process.pid
        os.kill(first, signal.SIGSTOP)
        children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        for child in map(int, children):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGSTOP)
        return [first, *map(int, children)]

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def sql(self, text: str, database: str = ROLE) -> list[list[str]]:
        """What the schema's owner is answered, by rows."""
        out = self.tool(
            "psql", "-AtXq", "-F", "\t", "-v", "ON_ERROR_STOP=1",
            "-h", str(self.folder), "-p", str(self.port), "-U", "owner", "-d", database, "-f", "-",
            text=text,
        )  # fmt: skip
        return [line.split("\t") for line in out.splitlines()]

    def configure(self, **settings: str) -> None:
        with open(self.data / "postgresql.auto.conf", "a") as conf:
            for name, value in settings.items():
                conf.write(f"{name} = '{value}'\n")


def dsn_of(*servers: Postgres) -> str:
    """How bellwetherd reaches whichever of them takes writes."""
    hosts = ",".join("127.0.0.1" for _ in servers)
    ports = ",".join(str(server.port) for server in servers)
    return (
        f"host={hosts} port={ports} user={ROLE} password={PASSWORD} dbname={ROLE} "
        "target_session_attrs=read-write"
    )


def start_primary() -> Postgres:
    """With the shared schema, and the role that servers use."""
    primary = Postgres("primary")
    primary.tool(
        "initdb", "-D", str(primary.data), "-U", "owner", "-A", "trust", "-E", "UTF8",
        "--no-sync", "--no-locale",
    )  # fmt: skip
    (primary.data / "pg_hba.conf").write_text(
        "local all all trust\n"
        "host replication owner 127.0.0.1/32 trust\n"
        "host all all 127.0.0.1/32 scram-sha-256\n"
    )
    primary.configure(
        listen_addresses="127.0.0.1",
        port=str(primary.port),
        unix_socket_directories=str(primary.folder),
        shared_buffers="64MB",
        max_connections="60",
    )
    primary.start()
    primary.sql(f"CREATE DATABASE {ROLE};", "postgres")
    for name in (
        "001_tables.sql",
        "engine_postgresql.sql",
        "roles.sql",
        "002_peers.sql",
        "003_databases.sql",
    ):
        primary.sql((ROOT / "deploy" / "postgres" / name).read_text())
    primary.sql(f"CREATE ROLE {ROLE} LOGIN PASSWORD '{PASSWORD}' IN ROLE bellwether_server;")
    return primary


def start_standby(primary: Postgres, name: str) -> Postgres:
    # The primary keeps what the standby has not got: one that falls behind while it is killed or
    # paused would never come back.
    primary.sql(
        f"SELECT pg_create_physical_replication_slot('{name}') WHERE NOT EXISTS "
        f"(SELECT FROM pg_replication_slots WHERE slot_name = '{name}');"
    )
    standby = Postgres(name)
    standby.tool(
        "pg_basebackup", "-D", str(standby.data), "-R", "-X", "stream", "-c", "fast", "--no-sync", "-S", name,
        "-d", f"host=127.0.0.1 port={primary.port} user=owner application_name={name}",
    )  # fmt: skip
    standby.configure(
        port=str(standby.port),
        unix_socket_directories=str(standby.folder),
        wal_retrieve_retry_interval="200ms",  # Back at a primary that is back, not within 5 s.
    )
    return standby.start()


@contextmanager
def synchronous_standbys(primary: Postgres, count: int) -> Iterator[list[Postgres]]:
    """So many (0: none), of which one must have what is committed."""
    with ExitStack() as stack:
        standbys = []
        for number in range(count):
            standbys.append(start_standby(primary, f"s{number + 1}"))
            stack.callback(standbys[-1].remove)
        if standbys:
            names = ", ".join(standby.name for standby in standbys)
            primary.configure(synchronous_standby_names=f"ANY 1 ({names})")
            primary.sql("SELECT pg_reload_conf();")
        yield standbys
