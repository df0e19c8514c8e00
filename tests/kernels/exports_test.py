"""Goal: libbellwether_kernels exports the C interface and nothing else, and needs
nothing beyond the C++ runtime.

Method: nm and readelf on the built library; the checks themselves are shown to
find a planted stranger.
"""

import re
import subprocess
import sys
import unittest

LIBRARY = sys.argv.pop(1)
HEADER = sys.argv.pop(1)
RUNTIME = {"libc.so", "libm.so", "libstdc++.so", "libgcc_s.so", "libpthread.so",
           "ld-linux-x86-64.so", "ld-linux-aarch64.so"}


def foreign(symbols: list[str]) -> list[str]:
    return [name for name in symbols if not name.startswith("bw_")]


def exported(path: str) -> list[str]:
    listing = subprocess.run(["nm", "-D", "--defined-only", path], check=True,
                             capture_output=True, text=True).stdout
    return [line.split()[-1] for line in listing.splitlines()]


class ExportsTest(unittest.TestCase):
    def test_only_the_c_interface_is_exported(self) -> None:
        self.assertEqual(foreign(exported(LIBRARY)), [])

    def test_every_function_of_the_headers_is_exported(self) -> None:
        declared = set()
        with open(HEADER, encoding="utf-8") as header:
            declared.update(re.findall(r"\b(bw_[a-z0-9_]+)\(", header.read()))
        self.assertGreaterEqual(len(declared), 8)
        self.assertEqual(declared - set(exported(LIBRARY)), set())

    def test_only_the_runtime_is_needed(self) -> None:
        dynamic = subprocess.run(["readelf", "-d", LIBRARY], check=True,
                                 capture_output=True, text=True).stdout
        needed = re.findall(r"\(NEEDED\).*\[(.+?\.so)", dynamic)
        self.assertTrue(needed)
        self.assertEqual(set(needed) - RUNTIME, set())

    def test_foreign_symbol_is_found(self) -> None:
        self.assertEqual(foreign(["bw_probe", "_ZSt4cout"]), ["_ZSt4cout"])


if __name__ == "__main__":
    unittest.main()
