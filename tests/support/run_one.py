"""Builds and runs the tests that a pattern names: `./check one PATTERN`, which has configured build/cpu.

PATTERN is a part of the name of a C++ test or of its file, of a pytest file, of a check of tests/tidy or of
any other entry of ctest.  A whole name counts before a part of others.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/cpu"
MOST = 20  # A pattern that names more says too little.
TEST = re.compile(r"^(?:TEST|TEST_F|TEST_P|TYPED_TEST|TYPED_TEST_P)\((\w+),\s*(\w+)\)", re.MULTILINE)


@dataclass
class Run:
    command: list[str]
    target: str = ""  # What is built for it.
    environment: dict[str, str] = field(default_factory=dict)


def names_of(path: str) -> set[str]:
    """tests/python/test_attach.py: attach, test_attach, test_attach.py and the path."""
    stem = Path(path).stem
    return {path, Path(path).name, stem, stem.removeprefix("test_").removesuffix("_test")}


class CppTests:
    def __init__(self, sources: str) -> None:
        """`sources`: lines of a source below tests/ and its program, as tests/CMakeLists.txt writes them."""
        self._programs = dict(line.split("\t") for line in sources.splitlines())
        self._tests = {source: TEST.findall((ROOT / "tests" / source).read_text()) for source in self._programs}

    def names(self) -> set[str]:
        tests = [test for in_one in self._tests.values() for test in in_one]
        files = {Path(source).stem for source in self._programs}
        return files | set(self._programs.values()) | {suite for suite, _ in tests} | {f"{suite}.{test}" for suite, test in tests}

    def that(self, fits: Callable[[str], bool]) -> dict[str, Run]:
        """Whole programs; else files, suites or tests of them, whichever fits first."""
        filters: dict[str, set[str]] = {}
        for source, program in self._programs.items():
            found = filters.setdefault(program, set())
            whole = fits(program) or any(map(fits, names_of(f"tests/{source}")))
            for suite, test in self._tests[source]:
                if whole or fits(suite):
                    found |= {f"{suite}.*", f"{suite}/*", f"*/{suite}.*"}  # Plain, with types, with parameters.
                elif fits(f"{suite}.{test}"):
                    found |= {f"{suite}.{test}", f"{suite}/*.{test}", f"*/{suite}.{test}/*"}
        return {
            program: Run([str(BUILD / "bin" / program), "--gtest_filter=" + ":".join(sorted(found))], program)
            for program, found in filters.items()
            if found
        }


class OtherTests:
    def __init__(self, listed: str) -> None:
        """`listed`: ctest's own list, of which gtest's tests are left out."""
        self._runs: dict[str, tuple[set[str], Run]] = {}
        for test in json.loads(listed)["tests"]:
            command = test.get("command", [])
            of_gtest = any(part.startswith("--gtest_filter") for part in command)
            if not command or of_gtest or test["name"].endswith("_NOT_BUILT"):
                continue
            properties = {p["name"]: p["value"] for p in test["properties"]}
            reads_text_alone = "tidy" in properties.get("LABELS", []) and not any(part.startswith(f"{BUILD}/") for part in command)
            of_ours = Path(command[0]).parent == BUILD / "bin"
            target = "" if reads_text_alone else Path(command[0]).name if of_ours else "programs"
            files = (os.path.relpath(part, ROOT) for part in command if part.startswith(f"{ROOT}/tests/"))
            environment = dict(entry.split("=", 1) for entry in properties.get("ENVIRONMENT", []))
            self._runs[test["name"]] = ({test["name"]}.union(*map(names_of, files)), Run(command, target, environment))

    def names(self) -> set[str]:
        return {name for names, _ in self._runs.values() for name in names if "/" not in name}

    def that(self, fits: Callable[[str], bool]) -> dict[str, Run]:
        return {name: run for name, (names, run) in self._runs.items() if any(map(fits, names))}


def main() -> int:
    (pattern,) = sys.argv[1:]
    listed = subprocess.run(["ctest", "--test-dir", str(BUILD), "--show-only=json-v1"], capture_output=True, text=True, check=True)
    cpp, others = CppTests((BUILD / "test_sources.txt").read_text()), OtherTests(listed.stdout)
    word = pattern.lower().removeprefix("./")

    def that(fits: Callable[[str], bool]) -> dict[str, Run]:
        return {**cpp.that(lambda name: fits(name.lower())), **others.that(lambda name: fits(name.lower()))}

    runs = that(lambda name: name == word) or that(lambda name: word in name)
    if not runs:
        near = difflib.get_close_matches(pattern, cpp.names() | others.names(), 8, 0.5)
        print(f'check: no test is named "{pattern}"; near it: {", ".join(near) or "none"}', file=sys.stderr)
        return 2
    if len(runs) > MOST:
        print(f'check: "{pattern}" is in the names of {len(runs)} tests, more than {MOST}: {", ".join(sorted(runs))}', file=sys.stderr)
        return 2
    if targets := sorted({run.target for run in runs.values()} - {""}):
        print("== Building", *targets, flush=True)
        if subprocess.run(["cmake", "--build", str(BUILD), "--target", *targets]).returncode != 0:
            return 1
    failed = []
    for name, run in runs.items():
        print("==", *run.command, flush=True)
        if subprocess.run(run.command, env={**os.environ, **run.environment}, cwd=BUILD).returncode != 0:
            failed.append(name)
    if failed:
        print("check: failed:", *failed, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
