"""Every relative link of a document leads somewhere, and so does the heading it names."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_listed = subprocess.run(
    ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "*.md"],
    capture_output=True, text=True,
)  # fmt: skip
DOCUMENTS = sorted(set(_listed.stdout.split()))


def anchors(text: str) -> set[str]:
    """The ids that its headings get where it is shown."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(words.strip().replace(" ", "-"))
    return found


def test_documents_are_found() -> None:
    assert {"README.md", "docs/paper.md"} <= set(DOCUMENTS)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    document = ROOT / name
    broken = []
    for target in LINK.findall(FENCE.sub("", document.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        place = document if not path else document.parent / path
        if not place.exists():
            broken.append(target)
            continue
        heads = anchors(place.read_text()) if anchor and place.suffix == ".md" else {anchor}
        if anchor not in heads:
            broken.append(target)
    assert not broken
