"""Checks what no compiler does: which room may include which, and how the code is laid out.

Goal: dependencies point one way, public headers need no CUDA, whether CUDA
is there is decided in CMake alone, and all C++ and CUDA is as .clang-format has it.
Method: read the sources as text; a planted violation shows that each check sees.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import unittest
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FORMATTER = "clang-format-14"  # Other versions lay out otherwise.
SUFFIXES = {".h", ".hpp", ".c", ".cc", ".cu", ".cuh"}

WALL_CLOCK_WAIT = re.compile(r"[.>]\w*(Await|Wait|WaitForNotification)With(Timeout|Deadline)\(")

# Folder -> folders it may include, itself aside.
_DATA = {"server/util", "server/model", "proto/signals"}
ALLOWED: dict[str, set[str]] = {
    "kernels": set(),
    "proto": {"proto/signals"},
    "client_lib": {"proto", "proto/signals", "client_lib/src"},
    "client_lib/src": {"client_lib", "proto/signals"},  # No protobuf in the trainer.
    "server/util": set(),
    "server/model": {"proto/signals"},
    "server/store": _DATA,
    "server/access": {"server/util"},
    "server/net": {"server/util"},
    "server/detect": _DATA | {"kernels"},
    "server/act": _DATA | {"server/detect"},  # It judges effects as alerts are judged.
    # The two rooms in which wire types and our own meet.
    "server/ingest": _DATA | {"proto", "server/access", "server/engine/ports", "server/store"},
    "server/query/ports": {"server/model"},
    "server/query": _DATA | {"proto", "server/access", "server/act", "server/engine/ports", "server/ingest", "server/query/ports", "server/store"},
    "server/export": _DATA | {"server/store"},
    "server/http": _DATA | {"server/access", "server/export", "server/net", "server/store"},
    "server/engine/ports": {"server/model", "server/store"},
    "server/engine": _DATA | {"server/act", "server/detect", "server/engine/ports", "server/ingest", "server/store"},
    "server/cluster": _DATA | {"server/access", "server/engine/ports", "server/query/ports", "server/store"},
    "server/offline": _DATA | {"proto", "server/act", "server/detect", "server/ingest", "server/query"},
    "server/commands": _DATA | {"server/access", "server/act", "server/detect", "server/engine", "server/net", "server/offline", "server/store"},
}
ALLOWED["server/app"] = set(ALLOWED)
ALLOWED["tools/lab"] = _DATA | {"server/detect", "server/offline"}  # A program of its own.

# First match wins; other includes are a folder's own or a third party's.
OWNERS = [
    (re.compile(r"bellwether/v1/.*\.pb\.h$"), "proto"),
    (re.compile(r"bellwether/recording\.h$"), "proto"),
    (re.compile(r"bellwether/(signal_(table|id)|crc32c|time_text)\.h$"), "proto/signals"),  # No protobuf in it.
    (re.compile(r"client_lib/src/"), "client_lib/src"),
    (re.compile(r"client_lib/"), "client_lib"),
    (re.compile(r"bellwether/kernels/"), "kernels"),
    (re.compile(r"bellwether/client\.hp?p?$"), "client_lib/src"),
    (re.compile(r"server/(engine|query)/ports/"), r"server/\1/ports"),
    (re.compile(r"server/(\w+)/"), r"server/\1"),
    (re.compile(r"tools/lab/"), "tools/lab"),
]
INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]')
HEADER_ROOTS = ["", "proto/include", "kernels/include", "client_lib/include"]
CUDA_MACRO = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif)\b.*BELLWETHER_CUDA")


def owner(included: str) -> str | None:
    """Returns the folder that owns a #include path, None for a third party."""
    for pattern, folder in OWNERS:
        if match := pattern.match(included):
            return match.expand(folder)
    return None


def folder_of(path: str) -> str | None:
    """Returns the key of ALLOWED that holds `path` (relative to the root)."""
    fitting = [key for key in ALLOWED if path.startswith(f"{key}/")]
    return max(fitting, key=len, default=None)


