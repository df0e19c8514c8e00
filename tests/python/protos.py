"""The Python modules of proto/, made by protoc and importable as bellwether.v1."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def generate(folder: Path) -> None:
    protoc = shutil.which("protoc")
    assert protoc, "protoc is needed (apt-get install protobuf-compiler)"
    protos = sorted((ROOT / "proto" / "bellwether" / "v1").glob("*.proto"))
    subprocess.run(
        [protoc, f"-I{ROOT / 'proto'}", f"--python_out={folder}", *map(str, protos)], check=True
    )
    # The generated package is called bellwether too: let the real one hold both.
    import bellwether

    bellwether.__path__.append(str(folder / "bellwether"))
