#!/usr/bin/env python3
"""Writes docs/reference/cli.md from the programs' own help, and man pages from that document.

    python docs/cli_reference.py --bin build/cpu/bin   # the document, which is committed
    python docs/cli_reference.py --man DIR             # the man pages, which a build makes

The help is printed from the command tree that parses the words, so nothing is described that is
not there; help2man, which does the same, knows neither commands below commands nor Markdown.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs/reference/cli.md"
VERSION = re.search(r"project\(bellwether VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())
COMMANDS = ("Subcommands", "commands")
ARGUMENTS = ("Positionals", "positional arguments")
OPTIONS = ("Options", "options")
EXAMPLES = ("Example", "Examples")
# As tests/docs/blocks.py reads it, by program.
EXAMPLES_ARE = {
    "bellwether": "run by tests/cli/test_examples.py",
    "bellwetherd": "not run: the first one stays in front; tests/e2e start servers and replay runs",
    "python -m bellwether": "not run: a kernel's check takes a minute; tests/python runs each command",
}


@dataclass
class Page:
    """What one --help says."""

    path: tuple[str, ...]
    about: str = ""
    usage: str = ""
    epilog: str = ""
    sections: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    below: list[Page] = field(default_factory=list)

    @property
    def name(self) -> str:
        return " ".join(self.path)

    def entries(self, titles: tuple[str, ...]) -> list[tuple[str, str]]:
        return [entry for title in titles for entry in self.sections.get(title, [])]

    def all(self) -> Iterator[Page]:
        yield self
        for page in self.below:
            yield from page.all()


def plain(term: str) -> str:
    """Without what CLI11 says of types beside their names.  It has what an option excludes in a set
    of pointers, whose order differs from build to build."""
    term = re.sub(
        r"(?<=Excludes: )--[-\w]+(?: --[-\w]+)*", lambda m: " ".join(sorted(m[0].split())), term
    )
    term = re.sub(r"\b\w+:(FILE|DIR)\b", r"\1", term)
    return re.sub(r":(?:NONNEGATIVE|INT in \[[^]]*\])", "", term)


def parse(path: tuple[str, ...], text: str) -> Page:
    """CLI11's layout, and argparse's, which is the same but for names."""
    page = Page(path)
    section = ""
    for block in re.split(r"\n\n+", text.strip("\n")):
        for line in block.splitlines():
            if usage := re.match(r"[Uu]sage: (.*)", line):
                section = "usage"
                page.usage = usage[1]
            elif section == "usage" and line.startswith(" "):
                page.usage += " " + line.strip()
            elif title := re.fullmatch(r"(\S.*):", line):
                section = title[1]
                page.sections[section] = []
            elif section in EXAMPLES and line.startswith("  "):
                page.sections[section].append((line.strip(), ""))
            elif section and (entry := re.fullmatch(r" {2,4}(\S.*?)(?: {2,}(\S.*))?", line)):
                page.sections.setdefault(section, []).append((plain(entry[1]), entry[2] or ""))
            elif section and line.startswith("      ") and page.sections.get(section):
                term, words = page.sections[section][-1]
                page.sections[section][-1] = (term, f"{words} {line.strip()}".strip())
            elif section and page.sections:
                page.epilog = f"{page.epilog} {line.strip()}".strip()
            else:
                page.about = f"{page.about} {line.strip()}".strip()
        section = "" if section == "usage" else section
    return page


def tree(program: list[str], shown: str, bin_folder: Path, *path: str, about: str = "") -> Page:
    """The page of a command and of all below it; `about` is for one that has no help."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("BELLWETHER_", "XDG_"))}
    env |= {"HOME": "$HOME", "COLUMNS": "100", "PYTHONPATH": str(ROOT / "client_lib/python")}
    env["BELLWETHER_LIB_DIR"] = str(bin_folder)
    called = [*program, *path, "--help"]
    # By its bare name, wherever it lies.
    name = shown if len(program) == 1 else program[0]
    done = subprocess.run(
        [name, *called[1:]], executable=program[0], capture_output=True, text=True, env=env
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(called)}: {done.stderr}")
    page = parse((*shown.split(" "), *path), done.stdout.replace(f"{bin_folder}/", ""))
    if not page.usage:
        return Page(page.path, about, page.name)
    page.below = [
        tree(program, shown, bin_folder, *path, term.split()[0], about=words)
        for term, words in page.entries(COMMANDS)
    ]
    return page


def trees(bin_folder: Path) -> list[Page]:
    module = [sys.executable, "-m", "bellwether"]
    return [
        tree([str(bin_folder / "bellwether")], "bellwether", bin_folder),
        tree([str(bin_folder / "bellwetherd")], "bellwetherd", bin_folder),
        tree([str(bin_folder / "bellwether-lab")], "bellwether-lab", bin_folder),
        tree(module, "python -m bellwether", bin_folder),
    ]