def violations(path: str, text: str) -> Iterator[str]:
    """Yields one `path:line: reason` for each broken rule in one file."""
    folder = folder_of(path)
    if folder is None:
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if CUDA_MACRO.match(line):
            yield f"{path}:{number}: BELLWETHER_CUDA outside CMake"
        if folder.startswith("server") and WALL_CLOCK_WAIT.search(line):
            yield f"{path}:{number}: a wait by the wall clock; server/util/await_for.h has one"
        if not (match := INCLUDE.match(line)):
            continue
        target = owner(match[1])
        if target not in {None, folder} | ALLOWED[folder]:
            yield f"{path}:{number}: {folder} must not include {target}"
        if "/include/" in path and match[1].startswith("cuda"):
            yield f"{path}:{number}: CUDA header in a public header"


@functools.cache
def includes_of(path: Path) -> list[tuple[str, Path | None]]:
    """What a file includes, each with the file of the tree that this is, None for another's."""
    names = [match[1] for match in map(INCLUDE.match, path.read_text().splitlines()) if match]
    return [(name, next((p for p in (ROOT / root / name for root in HEADER_ROOTS) if p.is_file()), None)) for name in names]


def way_to_protobuf(path: Path, seen: set[Path]) -> list[str]:
    """The headers that lead from `path` to generated wire types; empty: none does."""
    seen.add(path)
    for name, header in includes_of(path):
        if name.endswith(".pb.h"):
            return [name]
        if header is not None and header not in seen and (way := way_to_protobuf(header, seen)):
            return [name, *way]
    return []


def sources() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / line for line in listed.stdout.splitlines()]
    return [p for p in files if p.suffix in SUFFIXES and p.exists()]


def misformatted(text: str, *files: Path) -> list[str]:
    """The first complaint of each file; of `text` if there are none."""
    command = [FORMATTER, "--dry-run", "--Werror", "--ferror-limit=1", "--style=file", *map(str, files)]
    said = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=False)
    return [line for line in said.stderr.splitlines() if "code should be clang-formatted" in line]


class TidyTest(unittest.TestCase):
    @unittest.skipUnless(shutil.which(FORMATTER), f"{FORMATTER} is not installed")
    def test_all_is_formatted(self) -> None:
        self.assertEqual(len(misformatted("int  x;\n")), 1)
        self.assertEqual(misformatted("int x;\n"), [])
        files = sources()
        self.assertGreater(len(files), 0, "the check looks in the wrong place")
        found = misformatted("", *files)
        self.assertEqual(found, [], "\n" + "\n".join(found))

    def test_tree_is_clean(self) -> None:
        files = [p for p in sources() if folder_of(str(p.relative_to(ROOT)))]
        self.assertGreater(len(files), 0, "the check looks in the wrong place")
        found = [
            line
            for p in sorted(files)
            for line in violations(str(p.relative_to(ROOT)), p.read_text())
        ]
        self.assertEqual(found, [], "\n" + "\n".join(found))

    def test_protobuf_is_behind_no_header(self) -> None:
        self.assertNotEqual(way_to_protobuf(ROOT / "server/ingest/decode.cc", set()), [])
        free = {folder for folder, allowed in ALLOWED.items() if "proto" not in allowed | {folder}}
        self.assertIn("server/engine", free)
        files = [p for p in sources() if folder_of(str(p.relative_to(ROOT))) in free]
        found = [f"{p.relative_to(ROOT)}: {' > '.join(way)}" for p in files if (way := way_to_protobuf(p, set()))]
        self.assertEqual(found, [], "\n" + "\n".join(found))

    def test_sees_planted_violations(self) -> None:
        planted = {
            "kernels/cpu/x.cc": '#include "server/util/clock.h"',
            "client_lib/src/x.cc": '#include "bellwether/kernels/device.h"',
            "server/store/x.h": '#include "bellwether/v1/ingest.pb.h"',
            "server/detect/x.h": '#include "server/act/policy.h"',
            "server/query/x.h": '#include "server/http/console.h"',
            "kernels/include/bellwether/kernels/x.h": "#include <cuda.h>",
            "server/app/main.cc": "#ifdef BELLWETHER_CUDA",
            "server/engine/shard.cc": "mutex_.AwaitWithTimeout(done, absl::Seconds(1));",
        }
        for path, line in planted.items():
            with self.subTest(path):
                self.assertEqual(len(list(violations(path, line))), 1)


if __name__ == "__main__":
    unittest.main()
