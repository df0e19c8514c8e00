"""A PostgreSQL of its own for each test of a cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from postgres_processes import Postgres, start_primary


@pytest.fixture
def primary() -> Iterator[Postgres]:
    started = start_primary()
    yield started
    started.remove()
