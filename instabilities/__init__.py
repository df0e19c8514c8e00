"""A benchmark of instabilities: small trainings with one fault each, and what monitors say.

README.md is its page; `python -m instabilities --help` its commands.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# A checkout beside no installed package: its own.
if importlib.util.find_spec("bellwether") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "client_lib" / "python"))