def roff(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text[:1] in (".", "'") else text


def definitions(entries: list[tuple[str, str]]) -> Iterator[str]:
    for term, words in entries:
        yield ".TP"
        yield f"\\fB{roff(term)}\\fR"
        yield roff(words) if words else "\\&"


def body(page: Page, top: bool) -> Iterator[str]:
    """Arguments, options and examples; of a command below as one subsection."""

    def heading(title: str) -> str:
        return f".SH {title}" if top else f".PP\n\\fI{title.capitalize()}\\fR"

    for title, entries in (
        ("ARGUMENTS", page.entries(ARGUMENTS)),
        ("OPTIONS", page.entries(OPTIONS)),
    ):
        if entries:
            yield heading(title)
            yield from definitions(entries)
    if examples := page.entries(EXAMPLES):
        yield heading("EXAMPLES" if len(examples) > 1 else "EXAMPLE")
        yield from (".nf", *(f"    {roff(line)}" for line, _ in examples), ".fi")


def man(page: Page, section: str, others: list[str], manual: str) -> str:
    name = "-".join(page.path).replace("python--m-", "python-")
    version = VERSION[1] if VERSION else ""
    out = [
        f'.TH {roff(name.upper())} {section} "" "bellwether {version}" "{manual}"',
        ".SH NAME",
        f"{roff(name)} \\- {roff(page.about.split('. ')[0].rstrip('.') or 'Bellwether in Python')}",
        ".SH SYNOPSIS",
        f"\\fB{roff(page.usage)}\\fR",
        ".SH DESCRIPTION",
        roff(page.about or page.usage),
        *body(page, top=True),
    ]
    if page.below:
        out.append(".SH COMMANDS")
        apart = name == "bellwether"  # Each of its commands has a page of its own.
        for below in page.below:
            if apart:
                out += [".TP", f"\\fBbellwether\\-{roff(below.path[-1])}\\fR(1)", roff(below.about)]
                continue
            for leaf in below.all():
                out += [f".SS {roff(leaf.name)}", f"\\fB{roff(leaf.usage)}\\fR", ".PP"]
                out += [roff(leaf.about or leaf.usage), *body(leaf, top=False)]
    if page.epilog:
        out += [".SH NOTES", roff(page.epilog)]
    out.append(".SH SEE ALSO")
    out.append(",\n".join(f"\\fB{roff(other[:-2])}\\fR({other[-1]})" for other in others))
    return "\n".join(out) + "\n"


def man_pages(roots: list[Page]) -> dict[str, str]:
    """Text by file name: one page a program, and one for each command of bellwether."""
    names = ("bellwether.1", "bellwetherd.8", "bellwether-lab.1", "python-bellwether.1")
    pages = dict(zip(names, roots, strict=True))
    root = pages["bellwether.1"]
    own = {f"bellwether-{below.path[-1]}.1": below for below in root.below}
    main = list(pages)
    texts = {}
    for file, page in {**pages, **own}.items():
        others = [name for name in main if name != file]
        if page is root:
            others += list(own)
        elif file in own:
            page.epilog = "Global options, exit codes and the environment: see bellwether(1)."
        texts[file] = man(page, file[-1], others, "Bellwether")
    return texts


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def markdown(roots: list[Page]) -> str:
    out = [
        "# Commands",
        "",
        "Written by `docs/cli_reference.py` from the programs' own help. The man pages are made from this page.",
        "",
    ]
    for root in roots:
        for page in root.all():
            out += [f"{'#' * (2 if page is root else 3)} {page.name}", ""]
            if page.about:
                out += [page.about, ""]
            out += ["```text", page.usage, "```", ""]
            rows = page.entries(ARGUMENTS) + page.entries(OPTIONS)
            rows = [row for row in rows if not re.match(r"-h, ?--help", row[0])]
            if rows:
                out += ["| | |", "| --- | --- |"]
                out += [f"| `{cell(term)}` | {cell(words)} |" for term, words in rows] + [""]
            if examples := page.entries(EXAMPLES):
                told = f"<!-- {EXAMPLES_ARE[root.name]} -->"
                out += [told, "```sh", *(line for line, _ in examples), "```", ""]
            if page.epilog:
                out += [page.epilog, ""]
    return "\n".join(out).rstrip("\n") + "\n"


def read_markdown(text: str) -> list[Page]:
    """What markdown() was given, but for --help."""
    roots: list[Page] = []
    by_path: dict[tuple[str, ...], Page] = {}
    for chapter in re.split(r"(?m)^(?=###? )", text)[1:]:
        heading, rest = chapter.split("\n\n", 1)
        page = Page(tuple(heading.lstrip("# ").split(" ")))
        about, page.usage, rest = re.split(r"```(?:text)?\n", rest, maxsplit=2)
        page.about, page.usage = about.strip(), page.usage.strip()
        for term, words in re.findall(r"(?m)^\| `([^`]*)` \| (.*) \|$", rest):
            title = OPTIONS[0] if term.startswith("-") else ARGUMENTS[0]
            entry = html.unescape(term.replace("\\|", "|")), html.unescape(words.replace("\\|", "|"))
            page.sections.setdefault(title, []).append(entry)
        if examples := re.search(r"```sh\n(.*?)```\n", rest, re.DOTALL):
            page.sections[EXAMPLES[0]] = [(line, "") for line in examples[1].splitlines()]
        page.epilog = re.sub(r"```sh\n.*?```\n|(?m:^\|.*\n|^<!--.*\n)", "", rest, flags=re.DOTALL).strip()
        (by_path[page.path[:-1]].below if heading.startswith("###") else roots).append(page)
        by_path[page.path] = page
    return roots


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--bin", type=Path, help="the folder of the programs that the reference is about")
    what.add_argument("--man", type=Path, metavar="DIR", help="write the man pages there")
    parser.add_argument("--out", type=Path, default=REFERENCE, help="the reference that --bin writes")
    given = parser.parse_args()
    if given.bin:
        given.out.write_text(markdown(trees(given.bin.resolve())))
        return 0
    given.man.mkdir(parents=True, exist_ok=True)
    for name, text in man_pages(read_markdown(REFERENCE.read_text())).items():
        (given.man / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
