"""Measures the words of documents, of comments in C++ headers and of docstrings in Python.

Goal: every sentence can be read once. A sentence has at most 35 words, where neither a semicolon
nor a colon ends one. A document has at most 18 words a sentence on average. Programs are not
spoken of as persons.
Method: each text is cut into blocks (paragraphs, items, cells), and each block into sentences.
Planted sentences show that each check sees.

    python3 tests/tidy/words_test.py --list [PATH...]   every finding, as file:line
    python3 tests/tidy/words_test.py --figures          one line a document
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import unittest
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORDS_MAX = 35  # Of one sentence.
MEAN_MAX = 18.0  # Of the sentences of a document.
HEADERS = {".h", ".hpp", ".cuh"}

# A person's words, which comments used of programs; and references to nothing that stands there.
UNWANTED = re.compile(
    r"\b(he|him|his|himself|who|whom|whoever|nobody|everybody|likewise|of before)\b", re.IGNORECASE
)
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|cf|vs|etc|approx|resp|Fig|Sec|Eq|No|al|St)\.$")
SENTENCE_END = re.compile(r"[.!?][\"'”’)*_\]]*(?=\s)")
WORD = re.compile(r"[^\W_]")


@dataclass(frozen=True)
class Block:
    """Text in which no sentence goes on from another block."""

    line: int  # Of the file, from 1.
    lines: tuple[str, ...]
    prose: bool = True  # A paragraph or an item; headings and cells do not count in the mean.


@dataclass(frozen=True)
class Sentence:
    line: int
    text: str
    prose: bool

    @property
    def words(self) -> int:
        return sum(bool(WORD.search(token)) for token in self.text.split())


def plain(text: str) -> str:
    """`text` without markup: code and formulas are one word each, a link is its text."""
    text = re.sub(r"(`+)(.+?)\1", " code ", text, flags=re.DOTALL)
    text = re.sub(r"\$\$?[^$]+\$\$?", " formula ", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)\s]*\)", r"\1", text)
    text = re.sub(r"https?://\S+", " address ", text)
    return re.sub(r"</?[a-zA-Z][^>]*>", " ", text)


def sentences(block: Block) -> Iterator[Sentence]:
    """The sentences of a block, each with the line it begins on."""
    # A line's end is kept as a mark, so that each sentence knows its line.
    text = plain("\n".join(block.lines))
    start, line = 0, block.line
    for match in [*SENTENCE_END.finditer(text), None]:
        end = match.end() if match else len(text)
        if match and ABBREVIATION.search(text[: match.start() + 1]):
            continue
        piece = text[start:end]
        blank = piece[: len(piece) - len(piece.lstrip())]
        if piece.strip():
            yield Sentence(line + blank.count("\n"), " ".join(piece.split()), block.prose)
        line += piece.count("\n")
        start = end


ITEM = re.compile(r"^\s*([-*+]|\d+[.)])\s+")

# A row of a table in a comment: its first column, a gap, the text.
ROW = re.compile(r"^\s*[^\s/]\S*( \S+){0,2}(?<![.!?:;]) {2,}(?=\S)")
FIELD = re.compile(r"^\s+[\w*, `]+(\([^)]*\))?: ")  # Of a list of arguments.


def markdown_blocks(text: str) -> Iterator[Block]:
    """Paragraphs, items, headings and table cells; code and comments are left out."""
    text = re.sub(r"<!--.*?-->", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    held: list[str] = []
    begin = 0
    fence = ""
    for number, line in enumerate(text.splitlines() + [""], start=1):
        stripped = line.strip()
        marker = re.match(r"(```+|~~~+)", stripped)
        ends = bool(fence or marker or not stripped or ITEM.match(line))
        ends = ends or stripped.startswith(("#", "|", "$$", ">"))
        if ends and held:
            yield Block(begin, tuple(held))
            held = []
        if fence:
            fence = "" if stripped.startswith(fence) else fence
        elif marker:
            fence = marker[1]
        elif stripped.startswith("#"):
            yield Block(number, (stripped.lstrip("#"),), prose=False)
        elif stripped.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", re.sub(r"`[^`]*`", " code ", stripped)):
                yield Block(number, (cell,), prose=False)
        elif stripped:
            if not held:
                begin = number
            held.append(ITEM.sub("", line, count=1) if not held else line.lstrip("> "))


CPP = re.compile(
    r"""(?P<line>//[^\n]*)|(?P<block>/\*.*?\*/)
      |R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|(?<![\w])'(?:\\.|[^'\\\n])+'""",
    re.DOTALL | re.VERBOSE,
)


