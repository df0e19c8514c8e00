"""Goal: the rooms of the Python package take only what lies below them, and no module of it
     takes part in a circle of imports.  No class has more attributes than a reader can hold, the
     handle stays short, and tests ask it by its public members.
Method: every import is read from the syntax tree, those within functions and those for types
     alone included; the table says which rooms a room may import.  A planted import of each kind
     must be found, and a planted class.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from imports import circles, python_imports

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "client_lib" / "python" / "bellwether"
ATTRIBUTES_MAX = 20
HANDLE_LINES_MAX = 300
_PRIVATE = re.compile(r"\b(?:monitor|mon|handle)\._[a-z]\w*")

# A room is a folder of the package, a folder within one, or a module beside the folders.
_LOW = {"_util", "actions", "settings", "_native", "_kernels"}
_HOOK = {"_hook"} | {
    f"_hook.{name}" for name in ("calls", "model", "functions", "compiled", "layer", "patches")
}
_WATCHING = _LOW | _HOOK | {"_weights", "_server", "_step", "_actions", "_attention", "monitor"}
_ATTACHING = _WATCHING | {"_attach"}
ALLOWED: dict[str, set[str]] = {
    "_util": set(),
    "actions": set(),
    "settings": {"_util", "actions"},
    "_native": {"_util"},
    "_server": {"_util", "_native", "settings"},
    "_kernels": {"_util", "_native"},
    "_weights": {"_util"},
    "_hook.calls": {"_weights"},
    "_hook.model": {"_util", "_weights", "_hook.calls"},
    "_hook.functions": {"_util", "_native", "_hook.calls"},
    "_hook": {"_util", "_kernels", "settings", "_hook.calls"},
    "_hook.compiled": {"_util", "_kernels", "_weights", "_hook", "_hook.calls", "_hook.functions"},
    "_hook.layer": {"_util", "settings", "_kernels", "_weights", "_hook", "_hook.calls"}
    | {"_hook.model"},
    "_hook.patches": {"_util"} | _HOOK - {"_hook.layer"},
    "_adapters": {"_util", "_hook.calls", "_hook.functions", "_hook.patches"},
    "_attention": _LOW | {"_weights", "_hook", "_hook.calls", "_hook.model", "_hook.patches"},
    "_laws": {"_util", "_kernels"},
    "_step": _LOW | {"_laws", "_weights", "_hook", "_hook.model", "_hook.layer", "_hook.patches"},
    "_actions": _LOW | (_HOOK - {"_hook.compiled"}) | {"_weights", "_attention", "_step"},
    "monitor": _WATCHING - {"_attention", "monitor"},
    "_unwatched": {"_util"},
    "_attach": _WATCHING | {"_adapters", "_unwatched"},
    # What users import, and the commands.
    "client": {"_native"},
    "query": {"_util", "_server", "actions"},
    "hf": {"_attention", "_hf_callback"},
    "rl": {"_util"},
    "trackers": {"_util", "_server", "rl"},
    "accelerate": _ATTACHING | {"trackers"},
    "_hf_callback": _ATTACHING | {"rl"},
    "lightning": _ATTACHING,
    "megatron": {"_adapters", "_hook.model", "_hook.patches"},
    "sdpa": {"_util", "_native", "_attention"},
    "attach_pid": _ATTACHING,
    "forward": {"_util", "_server", "query"},
    "scan": _LOW | {"_server", "_weights", "_step"},
    "tools": _ATTACHING | {"query", "_laws"},
    "npz2run": {"tools"},
}
_FACES = {"__init__", "__main__"}  # They may import all, and nothing imports them but for names.


def modules(package: Path) -> dict[str, str]:
    """Text of each module by its dotted place below the package."""
    return {
        ".".join(path.relative_to(package).with_suffix("").parts): path.read_text()
        for path in sorted(package.rglob("*.py"))
    }


def room(place: str) -> str:
    return place.rpartition(".")[0] or place


def violations(texts: dict[str, str]) -> list[str]:
    known = set(texts)
    arrows = {place: python_imports(place, text, known) for place, text in texts.items()}
    found = []
    for place, targets in sorted(arrows.items()):
        own = room(place)
        if own in _FACES:
            continue
        if own not in ALLOWED:
            found.append(f"{place}: no row of the table names the room {own}")
            continue
        for target in sorted(targets):
            other = room(target)
            if other not in {own, "__init__"} | ALLOWED[own]:
                found.append(f"{place} imports {target}: {own} may not import {other}")
    # The package itself, whose names all may take (`from .. import __version__`), is left out.
    inside = {a: to - {"__init__"} for a, to in arrows.items() if a != "__init__"}
    return found + [f"a circle: {', '.join(circle)}" for circle in circles(inside)]


def attributes(of: ast.ClassDef) -> set[str]:
    """What its methods assign to self, within this class alone."""
    return {
        node.attr
        for node in ast.walk(of)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def too_large(texts: dict[str, str]) -> list[str]:
    found = []
    for place, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and len(attributes(node)) > ATTRIBUTES_MAX:
                count = len(attributes(node))
                found.append(f"{place}.{node.name}: {count} attributes, {ATTRIBUTES_MAX} at most")
    lines = texts["monitor"].count("\n")
    if lines >= HANDLE_LINES_MAX:
        found.append(f"monitor: {lines} lines, below {HANDLE_LINES_MAX} is legal")
    return found


def private_reaches() -> list[str]:
    """Tests that would break where nothing that they are about has changed."""
    return [
        f"{path.relative_to(ROOT)}: {hit.group()}"
        for folder in ("python", "bench", "e2e", "docs")
        for path in sorted((ROOT / "tests" / folder).glob("*.py"))
        for hit in _PRIVATE.finditer(path.read_text())
    ]


def main() -> int:
    texts = modules(PACKAGE)
    found = violations(texts) + too_large(texts) + private_reaches()
    for line in found:
        print(line)
    unused = set(ALLOWED) - {room(place) for place in texts}
    if unused:
        print(f"rooms of the table that are not there: {', '.join(sorted(unused))}")
    failed = bool(found or unused)
    planted = {
        "at the top": "from ...monitor import Monitor\n",
        "in a function": "def f() -> None:\n    from ... import monitor\n",
        "for types alone": "if TYPE_CHECKING:\n    from ...monitor import Monitor\n",
        "by its whole name": "import bellwether.monitor\n",
        "a name of a room": "from ..._actions import executor\n",
        "a room beside it": "from ..patches import intercept\n",
    }
    for how, line in planted.items():
        place = "_hook.layer.layer"
        if not violations({**texts, place: texts[place] + line}):
            print(f"a planted import was not found: {how}")
            failed = True
    members = "".join(f"        self.a{i} = 0\n" for i in range(ATTRIBUTES_MAX + 1))
    if not too_large({**texts, "stray": f"class A:\n    def __init__(self):\n{members}"}):
        print("a planted class of many attributes was not found")
        failed = True
    circle = {**texts, "_util.log": texts["_util.log"] + "from . import guard\n"}
    if not any("circle" in line for line in violations(circle)):
        print("a planted circle was not found")
        failed = True
    if not violations({**texts, "stray": ""}):
        print("a module that no row names was not found")
        failed = True
    arrows = {
        (room(a), room(b)) for a, t in texts.items() for b in python_imports(a, t, set(texts))
    }
    apart = {(a, b) for a, b in arrows if a != b and not {a, b} & _FACES}
    print(f"{len(texts)} modules, {len(ALLOWED)} rooms, {len(apart)} arrows between them")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
