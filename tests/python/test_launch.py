"""Goal: the processes of one start tell one time of it, and those of another start another.
Method: one process, its child, and the store of a process group with what a start before left.
(torchrun itself: tests/e2e/test_torchrun.py.)
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Optional

import pytest
import torch.distributed as dist

from bellwether._util import launch
from bellwether._util.launch import launch_unix_ms

from conftest import ROOT

KEY = "bellwether/launch_unix_ms"


def now() -> int:
    return int(time.time() * 1000)


@pytest.fixture
def store() -> Iterator[dist.Store]:
    """That of a group of which this process is the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()


def test_a_process_alone_tells_when_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    first = launch_unix_ms()
    assert now() - 24 * 3600_000 < first < now()
    monkeypatch.setattr(time, "time", lambda: 0.0)  # A clock that is set is no new start.
    assert launch_unix_ms() == first


def test_each_process_is_a_start_of_its_own() -> None:
    begun = now()
    code = "from bellwether._util.launch import launch_unix_ms as f; print(f(), f())"
    path = {**os.environ, "PYTHONPATH": str(ROOT / "client_lib" / "python")}
    told = subprocess.run(
        [sys.executable, "-c", code], env=path, stdout=subprocess.PIPE, check=True
    )
    first, second = map(int, told.stdout.split())
    # The kernel counts the starts of processes in hundredths of a second.
    assert first == second and begun - 20 <= first <= now()


def test_ranks_without_a_process_group_cannot_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch_unix_ms() == 0


def test_later_ranks_read_the_first_ranks_time(store: dist.Store) -> None:
    store.set(KEY, str(now() - 1))
    assert launch_unix_ms() == int(store.get(KEY))


@pytest.mark.parametrize("left", [None, 1_000_000_000_000])
def test_first_rank_overwrites_an_earlier_launch_time(
    store: dist.Store, left: Optional[int]
) -> None:
    if left is not None:
        store.set(KEY, str(left))
    begun = now()
    first = launch_unix_ms()
    assert begun <= first <= now()
    assert launch_unix_ms() == first == int(store.get(KEY))


@pytest.mark.parametrize("left", [str(2**53 + 1), "9" * 30, "inf", "\u00b2"])
def test_invalid_launch_time_is_ignored(store: dist.Store, left: str) -> None:
    store.set(KEY, left)
    assert launch_unix_ms() == 0


def test_a_clock_before_1970_is_told_as_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_started_unix_ms", lambda pid: -5)
    assert launch_unix_ms() == 0


def test_a_store_that_does_not_answer_is_left_alone(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mute:
        def compare_set(self, *_: Any) -> bytes:
            time.sleep(60)
            return b""

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", Mute)
    monkeypatch.setattr(launch, "_SECONDS_MAX", 0.2)
    begun = time.monotonic()
    assert launch_unix_ms() == 0
    assert time.monotonic() - begun < 30


def test_failing_store_gives_no_launch_time(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(dist.distributed_c10d, "_get_default_store")
    assert launch_unix_ms() == 0
