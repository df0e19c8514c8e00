"""What the tests of the matrix share: one thread, where the package and its readers are."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client_lib" / "python"), str(ROOT / "tests" / "python")]

from one_thread import compute_on_one_thread  # noqa: E402

compute_on_one_thread()
