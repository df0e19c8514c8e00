"""Goal: argument beats settings= beats environment beats file beats default; a bad value is told
where it is.
Method: the sources in one call; no torch, no library.
"""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from bellwether.settings import STATS, Settings, resolve

from conftest import ROOT


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "bellwether.yml"
    file.write_text("# ours\nevery: 7\nrows: 8  # few\nrun: from-file\nserver: file:1\n")
    environment = {"BELLWETHER_RUN": "from-environment", "BELLWETHER_SERVER": "environment:1"}
    found = resolve({"server": "argument:1", "rows": None}, str(file), environment)
    assert (found.server, found.run) == ("argument:1", "from-environment")
    assert (found.every, found.rows, found.overhead_budget) == (7, 8, 0.005)


def test_config_file_by_environment_and_its_faults(tmp_path: Path) -> None:
    file = tmp_path / "bad.yml"
    file.write_text("every: 5\nevrey: 6\n")
    said: list[str] = []
    found = resolve({}, None, {"BELLWETHER_CONFIG": str(file)}, said.append)
    assert found.every == 20 and "bad.yml:2: unknown key 'evrey'" in said[0]
    with pytest.raises(ValueError, match=r"bad\.yml:2"):
        resolve({}, str(file), {})
    file.write_text("just words\n")
    with pytest.raises(ValueError, match="expected `key: value`"):
        resolve({}, str(file), {})


