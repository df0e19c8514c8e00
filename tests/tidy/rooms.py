"""Measures the structure of a revision: rooms, floors, arrows, and arrows that point upward.

A room is a folder of C++, with its library's public headers, or a folder of the Python package,
or a module beside those, or a file of the page.  An arrow goes from a room to each other room that
it includes or imports, also within functions and for types alone.  A floor stands on all that its
rooms include; rooms that reach each other share one.  An arrow points upward if a circle has to be
cut at it, where as few as were found by moving one room at a time are cut.

    python3 tests/tidy/rooms.py [REVISION...]    one table a revision; without one, the working tree
    python3 tests/tidy/rooms.py --arrows         every arrow as well
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path, PurePosixPath

from imports import circles, page_imports, python_imports, reach

ROOT = Path(__file__).resolve().parents[2]
CPP = re.compile(r"^(server|client_lib|kernels|proto)/.*\.(h|hpp|cc|cu|cuh)$")
PYTHON = "client_lib/python/bellwether/"
PAGE = "dashboards/console/src/"
INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)
Arrows = set[tuple[str, str]]


def texts(revision: str | None) -> dict[str, str]:
    """Path -> text of the sources of a revision; None: of the working tree's tracked files."""
    listed = ["ls-tree", "-r", "--name-only", revision] if revision else ["ls-files"]
    paths = subprocess.run(
        ["git", *listed], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    wanted = [
        path
        for path in paths
        if CPP.match(path) or (path.startswith((PYTHON, PAGE)) and path.endswith((".py", ".ts")))
    ]
    if revision is None:
        return {path: (ROOT / path).read_text() for path in wanted if (ROOT / path).is_file()}
    names = "".join(f"{revision}:{path}\n" for path in wanted).encode()
    out = subprocess.run(
        ["git", "cat-file", "--batch"], cwd=ROOT, check=True, capture_output=True, input=names
    ).stdout
    found = {}
    for path in wanted:
        head, _, out = out.partition(b"\n")
        size = int(head.split()[2])
        found[path], out = out[:size].decode(), out[size + 1 :]
    return found


def cpp(sources: dict[str, str]) -> tuple[set[str], Arrows]:
    files = {path for path in sources if CPP.match(path)}
    roots = [""] + [f"{top}/include/" for top in ("kernels", "client_lib", "proto")]

    def folder(path: str) -> str:
        return str(PurePosixPath(path).parent).partition("/include")[0]

    def target(path: str, name: str) -> str | None:
        if name.endswith(".pb.h"):
            return "proto"
        places = [f"{PurePosixPath(path).parent}/{name}", *(root + name for root in roots)]
        return next((folder(place) for place in places if place in files), None)

    arrows = {
        (folder(path), to)
        for path in files
        for name in INCLUDE.findall(sources[path])
        if (to := target(path, name))
    }
    return {folder(path) for path in files} | {to for _, to in arrows}, arrows


def python(sources: dict[str, str]) -> tuple[set[str], Arrows]:
    modules = {
        path.removeprefix(PYTHON).removesuffix(".py").replace("/", "."): text
        for path, text in sources.items()
        if path.startswith(PYTHON)
    }
    # The package's own face imports all of it and is imported for names alone.
    rooms = {place.split(".")[0] for place in modules} - {"__init__", "__main__"}
    arrows = {
        (place.split(".")[0], to.split(".")[0])
        for place, text in modules.items()
        for to in python_imports(place, text, set(modules))
    }
    return rooms, {(a, b) for a, b in arrows if a in rooms and b in rooms}


def page(sources: dict[str, str]) -> tuple[set[str], Arrows]:
    files = {p.removeprefix(PAGE)[:-3]: text for p, text in sources.items() if p.startswith(PAGE)}
    return set(files), {(a, b) for a, to in page_imports(files).items() for b in to}


def groups(rooms: set[str], arrows: Arrows) -> list[set[str]]:
    """Rooms that reach each other, lowest first."""
    below = {room: {b for a, b in arrows if a == room} for room in rooms}
    together = [set(circle) for circle in circles(below)]
    alone = rooms.difference(*together)
    reached = reach(below)
    # What reaches less stands lower.
    found = [*together, *({room} for room in sorted(alone))]
    return sorted(found, key=lambda g: len(g.union(*(reached[room] for room in g))))


def upward(group: set[str], arrows: Arrows) -> set[tuple[str, str]]:
    """Arrows of a group against the order that has the fewest, found by moving one at a time."""
    inside = {(a, b) for a, b in arrows if a in group and b in group and a != b}
    order = sorted(group, key=lambda r: (sum(a == r for a, _ in inside), r))

    def against(rooms: list[str]) -> set[tuple[str, str]]:
        at = {room: place for place, room in enumerate(rooms)}
        return {(a, b) for a, b in inside if at[a] < at[b]}

    best = against(order)
    improved = True
    while improved:
        improved = False
        for room in sorted(group):
            rest = [other for other in order if other != room]
            for place in range(len(order)):
                tried = [*rest[:place], room, *rest[place:]]
                if len(found := against(tried)) < len(best):
                    order, best, improved = tried, found, True
    return best


def floors(ordered: list[set[str]], arrows: Arrows) -> int:
    floor: dict[str, int] = {}
    for group in ordered:
        under = [floor[b] for a, b in arrows if a in group and b not in group]
        for room in group:
            floor[room] = 1 + max(under, default=0)
    return max(floor.values(), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("revision", nargs="*")
    parser.add_argument("--arrows", action="store_true", help="print every arrow")
    options = parser.parse_args()
    for revision in options.revision or [None]:
        print(f"{revision or 'working tree':<14} rooms floors arrows upward")
        sources = texts(revision)
        for language, read in (("C++", cpp), ("Python", python), ("TypeScript", page)):
            rooms, arrows = read(sources)
            apart = {(a, b) for a, b in arrows if a != b}
            ordered = groups(rooms, apart)
            against = set[tuple[str, str]]().union(*(upward(g, apart) for g in ordered))
            height = floors(ordered, apart)
            print(f"{language:<14} {len(rooms):5} {height:6} {len(apart):6} {len(against):6}")
            for a, b in sorted(against):
                print(f"  upward: {a} -> {b}")
            if options.arrows:
                for a, b in sorted(apart):
                    print(f"  {a} -> {b}")


if __name__ == "__main__":
    main()