def header_blocks(text: str) -> Iterator[Block]:
    """The comments of C or C++; what is indented behind an empty line or a colon is no prose."""
    lines: list[tuple[int, str]] = []
    for match in CPP.finditer(text):
        if not (match["line"] or match["block"]):
            continue
        start = text.rfind("\n", 0, match.start()) + 1
        number = text.count("\n", 0, match.start()) + 1
        if text[start : match.start()].strip() or lines and number != lines[-1][0] + 1:
            lines.append((number - 1, ""))  # Behind code, or apart: another comment.
        inner = match[0].lstrip("/").removeprefix("<") if match["line"] else match[0][2:-2]
        for offset, line in enumerate(inner.split("\n")):
            body = line if match["line"] else re.sub(r"^\s*[*!]", "", line)
            lines.append((number + offset, body.removeprefix(" ")))
    yield from _runs(lines)


def _runs(lines: Iterable[tuple[int, str]]) -> Iterator[Block]:
    """Cuts numbered lines at empty ones and at items; leaves out indented examples."""
    held: list[str] = []
    begin = 0
    item = example = False
    before = ""
    for number, line in [*lines, (0, "")]:
        indented = line.startswith("  ") and not _begins(line) and not item
        example = indented and (example or not before.strip() or before.rstrip().endswith(":"))
        before = line
        if held and (not line.strip() or _begins(line) or example):
            yield Block(begin, tuple(held))
            held = []
        if not line.strip():
            item = False
        elif not example:
            if not held:
                begin, item = number, _begins(line)
            held.append(ITEM.sub("", line) if not held else line)


def _begins(line: str) -> bool:
    return any(pattern.match(line) for pattern in (ITEM, ROW, FIELD))


def docstring_blocks(text: str) -> Iterator[Block]:
    """The docstrings of a module, its classes and functions."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is None:
            continue
        first = node.body[0]
        assert isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        raw = str(first.value.value).split("\n")
        indents = [len(line) - len(line.lstrip()) for line in raw[1:] if line.strip()]
        margin = min(indents, default=0)
        lines = [raw[0], *(line[margin:] for line in raw[1:])]
        yield from _runs((first.lineno + offset, line) for offset, line in enumerate(lines))


def blocks_of(path: str, text: str) -> Iterator[Block]:
    suffix = Path(path).suffix
    if suffix == ".md":
        return markdown_blocks(text)
    if suffix in HEADERS:
        return header_blocks(text)
    return docstring_blocks(text)


def mean_words(found: list[Sentence]) -> float:
    """The mean number of words of the sentences in paragraphs and items; 0 if there are none.

    One or two words are a label ("Context.") or a program's name, no sentence.
    """
    counts = [sentence.words for sentence in found if sentence.prose and sentence.words > 2]
    return sum(counts) / len(counts) if counts else 0.0


def findings(path: str, text: str) -> Iterator[str]:
    """Yields `path:line: reason` for each thing in one file that is to be rewritten."""
    found = [sentence for block in blocks_of(path, text) for sentence in sentences(block)]
    for sentence in found:
        opening = " ".join(sentence.text.split()[:8])
        if sentence.words > WORDS_MAX:
            yield f"{path}:{sentence.line}: {sentence.words} words, {WORDS_MAX} at most: {opening} ..."
        for match in UNWANTED.finditer(sentence.text):
            yield f'{path}:{sentence.line}: "{match[0]}": {opening} ...'
    mean = mean_words(found)
    if path.endswith(".md") and mean > MEAN_MAX:
        yield f"{path}:1: {mean:.1f} words a sentence on average, {MEAN_MAX:.0f} at most"


def texts() -> dict[str, str]:
    """The files that are measured: those that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md", "*.py", *(f"*{s}" for s in HEADERS)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    names = sorted(set(listed.stdout.splitlines()))
    return {name: (ROOT / name).read_text() for name in names if (ROOT / name).is_file()}


