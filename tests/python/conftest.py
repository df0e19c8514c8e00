"""What every test of the package shares: one thread, no outside settings, a state folder of its
own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client_lib" / "python"), str(Path(__file__).resolve().parent)]

import protos  # noqa: E402
from one_thread import compute_on_one_thread  # noqa: E402

compute_on_one_thread()


def in_long(moved: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which ./check leaves some to its --long: others are of the same."""
    if os.environ.get("BELLWETHER_LONG"):
        return list(every)
    left = list(moved)
    kept = [one for one in every if one not in left]
    assert len(kept) == len(list(every)) - len(left), "one that is moved is not there"
    return kept


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("BELLWETHER_") and name != "BELLWETHER_LIB_DIR":
            monkeypatch.delenv(name)
        if name in ("RANK", "WORLD_SIZE", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name)
    # Jobs as small as these take hundreds of samples a second: each step that a test asks for.
    monkeypatch.setenv("BELLWETHER_BYTE_BUDGET", "0")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    # Where torch.compile is at work, linear layers have no laws; that was in another test.
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    if counters is not None:
        counters.clear()
    # Where both cores are busy, a server may take longer to start than a job should wait for it.
    monkeypatch.setattr("bellwether._server.private_server.READY_SECONDS", 60.0)


@pytest.fixture(scope="session", autouse=True)
def generated_protos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python modules of proto/, made by protoc, importable as bellwether.v1."""
    folder = tmp_path_factory.mktemp("protos")
    protos.generate(folder)
    return folder
