"""The man pages and docs/reference/cli.md say what the programs take, all of it, and as of now.

Goal: every flag of every command is on its page, in a form that man and mandoc can show. The
committed reference is what docs/cli_reference.py writes. A build makes the pages of it, and
installing puts them where man looks.
Method: the flags are taken from each --help here, not by the generator; pages are rendered by man.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get("BELLWETHER_LIB_DIR", ROOT / "build/cpu/bin"))
GENERATOR = str(ROOT / "docs/cli_reference.py")
FLAG = re.compile(r"(?m)^  (?:-\w, ?)?(--[\w.-]+)")
COMMANDS = re.compile(r"\n(?:Subcommands|commands):\n((?:  .*\n)+)")
PROGRAMS = {
    "bellwether.1": [str(BIN / "bellwether")],
    "bellwetherd.8": [str(BIN / "bellwetherd")],
    "python-bellwether.1": [sys.executable, "-m", "bellwether"],
}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "client_lib/python"), "MANWIDTH": "200"}
    env.pop("BELLWETHER_SERVER", None)
    return subprocess.run(words, capture_output=True, text=True, env=env, timeout=120)


def flags_below(*command: str) -> dict[tuple[str, ...], set[str]]:
    """By command, what its --help shows."""
    text = run(*command, "--help").stdout
    found = {command: set(FLAG.findall(text))}
    if below := COMMANDS.search(text):
        for name in re.findall(r"(?m)^  (\S+)", below[1]):
            if name != "version":  # Takes nothing; in Python it has no help either.
                found |= flags_below(*command, name)
    return found


@pytest.fixture(scope="module")
def man(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The man pages as a build makes them: Python without a package is enough."""
    folder = tmp_path_factory.mktemp("man")
    done = run(sys.executable, "-I", "-S", GENERATOR, "--man", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


def rendered(page: Path) -> str:
    shown = run("man", "--warnings", "-l", str(page))
    assert (shown.returncode, shown.stderr) == (0, ""), page
    return re.sub(r".\x08", "", shown.stdout)


def test_the_committed_reference_is_current(tmp_path: Path) -> None:
    written = tmp_path / "cli.md"
    done = run(sys.executable, GENERATOR, "--bin", str(BIN), "--out", str(written))
    assert done.returncode == 0, done.stderr
    committed = (ROOT / "docs/reference/cli.md").read_text()
    assert written.read_text() == committed, "cmake --build build/cpu --target reference"


def test_excluded_options_are_listed_in_one_order() -> None:
    code = "import cli_reference; print(cli_reference.plain('--a Excludes: --json --b-d --c'))"
    done = run(
        sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'docs')!r}); {code}"
    )
    assert (done.stdout, done.stderr) == ("--a Excludes: --b-d --c --json\n", "")


@pytest.mark.parametrize("page", PROGRAMS)
def test_every_flag_is_on_its_page_and_in_the_reference(page: str, man: Path) -> None:
    program = PROGRAMS[page]
    reference = (ROOT / "docs/reference/cli.md").read_text()
    commands = flags_below(*program)
    assert len(commands) > 5
    for command, flags in commands.items():
        below = command[len(program) :]
        own = f"bellwether-{below[0]}.1" if page == "bellwether.1" and below else page
        text = rendered(man / own)
        name = " ".join((page.split(".")[0].replace("python-", "python -m "), *below))
        chapter = reference.split(f" {name}\n\n")[1].split("\n##")[0]
        assert flags - {"--help"} <= set(re.findall(r"--[\w.-]+", chapter)), command
        # The command's own part of the page.
        if (own == page and below) or len(below) > 1:
            text = text.split(f"\n   {name}\n")[1]
            text = re.split(r"\n(?:   )?\S", text)[0]
        assert flags - {"--help"} <= set(re.findall(r"--[\w.-]+", text)), command


def test_every_entry_is_explained() -> None:
    reference = (ROOT / "docs/reference/cli.md").read_text()
    bare = re.findall(r"(?m)^\| `(--?[^`]*)` \|  \|$", reference)
    # Those that Python's own parsers leave bare are said by their names.
    assert bare == []


def test_man_and_mandoc_can_show_all_pages(man: Path) -> None:
    pages = sorted(path.name for path in man.iterdir())
    assert {"bellwether-run.1", *PROGRAMS} <= set(pages)
    for page in pages:
        linted = run("mandoc", "-T", "lint", "-W", "warning", str(man / page))
        complaints = [line for line in linted.stdout.splitlines() if "missing date" not in line]
        assert complaints == []
        text = rendered(man / page)
        assert re.search(r"bellwether \d+\.\d+\.\d+ ", text), page
        for part in ("NAME", "SYNOPSIS", "DESCRIPTION", "SEE ALSO"):
            assert f"\n{part}\n" in text, page
        # What is named elsewhere is there.
        for name, section in re.findall(r"(?m)\b((?:python-)?bellwether[\w-]*)\((\d)\)", text):
            assert f"{name}.{section}" in pages, f"{page}: {name}({section})"


def test_the_pages_of_the_build_are_installed(tmp_path: Path, man: Path) -> None:
    script = BIN.parent / "client_lib/cli/cmake_install.cmake"
    done = run("cmake", f"-DCMAKE_INSTALL_PREFIX={tmp_path}", "-P", str(script))
    assert done.returncode == 0, done.stderr
    installed = {path.name: path.read_text() for path in (tmp_path / "share/man").rglob("*.*")}
    assert installed == {path.name: path.read_text() for path in man.iterdir()}
    assert (tmp_path / "share/man/man8/bellwetherd.8").exists()
