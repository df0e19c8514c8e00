"""Goal: an alert says the same, and enough to act on, by each way to a person, and the documents show it as it is
sent.
Method: recorded failing runs are imported with --notify; behind the server stand a webhook, one with the template for
Slack, and a real Alertmanager with the template for e-mail.

`python tests/e2e/test_alert_texts.py` writes the texts into docs/operate/alerting.md.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import ROOT, Server, await_silence, wait_for
from telling import alertmanager, mailbox, receiver

RUN = "gpt-flash-s12"
PAGE = "https://bellwether.example.org/"
DOCUMENT = ROOT / "docs/operate/alerting.md"
BEGIN, END = "<!-- as sent: begin -->\n\n", "\n<!-- as sent: end -->\n"


class Told:
    def __init__(self) -> None:
        self.hooks: list[dict[str, Any]] = []
        self.chat: list[dict[str, Any]] = []
        self.mails: list[EmailMessage] = []

    def take(self, path: str, body: dict[str, Any]) -> None:
        if path in ("/hook", "/chat"):
            (self.hooks if path == "/hook" else self.chat).append(body)

    def newest(self) -> dict[str, dict[str, Any]]:
        """By its key, each alert as it was told last."""
        return {alert["annotations"]["alert"]: alert for body in self.hooks for alert in body["alerts"]}


@contextmanager
def server_that_tells(folder: Path) -> Iterator[tuple[Server, Told]]:
    told = Told()
    with receiver(told.take) as url, mailbox(told.mails.append) as smarthost, alertmanager(folder, url, smarthost) as address:
        slack = ROOT / "deploy/webhook/slack.json"
        config = (
            f"web: {{external_url: '{PAGE}'}}\nalerting:\n"
            f"  alertmanagers: [{{url: 'http://{address}', severity: warning, resend_seconds: 1}}]\n"
            f"  webhooks:\n    - {{url: '{url}hook', name: hook, severity: info}}\n"
            f"    - {{url: '{url}chat', name: chat, template_file: {slack}, severity: info}}\n"
        )
        with Server(folder, config) as server:
            yield server, told


def tell(server: Server, told: Told, run: str) -> None:
    server.run("run", "import", "--notify", str(ROOT / f"tests/testdata/runs/{run}.bwrun"))
    if run == RUN:
        wait_for("the webhook is told", lambda: told.hooks)
    await_silence(lambda: len(told.hooks) + len(told.chat), 1.0, 60)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Told]]:
    with server_that_tells(tmp_path_factory.mktemp("texts")) as (server, told):
        tell(server, told, RUN)
        yield server, told


def as_sent(told: Told) -> str:
    """The texts of the alert of attention, for the document."""
    alert = min(told.newest().values(), key=lambda alert: int(alert["annotations"]["first_step"]))
    texts = alert["annotations"]
    summary = texts["summary"].replace("(imported) ", "")  # As of a live run.
    return f"```text\n{summary}\n{texts['description']}\nRunbook: {texts['runbook_url']}\n```\n"


def test_a_sentence_has_severity_run_place_and_step(one: tuple[Server, Told]) -> None:
    _, told = one
    for alert in told.newest().values():
        texts, labels = alert["annotations"], alert["labels"]
        word = "RESOLVED" if alert["status"] == "resolved" else labels["severity"].upper()
        assert re.match(rf"{word} {RUN}: \(imported\) [a-z].* step [\d,]+.*\.\Z", texts["summary"]), texts["summary"]
        if "layer" in labels:
            assert f"layer {labels['layer']}" in texts["summary"], texts["summary"]
        assert labels["imported"] == "true"
        assert texts["description"].startswith(f"Do: {texts['do']}") and len(texts["do"]) > 10
        assert texts["runbook_url"] == f"{PAGE}#/runbook/{labels['alertname'].lower()}"
        assert texts["page_url"] == alert["generatorURL"] and texts["page_url"].startswith(f"{PAGE}#/run/{RUN}?")
        assert not re.search(r"\d{5}", texts["summary"]), "numbers have separators"


def test_a_message_carries_no_alert_that_has_not_changed(one: tuple[Server, Told]) -> None:
    _, told = one
    seen: dict[str, dict[str, Any]] = {}
    for body in told.hooks:
        assert body["alerts"]
        for alert in body["alerts"]:
            assert seen.get(alert["fingerprint"]) != alert, "it was told so before"
            seen[alert["fingerprint"]] = alert


def test_slack_has_the_same_words(one: tuple[Server, Told]) -> None:
    _, told = one
    sentences = {alert["annotations"]["summary"] for body in told.hooks for alert in body["alerts"]}
    shown = [attachment for message in told.chat for attachment in message["attachments"]]
    assert shown
    for attachment in shown:
        assert RUN in attachment["title"] and attachment["title_link"].startswith(PAGE)
        whole = f"{attachment['title'].split()[0]} {RUN}: {attachment['text']}"
        assert whole == attachment["fallback"].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&")
        fields = {field["title"]: field["value"] for field in attachment["fields"]}
        assert fields["Do"] and fields["Runbook"].startswith(PAGE)
    newest = {alert["annotations"]["summary"] for alert in told.newest().values()}
    assert newest <= sentences and newest & {attachment["fallback"] for attachment in shown}


def test_mail_has_the_same_words_by_the_shipped_template(one: tuple[Server, Told]) -> None:
    _, told = one
    wait_for("the mail", lambda: told.mails)
    sentences = {alert["annotations"]["summary"] for body in told.hooks for alert in body["alerts"]}

    def texts_of(mail: EmailMessage) -> tuple[str, str]:
        parts = {part.get_content_type(): part.get_content() for part in mail.walk() if not part.is_multipart()}
        return parts["text/plain"], parts["text/html"]

    mail = told.mails[-1]
    text, page = texts_of(mail)
    assert re.match(rf"(CRITICAL|WARNING|RESOLVED) {RUN}: ", str(mail["Subject"]).replace("\n", "")), mail["Subject"]
    said = [sentence for sentence in sentences if sentence in text]
    assert said and "Do: " in text and f"Runbook: {PAGE}#/runbook/" in text and f"Page: {PAGE}#/run/" in text
    assert "<b>" in page and "Open the alert</a>" in page and "no value" not in text + page


def test_documents_show_what_is_sent(one: tuple[Server, Told]) -> None:
    """Reasons have the newest values, which are those of the moment at which a message is made."""
    _, told = one
    document = DOCUMENT.read_text()
    shown = document[document.index(BEGIN) + len(BEGIN) : document.index(END)]
    sent = as_sent(told)
    number = r"-?[\d,.]+( %)?"
    reason = rf"[a-z ]+ {number} \(limit {number}\)( of layer \d+ head \d+)?( since step {number})?"
    why = re.compile(rf"(?m)^Why: loss {number} \(limit {number}\) since step {number}(; {reason}){{2}}; and \d+ more$")
    assert why.search(shown) and why.search(sent)
    assert why.sub("", shown) == why.sub("", sent)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name, server_that_tells(Path(name)) as (server, told):
        runs = sys.argv[1:] or [RUN]
        for run in runs:
            told.hooks.clear()
            tell(server, told, run)
            if sys.argv[1:]:
                for body in told.hooks:
                    for alert in body["alerts"]:
                        texts = alert["annotations"]
                        print(f"{texts['summary']}\n{texts['description']}\n")
        if not sys.argv[1:]:
            document = DOCUMENT.read_text()
            begin = document.index(BEGIN) + len(BEGIN)
            DOCUMENT.write_text(document[:begin] + as_sent(told) + document[document.index(END) :])
