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

from bellwether._native import c_api

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


# What no header has: by the minor version of the client's library since which it is so.  A change
# is a new entry, of a higher version.
HOOK = {
    7: {
        "void bw_python_call_to(void* target, void* vector_call)",
        "void* bw_python_call(void* callable, void* const* arguments, size_t count, void* names)",
        "void bw_python_functions(void* function_call, void* vector_call)",
        "void bw_python_frames(void* interpreter, void* plain, void* get, void* set)",
        "void bw_python_function_to(void* function, void* target)",
        "void bw_python_function_left(void* function)",
        "void bw_python_plainly(void* function)",
        "void bw_python_see(void)",
        "void bw_python_leave(void)",
        "void* bw_python_function_call"
        "(void* function, void* const* arguments, size_t count, void* names)",
    }
}


def test_the_version_counts_what_only_the_hook_calls() -> None:
    source = (ROOT / "client_lib/src/python_call.cc").read_text(encoding="utf-8")
    found = {" ".join(text.split()) for text in re.findall(r"^BW_EXPORT ([^;{]*);", source, re.M)}
    assert found == HOOK[max(HOOK)], "raise BW_API_VERSION and CLIENT_ABI, and add an entry here"
    assert max(HOOK) <= versions("client")[1]
    # A library from before it counted has no functions that anybody vouches for.
    assert min(HOOK) <= c_api.CLIENT_ABI[1]
