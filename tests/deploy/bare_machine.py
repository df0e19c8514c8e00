"""A machine without our packages: this one, with every system library hidden but a chosen few."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")
# What the package libc6 brings, as far as programs load it.
GLIBC = re.compile(
    r"(ld-linux-x86-64|libc|libm|libdl|librt|libpthread|libresolv|libutil|libanl|libnss_\w+)\.so\.\d+"
)


def glibc_files() -> set[Path]:
    return {path for path in LIBRARIES.iterdir() if GLIBC.fullmatch(path.name)}


def python_files(python: Path) -> set[Path]:
    """The system libraries that an interpreter, its own modules, and PyTorch's wheel need."""
    variables = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_config_var('DESTSHARED'))"], text=True
    )
    modules = Path(variables.strip()).glob("*.so")
    told = subprocess.run(["ldd", python, *modules], capture_output=True, text=True, check=True).stdout
    needed = {Path(found) for found in re.findall(r"=> (/\S+)", told)}
    needed |= {LIBRARIES / "libstdc++.so.6", LIBRARIES / "libgcc_s.so.1"}
    return {path for path in needed if path.resolve().parent == LIBRARIES}


class BareMachine:
    """`command(...)` is what runs there; the rest of the file system is this machine's."""

    def __init__(self, folder: Path, libraries: Iterable[Path]) -> None:
        folder.mkdir()
        for library in libraries:
            shutil.copy(library, folder / library.name)
        as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
        hide = f'mount --bind "{folder}" {LIBRARIES} && exec "$@"'
        self._within = ["unshare", "--mount", *as_root, "sh", "-c", hide, "sh"]

    def command(self, *words: str | Path) -> list[str]:
        return [*self._within, *map(str, words)]

    def works(self) -> bool:
        return subprocess.run(self.command("/bin/sh", "-c", ":"), capture_output=True, check=False).returncode == 0
