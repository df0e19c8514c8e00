"""Goal: what is built carries what makes an error hard to use, and the bill of materials names what
is inside as it is installed.
Method: readelf and nm on the built programs, with a plain program as the planted one that lacks
it all; the bill against dpkg and the lock files.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT

PROGRAMS = ["bellwetherd", "bellwether", "bellwether-lab", "bellwether-sender"]
LIBRARIES = ["libbellwether_client.so", "libbellwether_kernels.so"]


def read(*command: object) -> str:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout


def lacks(path: Path, program: bool = True) -> set[str]:
    """What the file has not."""
    head = read("readelf", "-hlW", path)
    dynamic = read("readelf", "-dW", path)
    symbols = read("nm", "-D", "--undefined-only", path)
    stack = re.search(r"GNU_STACK.*", head)
    has = {
        "PIE": "DYN (" in head,
        "relro": "GNU_RELRO" in head,
        "now": "NOW" in dynamic,
        "no executable stack": stack is not None and "RWE" not in stack[0],
        "stack protector": "__stack_chk_fail" in symbols,
    }
    if program:
        has["fortify"] = re.search(r"__\w+_chk(@|\b)", symbols.replace("__stack_chk_fail", "")) is not None
    if "X86-64" in head:
        # The instruction itself: the file's mark is that of all objects together, and Debian's own
        # start files have none, so that no program there carries it.
        has["landing pads"] = path.read_bytes().count(b"\xf3\x0f\x1e\xfa") >= 20
    return {name for name, there in has.items() if not there}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_hardened(name: str) -> None:
    assert lacks(BIN / name) == set()


@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries_in_a_trainer_are_hardened(name: str) -> None:
    # Where no function has a buffer on its stack none is guarded.
    assert lacks(BIN / name, program=False) <= {"stack protector"}


def test_a_plain_program_is_seen(tmp_path: Path) -> None:
    (tmp_path / "plain.c").write_text("int main(void) { return 0; }\n")
    flags = ["-no-pie", "-fno-stack-protector", "-Wl,-z,norelro", "-Wl,-z,lazy", "-Wl,-z,execstack", "-fcf-protection=none"]
    subprocess.run(["cc", tmp_path / "plain.c", "-o", tmp_path / "plain", *flags], check=True, capture_output=True)
    assert {"PIE", "relro", "now", "no executable stack", "stack protector", "fortify", "landing pads"} <= lacks(tmp_path / "plain")


def test_the_bill_of_materials_names_what_is_inside() -> None:
    bill = json.loads(read(sys.executable, ROOT / "deploy/sbom.py", BIN))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    by_name = {component["name"]: component for component in bill["components"]}
    for package in ("libgrpc++1.51", "libssl3", "libprotobuf32", "librocksdb-dev", "libcpp-httplib0.11"):
        installed = read("dpkg-query", "-W", "-f", "${Version}", package)
        assert by_name[package]["version"] == installed
        assert by_name[package]["purl"].startswith("pkg:deb/debian/")
    assert any(ref.startswith("pkg:npm/") for ref in (c["bom-ref"] for c in bill["components"]))
    refs = [component["bom-ref"] for component in bill["components"]]
    assert len(refs) == len(set(refs))
    files = {file["name"] for file in bill["metadata"]["component"]["components"]}
    assert set(PROGRAMS) <= files
    assert bill == json.loads(read(sys.executable, ROOT / "deploy/sbom.py", BIN)), "the same build, another bill"
