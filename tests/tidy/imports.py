"""Reads imports of the Python package and of the page, and finds circles of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

_PAGE_IMPORT = re.compile(r"""(?:from|import)\s*\(?['"]\./([\w-]+)(?:\.js)?['"]""")


def python_imports(place: str, text: str, known: set[str]) -> set[str]:
    """Modules of the package that the module at `place` imports, wherever in its text.

    `place` and `known` are dotted places below the package; "x.__init__" is the package x.
    """

    def module(parts: list[str]) -> str | None:
        whole = ".".join(parts)
        face = ".".join([*parts, "__init__"])
        return whole if whole in known else face if face in known else None

    found: set[str] = set()
    for parts, name in _imported(place.split(".")[:-1], text):
        if to := (module([*parts, name]) if name else None) or module(parts):
            found.add(to)
    return found


def _imported(folder: list[str], text: str) -> Iterator[tuple[list[str], str]]:
    """Each import as the module's place and the name that is taken from it, "" = none."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for name in node.names:
                top, *parts = name.name.split(".")
                if top == "bellwether":
                    yield parts, ""
        elif isinstance(node, ast.ImportFrom):
            parts = node.module.split(".") if node.module else []
            if node.level:
                parts = [*folder[: len(folder) - (node.level - 1)], *parts]
            elif parts[:1] == ["bellwether"]:
                parts = parts[1:]
            else:
                continue
            for name in node.names:
                yield parts, name.name


def page_imports(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Which of the page's files each of them imports, types included; by name without ending."""
    return {name: set(_PAGE_IMPORT.findall(text)) & set(sources) for name, text in sources.items()}


def reach(arrows: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """What each place reaches along arrows; itself only if it is on a circle."""
    reached = {}
    for start in arrows:
        seen, waiting = set[str](), [start]
        while waiting:
            for to in arrows.get(waiting.pop(), set()) - seen:
                seen.add(to)
                waiting.append(to)
        reached[start] = seen
    return reached


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of places that reach each other, sorted."""
    reached = reach(arrows)
    found = {
        tuple(sorted(other for other in reached[place] if place in reached.get(other, set())))
        for place in reached
        if place in reached[place]
    }
    return [list(group) for group in sorted(found)]
