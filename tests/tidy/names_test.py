"""Checks the names of tests.

Goal: a test's name states one fact in ten words at most, so that a search for the fact finds it.
Method: read the names in C++, Python and the page's checks as text. Planted names show that each kind is read.
"""

from __future__ import annotations

import ast
import re
import subprocess
import unittest
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORDS_MAX = 10
# A fact does not begin with a question, and no program is a person.
QUESTIONS = {"what", "whatever", "who", "whoever"}
PERSONS = {"everybody", "he", "his", "nobody", "somebody", "whoever"}

CPP_TEST = re.compile(r"^\s*(?:TYPED_)?TEST(?:_F|_P)?\(\s*\w+,\s*(?:DISABLED_)?(\w+)\)", re.MULTILINE)
PAGE_CHECK = re.compile(r"^  async '([^']+)'\(\)", re.MULTILINE)


def named(path: str, text: str) -> Iterator[tuple[str, list[str]]]:
    """The tests of one file: each name with its words, in small letters.

    In C++ each capital begins a word, and digits belong to the word before.
    """
    if path.endswith(".py"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield node.name, [word for word in node.name.split("_")[1:] if word]
    elif path.endswith(".mjs"):
        for match in PAGE_CHECK.finditer(text):
            yield match[1], re.findall(r"[\w'-]+", match[1].lower())
    else:
        for match in CPP_TEST.finditer(text):
            yield match[1], [word.lower() for word in re.findall(r"[A-Z][^A-Z]*", match[1])]


def findings(path: str, text: str) -> Iterator[str]:
    """Yields `path: reason` for each name that is to be given anew."""
    for name, words in named(path, text):
        if len(words) > WORDS_MAX:
            yield f"{path}: {name} has {len(words)} words, {WORDS_MAX} at most"
        if words[:1] and words[0] in QUESTIONS:
            yield f'{path}: {name} begins with "{words[0]}", must state a fact'
        for word in sorted(PERSONS & set(words[1:])):
            yield f'{path}: {name} says "{word}", must name the program'


def texts() -> dict[str, str]:
    """The files of tests that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "tests/*.cc", "tests/*.py", "tests/*.mjs"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    names = sorted(set(listed.stdout.splitlines()))
    return {name: (ROOT / name).read_text() for name in names if (ROOT / name).is_file()}


class NamesTest(unittest.TestCase):
    def test_names_are_short_facts(self) -> None:
        files = texts()
        kinds = {Path(path).suffix for path, text in files.items() if any(named(path, text))}
        self.assertEqual(kinds, {".cc", ".mjs", ".py"}, "the check looks in the wrong place")
        found = [line for path, text in files.items() for line in findings(path, text)]
        self.assertEqual(len(found), 0, "\n" + "\n".join(found))

    def test_planted_names_are_seen(self) -> None:
        long = "AFrameOf16RanksIsStoredOnceAndReadAgain"
        under = "_".join(["word"] * (WORDS_MAX + 1))
        planted = {
            "a.cc": [f"TEST({{}}, {long}ByAll) {{", f"TYPED_TEST({{}},\n     {long}ByAll) {{", "TEST_F({}, WhatComesWaits) {"],
            "a.py": [f"def test_{under}() -> None: ...", f"class A:\n  async def test_{under}(self) -> None: ...", "def test_a_watch_holds_nobody_up(): ..."],
            "a.mjs": [f"  async '{under.replace('_', ' ')}'() {{"],
        }  # fmt: skip
        for path, names in planted.items():
            for text in names:
                with self.subTest(text):
                    self.assertEqual(len(list(findings(path, text.replace("{}", "ATest")))), 1)
        self.assertEqual(list(findings("a.cc", f"TEST(ATest, {long}) {{\nTEST_P(ATest, MessagesSayWhatWaits) {{")), [])
        self.assertEqual(list(findings("a.py", "def test_" + "_".join(["word"] * WORDS_MAX) + "(): ...")), [])


if __name__ == "__main__":
    unittest.main()
