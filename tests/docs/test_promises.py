"""Goal: no document takes back what the product promises: a restart of the server takes nothing
away, and what is kept how long depends on retention alone.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOSS = re.compile(r"\b(takes? (it|them|all|that) away|is lost|are lost|loses|forgets?)\b")


def sentences(path: Path) -> list[str]:
    return re.split(r"(?<=[.!?:])\s+", path.read_text())


def says_that_a_restart_loses_runs(sentence: str) -> bool:
    """Of the server: a training job that restarts is another matter."""
    denies = re.search(r"\b(none|nothing|not|no)\b", sentence)
    return bool(re.search(r"\brestart\b", sentence) and LOSS.search(sentence) and not denies)


def test_no_document_says_that_a_restart_loses_runs() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "dashboards/alerts/runbooks").glob("*.md")]
    assert len(pages) > 60
    found = [f"{page.name}: {text}" for page in pages for text in sentences(page)]
    assert [text for text in found if says_that_a_restart_loses_runs(text)] == []
    assert says_that_a_restart_loses_runs("Export it before a restart takes it away.")
    assert not says_that_a_restart_loses_runs("Export it before retention thins it.")


def test_exporting_a_run_is_advised_before_retention_thins_it() -> None:
    page = sentences(ROOT / "docs/respond.md")
    (advice,) = [text for text in page if "run export RUN FILE" in text]
    assert "retention" in advice and "restart" not in advice
