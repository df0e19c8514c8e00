"""The documentation as a site: every Markdown document of the repository, at its own path.

    sphinx-build -W --keep-going -q -c docs/site . build/site

MyST reads Markdown as GitHub does, so the documents are the same in both places.  What a document
links to beside documents (a rules file, a .proto) is copied into the site.  A document that is in
no chapter below, a link that leads nowhere and a heading that is not there are errors.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
RUNBOOKS = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "dashboards/alerts/runbooks").glob("*.md")
)
CHAPTERS = {
    "Begin": ["docs/index.md", "docs/tutorial.md", "docs/quickstart.md", "docs/frameworks.md",
              "docs/attach.md", "docs/scan.md", "docs/faq.md", "docs/comparison.md",
              "examples/README.md"],
    "Understand": ["docs/console.md", "docs/concepts/detection.md", "docs/concepts/causes.md",
                   "docs/concepts/judged.md",
                   "docs/concepts/granularities.md", "docs/concepts/own_signals.md",
                   "docs/concepts/experts.md", "docs/concepts/fp8.md", "docs/concepts/losses.md",
                   "docs/concepts/steps.md", "docs/concepts/baselines.md",
                   "docs/concepts/spectra.md", "docs/concepts/attention.md",
                   "docs/concepts/laws.md",
                   "docs/concepts/actions.md", "docs/paper.md"],
    "Operate": ["docs/operate/lifecycle.md", "deploy/README.md", "docs/operate/alerting.md",
                "docs/operate/grafana.md", "docs/operate/sizing.md", "docs/reliability.md",
                "docs/reliability_evidence.md",
                "docs/operate/security.md", "docs/operate/cluster.md", "docs/operate/site.md",
                "SECURITY.md"],
    "Respond": ["docs/respond.md", *RUNBOOKS],
    "Query": ["docs/query.md", "docs/integrations.md"],
    "Reference": ["docs/reference/cli.md", "docs/reference/signals.md", "docs/reference/rules.md",
                  "docs/reference/policy.md", "docs/reference/configuration.md",
                  "docs/glossary.md",
                  "docs/benchmarks.md", "kernels/RESULTS.md",
                  "instabilities/README.md",
                  "CHANGELOG.md"],
    "Change it": ["ARCHITECTURE.md", "docs/design/client.md", "docs/design/ingest.md",
                  "docs/design/durability.md", "docs/design/detection.md",
                  "docs/design/actions.md", "docs/design/cluster.md", "docs/design/build.md",
                  "CONTRIBUTING.md", "tests/testdata/runs/README.md",
                  "tests/testdata/tiny/README.md"],
}  # fmt: skip

project = "Bellwether"
_version = re.search(r"project\(bellwether VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())
assert _version
release = _version[1]
extensions = ["myst_parser"]
root_doc = "README"
_listed = subprocess.run(
    ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "*.md"],
    capture_output=True, text=True, check=True,
)  # fmt: skip
include_patterns = _listed.stdout.split()
exclude_patterns = ["build", ".venv", ".git", "**/node_modules"]
myst_heading_anchors = 6
myst_links_external_new_tab = False
suppress_warnings = ["misc.highlighting_failure"]  # Excerpts with "..." are no whole programs.
highlight_language = "text"
html_theme = "furo"
html_title = f"Bellwether {release}"
html_favicon = "../../dashboards/console/src/favicon.svg"
html_copy_source = html_show_sourcelink = html_show_sphinx = False
html_show_copyright = False


def _chapters(_: Sphinx, docname: str, source: list[str]) -> None:
    """Gives the first page the table of contents, which is left out of the page in the repository.
    """
    if docname != root_doc:
        return
    for caption, documents in CHAPTERS.items():
        entries = "\n".join(document.removesuffix(".md") for document in documents)
        source[0] += f"\n\n```{{toctree}}\n:caption: {caption}\n:hidden:\n\n{entries}\n```\n"


def _home(app: Sphinx, error: Exception | None) -> None:
    """The first page under the name that servers look for."""
    if error is None and app.builder.name == "html":
        shutil.copy(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("source-read", _chapters)
    app.connect("build-finished", _home)
