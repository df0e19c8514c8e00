"""docs/paper.md names what exists, and its figures are drawn from the recordings by its command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "paper.md").read_text()
PLACES = ("client_lib/", "kernels/", "server/", "tests/", "proto/", "examples/", "docs/")


def test_the_figures_are_drawn(tmp_path: Path) -> None:
    command = re.search(r"`python (docs/\S+\.py)`", PAGE)
    assert command
    done = subprocess.run(
        [sys.executable, str(ROOT / command[1]), "--out", str(tmp_path)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = set(re.findall(r"\(images/paper/(figure-\d+\.png)\)", PAGE))
    assert {path.name for path in tmp_path.iterdir()} == shown
    assert {path.name for path in (ROOT / "docs" / "images" / "paper").iterdir()} == shown
    assert all((tmp_path / name).stat().st_size > 5000 for name in shown)


def test_named_files_and_runs_exist() -> None:
    quoted = set(re.findall(r"`([^`\n]+)`", PAGE))
    paths = {name for name in quoted if name.startswith(PLACES)}
    assert len(paths) > 5
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    files = {name for name in quoted if re.fullmatch(r"\w+\.(py|h|md)", name)}
    known = {path.name for path in ROOT.rglob("*") if path.suffix in (".py", ".h", ".md")}
    assert files <= known
    runs = {name for name in quoted if re.match(r"(gpt|llama)\d*-", name)}
    assert len(runs) >= 4
    for run in runs:
        assert (ROOT / "tests" / "testdata" / "runs" / f"{run}.bwrun").exists(), run


def test_the_tests_it_names_are_there() -> None:
    named = set(re.findall(r"`(\w+Test)\.(\w+)`", PAGE))
    assert named
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("*_test.cc"))
    for suite, test in named:
        assert re.search(rf"TEST\w*\({suite}, {test}\)", sources), f"{suite}.{test}"


def test_the_signals_it_names_are_there() -> None:
    catalogue = (ROOT / "docs" / "reference" / "signals.md").read_text()
    for name in ("delta_bias_sum", "key_coherence_sum", "wq_direction_overlap", "wq_stable_rank",
                 "drift_ratio", "key_leak", "tied_rows_bf16", "tied_rows_eps", "saturated_rows",
                 "tied_rows_eps_paper", "tied_fraction_bf16"):  # fmt: skip
        assert f"`{name}`" in PAGE and f"`{name}`" in catalogue, name
