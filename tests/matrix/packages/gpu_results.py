"""What ran on a GPU, as lines of JSON in build/matrix_gpu.jsonl, for support_table.py."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]


@functools.cache
def machine() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    count, name = torch.cuda.device_count(), torch.cuda.get_device_name(0)
    return f"{count} x {name}, driver {driver}, torch {torch.__version__}"


def note(result: dict[str, Any], package: str, passed: bool) -> None:
    """`result` is that of a training or a function, of a package that is installed."""
    path = ROOT / "build" / "matrix_gpu.jsonl"
    path.parent.mkdir(exist_ok=True)
    told = {"version": importlib.metadata.version(package), "machine": machine()}
    with path.open("a") as file:
        file.write(json.dumps({**result, "package": package, **told, "passed": passed}) + "\n")
