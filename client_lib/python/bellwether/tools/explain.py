"""python -m bellwether explain RUN: how a run is, on what evidence, and what to do, for people and,
with --json, for scripts and agents."""

from __future__ import annotations

import argparse
import base64
import json
import math
import shlex
import sys
import urllib.parse
from collections.abc import Mapping
from typing import Any, Optional

from .._server import private_server
from .._server.run_state import SEVERITIES, severity_of, without_run, word
from .._util import files
from ..actions import JSON_KINDS
from ..query import Client, QueryError, add_client_arguments, client_of, unreachable
from .open_page import address

OK, FAILED, FINDINGS, UNREACHABLE, DENIED = 0, 1, 3, 4, 5
FORMAT = "bellwether.explain/1"
_EVIDENCE_MAX = 4  # Of an alert, in words.
STAGES = ("healthy", "drift", "ties and bias", "norm growth", "logits", "loss")  # As on the page.

_EPILOG = """\
examples:
  python -m bellwether explain llama
  python -m bellwether explain llama --json | jq -r .verdict
  python -m bellwether explain llama --json --exit-code || page-somebody

exit codes:
  0  it is explained
  1  the server refuses; there is no such run
  2  wrong usage
  3  with --exit-code: an alert of warning or more fires
  4  the server could not be reached
  5  not allowed

docs/query.md describes the fields of --json.
"""


