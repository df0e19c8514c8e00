"""Goal: dashboards, rules, runbooks and page agree with each other and with the server's list of
metrics.

Method: Prometheus' own checker where it is installed; generated
files are generated again and compared; names are compared as text. Each check
that could find nothing is shown a planted fault.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = ROOT / "dashboards"
ALERTS = DASHBOARDS / "alerts"
sys.path[:0] = [str(Path(__file__).parent), str(DASHBOARDS / "grafana"), str(ROOT / "tests/tidy")]
import thresholds_said
from imports import circles, page_imports
from thresholds import built_in

SUFFIXES = ("_bucket", "_sum", "_count")

# Lines 3 to 6 name what proto/ does not have, or take a message that may be absent.
PLANTED_TYPES = """\
import type { Alert, Query, Run } from './wire';
export const good = (alert: Alert, run: Run): boolean => alert.last.state === 'ALERT_STATE_FIRING' && run.stage > 0;
export const field = (run: Run): number => run.phase;
export const name = (alert: Alert): boolean => alert.last.state === 'ALERT_STATE_BURNING';
export const absent = (run: Run): boolean => run.eta.known;
export type Method = Query['ReadRun'];
"""


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)


def known_metrics() -> dict[str, str]:
    """Name -> kind of everything that may be exported."""
    catalogue = (ROOT / "server/export/metrics_catalog.cc").read_text()
    known = {m[1]: m[2] for m in re.finditer(r'\{"([a-z0-9_]+)",\s*k(Counter|Gauge|Histogram)', catalogue)}
    for name in re.findall(r'name: "(bellwether_[a-z0-9_]+)"', (ROOT / "proto/bellwether/v1/signals.proto").read_text()):
        known[name] = "Counter" if name.endswith("_total") else "Gauge"
    return known


def unknown_names(text: str, known: dict[str, str]) -> set[str]:
    """Metric names in `text` that are not exported."""
    unknown = set()
    for name in re.findall(r"(?<![\w:.\-/])((?:bellwether|process|grpc_server)_[a-z0-9_]+)", text):
        base = next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s) and known.get(name.removesuffix(s)) == "Histogram"), name)
        if base not in known and name not in {"bellwether_alerts"}:
            unknown.add(name)
    return unknown


class MetricNames(unittest.TestCase):
    def test_dashboards_rules_and_runbooks_name_exported_metrics_only(self) -> None:
        known = known_metrics()
        self.assertGreater(len(known), 70)
        files = [p for p in DASHBOARDS.rglob("*") if p.suffix in {".json", ".yml", ".md", ".py", ".libsonnet"} and "node_modules" not in p.parts]
        self.assertGreater(len(files), 20)
        for path in files:
            self.assertEqual(unknown_names(path.read_text(), known), set(), path)

    def test_planted_names_are_seen(self) -> None:
        known = known_metrics()
        self.assertEqual(unknown_names("rate(bellwether_no_such_total[5m])", known), {"bellwether_no_such_total"})
        self.assertEqual(unknown_names("bellwether_run_step_bucket", known), {"bellwether_run_step_bucket"})
        self.assertEqual(unknown_names("bellwether_ack_seconds_bucket", known), set())

    def test_listed_metrics_are_all_counted(self) -> None:
        code = "".join(p.read_text() for p in (ROOT / "server").rglob("*.[ch]*") if p.name != "metrics_catalog.cc")
        listed = re.findall(r'\{"([a-z0-9_]+)", k(?:Counter|Gauge|Histogram)', (ROOT / "server/export/metrics_catalog.cc").read_text())
        self.assertGreater(len(listed), 40)
        self.assertEqual([name for name in listed if f'"{name}"' not in code], [])

    def test_the_server_counts_under_listed_names_and_kinds(self) -> None:
        known = known_metrics()
        calls = 0
        for path in (ROOT / "server").rglob("*.[ch]*"):
            for kind, name in re.findall(r'\b(counter|gauge|histogram)\(\s*"([a-z0-9_]+)"', path.read_text()):
                calls += 1
                self.assertEqual(known.get(name, "unlisted"), kind.capitalize(), f"{path}: {name}")
        self.assertGreater(calls, 5)


class Rules(unittest.TestCase):
    def setUp(self) -> None:
        if shutil.which("promtool") is None:
            self.skipTest("promtool is not installed")

    def test_promtool_accepts_the_rules(self) -> None:
        checked = run("promtool", "check", "rules", "--lint=all", "--lint-fatal", "rules.yml", cwd=ALERTS)
        self.assertEqual(checked.returncode, 0, checked.stdout + checked.stderr)

    def test_the_rules_do_what_their_tests_say(self) -> None:
        tested = run("promtool", "test", "rules", "rules_test.yml", cwd=ALERTS)
        self.assertEqual(tested.returncode, 0, tested.stdout + tested.stderr)

    def test_a_weakened_rule_fails_its_test(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            text = (ALERTS / "rules.yml").read_text()
            self.assertIn('rule="drift"}[5m]', text)
            (Path(folder) / "rules.yml").write_text(text.replace('rule="drift"}[5m]', 'rule="drift"}[30s]'))
            shutil.copy(ALERTS / "rules_test.yml", folder)
            self.assertNotEqual(run("promtool", "test", "rules", "rules_test.yml", cwd=Path(folder)).returncode, 0)


class Runbooks(unittest.TestCase):
    def test_one_per_alert_and_the_reverse(self) -> None:
        text = (ALERTS / "rules.yml").read_text()
        alerts = set(re.findall(r"- alert: (\w+)", text))
        self.assertGreater(len(alerts), 15)
        books = {p.stem: p.read_text() for p in (ALERTS / "runbooks").glob("*.md")}
        self.assertEqual({a.lower() for a in alerts}, set(books))
        self.assertEqual(set(re.findall(r"/runbook/(\w+)", text)), set(books))
        for alert in alerts:
            book = books[alert.lower()]
            self.assertTrue(book.startswith(f"# {alert}\n"), alert)
            for section in ("## Meaning", "## Impact", "## Diagnosis", "## What to do"):
                self.assertRegex(book, rf"(?m)^{section}\n\S", f"{alert}: {section}")

    def test_respond_page_links_all_runbooks(self) -> None:
        page = (ROOT / "docs/respond.md").read_text()
        books = {p.stem for p in (ALERTS / "runbooks").glob("*.md")}
        self.assertEqual(set(re.findall(r"/runbooks/(\w+)\.md\)", page)), books)

    def test_notifications_use_the_names_of_the_rules(self) -> None:
        alerts = set(re.findall(r"- alert: (\w+)", (ALERTS / "rules.yml").read_text()))
        sent = set(re.findall(r'"(Bellwether[A-Z]\w+)"', (ROOT / "server/export/alert_json.cc").read_text()))
        self.assertGreater(len(sent), 8)
        self.assertEqual(sent - alerts, set())

    def test_every_alert_of_the_server_has_a_runbook(self) -> None:
        sent = set(re.findall(r'"(Bellwether[A-Z]\w+)"', (ROOT / "server/export/alert_json.cc").read_text()))
        books = {p.stem for p in (ALERTS / "runbooks").glob("*.md")}
        self.assertEqual({name.lower() for name in sent} - books, set())

    def test_prometheus_rules_say_the_server_words(self) -> None:
        words = (ROOT / "server/model/alert_words.cc").read_text()
        table = words[words.index("kWords[]") : words.index("};", words.index("kWords[]"))]
        said = {row[0]: [phrase for phrase in row[2:] if phrase] for row in re.findall(r'\{"(\w+)",\s*"([^"]*)",\s*"([^"]*)",\s*"([^"]*)",\s*"([^"]*)"\}', table)}
        names = dict(re.findall(r'\{"(\w+)", "(Bellwether\w+)"\}', (ROOT / "server/export/alert_json.cc").read_text()))
        self.assertEqual(set(said), set(names))
        text = (ALERTS / "rules.yml").read_text()
        summaries = dict(re.findall(r"- alert: (\w+)\n(?: {4,}[^ -].*\n)*? +summary: '(.*)'", text))
        for rule, phrases in said.items():
            self.assertTrue(summaries[names[rule]].startswith("{{ toUpper $labels.severity }} {{ $labels.run }}: "), rule)
            for phrase in phrases:
                self.assertIn(phrase.replace("{place}", "layer {{ $labels.layer }} head {{ $labels.head }}"), summaries[names[rule]])

    def test_documented_commands_replace_every_placeholder_link(self) -> None:
        for document, kept in (("alerting", ""), ("site", "https://bellwether.example/d/")):
            page = (ROOT / f"docs/operate/{document}.md").read_text()
            (command,) = re.findall(r"(?m)^(sed .*) dashboards/alerts/rules.yml >bellwether_alerts.yml$", page)
            made = subprocess.run([*shlex.split(command), ALERTS / "rules.yml"], capture_output=True, text=True, check=True).stdout
            links = re.findall(r'_url: "(https://bellwether\.example/[^"]*)', made)
            self.assertEqual([link for link in links if not kept or not link.startswith(kept)], [], document)
            self.assertEqual(len(made.splitlines()), len((ALERTS / "rules.yml").read_text().splitlines()))

    def test_a_spike_is_told_in_the_words_of_its_runbook(self) -> None:
        # Those are the words of the server's advice: tests/server/detect/advice_test.cc compares them.
        text = (ALERTS / "rules.yml").read_text()
        told = re.findall(r'- alert: (\w+)\n(?: {4,}[^ -].*\n)*? +description: .*eq \$labels.severity "info" }}(One spike[^.{]*)\.', text)
        self.assertEqual([alert for alert, _ in told], ["BellwetherDiverging", "BellwetherGradientJump"])
        for alert, words in told:
            book = (ALERTS / f"runbooks/{alert.lower()}.md").read_text()
            self.assertIn(f"| information | **{words}** |", book, alert)
        nonfinite = text[text.index("- alert: BellwetherNonFinite") :].split("- alert: ", 2)[1]
        book = (ALERTS / "runbooks/bellwethernonfinite.md").read_text()
        for words, severity in (("Nothing to do unless it goes on", "information"), ("See whether these steps are skipped", "warning")):
            self.assertIn(f"}}}}{words}.", nonfinite)
            self.assertIn(f"| {severity} | **{words}** |", book)

    def test_server_alerts_keep_their_name_and_severity(self) -> None:
        names = dict(re.findall(r'\{"(\w+)", "(Bellwether\w+)"\}', (ROOT / "server/export/alert_json.cc").read_text()))
        self.assertGreater(len(names), 8)
        asked: dict[str, str] = {}
        for path in (ALERTS / "rules.yml", ROOT / "deploy/kubernetes/monitoring/prometheus-rule.yml"):
            for alert, body in re.findall(r"- alert: (\w+)\n((?: {4,}[^ -].*\n)+)", path.read_text()):
                for operator, rules in re.findall(r'bellwether_alert_active\{rule(=|!~)"([^"]+)"', body):
                    self.assertNotIn("labels:", body, f"{path}: {alert}")
                    if operator == "=":
                        asked[rules] = alert
                    else:  # The rules of people's own: whatever is not built in.
                        self.assertEqual((alert, set(rules.split("|"))), ("BellwetherAlert", set(names)), path)
            self.assertEqual(asked, names, path)


class SignalNames(unittest.TestCase):
    """What people call a signal stands in proto/signal_titles.json alone."""

    def setUp(self) -> None:
        titles = json.loads((ROOT / "proto/signal_titles.json").read_text())
        self.titles: dict[str, str] = titles["signals"]
        self.assertGreater(len(self.titles), 80)

    def test_page_and_plot_call_signals_alike(self) -> None:
        page = dict(re.findall(r"\{ name: '(\w+)',[^{}]*?label: '([^']*)'", (DASHBOARDS / "console/src/signals.ts").read_text()))
        self.assertGreater(len(page), 60)
        self.assertEqual(page, {name: self.titles.get(name) for name in page})
        plot = (ROOT / "client_lib/python/bellwether/tools/plot.py").read_text()
        labels = re.findall(r'^    "(\w+)": \("([^"]+)", "[^"]*"\),$', plot.replace("\\N{GREEK SMALL LETTER SIGMA}", "σ"), re.MULTILINE)
        self.assertGreater(len(labels), 8)
        self.assertEqual(dict(labels), {name: self.titles[name] for name, _ in labels})

    def test_boards_call_signals_alike(self) -> None:
        board = json.loads((DASHBOARDS / "grafana/bellwether-run.json").read_text())
        numbered = [match[1] for panel in board["panels"] if (match := re.match(r"\d (.+)", panel.get("title", "")))]
        self.assertGreater(len(numbered), 6)
        self.assertEqual([title for title in numbered if title not in self.titles.values()], [])

    def test_documents_list_the_names(self) -> None:
        page = (ROOT / "docs/reference/signals.md").read_text()
        listed = dict(re.findall(r"^\| \d+ \| `(\w+)` \| ([^|]*?) \|", page, re.MULTILINE))
        self.assertEqual({name: title for name, title in listed.items() if title}, self.titles)

    def test_words_of_the_glossary_that_name_signals_are_theirs(self) -> None:
        headings = re.findall(r"^## (.+)$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
        mine = {title.lower(): title for title in self.titles.values()}
        self.assertEqual([word for word in headings if word.lower() in mine and word != mine[word.lower()]], [])


class Thresholds(unittest.TestCase):
    """The detectors' numbers are those of server/detect/judge_options.h, of which
    deploy/rules/builtin.yml is made."""

    # Numbers that are no thresholds: names, stages, and what follows from bf16 alone.
    FACTS = re.compile(
        r"\bbf16|\bfp16|\bfp32|(?i:\bstages? \d( (or|and) \d)?)|Stages of a head: 1 drift, 2 ties and bias, 3 norm growth, 4 logits"
        r"|\b5 while the loss|0 healthy to 5 loss|From 128 on bf16|\b1 is uniform|\b0 is one key|Near 0"
    )

    def setUp(self) -> None:
        self.rules = built_in()
        self.assertGreater(len(self.rules), 50)

    def said(self, template: str) -> str:
        names = {section: SimpleNamespace() for section in {path.split(".")[0] for path in self.rules}}
        for path, value in self.rules.items():
            section, name = path.split(".")
            setattr(names[section], name, value)

        def number(found: re.Match[str]) -> str:
            expression, _, form = found[1].partition(":")
            value = eval(expression, {}, names)  # Of this repository alone.
            if form == "%":
                return f"{value * 100:g} %"
            return re.sub(r"e-0", "e-", f"{value:{form}}") if form else f"{value:,g}" if value < 1e6 else f"{value:g}"

        return re.sub(r"\{([^}]+)\}", number, template)

    def unsaid(self, text: str, templates: Iterable[str]) -> list[str]:
        """What is missing of the templates, and numbers that are in none of them."""
        missing = []
        for template in templates:
            said = self.said(template)
            if said not in text:
                missing.append(said)
            text = text.replace(said, "")
        rest = re.sub(r"\[[^\]]*\]\([^)]*\)", "", self.FACTS.sub("", text))
        return missing + re.findall(r".{0,30}(?<![\w.])\d[\d.,]*.{0,20}", rest)

    def part(self, path: Path, begin: str, end: str) -> str:
        text = path.read_text()
        first = text.index(begin)
        return text[first : text.index(end, first)]

    def test_documents_say_the_numbers_of_the_rules(self) -> None:
        detection = self.part(ROOT / "docs/concepts/detection.md", "A sample of the heads", "## What is not alarming")
        self.assertEqual(self.unsaid(detection, thresholds_said.DETECTION), [])
        respond = self.part(ROOT / "docs/respond.md", "**Is the loss", "3. **Is there")
        respond += self.part(ROOT / "docs/respond.md", "## Alerts of a run", "## Alerts of the server")
        self.assertEqual(self.unsaid(respond, thresholds_said.RESPOND), [])

    def test_glossary_says_the_numbers_of_the_rules(self) -> None:
        self.assertEqual(self.unsaid((ROOT / "docs/glossary.md").read_text(), thresholds_said.GLOSSARY), [])

    def test_runbooks_say_the_numbers_of_the_rules(self) -> None:
        for name, templates in thresholds_said.RUNBOOKS.items():
            book = ALERTS / f"runbooks/bellwether{name}.md"
            meaning = self.part(book, "## Meaning", "## Impact")
            if any("rescue" in template for template in templates):
                meaning += book.read_text().split("|\n\n")[-1]
            self.assertEqual(self.unsaid(meaning, templates), [], name)

    def test_page_and_catalogue_say_the_thresholds(self) -> None:
        page = (DASHBOARDS / "console/src/signals.ts").read_text()
        self.assertEqual(self.unsaid(" ".join(re.findall(r"help: ['\"](.*)['\"]", page)), thresholds_said.PAGE), [])
        catalogue = (ROOT / "proto/bellwether/v1/signals.proto").read_text()
        derived = catalogue[catalogue.index("---- derived in the server") :]
        helps = [text for text in re.findall(r'(?m)^    help: "(.*)"', derived) if "scores" in text or "logit" in text]
        self.assertEqual(self.unsaid(" ".join(h for h in helps if "within" not in h), ()), [])

    def test_grafana_has_the_numbers_of_the_rules(self) -> None:
        board = json.loads((DASHBOARDS / "grafana/bellwether-run.json").read_text())
        panels = {panel["title"]: panel for panel in board["panels"] if panel["type"] != "row"}
        self.assertEqual(self.unsaid(" ".join(panel.get("description", "") for panel in panels.values()), thresholds_said.BOARD), [])
        for title, panel in panels.items():
            if title in ("Stage", "Stage over time", "Last report"):
                continue  # Of its own numbers, and of the rule of a silent run.
            steps = [step["value"] for step in panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", []) if step.get("value") is not None]
            self.assertEqual(steps, [self.rules[path] for path in thresholds_said.PANELS.get(title, ())], title)

    def test_another_number_is_seen(self) -> None:
        self.assertEqual(self.unsaid("Above 1,000 attention fails", thresholds_said.BOARD[3:]), [])
        self.assertNotEqual(self.unsaid("Above 100 attention fails", thresholds_said.BOARD[3:]), [])
        self.assertNotEqual(self.unsaid("Above 1,000 attention fails. Beyond 100 too", thresholds_said.BOARD[3:]), [])


def glossary() -> dict[str, str]:
    """By anchor, what docs/glossary.md says of a word."""
    sections = (ROOT / "docs/glossary.md").read_text().split("\n## ")[1:]
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-"): text for title, _, text in (part.partition("\n") for part in sections)}


class Glossary(unittest.TestCase):
    def test_every_word_has_two_sentences_and_a_link(self) -> None:
        words = glossary()
        self.assertGreater(len(words), 40)
        for anchor, section in words.items():
            said, _, more = section.strip().partition("\n\nMore: ")
            self.assertIn("](", more, anchor)
            self.assertEqual(len(re.findall(r"[.](?= |$)", said)), 2, f"{anchor}: {said}")

    def test_urgency_is_said_in_the_same_sentence_everywhere(self) -> None:
        sentence = re.search(r"Information .*\.", glossary()["severity"])
        assert sentence
        for path in ("docs/operate/alerting.md", "docs/respond.md"):
            self.assertIn(sentence[0], (ROOT / path).read_text(), path)

    def test_words_stand_in_order(self) -> None:
        titles = re.findall(r"(?m)^## (.+)$", (ROOT / "docs/glossary.md").read_text())
        self.assertEqual(titles, sorted(titles, key=str.lower))

    def test_words_that_the_page_explains_exist(self) -> None:
        words = set(glossary())
        asked: set[str] = set()
        for path in (DASHBOARDS / "console/src").glob("*.ts"):
            text = path.read_text()
            asked |= set(re.findall(r"\bterm\((?:[^'()]*\? )?'([\w-]+)'(?: : '[\w-]+')?[,)]", text))
            asked |= set(re.findall(r"\babout: '([\w-]+)'", text))
        signals = (DASHBOARDS / "console/src/signals.ts").read_text()
        asked |= set(re.findall(r"\w+: '([\w-]+)'", signals[signals.index("const terms: ") : signals.index("/** The anchor of the word")]))
        asked |= {"law", "reference", "rank"} | set(re.findall(r"'([\w-]+)'", re.search(r"railTerms = \[(.*)\]", (DASHBOARDS / "console/src/verdict.ts").read_text())[1]))
        self.assertGreater(len(asked), 25, "the check looks in the wrong place")
        self.assertEqual(asked - words, set())

    def test_words_that_runbooks_link_exist(self) -> None:
        linked = {anchor for book in (ALERTS / "runbooks").glob("*.md") for anchor in re.findall(r"glossary\.md#([\w-]+)", book.read_text())}
        self.assertGreater(len(linked), 8)
        self.assertEqual(linked - set(glossary()), set())


class Console(unittest.TestCase):
    def test_the_lock_names_no_registry(self) -> None:
        for path in (DASHBOARDS / "console/package-lock.json", ROOT / "tests/dashboards/package-lock.json", ROOT / "tests/deploy/package-lock.json",
                     ROOT / "tests/dashboards/grafana/package-lock.json"):
            self.assertNotIn("resolved", path.read_text(), path)

    def test_no_two_files_of_the_page_import_each_other(self) -> None:
        arrows = page_imports({path.stem: path.read_text() for path in (DASHBOARDS / "console/src").glob("*.ts")})
        self.assertGreater(sum(map(len, arrows.values())), 40, "the check looks in the wrong place")
        self.assertEqual(circles(arrows), [])

    def test_no_line_of_the_page_is_over_140_columns(self) -> None:
        for path in (DASHBOARDS / "console/src").glob("*.ts"):
            self.assertEqual([line for line in path.read_text().splitlines() if len(line) > 140], [], path)

    def test_a_planted_circle_is_seen(self) -> None:
        planted = {
            "main": "import './style.css';\nimport { A } from './a';",
            "a": "import {\n  b,\n} from './b';",
            "b": "export * from \"./c\";",
            "c": "import type { A } from './a';\nimport { d } from './d';\nimport 'uplot';",
            "d": "",
        }
        self.assertEqual(page_imports(planted)["c"], {"a", "d"})
        self.assertEqual(circles(page_imports(planted)), [["a", "b", "c"]])
        planted["c"] = "const later = await import('./b');"
        self.assertEqual(circles(page_imports(planted)), [["b", "c"]])
        planted["c"] = ""
        self.assertEqual(circles(page_imports(planted)), [])

    def test_page_calls_runs_silent_as_the_rules_do(self) -> None:
        page = re.search(r"silentAfterSeconds = (\d+);", (DASHBOARDS / "console/src/badges.ts").read_text())
        rule = re.search(r"- alert: BellwetherRunSilent\n    expr: .* > (\d+) ", (ALERTS / "rules.yml").read_text())
        assert page and rule
        self.assertEqual(page[1], rule[1])

    def test_the_page_names_alerts_as_the_server_does(self) -> None:
        server = re.findall(r'\{"(\w+)", "(Bellwether\w+)"\}', (ROOT / "server/export/alert_json.cc").read_text())
        self.assertGreater(len(server), 15)
        page = (DASHBOARDS / "console/src/alerts.ts").read_text()
        self.assertEqual(sorted(re.findall(r"\b(\w+): '(Bellwether\w+)'", page)), sorted(server))

    def test_page_and_notifications_call_actions_alike(self) -> None:
        kinds = set(re.findall(r"ACTION_KIND_(\w+) = [1-9]", (ROOT / "proto/bellwether/v1/actions.proto").read_text()))
        names = dict(re.findall(r'\{"([\w.]+)",\s*v1::ACTION_KIND_(\w+)\}', (ROOT / "client_lib/cli/actions.cc").read_text()))
        told = dict(re.findall(r'\{"([\w.]+)", "([^"]+)"\}', (ROOT / "server/model/alert_words.cc").read_text().split("kActions[] = ")[1].split("};")[0]))
        table = (DASHBOARDS / "console/src/action_words.ts").read_text().split("const words: ")[1].split("};")[0]
        shown = dict(re.findall(r"(\w+): '([^']+)'", table))
        self.assertEqual(set(shown), kinds)
        self.assertEqual({names[name]: words for name, words in told.items()}, shown)

    def test_the_maps_signals_are_the_catalogues(self) -> None:
        catalogue = (ROOT / "proto/bellwether/v1/signals.proto").read_text()
        known = {}
        for name, kind, rest in re.findall(r'name: "(\w+)" unit: "[^"]*" granularity: GRANULARITY_(TENSOR|MODULE|EXPERT|LAYER)\b(.*)', catalogue):
            derived = re.search(r'numerator: "(\w+)"', rest)
            known[name] = (kind.lower(), derived[1] if derived else name)
        page = (DASHBOARDS / "console/src/signals.ts").read_text()
        shown = re.findall(r"\{ name: '(\w+)', of: '(\w+)', part: '(\w+)'", page)
        self.assertGreater(len(shown), 8)
        for name, kind, part in shown:
            self.assertEqual(known.get(name), (kind, part), name)

    def test_the_maps_colours_turn_at_the_rules_thresholds(self) -> None:
        rules = built_in()
        page = (DASHBOARDS / "console/src/signals.ts").read_text()
        found = dict(re.findall(
            r"\{ name: '(\w+)',(?: of: 'expert', part: '\w+',)? label: '[^']*', scale: '\w+',(?: unit: '\w+',)?(?: warmBelow: true,)? (?:anchor|ofMedian): ([\d.]+)", page
        ))
        expected = {"drift_ratio": "drift.grown_factor", "tied_fraction_bf16": "ties.fraction_min", "delta_bias_t": "ties.bias_t_min",
                    "wq_sigma": "norm.peer_factor", "logit_max": "logits.logit_max_large", "expert_share": "experts.steady_share"}
        self.assertEqual({name: float(value) for name, value in found.items()}, {name: rules[rule] for name, rule in expected.items()})

    def test_the_pages_units_are_the_catalogues(self) -> None:
        catalogue = dict(re.findall(r'name: "(\w+)" unit: "([^"]*)"', (ROOT / "proto/bellwether/v1/signals.proto").read_text()))
        page = re.findall(r"name: '(\w+)',[^}]*?\bunit: '(\w+)'", (DASHBOARDS / "console/src/signals.ts").read_text())
        self.assertGreater(len(page), 2)
        for name, unit in page:
            self.assertEqual(catalogue[name], unit, name)

    def test_the_panels_signals_are_the_catalogues(self) -> None:
        catalogue = (ROOT / "proto/bellwether/v1/signals.proto").read_text()
        known = {}
        for name, rest in re.findall(r'name: "(\w+)" unit: "[^"]*" granularity: GRANULARITY_RUN\b(.*)', catalogue):
            derived = re.search(r'numerator: "(\w+)"', rest)
            known[name] = derived[1] if derived else name
        page = (DASHBOARDS / "console/src/signals.ts").read_text()
        shown = re.findall(r"\{ name: '(\w+)', part: '(\w+)'", page)
        self.assertGreater(len(shown), 15)
        for name, part in shown:
            self.assertEqual(known.get(name), part, name)

    def test_the_panel_draws_every_name_that_is_judged(self) -> None:
        server = (ROOT / "server/model/own_signals.cc").read_text()
        page = (DASHBOARDS / "console/src/signals.ts").read_text()
        known = re.search(r"learningNames = \[(.*?)\n\];", page, re.DOTALL)
        assert known
        patterns = [line.strip().removeprefix("/").removesuffix("/,").replace(r"\/", "/") for line in known[1].strip().splitlines()]
        judged = re.findall(r'\{"([\w/*]+)", PastSide::k(?:Falls|Rises)\}', server)
        self.assertGreater(len(judged), 30)
        for name in [*judged, "critic/rewards/mean", "train/clip_ratio/high_max"]:
            self.assertTrue(any(re.search(pattern, name) for pattern in patterns), name)
        self.assertFalse(any(re.search(pattern, "queue_depth") for pattern in patterns))

    def test_page_has_no_external_requests(self) -> None:
        dist = DASHBOARDS / "console/dist"
        for path in sorted(dist.iterdir()):
            addresses = set(re.findall(r"https?://[^\s\"'`)<]+", path.read_text()))
            # uPlot's licence notice and the SVG name space are no requests.
            self.assertEqual({a for a in addresses if not a.startswith(("http://www.w3.org/", "https://github.com/leeoniya/uPlot"))}, set(), path)

    def test_every_picture_of_the_page_is_shown(self) -> None:
        taken = set(re.findall(r"picture\(\w+, ['`]([^'`]+)['`]", (ROOT / "tests/dashboards/page_test.mjs").read_text()))
        taken = (taken - {"run-${colorScheme}"}) | {"run-light", "run-dark"}
        self.assertGreater(len(taken), 12)
        shown = set(re.findall(r"images/console/([\w-]+)\.webp", (ROOT / "docs/console.md").read_text()))
        self.assertEqual(taken, shown)
        self.assertEqual(taken, {p.stem for p in (ROOT / "docs/images/console").iterdir()})

    def test_the_committed_page_is_what_the_sources_give(self) -> None:
        if shutil.which("npm") is None or shutil.which("node") is None:
            self.skipTest("node and npm are not installed")
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder) / "dashboards/console"
            shutil.copytree(DASHBOARDS / "console", work, ignore=shutil.ignore_patterns("node_modules", "dist"))
            shutil.copytree(DASHBOARDS / "alerts/runbooks", Path(folder) / "dashboards/alerts/runbooks")
            (Path(folder) / "docs").mkdir()
            shutil.copy(ROOT / "docs/glossary.md", Path(folder) / "docs")
            installed = run("npm", "ci", "--no-audit", "--no-fund", cwd=work)
            self.assertEqual(installed.returncode, 0, installed.stderr)
            typed = run("npx", "--no-install", "tsc", "--noEmit", cwd=work)
            self.assertEqual(typed.returncode, 0, typed.stdout)
            (work / "src/planted.ts").write_text(PLANTED_TYPES)
            typed = run("npx", "--no-install", "tsc", "--noEmit", cwd=work)
            self.assertEqual(re.findall(r"planted\.ts\((\d+),", typed.stdout), ["3", "4", "5", "6"], typed.stdout)
            built = run("node", "build.mjs", cwd=work)
            self.assertEqual(built.returncode, 0, built.stderr)
            for path in sorted((DASHBOARDS / "console/dist").iterdir()):
                self.assertEqual((work / "dist" / path.name).read_bytes(), path.read_bytes(), f"dist/{path.name} is stale: npm ci && node build.mjs")


if __name__ == "__main__":
    unittest.main()
