"""Goal: the documentation builds as a site without a warning.  Every document is in a chapter,
every link, picture and heading is there.  It loads nothing from elsewhere, and can be searched.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/operate/site.md").read_text()
_command = re.search(r"(?m)^python (-m sphinx .*) build/site$", PAGE)
assert _command
BUILD = [sys.executable, *_command[1].split()]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    built = subprocess.run([*BUILD, out], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return out


def test_site_begins_with_the_readme_and_has_every_document(site: Path) -> None:
    assert "Build from source" in (site / "index.html").read_text()
    runbook = "dashboards/alerts/runbooks/bellwetherdown"
    for document in ("ARCHITECTURE", "docs/reference/cli", "deploy/README", runbook):
        assert (site / f"{document}.html").exists(), document
    assert "key_leak" in (site / "searchindex.js").read_text()


def test_site_has_the_version_of_the_program(site: Path) -> None:
    said = re.search(r"project\(bellwether VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert said
    assert f"<title>Bellwether {said[1]}</title>" in (site / "index.html").read_text()


def test_site_needs_no_external_resources(site: Path) -> None:
    asked = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["']https?://[^"']+""")
    for page in site.rglob("*.html"):
        assert asked.findall(page.read_text()) == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?https?:", sheet.read_text()), sheet


def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "docs/site").mkdir(parents=True)
    for name in ("README.md", "CMakeLists.txt"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    conf = (ROOT / "docs/site/conf.py").read_text()
    (source / "docs/site/conf.py").write_text(
        re.sub(r"(?s)CHAPTERS = .*?# fmt: skip", "CHAPTERS = {}", conf)
    )
    (source / "README.md").write_text("# Title\n\n[nowhere](nowhere.md) and [no heading](#none)\n")
    (source / "dashboards/console/src").mkdir(parents=True)
    (source / "dashboards/console/src/favicon.svg").write_text("<svg/>")
    subprocess.run(["git", "init", "-q"], cwd=source, check=True)
    built = subprocess.run([*BUILD, tmp_path / "out"], cwd=source, capture_output=True, text=True)
    assert built.returncode != 0
    assert "nowhere.md" in built.stderr and "none" in built.stderr