def _parse(arguments: Optional[list[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bellwether explain",
        description="Says how a run is: the verdict, the evidence, what to do and where to look.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="the run's name (the newest of it) or uuid")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    parser.add_argument("--exit-code", action="store_true", help="3 if a warning or more fires")
    add_client_arguments(parser)
    return parser.parse_args(arguments)


def _number(value: Any) -> Optional[float]:
    """As JSON has it: what is not finite is null."""
    return None if value is None or not math.isfinite(value) else value


def _place(of: Mapping[str, Any], name: str) -> Optional[int]:
    return None if of.get(name, -1) < 0 else int(of[name])


def _eta(told: Mapping[str, Any]) -> Optional[dict[str, Any]]:
    if not told.get("known"):
        return None
    seconds = told["steps"] * told.get("step_seconds", 0.0)
    return {
        "steps": _number(told["steps"]),
        "lower_steps": _number(told["lower_steps"]),
        "upper_steps": _number(told["upper_steps"]),
        "seconds": _number(seconds) if seconds > 0 else None,
    }


def _evidence(told: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "signal": told["signal"],
        "layer": _place(told, "layer"),
        "head": _place(told, "head"),
        "value": _number(told["value"]),
        "threshold": _number(told["threshold"]),
        "baseline": _number(told["baseline"]),
        "first_step": told["first_step"],
        "detector": told["detector"],
        "text": told["text"],
    }


def _alert(told: Mapping[str, Any], actions: list[dict[str, Any]]) -> dict[str, Any]:
    last = told["last"]
    false_alarm = told.get("false_alarm") or {}
    return {
        "key": last["key"],
        "state": word(last["state"]),
        "severity": SEVERITIES[severity_of(last)],
        "rule": last["rule"],
        "cause": last["cause"],
        "stage": last["stage"],
        "layer": _place(last, "layer"),
        "head": _place(last, "head"),
        "heads": [[head["layer"], head["head"]] for head in last["heads"]],
        "heads_total": last["heads_total"],
        "first_step": last["first_step"],
        "step": last["step"],
        "summary": without_run(last),
        "do": last.get("do_first", ""),
        "advice": last["advice"],
        "eta": _eta(last["eta"]),
        "evidence": [_evidence(each) for each in last["evidence"]],
        "acknowledged_by": told["acknowledged_by"] if told["acknowledged"] else None,
        "false_alarm": false_alarm.get("reason") if told.get("muted") else None,
        "actions": actions,
    }


def _action(told: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": told["id"],
        "kind": JSON_KINDS.get(told["kind"], told["kind"]),
        "state": word(told["state"]),
        "not_allowed": told.get("not_allowed", ""),
    }


def _to_do(run: str, ended: bool, alerts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of what fires, the worst first; a command only where it is one to type as it stands."""
    found: list[dict[str, Any]] = []
    for alert in alerts:
        if alert["state"] != "firing" or alert["false_alarm"] is not None:
            continue
        first = alert["do"] or alert["advice"]
        if first:
            found.append({"alert": alert["key"], "text": first, "command": None})
        for action in alert["actions"]:
            if action["state"] != "proposed" or action["not_allowed"] or ended:
                continue
            command = shlex.join(["bellwether", "action", "approve", run, action["id"]])
            if f" {action['id']}`" in first:
                found[-1]["command"] = command
                continue
            text = f"approve what is proposed: {action['kind']}"
            found.append({"alert": alert["key"], "text": text, "command": command})
    return found


def _verdict(run: Mapping[str, Any], ill: list[dict[str, Any]], any_alert: bool) -> str:
    if ill:
        return "ill"
    judged = run.get("judged") or {}
    if any_alert:
        return "recovered"
    if not judged.get("whole"):
        return "not judged"
    return "healthy" if judged.get("text") == "healthy" else "nothing found"


def explain(client: Client, name: str, page: str) -> dict[str, Any]:
    """What --json prints.  Raises QueryError, OSError."""
    run = client.run(name)
    of, uuid = run["description"], base64.b64decode(run["description"]["uuid"]).hex()
    alerts = []
    for told in client.alerts(uuid):
        last = told["last"]
        firing = word(last["state"]) == "firing"  # What is over has nothing to approve.
        actions = client.alert(uuid, last["key"])["actions"] if firing else []
        alerts.append(_alert(told, [_action(each) for each in actions]))
    alerts.sort(
        key=lambda each: (
            each["state"] != "firing", each["false_alarm"] is not None,
            -SEVERITIES.index(each["severity"]), -each["stage"], each["first_step"],
        )
    )  # fmt: skip
    counts = [each for each in alerts if each["severity"] in ("warning", "critical")]
    counts = [each for each in counts if each["false_alarm"] is None]
    ill = [each for each in counts if each["state"] == "firing"]
    judged = run.get("judged") or {}
    return {
        "format": FORMAT,
        "run": {
            "name": of["name"],
            "uuid": uuid,
            "step": run["step"],
            "loss": _number(run["loss"]),
            "ended": run["ended"],
            "end_reason": run["end_reason"] or None,
            "imported": bool(run.get("imported")),
            "last_report_unix_ns": run["last_report_unix_ns"],
        },
        "verdict": _verdict(run, ill, bool(counts)),
        "severity": ill[0]["severity"] if ill else None,
        "stage": run["stage"],
        "stage_name": STAGES[run["stage"]] if run["stage"] < len(STAGES) else None,
        "judged": {"whole": bool(judged.get("whole")), "text": judged.get("text", "")},
        "eta": _eta(run["eta"]),
        "alerts": alerts,
        "do": _to_do(of["name"], run["ended"], alerts),
        "page": address(page if _is_private(page) else _without_token(page), of["name"]),
    }


def _is_private(page: str) -> bool:
    """Whether it is that of one's own private server, which nothing but its token opens."""
    own = private_server.running()
    return own is not None and page == own.page_url("").partition("#")[0]


def _without_token(page: str) -> str:
    """What is printed may be kept in logs, where a token of others must not be."""
    return urllib.parse.urlsplit(page)._replace(query="", fragment="").geturl()


def _why(evidence: Mapping[str, Any]) -> str:
    if evidence["text"]:
        return str(evidence["text"])
    places = (("layer", evidence["layer"]), ("head", evidence["head"]))
    where = "".join(f" {name} {place}" for name, place in places if place is not None)
    numbers = ("none" if each is None else f"{each:.4g}"
               for each in (evidence["value"], evidence["threshold"]))  # fmt: skip
    value, threshold = numbers
    of = f" of{where}" if where else ""
    return f"{evidence['signal']}{of} is {value}, limit {threshold}, since {evidence['first_step']}"


def _in_words(told: Mapping[str, Any]) -> str:
    run = told["run"]
    state = "ended" if run["ended"] else "running"
    young = told["verdict"] == "nothing found"
    said = told["judged"]["text"] if young else told["verdict"]
    lines = [f"{run['name']}: {said}, {state}, step {run['step']}"]
    if told["verdict"] == "not judged" or not told["judged"]["whole"]:
        text = str(told["judged"]["text"])
        lines.append(text if text.startswith("judged by") else f"judged: {text}")
    for alert in told["alerts"]:
        marks = [alert["severity"], alert["state"]]
        marks += ["a false alarm"] if alert["false_alarm"] is not None else []
        marks += [f"acknowledged by {alert['acknowledged_by']}"] * bool(alert["acknowledged_by"])
        cause = f" [{alert['cause']}]" if alert["cause"] not in ("", "unknown") else ""
        lines += ["", f"{', '.join(marks)}: {alert['summary']}{cause}"]
        lines += [f"  why: {_why(each)}" for each in alert["evidence"][:_EVIDENCE_MAX]]
        more = alert["state"] == "firing" and alert["advice"] not in ("", alert["do"])
        lines += [f"  advice: {alert['advice']}"] * more
    for number, each in enumerate(told["do"]):
        lines += [""] * (number == 0) + [f"do: {each['text']}"]
        lines += [f"    {each['command']}"] * bool(each["command"])
    printable = ["".join(c if c.isprintable() else " " for c in line) for line in lines]
    return "\n".join([*printable, "", told["page"]])


def main(arguments: Optional[list[str]] = None) -> int:
    given = _parse(arguments)
    try:
        client = client_of(given)
        told = explain(client, given.run, given.page)
    except QueryError as e:
        print(f"explain: {files.one_line(e)}", file=sys.stderr)
        return DENIED if e.status in (401, 403) else FAILED
    except ValueError as e:
        print(f"explain: {e}", file=sys.stderr)
        return FAILED
    except OSError as e:
        print(f"explain: {unreachable(given.page, e)}", file=sys.stderr)
        return UNREACHABLE
    print(json.dumps(told, indent=2, allow_nan=False) if given.json else _in_words(told))
    return FINDINGS if given.exit_code and told["severity"] is not None else OK
