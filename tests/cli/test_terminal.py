"""What a person sees of `bellwether` on a terminal of 80, 100 and 120 columns.

Goal: every list fits, nothing of it is cut off without a word, times are told from now, and
`--wide` or a pipe shows every column as ever.
Method: the real command on a pseudo-terminal, a real bellwetherd with recorded runs; the words on
the terminal are compared with the JSON of the same answers.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, Server
from pseudo_terminal import on_terminal

WIDTHS = (80, 100, 120)
ILL, WARNED, SOUND = "gpt-flash-s12", "gpt-live-flash-s14", "gpt-center-s4"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder)) as started:
        for run in (ILL, WARNED, SOUND):
            started.run("run", "import", str(ROOT / f"tests/testdata/runs/{run}.bwrun"))
        yield started


def environment(**extra: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("BELLWETHER_")}
    return {**clean, "TERM": "xterm-256color", "XDG_STATE_HOME": "/nonexistent", **extra}


def shown(server: Server, columns: int, *words: str, code: int = 0) -> str:
    got, text = on_terminal([BIN / "bellwether", "--server", server.grpc, *words], columns, environment())
    assert got == code, text
    return text


def folded(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def too_long(text: str, columns: int) -> list[str]:
    return [line for line in text.splitlines() if len(line) > columns]


@pytest.mark.parametrize("columns", WIDTHS)
def test_every_list_fits_the_terminal(server: Server, columns: int) -> None:
    key = server.json("alert", "list", "--run", ILL)["alerts"][0]["last"]["key"]
    for words in (
        ("run", "list"), ("run", "get", ILL), ("run", "explain", ILL), ("run", "events", ILL),
        ("run", "watch", ILL, "--once"), ("alert", "list"), ("alert", "get", ILL, key),
        ("head", "top", ILL), ("tensor", "top", ILL), ("server", "info"), ("baseline", "list"),
        ("run", "compare", ILL, SOUND), ("matrix", ILL, "drift_ratio"), ("action", "list", ILL),
    ):  # fmt: skip
        text = shown(server, columns, *words)
        assert not too_long(text, columns), (words, too_long(text, columns))


@pytest.mark.parametrize("columns", WIDTHS)
def test_alerts_keep_key_and_whole_summary(server: Server, columns: int) -> None:
    text = shown(server, columns, "alert", "list")
    header = text.splitlines()[0].split()
    assert header[:3] == ["RUN", "STATE", "SEVERITY"] and "KEY" in header
    for alert in server.json("alert", "list")["alerts"]:
        last = alert["last"]
        assert re.search(rf"(?m)^{last['run']} .* {last['key']}( |$)", text)
        assert folded(last["summary"].removeprefix(f"{last['run']}: ")) in folded(text)
    assert f"{ILL}: " not in text  # The column has the name.


@pytest.mark.parametrize("columns", WIDTHS)
def test_runs_show_where_they_stand(server: Server, columns: int) -> None:
    lines = shown(server, columns, "run", "list").splitlines()
    assert lines[0].split()[:6] == ["RUN", "STATE", "SEV", "HEAD", "SINCE", "LEFT"]
    ill = next(line for line in lines if line.startswith(ILL))
    assert ill.split()[1:3] == ["imported", "critical"]
    warned = next(line for line in lines if line.startswith(WARNED))
    assert re.search(r"warning +L1 H\d +\d+ +~\d+ \(\d+-\d+\)", warned)
    # No alert, and not all families could judge it: that is no clean bill.
    assert next(line for line in lines if line.startswith(SOUND)).split()[2] == "partly"
    if columns < 100:  # Said, not cut off.
        assert re.search(r"no room for .*LOSS.*\(see --wide\)", lines[-1])


def test_wide_and_pipes_show_every_column(server: Server) -> None:
    for words in (("run", "list"), ("alert", "list")):
        wide = shown(server, 80, *words, "--wide")
        assert wide == server.run(*words)
    assert "LAST REPORT" in shown(server, 80, "run", "list", "--wide")
    assert re.search(r"20\d\d-\d\d-\d\dT", server.run("run", "list"))


def test_times_are_told_from_now(server: Server) -> None:
    text = shown(server, 120, "run", "list")
    assert re.search(r"\d+ (s|min|h) ago", text) and not re.search(r"20\d\d-", text)
    key = server.json("alert", "list", "--run", WARNED, "--firing")["alerts"][0]["last"]["key"]
    server.run("alert", "silence", WARNED, key, "--for", "2h")
    silenced = shown(server, 120, "alert", "list", "--run", WARNED)
    assert re.search(r"silenced, ends in (2\.0 h|1\d\d min)", silenced)


def test_runs_with_false_alarms_alone_are_muted(server: Server) -> None:
    firing = [alert["last"]["key"] for alert in server.json("alert", "list", "--run", WARNED, "--firing")["alerts"]]
    try:
        for key in firing:
            server.run("alert", "false-alarm", WARNED, key, "--reason", "known")
        lines = shown(server, 120, "run", "list").splitlines()
        assert next(line for line in lines if line.startswith(WARNED)).split()[2] == "muted"
    finally:
        for key in firing:
            server.run("alert", "false-alarm", WARNED, key, "--undo")


@contextmanager
def proposing() -> Iterator[str]:
    """The address of a server that takes proposals."""
    asked = [BIN / "query_test_server"]
    with subprocess.Popen(asked, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        yield f"127.0.0.1:{process.stdout.readline().split()[1]}"
        process.stdin.close()


def test_alerts_show_owner_and_what_waits() -> None:
    with proposing() as address:
        command = [BIN / "bellwether", "--server", address]
        key = json.loads(subprocess.check_output([*command, "alert", "list", "-o", "json"]))["alerts"][0]["last"]["key"]
        subprocess.run([*command, "alert", "ack", "gpt-bf16", key, "--by", "ann"], check=True, capture_output=True)
        propose = ["action", "propose", "gpt-bf16", "attention.center_k", "--value", "1", "--alert", key, "-o", "json"]
        id = json.loads(subprocess.check_output([*command, *propose]))["id"]
        for columns in (*WIDTHS, 250):
            code, text = on_terminal([*command, "alert", "list"], columns, environment())
            assert code == 0 and not too_long(text, columns)
            waiting = f"attention.center_k, all ({id})"
            if columns < 250:
                assert "owner: ann" in text and f"waiting: {waiting}" in folded(text)
                assert text.count("owner: ") == text.count("waiting: ") == 1
            else:
                assert "OWNER" in text and re.search(rf"{key} +ann +{re.escape(waiting)}", text)


def test_signals_have_their_titles_on_a_terminal_alone(server: Server) -> None:
    top = ("head", "top", ILL, "--signal", "wq_sigma")
    assert "σ(W_Q)" in shown(server, 80, *top).splitlines()[0]
    assert "wq_sigma" in server.run(*top).splitlines()[0]
    assert shown(server, 80, "matrix", ILL, "drift_ratio").startswith("Drift ratio at step ")
    key = server.json("alert", "list", "--run", ILL)["alerts"][-1]["last"]["key"]
    evidence = server.json("alert", "get", ILL, key)["alert"]["last"]["evidence"]
    text = shown(server, 120, "alert", "get", ILL, key)
    assert evidence and not any(item["signal"] in text.split() for item in evidence if "_" in item["signal"])


def test_actions_keep_cost_and_reason() -> None:
    with proposing() as address:
        reason = "the drift ratio of this head doubles every fifty steps, and the night is long"
        propose = ["action", "propose", "gpt-bf16", "attention.center_k", "--value", "1", "--reason", reason]
        subprocess.run([BIN / "bellwether", "--server", address, *propose], check=True, capture_output=True)
        listed = [BIN / "bellwether", "--server", address, "action", "list", "gpt-bf16"]
        as_json = json.loads(subprocess.check_output([*listed, "-o", "json"]))
        for columns in WIDTHS:
            code, text = on_terminal([*listed], columns, environment())
            assert code == 0 and not too_long(text, columns)
            assert reason in folded(text)
            assert folded(as_json["actions"][0]["cost"]) in folded(text)


def test_watched_alerts_stand_below_each_other(server: Server) -> None:
    process = subprocess.Popen(
        ["script", "-qec", f"stty cols 80; exec {BIN}/bellwether --server {server.grpc} alert watch", "/dev/null"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment(), start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    text = ""
    wanted = sum(
        len(server.json("alert", "get", each["last"]["run"], each["last"]["key"])["alert"]["history"])
        for each in server.json("alert", "list")["alerts"]
    )
    try:
        while len(re.findall(r"(?m)^20\d\d-", text)) < wanted or not text.endswith("\n"):
            assert select.select([process.stdout], [], [], 20)[0], text
            text += os.read(process.stdout.fileno(), 1 << 16).decode()
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).replace("\r\n", "\n")
    assert not too_long(text, 80)
    lines = text.splitlines()
    at = lines[0].index("STATE")
    told = [line for line in lines[1:] if line.startswith("20") and ILL in line]
    assert told and all(line[at:].split()[0] in ("firing", "resolved") for line in told)
    assert "do: " in text and f"{ILL}: " not in text


def test_a_run_names_its_worst_alert(server: Server) -> None:
    text = folded(shown(server, 120, "run", "get", ILL))
    assert re.search(r"alerts_firing \d+, the worst critical at L\d+ H\d+ since step [\d,]+", text), text
    assert re.search(r"signals \d+; -o json has their names", text), text


def test_one_frame_of_a_run_says_what_to_do(server: Server) -> None:
    text = shown(server, 80, "run", "watch", ILL, "--once")
    alerts = server.json("alert", "list", "--run", ILL, "--firing")["alerts"]
    assert any(folded(f"do: {each['last']['do_first']}") in folded(text) for each in alerts)
    assert f"{ILL}: " not in text


def test_an_empty_server_says_how_to_begin(tmp_path: Path) -> None:
    with Server(tmp_path) as empty:
        code, text = on_terminal([BIN / "bellwether", "--server", empty.grpc, "run", "list"], 80, environment())
        assert code == 0
        assert f"BELLWETHER_SERVER={empty.grpc} python -m bellwether run train.py" in folded(text)
        piped = subprocess.run(
            [BIN / "bellwether", "--server", empty.grpc, "run", "list"], capture_output=True, text=True
        )
        assert len(piped.stdout.splitlines()) == 1 and "to begin" in piped.stderr


def test_the_beginning_of_a_name_asks_only(server: Server) -> None:
    text = shown(server, 80, "run", "get", "gpt-live")
    assert f'"gpt-live" is taken as {WARNED}' in text and re.search(rf"(?m)^run +{WARNED}$", text)
    assert "did you mean" in shown(server, 80, "run", "get", "gpt-", code=1)  # Of several.
    key = server.json("alert", "list", "--run", WARNED)["alerts"][0]["last"]["key"]
    assert "did you mean" in shown(server, 80, "alert", "ack", "gpt-live", key, code=1)
    server.run("run", "get", "gpt-live", exit_code=1)  # No script is guessed for.