def measured() -> dict[str, list[str]]:
    """Path -> findings, of the files that have any."""
    found = {path: list(findings(path, text)) for path, text in texts().items()}
    return {path: lines for path, lines in found.items() if lines}


class WordsTest(unittest.TestCase):
    def test_every_sentence_can_be_read_once(self) -> None:
        lines = [line for found in measured().values() for line in found]
        self.assertEqual(lines, [], "\n" + "\n".join(lines))

    def test_long_sentences_are_seen(self) -> None:
        words = " ".join(["word"] * 20)
        for mark in ("; ", ": ", ", ", " - ", "\n", ". . "):
            text = f"{words}{mark}{words}.\n"
            with self.subTest(mark):
                for path, source in _planted(text).items():
                    long = [line for line in findings(path, source) if "35 at most" in line]
                    self.assertEqual(len(long), 0 if mark == ". . " else 1, path)

    def test_sentences_end_where_they_end(self) -> None:
        def counts(*lines: str) -> list[int]:
            return [sentence.words for sentence in sentences(Block(1, lines))]

        self.assertEqual(counts("One two. Three (four five.) Six! Seven?"), [2, 3, 1, 1])
        self.assertEqual(counts("A file, e.g. of version 0.1.0, is `one word here`."), [8])
        self.assertEqual(counts("See [two words](a/long.md#place).", "Then $a + b$."), [3, 2])

    def test_blocks_are_apart(self) -> None:
        text = "# Head\n\n* one\n  two\n* three\n\n| a | b |\n| --- | --- |\n\n```sh\nls\n```\nEnd <!-- no\nno --> here.\n"
        found = [s for block in markdown_blocks(text) for s in sentences(block)]
        self.assertEqual(
            [(s.line, s.text) for s in found if s.words],
            [(1, "Head"), (3, "one two"), (5, "three"), (7, "a"), (7, "b"), (13, "End here.")],
        )
        code = """\
int a;  // One
        // two.
int b;  // Three "// four"
const char* c = "// no";
/* Five
 * six. */
int d;
// Seven:
//   int no;
// * eight
//   nine
"""
        found = [s for block in header_blocks(code) for s in sentences(block)]
        self.assertEqual(
            [(s.line, s.text) for s in found],
            [
                (1, "One two."), (3, 'Three "// four"'), (5, "Five six."), (8, "Seven:"), (10, "eight nine"),
            ],
        )

    def test_unwanted_words_are_seen(self) -> None:
        for word in ("he", "his", "Who", "whoever", "nobody", "Everybody", "Likewise", "of before"):
            for path, source in _planted(f"The {word} `who` here.\n").items():
                with self.subTest(word=word, path=path):
                    self.assertEqual([line.split('"')[1] for line in findings(path, source)], [word])
        for path, source in _planted("The header, whose author is theirs.\n").items():
            self.assertEqual(list(findings(path, source)), [], path)

    def test_the_mean_is_of_a_document(self) -> None:
        text = " ".join(["word"] * 19) + ".\n\n| a | b |\n"
        self.assertEqual([line.split(":")[0] for line in findings("a.md", text)], ["a.md"])
        self.assertEqual(list(findings("a.h", f"// {text.splitlines()[0]}\n")), [])


def _planted(text: str) -> dict[str, str]:
    """`text` as a document, a header and a docstring."""
    comment = "".join(f"// {line}\n" for line in text.splitlines())
    return {"x.md": text, "x.h": comment, "x.py": f'"""{text}"""\n'}


def main(arguments: list[str]) -> int:
    match arguments:
        case ["--list", *paths]:
            for path, lines in measured().items():
                if not paths or any(path.startswith(wanted) for wanted in paths):
                    print("\n".join(lines))
        case ["--figures"]:
            print("sentences  mean  over 35  words  document")
            for path, text in texts().items():
                if not path.endswith(".md"):
                    continue
                found = [s for block in markdown_blocks(text) for s in sentences(block) if s.words]
                long = sum(s.words > WORDS_MAX for s in found)
                unwanted = sum(len(UNWANTED.findall(s.text)) for s in found)
                print(f"{len(found):9} {mean_words(found):5.1f} {long:8} {unwanted:6}  {path}")
        case _:
            unittest.main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
