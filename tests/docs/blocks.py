"""The fenced blocks of a document, and the comments right above each:

    <!-- not run: REASON -->       the block is not run here; its flags are looked up all the same
    <!-- run by tests/x.py -->     that test reads the block from the document and runs it
    <!-- before: CODE -->          runs before the block; what a reader has already, or leaves
    behind
    <!-- checked as: KIND -->      for YAML: whose file it is

Several may stand above one block.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^( *)```(.*)\n((?:.*\n)*?) *```$", re.MULTILINE)
_COMMENTS = re.compile(r"(?:^ *<!-- .* -->\n)+\Z", re.MULTILINE)
_COMMENT = re.compile(r"<!-- (not run|run by|before|checked as):? (.*) -->")


@dataclass
class Block:
    document: str
    line: int
    language: str
    text: str
    said: dict[str, list[str]] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def before(self) -> str:
        return "\n".join(self.said.get("before", []))

    @property
    def is_elsewhere(self) -> bool:
        return "not run" in self.said or "run by" in self.said


def documents() -> list[str]:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "*.md"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return sorted(set(listed.stdout.split()))


def blocks_of(document: str, text: str | None = None) -> list[Block]:
    """Raises ValueError for a comment above a block that says nothing that is known."""
    text = (ROOT / document).read_text() if text is None else text
    found = []
    for fence in _FENCE.finditer(text):
        block = Block(document, text.count("\n", 0, fence.start()) + 1, fence[2].strip(),
                      re.sub(f"(?m)^{fence[1]}", "", fence[3]))  # fmt: skip
        above = _COMMENTS.search(text[: fence.start()])
        for line in above[0].splitlines() if above else ():
            said = _COMMENT.fullmatch(line.strip())
            if not said:
                raise ValueError(f"{block.place}: {line.strip()}: says nothing that is known")
            block.said.setdefault(said[1], []).append(said[2])
        found.append(block)
    return found


def without_blocks(text: str) -> str:
    return _FENCE.sub("", text)