@pytest.mark.parametrize(
    ("text", "why"),
    [(b"every: 010\n", "bad.yml:1: every: '010' must be a whole number, decimal: write 10"),
     (b"every: 0x10\n", "'0x10' must be a whole number, decimal: write 16"),
     (b"every: 1_0\n", "'1_0' must be a whole number"),
     ("every: \u0663\n".encode(), "must be a whole number"),
     (b"every: 5.0\n", "'5.0' must be a whole number"),
     (b"every: 0\n", "bad.yml:1: every: 0 is below 1"),
     (b"every: 99999999999999999999999\n", "must be a whole number"),
     (b"disabled: maybe\n", "'maybe' must be true or false"),
     (b"rows: 5\nevery: 5\nrows: 6\n", "bad.yml:3: rows stands twice"),
     (b"rows: 5\n---\nevery: 5\n", "bad.yml:2: a second document: the file must hold one"),
     (b"---\n---\nevery: 5\n", "bad.yml:2: a second document"),
     (b",\nevery: 5\n", "bad.yml:1: expected `key: value`"),
     (b", every: 5\n", "bad.yml:1: expected `key: value`"),
     (b"rows: 5\n# b\xe4r\n", "bad.yml:2: byte 228 is no UTF-8"),
     (b"\xff\xfee\0", "bad.yml:1: byte 255 is no UTF-8"),
     (b"#" * (2 << 20), "it has more than 1048576 bytes")],
)  # fmt: skip
def test_a_bad_file_is_refused_with_its_place(text: bytes, why: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yml"
    file.write_bytes(text)
    with pytest.raises(ValueError, match=r"^config: ") as refused:
        resolve({}, str(file), {})
    assert why in str(refused.value)


def test_only_a_plain_file_of_settings_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, what in ((tmp_path, "a folder"), (tmp_path / "pipe", "a FIFO"),
                       (Path("/dev/zero"), "a device")):  # fmt: skip
        with pytest.raises(ValueError, match=f"it is {what}, must be a regular file"):
            resolve({}, str(path), {})


def test_a_file_of_settings_may_begin_its_document(tmp_path: Path) -> None:
    (tmp_path / "good.yml").write_bytes(b"# ours\n---\nevery: 7\r\n")
    assert resolve({}, str(tmp_path / "good.yml"), {}).every == 7


@pytest.mark.parametrize(
    ("name", "value"),
    [("allow", "lr.scale,rm"), ("allow", ["rollback.suggest"]),
     ("every", 0), ("rows", -1), ("stats", {"drft"}), ("stats", ""), ("layers", "("),
     ("ranks", "some"), ("microbatches", "two"), ("overhead_budget", 0),
     ("spool_bytes", 1000), ("spool_bytes", 1 << 45)],
)  # fmt: skip
def test_a_bad_argument_names_itself(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        resolve({name: value}, None, {})


def test_a_bad_environment_is_reported_and_left_out() -> None:
    said: list[str] = []
    found = resolve({}, None, {"BELLWETHER_EVERY": "often", "BELLWETHER_ROWS": "3"}, said.append)
    assert found.every == 20 and found.rows == 3
    assert len(said) == 1 and said[0].startswith("BELLWETHER_EVERY is ignored")


def test_runs_have_names_of_their_own_and_attempts_count() -> None:
    assert resolve({}, None, {"SLURM_JOB_ID": "77"}).run.endswith("-77")
    assert resolve({}, None, {"SLURM_RESTART_COUNT": "2"}).attempt == 2
    both = {"SLURM_RESTART_COUNT": "2", "BELLWETHER_ATTEMPT": "5"}
    assert resolve({}, None, both).attempt == 5
    assert resolve({"run": "a b/c"}, None, {}).run == "a-b/c"


@pytest.mark.parametrize(
    ("requeues", "restarts", "restarts_max", "attempt"),
    [("1", "0", "0", 1), ("0", "3", "3", 3), ("1", "0", "3", 4), ("2", "1", "3", 9)],
)
def test_a_requeue_counts_although_torchrun_begins_again(
    requeues: str, restarts: str, restarts_max: str, attempt: int
) -> None:
    told = {
        "SLURM_RESTART_COUNT": requeues,
        "TORCHELASTIC_RESTART_COUNT": restarts,
        "TORCHELASTIC_MAX_RESTARTS": restarts_max,
    }
    assert resolve({}, None, told).attempt == attempt


def test_only_named_actions_are_allowed(tmp_path: Path) -> None:
    assert resolve({}, None, {}).allow == frozenset()
    by_name = resolve({}, None, {"BELLWETHER_ALLOW": "attention.center_k, stop"})
    assert by_name.allow == {"attention.center_k", "stop"}
    file = tmp_path / "allow.yml"
    file.write_text("allow: [lr.scale, qk.clip]\n")
    assert resolve({}, str(file), {}).allow == {"lr.scale", "qk.clip"}
    assert resolve({"allow": ""}, str(file), {}).allow == frozenset()
    said: list[str] = []
    assert resolve({}, None, {"BELLWETHER_ALLOW": "all"}, said.append).allow == frozenset()
    assert said[0].startswith("BELLWETHER_ALLOW is ignored: allow: ['all'] unknown, legal are")


def test_a_spool_by_the_environment() -> None:
    told = {"BELLWETHER_SPOOL_DIR": "~/spool", "BELLWETHER_SPOOL_BYTES": str(1 << 22)}
    found = resolve({}, None, told)
    assert found.spool_dir is not None and found.spool_dir.endswith("/spool")
    assert not found.spool_dir.startswith("~") and found.spool_bytes == 1 << 22
    assert resolve({}, None, {}).spool_dir is None


def test_stats_by_words() -> None:
    assert resolve({"stats": "drift, sigma"}, None, {}).stats == {"drift", "sigma"}
    aside = {"tensors", "modules", "experts", "fp8", "steps", "rank_norms"}
    assert resolve({}, None, {}).stats == set(STATS) - aside


def test_settings_as_one_value_lie_between_arguments_and_environment() -> None:
    environment = {"BELLWETHER_EVERY": "7", "BELLWETHER_ROWS": "8", "BELLWETHER_SEQUENCES": "2"}
    given = Settings(every=5, rows=16, sequences=None, stats="drift,sigma", tls_ca="ca.pem")
    found = resolve({"rows": 32}, None, environment, settings=given)
    assert (found.every, found.rows, found.sequences) == (5, 32, 2)
    assert found.stats == {"drift", "sigma"} and found.tls_ca == "ca.pem"
    # A default that was given is given, too.
    assert resolve({}, None, environment, settings=Settings(every=20)).every == 20


def test_settings_as_one_value_are_checked_where_they_are_made() -> None:
    with pytest.raises(ValueError, match="every: 0 is below 1"):
        Settings(every=0)
    with pytest.raises(ValueError, match="microbatches: 'last' is not one of first, all"):
        Settings(microbatches="last")
    with pytest.raises(ValueError, match=r"settings: a bellwether\.Settings is legal, not \{"):
        resolve({}, None, {}, settings={"every": 5})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="evry"):
        Settings(evry=3)  # type: ignore[call-arg]


def test_settings_survive_being_copied_and_pickled() -> None:
    given = Settings(every=5)
    for other in (copy.deepcopy(given), pickle.loads(pickle.dumps(given))):
        assert other == given and other.given == {"every"}


def test_import_needs_neither_torch_nor_libraries() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
        "import bellwether, bellwether._native, bellwether.client, bellwether.__main__\n"
        "assert bellwether._native.c_api._client is None\n"
        "import threading; assert threading.active_count() == 1\n"
    )
    path = str(ROOT / "client_lib" / "python")
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": path, "PATH": "/usr/bin"}
    )


def test_the_package_is_typed_and_clean() -> None:
    package = ROOT / "client_lib" / "python"
    paths = ["bellwether", "../../examples", "../../docs/paper_figures.py", "../../deploy/sizing"]
    paths += [f"../../tests/{folder}" for folder in ("python", "bench", "docs", "matrix")]
    here = ["--config", "pyproject.toml"]
    for tool in (
        ["mypy", "bellwether"],
        ["mypy", "../../deploy/sizing"],
        ["ruff", "check", *here, *paths],
        ["ruff", "format", "--check", *here, *paths],
    ):
        found = subprocess.run(
            [sys.executable, "-m", *tool], cwd=package, capture_output=True, text=True
        )
        assert found.returncode == 0, found.stdout + found.stderr
