"""Goal: a library of another build is refused in a sentence, before a call can harm the trainer.
Method: libraries that have nothing but a version, made from the headers' versions.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The header, the prefix of its macros and the function that tells the version.
LIBRARIES = {
    "client": ("client_lib/include/bellwether/client.h", "BW", "bw_abi_version"),
    "kernels": (
        "kernels/include/bellwether/kernels/c_api.h", "BW_KERNELS", "bw_kernels_abi_version",
    ),
}  # fmt: skip


def versions(library: str) -> tuple[int, int]:
    """(major, minor) of the header."""
    header, prefix, _ = LIBRARIES[library]
    text = (ROOT / header).read_text(encoding="utf-8")
    found = re.findall(rf"^#define {prefix}_API_VERSION_(?:MAJOR|MINOR) (\d+)$", text, re.M)
    major, minor = map(int, found)
    return major, minor


def refusal(library: str, major: int, minor: int, folder: Path) -> str:
    """What loading a library of this version, which has nothing else, is refused with."""
    _, _, function = LIBRARIES[library]
    source = folder / "version.c"
    source.write_text(f"unsigned {function}(void) {{ return {(major << 16) | minor}u; }}\n")
    made = folder / f"libbellwether_{library}.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, source], check=True)
    code = f"from bellwether._native import c_api; c_api.{library}()"
    loading = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "client_lib" / "python", capture_output=True,
        text=True, env={**os.environ, "BELLWETHER_LIB_DIR": str(folder)},
    )  # fmt: skip
    assert loading.returncode == 1
    return loading.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("library", LIBRARIES)
def test_another_major_version_or_an_older_minor_is_refused(library: str, tmp_path: Path) -> None:
    major, minor = versions(library)
    for told in ((major + 1, minor), (major - 1, minor), *[(major, minor - 1)] * (minor > 0)):
        said = refusal(library, *told, tmp_path)
        assert f"libbellwether_{library}.so speaks ABI {told[0]}.{told[1]}, " in said
        assert f"needs {major}.{minor} or a later one of the same major version" in said


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_later_minor_version_is_taken(library: str, tmp_path: Path) -> None:
    major, minor = versions(library)
    said = refusal(library, major, minor + 1, tmp_path)
    assert "speaks ABI" not in said and "has no bw_" in said  # What it was asked next.
