"""Goal: the client library gives its host bw_* and nothing else, and needs only
the C and C++ run-time libraries.
Method: nm and readelf on the built library; a planted name must be seen."""

import re
import subprocess
import sys

# Of no header: the Python package brings its own library (client_lib/src/python_call.cc).
FOR_THE_HOOK = {f"bw_python_{name}" for name in ("call", "call_to", "frames", "function_call", "function_left", "function_to", "functions", "leave", "plainly", "see")}
ALLOWED = re.compile(r"^(libstdc\+\+|libgcc_s|libc|libm|libpthread|libdl|ld-linux-x86-64)\.so")


def exported(library: str) -> list[str]:
    lines = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    return [line.split()[-1].split("@")[0] for line in lines.splitlines()]


def strangers(names: list[str]) -> list[str]:
    return [name for name in names if not name.startswith("bw_")]


def main() -> int:
    library = sys.argv[1]
    names = exported(library)
    assert set(names) >= FOR_THE_HOOK and len(names) == 14 + len(FOR_THE_HOOK), names
    assert strangers(names) == [], strangers(names)
    assert strangers(names + ["_ZN4absl5Mutex"]) == ["_ZN4absl5Mutex"]
    dynamic = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert needed and all(ALLOWED.match(name) for name in needed), needed
    return 0


if __name__ == "__main__":
    sys.exit(main())
