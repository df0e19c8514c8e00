"""What the tests of the matrix share: where the package and its readers are."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client_lib" / "python"), str(ROOT / "tests" / "python")]
