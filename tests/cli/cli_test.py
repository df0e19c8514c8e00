"""The bellwether command: outputs, exit codes, streams.

Goal: what a person or a script sees of the command is stable: tables, JSON,
YAML and CSV, one exit code for each kind of end, data on stdout and everything
else on stderr.
Method: the real binary against a real server with synthetic runs; outputs are
compared with text written here.  Needs only the standard library; the test of
TLS needs openssl.
"""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import unittest
from pathlib import Path

CLI = os.environ["BELLWETHER_CLI"]
SERVER = os.environ["BELLWETHER_TEST_SERVER"]
TIMEOUT = 60


class Server:
    """A query_test_server; `tell` runs one of its commands."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [SERVER, *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline().split()[1])
        self.address = f"127.0.0.1:{self.port}"

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "ok\n"

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(TIMEOUT)
        self.process.stdout.close()


def environment(**extra: str) -> dict[str, str]:
    """Without what the caller's shell may say about servers."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("BELLWETHER_", "GRPC_"))}
    clean.pop("NO_COLOR", None)
    return {**clean, "USER": "ann", "XDG_STATE_HOME": "/nonexistent", **extra}


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [CLI, *arguments], capture_output=True, text=True, timeout=TIMEOUT, env=env or environment()
    )


class CliTest(unittest.TestCase):
    server: Server

    @classmethod
    def setUpClass(cls) -> None:
        cls.server = Server()

    @classmethod
    def tearDownClass(cls) -> None:
        cls.server.close()

    def ask(self, *arguments: str, code: int = 0) -> str:
        """Runs against the server; data only on stdout, none of it if it fails."""
        result = run("--server", self.server.address, *arguments)
        self.assertEqual(result.returncode, code, result.stderr)
        if code in (1, 2, 4, 5):
            self.assertEqual(result.stdout, "")
            self.assertNotEqual(result.stderr, "")
        return result.stdout if code in (0, 3) else result.stderr


class RunTest(CliTest):
    def test_list_as_a_table(self) -> None:
        self.assertEqual(
            self.ask("run", "list"),
            "RUN       STEP  STAGE                         LOSS  FIRING  ETA               LAST REPORT           STATE\n"
            "gpt-bf16  399   1 drift                       0.01  1       1200 (900..1600)  2023-11-14T22:13:20Z  live\n"
            "gpt-fp32  399   0 nothing found in 400 steps  0.01  0       -                 2020-09-13T12:26:40Z  ended\n",
        )

    def test_list_without_headers_filtered_and_limited(self) -> None:
        self.assertRegex(self.ask("run", "list", "--no-headers", "--live"), r"\Agpt-bf16 .*live\n\Z")
        self.assertRegex(self.ask("run", "list", "--no-headers", "--name", "fp32"), r"\Agpt-fp32 ")
        result = run("--server", self.server.address, "run", "list", "--limit", "1", "--no-headers")
        self.assertEqual(len(result.stdout.splitlines()), 1)
        self.assertIn("1 more runs", result.stderr)

    def test_list_as_json_yaml_csv(self) -> None:
        listed = json.loads(self.ask("run", "list", "-o", "json"))
        self.assertEqual([run["description"]["name"] for run in listed["runs"]], ["gpt-bf16", "gpt-fp32"])
        self.assertEqual(listed["total"], 2)
        self.assertEqual(listed["runs"][0]["step"], "399")
        self.assertEqual(listed["runs"][1]["alerts_firing"], 0)
        text = self.ask("run", "list", "-o", "yaml")
        self.assertTrue(text.startswith('runs:\n  - description:\n      name: "gpt-bf16"\n'), text[:200])
        self.assertIn("\ntotal: 2\n", text)
        rows = list(csv.reader(io.StringIO(self.ask("run", "list", "-o", "csv"))))
        self.assertEqual(rows[0][:3], ["RUN", "STEP", "STAGE"])
        self.assertEqual(rows[1][:3], ["gpt-bf16", "399", "1 drift"])

    def test_get(self) -> None:
        table = self.ask("run", "get", "gpt-bf16")
        self.assertRegex(table, r"(?m)^uuid +a1a2a3a4a5a6a7a8a9aaabacadaeafb0$")
        self.assertRegex(table, r"(?m)^labels +team=numerics$")
        by_uuid = self.ask("run", "get", "a1a2a3a4a5a6a7a8a9aaabacadaeafb0")
        self.assertEqual(by_uuid, table)
        self.assertIn('"nobody"', self.ask("run", "get", "nobody", code=1))

    def test_a_run_that_is_partly_judged_says_so(self) -> None:
        server = Server()
        try:
            server.tell("pad")
            told = "judged by: norm, leak, loss; drift, ties, logits in 1 of 3 layers"
            ask = [CLI, "--server", server.address, "run"]
            asked = {"text": True, "env": environment()}
            listed = subprocess.check_output([*ask, "list"], **asked)
            self.assertRegex(listed, rf"(?m)^gpt-fp32 +399 +0 {told} ")
            table = subprocess.check_output([*ask, "get", "gpt-fp32"], **asked)
            self.assertRegex(table, rf"(?m)^stage +0 {told}$")
            self.assertRegex(table, r"(?m)^judged +drift 1 of 3 layers, .*leak 3 of 3 layers, loss yes$")
            self.assertIn(f"stage 0 {told}", subprocess.check_output([*ask, "watch", "gpt-fp32", "--once"], **asked))
            run = json.loads(subprocess.check_output([*ask, "get", "gpt-fp32", "-o", "json"], **asked))
            self.assertEqual((run["stage"], run["judged"]["whole"], run["judged"]["text"]), (0, False, told))
            self.assertEqual(run["judged"]["families"][0], {"name": "drift", "layers": 1, "of": 3})
        finally:
            server.close()
        run = json.loads(self.ask("run", "get", "gpt-fp32", "-o", "json"))
        self.assertEqual((run["judged"]["whole"], run["judged"]["text"]), (True, "nothing found in 400 steps"))

    def test_a_loss_that_was_never_reported_is_no_nan(self) -> None:
        server = Server()
        try:
            server.tell("unreported")
            ask = ["--server", server.address, "run"]
            listed = run(*ask, "list", "--no-headers").stdout.splitlines()[1]
            self.assertRegex(listed, r"^gpt-fp32 +399 +0 judged by: all but loss +- ")
            self.assertRegex(run(*ask, "get", "gpt-fp32").stdout, r"(?m)^loss +not reported$")
            self.assertIn("loss not reported  last", run(*ask, "watch", "gpt-fp32", "--once").stdout)
            server.tell("nan")
            listed = run(*ask, "list", "--no-headers").stdout.splitlines()[1]
            self.assertRegex(listed, r"  NaN  ")
        finally:
            server.close()

    def test_events_and_annotate(self) -> None:
        self.ask("run", "annotate", "gpt-fp32", "new data", "--step", "7", "--kind", "data")
        self.ask("run", "annotate", "gpt-fp32", "a note")
        events = list(csv.DictReader(io.StringIO(self.ask("run", "events", "gpt-fp32", "-o", "csv"))))
        self.assertEqual([(e["STEP"], e["KIND"], e["TEXT"]) for e in events],
                         [("7", "DATA", "new data"), ("399", "ANNOTATION", "a note")])
        self.assertIn("257 bytes", self.ask("run", "annotate", "gpt-fp32", "x" * 257, code=2))
        self.ask("run", "annotate", "gpt-fp32", "x", "--kind", "party", code=2)

    def test_compare(self) -> None:
        # log2 = (step - 200) / 50 is 0.5 at step 225, less a rounding to float.
        self.assertEqual(
            self.ask("run", "compare", "gpt-bf16", "gpt-fp32"),
            "LAYER  HEAD  FIRST STEP  LOG2 RATIO  BAND\n1      2     226         3.98        0.5\n",
        )
        result = run("--server", self.server.address, "run", "compare", "gpt-bf16", "gpt-fp32", "-o", "json")
        self.assertIn("1 head differs, compared up to step 399", result.stderr)
        self.assertEqual(json.loads(result.stdout)["heads_differing"], 1)


class BaselineTest(CliTest):
    KIND = "TinyTransformer 3 layers x 4 heads (2 key heads) of 16, 64 tokens; flash, bf16"

    def test_list(self) -> None:
        self.assertEqual(
            self.ask("baseline", "list"),
            "RUNS  STEPS  NEWEST    KIND\n" f"1     399    gpt-fp32  {self.KIND}\n",
        )

    def test_get(self) -> None:
        text = self.ask("baseline", "get", "gpt-bf16", "--signal", "drift_ratio")
        self.assertIn(self.KIND, text)
        self.assertRegex(text, r"(?m)^gpt-fp32 +399 +2023-11-14T22:13:20Z$")
        self.assertRegex(text, r"(?m)^drift_ratio +256 +361 +1 +0\.25 +0\.5 +1 +1\.5 +2 +1 +9\.318$")
        bands = json.loads(self.ask("baseline", "get", "gpt-bf16", "-o", "json"))["bands"]
        self.assertEqual([band["signal"] for band in bands], ["drift_ratio"])
        own = run("--server", self.server.address, "baseline", "get", "gpt-fp32")
        self.assertEqual(own.returncode, 0)
        self.assertIn("no run of its kind", own.stderr)
        self.ask("baseline", "get", "nobody", code=1)
        self.ask("baseline", "get", "gpt-bf16", "--signal", "no_such", code=2)


class TransferTest(CliTest):
    def test_export_and_import(self) -> None:
        self.server.tell("export 600000")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "run.bwrun"
            self.assertEqual(self.ask("run", "export", "gpt-bf16", str(file)), "")
            self.assertEqual(file.read_bytes(), b"BWRUN" + b"x" * 600000)
            self.assertEqual(sorted(os.listdir(folder)), ["run.bwrun"])
            piped = subprocess.run([CLI, "--server", self.server.address, "run", "export", "gpt-bf16", "-"],
                                   capture_output=True, timeout=TIMEOUT, env=environment())
            self.assertEqual(piped.stdout, file.read_bytes())
            self.assertRegex(self.ask("run", "import", str(file), "--name", "copy"), r"(?m)^copy +10 +1$")
            self.assertIn("already", self.ask("run", "import", str(file), "--name", "copy", code=1))
            (Path(folder) / "bad").write_text("nonsense")
            bad = str(Path(folder) / "bad")
            self.assertIn(f"{bad}: not a .bwrun", self.ask("run", "import", bad, code=2))
            several = run("--server", self.server.address, "run", "import", bad, str(file), bad, str(file))
            self.assertEqual(several.returncode, 2)
            self.assertRegex(several.stdout, r"\ARUN +FRAMES +EVENTS\nimported +10 +1\n\Z")
            self.assertEqual(several.stderr.count(f"{bad}: not a .bwrun"), 2)
            self.assertIn(f'{file}: run "imported": is here already', several.stderr)
            self.assertIn("3 of 4 recordings were not imported", several.stderr)
            named = self.ask("run", "import", str(file), str(file), "--name", "x", code=2)
            self.assertIn("--name is one run's", named)
            self.ask("run", "import", str(Path(folder) / "missing"), code=2)
            self.ask("run", "export", "nobody", str(Path(folder) / "none"), code=1)
            self.ask("run", "export", "gpt-bf16", str(Path(folder) / "no" / "such"), code=1)
            self.assertEqual(sorted(os.listdir(folder)), ["bad", "run.bwrun"])

    def test_fifos_and_devices_are_neither_awaited_nor_replaced(self) -> None:
        self.server.tell("export 1000")
        with tempfile.TemporaryDirectory() as folder:
            fifo, part = Path(folder) / "fifo", Path(folder) / "new.part"
            os.mkfifo(fifo)
            os.mkfifo(part)
            before = os.stat(fifo)
            no_file = "it is a FIFO, must be a regular file"
            export = ("run", "export", "gpt-bf16")
            self.assertIn(f"{fifo}: {no_file}", self.ask(*export, str(fifo), code=1))
            self.assertIn(f"{part}: {no_file}", self.ask(*export, str(Path(folder) / "new"), code=1))
            self.assertIn("/dev/full: it is a device", self.ask("run", "export", "gpt-bf16", "/dev/full", code=1))
            for words in (("run", "import", str(fifo)), ("policy", "set", "gpt-bf16", str(fifo))):
                self.assertIn(f"{fifo}: {no_file}", self.ask(*words, code=1))
            for flag in ("--token-file", "--tls-ca"):
                said = self.ask(flag, str(fifo), "run", "list", code=2)
                self.assertIn(f"{flag} {fifo}: {no_file}", said)
            self.assertEqual(sorted(os.listdir(folder)), ["fifo", "new.part"])
            self.assertEqual(os.stat(fifo), before)


class HeadTest(CliTest):
    def test_top(self) -> None:
        self.assertEqual(
            self.ask("head", "top", "gpt-bf16", "--limit", "2"),
            "LAYER  HEAD  drift_ratio  MEDIAN  PEER SCORE  STAGE\n"
            "1      2     15.7797      1       9.57        1 drift\n"
            "0      0     1            1       0           0 healthy\n",
        )
        self.ask("head", "top", "gpt-bf16", "--limit", "1025", code=2)
        self.ask("head", "top", "gpt-bf16", "--signal", "no_such", code=2)

    def test_matrix(self) -> None:
        self.assertEqual(
            self.ask("matrix", "gpt-bf16", "drift_ratio", "--step", "300"),
            "drift_ratio at step 300\n"
            "layer  H0  H1  H2  H3\n"
            "0      1   1   1   1\n"
            "1      1   1   4   1\n"
            "2      1   1   1   1\n",
        )
        self.assertEqual(self.ask("matrix", "gpt-bf16", "drift_ratio", "--step", "300", "-o", "csv"),
                         "layer,0,1,2,3\n0,1,1,1,1\n1,1,1,4,1\n2,1,1,1,1\n")
        matrix = json.loads(self.ask("matrix", "gpt-bf16", "drift_ratio", "-o", "json"))
        self.assertEqual((matrix["layers"], matrix["heads"], matrix["step"]), (3, 4, "399"))

    def on_terminal(self, env: dict[str, str]) -> str:
        parent, child = pty.openpty()
        process = subprocess.Popen([CLI, "--server", self.server.address, "matrix", "gpt-bf16", "drift_ratio"],
                                   stdout=child, env=env)
        os.close(child)
        text = b""
        try:
            while data := os.read(parent, 4096):
                text += data
        except OSError:
            pass  # The other side has closed.
        os.close(parent)
        self.assertEqual(process.wait(TIMEOUT), 0)
        return text.decode()

    def test_colour_only_on_a_terminal_that_wants_it(self) -> None:
        self.assertIn("\x1b[38;5;196m15.78\x1b[0m", self.on_terminal(environment()))
        self.assertNotIn("\x1b", self.on_terminal(environment(NO_COLOR="1")))
        self.assertNotIn("\x1b", self.ask("matrix", "gpt-bf16", "drift_ratio"))


class SeriesTest(CliTest):
    def test_get(self) -> None:
        self.assertEqual(
            self.ask("series", "get", "gpt-bf16", "drift_ratio:1:2", "--from", "250", "--to", "252", "-o", "csv"),
            "SIGNAL,LAYER,HEAD,STEP,MIN,MEAN,MAX\n"
            "drift_ratio,1,2,250,2,2,2\n"
            "drift_ratio,1,2,251,2.02791905,2.02791905,2.02791905\n",
        )
        both = json.loads(self.ask("series", "get", "gpt-bf16", "loss", "rows:0:1", "--points", "10", "-o", "json"))
        self.assertEqual([series["id"]["signal"] for series in both["series"]], ["loss", "rows"])
        self.assertLessEqual(len(both["series"][0]["step"]), 10)
        self.assertTrue(both["series"][0]["downsampled"])

    def test_wrong_ones(self) -> None:
        for series in ("drift_ratio:1", "drift_ratio:x:1", ":1:2", "drift_ratio:1:2:3", "drift_ratio:-1:0"):
            self.assertIn("SIGNAL:LAYER:HEAD", self.ask("series", "get", "gpt-bf16", series, code=2))
        self.assertIn("0..2", self.ask("series", "get", "gpt-bf16", "drift_ratio:3:0", code=2))
        self.ask("series", "get", "gpt-bf16", "loss", "--points", "10001", code=2)
        self.ask("series", "get", "gpt-bf16", *["loss"] * 65, code=2)


class AlertTest(CliTest):
    def test_list(self) -> None:
        rows = list(csv.DictReader(io.StringIO(self.ask("alert", "list", "-o", "csv"))))
        self.assertEqual([(r["KEY"], r["STATE"], r["SEVERITY"]) for r in rows],
                         [("drift/1/2/220", "firing", "critical"), ("ties/0/3/100", "resolved", "info")])
        self.assertEqual(rows[0]["SUMMARY"], 'L1 H2 drifts, "faster"')
        self.assertEqual(rows[0]["HEAD"], "L1 H2")

    def test_exit_code_says_whether_one_fires(self) -> None:
        self.ask("alert", "list", code=0)
        self.ask("alert", "list", "--exit-code", code=3)
        self.ask("alert", "list", "--exit-code", "--run", "gpt-fp32", code=0)
        self.ask("alert", "list", "--severity", "critical", "--firing", "--exit-code", code=3)

    def test_get(self) -> None:
        text = self.ask("alert", "get", "gpt-bf16", "drift/1/2/220")
        self.assertRegex(text, r"(?m)^heads +L1 H2, L0 H3$")
        self.assertRegex(text, r"(?m)^drift_ratio +L1 H2 +4\.5 +2 +1 +0\.31\.\.1\.9 in 12 runs +220 +growth +doubles each 50 steps$")
        self.assertRegex(text, r"(?m)^siblings +of 12 siblings$")
        alert = json.loads(self.ask("alert", "get", "gpt-bf16", "drift/1/2/220", "-o", "json"))
        self.assertEqual([t["k"] for t in alert["alert"]["history"]], [0, 1])
        self.assertEqual(alert["window"][0]["id"], {"signal": "drift_ratio", "layer": 1, "head": 2, "name": ""})
        self.ask("alert", "get", "gpt-bf16", "no/such", code=1)

    def test_ack_and_silence(self) -> None:
        acked = json.loads(self.ask("alert", "ack", "gpt-bf16", "drift/1/2/220", "--comment", "on it", "-o", "json"))
        self.assertEqual((acked["acknowledged"], acked["acknowledged_by"], acked["comment"]), (True, "ann", "on it"))
        silenced = json.loads(self.ask("alert", "silence", "gpt-bf16", "drift/1/2/220", "--for", "2h", "-o", "json"))
        self.assertTrue(silenced["acknowledged"])
        self.assertGreater(int(silenced["silenced_until_unix_ns"]), 0)
        table = self.ask("alert", "ack", "gpt-bf16", "ties/0/3/100", "--by", "", "--comment", "fine", "--no-headers")
        self.assertRegex(table, r"ties/0/3/100  somebody  -  fine  no ties$")
        for wrong in ("0s", "31d", "2", "soon"):
            self.ask("alert", "silence", "gpt-bf16", "drift/1/2/220", "--for", wrong, code=2)
        self.ask("alert", "silence", "gpt-bf16", "drift/1/2/220", code=2)


class ActionTest(CliTest):
    def test_proposals_are_listed_approved_and_undone(self) -> None:
        proposed = json.loads(self.ask("action", "propose", "gpt-bf16", "attention.center_k",
                                       "--layer", "1", "--layer", "2", "--alert", "drift/1/2/220", "--reason", "it drifts",
                                       "-o", "json"))
        self.assertEqual(proposed["state"], "ACTION_STATE_PROPOSED")
        self.assertEqual(proposed["scope"]["layers"], [1, 2])
        self.assertEqual(proposed["history"][0]["by"], "ann")
        id = proposed["id"]
        rows = list(csv.DictReader(io.StringIO(self.ask("action", "list", "gpt-bf16", "--waiting", "-o", "csv"))))
        self.assertEqual([(r["ID"], r["STATE"], r["WHAT"], r["SCOPE"]) for r in rows],
                         [(id, "proposed", "attention.center_k", "L1, L2")])
        self.assertRegex(self.ask("alert", "get", "gpt-bf16", "drift/1/2/220"), rf"(?m)^{id} +proposed")
        approved = json.loads(self.ask("action", "approve", "gpt-bf16", id, "--by", "bob", "--reason", "yes", "-o", "json"))
        self.assertEqual([(c["state"], c["by"], c["reason"]) for c in approved["history"]],
                         [("ACTION_STATE_PROPOSED", "ann", "it drifts"), ("ACTION_STATE_APPROVED", "bob", "yes")])
        self.assertRegex(self.ask("action", "get", "gpt-bf16", id), r"(?m)^\S+ +approved +\S+ +bob +yes$")
        self.ask("action", "get", "gpt-bf16", "no-such", code=1)
        at_once = json.loads(self.ask("action", "propose", "gpt-bf16", "qk.clip", "--value", "0.5", "--head", "1/2",
                                      "--approve", "-o", "json"))
        self.assertEqual((at_once["state"], at_once["scope"]["heads"]), ("ACTION_STATE_APPROVED", [{"layer": 1, "head": 2}]))
        self.assertIn("refused", self.ask("action", "undo", "gpt-bf16", at_once["id"]))

    def test_alerts_show_their_owner_and_what_waits(self) -> None:
        key = "drift/1/2/220"
        self.ask("alert", "ack", "gpt-bf16", key, "--by", "ann")
        id = json.loads(self.ask("action", "propose", "gpt-bf16", "qk.clip", "--value", "0.5", "--head", "1/2", "--alert", key,
                                 "-o", "json"))["id"]
        rows = {r["KEY"]: r for r in csv.DictReader(io.StringIO(self.ask("alert", "list", "-o", "csv")))}
        self.assertEqual(rows[key]["OWNER"], "ann")
        self.assertIn(f"qk.clip 0.5, L1 H2 ({id})", rows[key]["WAITING"])
        self.assertEqual((rows["ties/0/3/100"]["WAITING"], "acknowledged" in rows[key]["NOTES"]), ("-", False))
        for alert in json.loads(self.ask("alert", "list", "-o", "json"))["alerts"]:
            waiting = [action["id"] for action in alert["proposed"]]
            self.assertEqual(id in waiting, alert["last"]["key"] == key)
        self.ask("action", "reject", "gpt-bf16", id)
        self.assertNotIn(id, self.ask("alert", "list"))

    def test_an_unknown_action_names_the_list(self) -> None:
        self.ask("action", "get", "gpt-bf16", "none", code=1)
        done = run("--server", self.server.address, "action", "get", "gpt-bf16", "none")
        self.assertIn("has no such action (see bellwether action list gpt-bf16)", done.stderr)
        done = run("--server", self.server.address, "action", "approve", "gpt-bf16", "none")
        self.assertIn("has no such action (see bellwether action list RUN)", done.stderr)

    def test_refused_actions_are_in_the_exported_audit(self) -> None:
        self.ask("action", "propose", "gpt-fp32", "stop", "--by", "policy", code=2)
        exported = json.loads(self.ask("action", "list", "gpt-fp32", "-o", "json"))
        self.assertIn("must be a person's name", exported["audit"][-1]["refused"])
        self.assertIn("must be a person's name", self.ask("action", "list", "gpt-fp32"))
        self.ask("action", "propose", "gpt-fp32", "explode", code=2)
        self.ask("action", "propose", "gpt-fp32", "qk.clip", "--head", "3", code=2)

    def test_policies(self) -> None:
        self.assertIn("mode: observe", self.ask("policy", "get", "gpt-fp32"))
        self.assertIn("mode: enforce", self.ask("policy", "set", "gpt-fp32", "--mode", "enforce"))
        with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
            file.write("mode: propose\n")
            file.flush()
            policy = json.loads(self.ask("policy", "set", "gpt-fp32", file.name, "-o", "json"))
            self.assertEqual((policy["yaml"], policy["own"]), ("mode: propose\n", True))
            self.ask("policy", "set", "gpt-fp32", file.name, "--mode", "observe", code=2)
        self.ask("policy", "set", "gpt-fp32", code=2)
        self.ask("policy", "set", "gpt-fp32", "/no/such/file", code=1)
        self.assertIn("the server's", self.ask("policy", "set", "gpt-fp32", "--reset"))


class ClusterTest(unittest.TestCase):
    def test_lists_say_whose_runs_are_missing(self) -> None:
        server = Server("--absent", "b:7070", "--unserved", "1")
        self.addCleanup(server.close)
        done = run("--server", server.address, "run", "list")
        self.assertEqual(done.returncode, 0)
        self.assertIn("gpt-bf16", done.stdout)
        self.assertEqual(
            done.stderr,
            "bellwether: 1 server of the cluster did not answer: its runs are missing here (b:7070)\n"
            "bellwether: 1 partition of the cluster is served by nobody just now: the runs there are missing here\n",
        )
        alerts = run("--server", server.address, "alert", "list")
        self.assertIn("drift/1/2/220", alerts.stdout)
        self.assertEqual(
            alerts.stderr,
            "bellwether: 1 server of the cluster did not answer: its alerts stand here without people's notes (b:7070)\n",
        )
        two = Server("--absent", "b:7070,c:7070")
        self.addCleanup(two.close)
        baselines = run("--server", two.address, "baseline", "list", "-o", "json")
        self.assertEqual(json.loads(baselines.stdout)["unanswered"], ["b:7070", "c:7070"])
        self.assertEqual(
            baselines.stderr,
            "bellwether: 2 servers of the cluster did not answer: their runs are missing here (b:7070, c:7070)\n",
        )


class WatchTest(unittest.TestCase):
    """Streams; each test has a server of its own."""

    def setUp(self) -> None:
        self.server = Server()

    def tearDown(self) -> None:
        self.server.close()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([CLI, "--server", self.server.address, *arguments], text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
        self.addCleanup(process.communicate)
        killer = threading.Timer(4 * TIMEOUT, process.kill)  # A hang fails instead of lasting.
        killer.start()
        self.addCleanup(killer.cancel)
        return process

    def line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline()

    def test_alerts_stored_then_live_and_ctrl_c_is_no_failure(self) -> None:
        watch = self.start("alert", "watch", "-o", "json")
        ids = [json.loads(self.line(watch))["id"] for _ in range(4)]
        self.assertEqual(ids, ["1", "2", "3", "4"])
        self.server.tell("post live/1 40")
        live = json.loads(self.line(watch))
        self.assertEqual((live["id"], live["key"], live["severity"]), ("5", "live/1", "SEVERITY_WARNING"))
        watch.send_signal(signal.SIGINT)
        self.assertEqual(watch.wait(TIMEOUT), 0)

    def test_alerts_resume_and_filter(self) -> None:
        watch = self.start("alert", "watch", "--after", "2", "-o", "json")
        self.assertEqual(json.loads(self.line(watch))["id"], "3")
        watch.send_signal(signal.SIGTERM)
        self.assertEqual(watch.wait(TIMEOUT), 0)
        watch = self.start("alert", "watch", "--severity", "critical")
        self.assertTrue(self.line(watch).startswith("ID  TIME"))
        self.assertRegex(self.line(watch), r'^2 .*critical.*L1 H2 drifts, "faster"$')
        watch.send_signal(signal.SIGINT)
        self.assertEqual(watch.wait(TIMEOUT), 0)
        self.assertEqual(run("--server", self.server.address, "alert", "watch", "--after", "99").returncode, 2)
        self.assertEqual(run("alert", "watch", "--after", "1", "--new").returncode, 2)

    def test_a_stopped_reader_misses_nothing(self) -> None:
        watch = self.start("alert", "watch", "--after", "4", "-o", "json")
        self.server.tell("post first 40")
        got = [int(json.loads(self.line(watch))["id"])]
        # 24 MB: sockets and windows fill and stay full; the server says resync.
        watch.send_signal(signal.SIGSTOP)
        for i in range(3000):
            self.server.tell(f"post k{i} 8000")
        watch.send_signal(signal.SIGCONT)
        while len(got) < 3001:
            got.append(int(json.loads(self.line(watch))["id"]))
        self.assertEqual(got, list(range(5, 3006)))
        watch.send_signal(signal.SIGINT)
        _, errors = watch.communicate(timeout=TIMEOUT)
        self.assertEqual(watch.returncode, 0)
        self.assertIn("asking again after", errors)

    def test_a_run_until_it_ends(self) -> None:
        watch = self.start("run", "watch", "gpt-bf16", "--interval", "100ms", "-o", "csv")
        self.assertTrue(self.line(watch).endswith("LARGEST drift_ratio\n"))
        self.assertTrue(self.line(watch).endswith(",live,L1 H2 15.78\n"))
        self.server.tell("end")
        self.assertIn(",ended,", self.line(watch))
        self.assertEqual(watch.wait(TIMEOUT), 0)
        self.assertEqual(run("--server", self.server.address, "run", "watch", "nobody").returncode, 1)

    def test_a_list_again_when_it_changes(self) -> None:
        watch = self.start("run", "list", "--live", "--no-headers", "--watch", "100ms")
        self.assertRegex(self.line(watch), "^gpt-bf16 .* live$")
        # Unchanged, it is told no second time: the next line is of the change.
        self.server.tell("end")
        again = self.start("run", "list", "--no-headers", "--watch", "100ms")
        self.assertRegex(self.line(again), "^gpt-bf16 .* ended$")
        again.send_signal(signal.SIGINT)
        self.assertEqual(again.wait(TIMEOUT), 0)
        self.server.close()
        output, errors = watch.communicate(timeout=TIMEOUT)
        self.assertEqual((watch.returncode, output), (4, ""))
        self.assertIn("cannot reach", errors)
        self.server = Server()

    def test_a_server_that_goes_away_is_waited_for(self) -> None:
        # That it goes on where it was: tests/fault/test_connection_age.py.
        watch = self.start("alert", "watch", "-o", "json")
        self.line(watch)
        self.server.close()
        assert watch.stderr is not None
        line = watch.stderr.readline()
        self.assertIn("cannot reach", line)
        self.assertIn("; trying until it answers", line)
        watch.send_signal(signal.SIGTERM)
        self.assertEqual(watch.wait(TIMEOUT), 0)
        self.server = Server()

    def test_a_closed_pipe_ends_it(self) -> None:
        watch = self.start("alert", "watch", "-o", "json")
        self.line(watch)
        assert watch.stdout is not None
        watch.stdout.close()
        watch.stdout = None
        self.server.tell("post one 40")
        self.server.tell("post two 40")
        self.assertEqual(watch.wait(TIMEOUT), 0)


class ConnectTest(unittest.TestCase):
    def test_unreachable(self) -> None:
        result = run("--server", "127.0.0.1:1", "run", "list")
        self.assertEqual((result.returncode, result.stdout), (4, ""))
        self.assertIn("cannot reach 127.0.0.1:1", result.stderr)

    def test_no_server_at_all(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            result = run("run", "list", env=environment(XDG_STATE_HOME=folder))
        self.assertEqual(result.returncode, 4, "is a server of yours on 127.0.0.1:7070?")
        self.assertIn("no private server", result.stderr)
        self.assertTrue(result.stderr.startswith("bellwether: no server is named: give --server HOST:PORT"), result.stderr)

    def test_environment_and_flag(self) -> None:
        server = Server()
        self.addCleanup(server.close)
        self.assertEqual(run("run", "list", env=environment(BELLWETHER_SERVER=server.address)).returncode, 0)
        both = run("run", "list", "--server", "127.0.0.1:1", env=environment(BELLWETHER_SERVER=server.address))
        self.assertEqual(both.returncode, 4)

    def test_the_private_server(self) -> None:
        server = Server("--token", "s3cret")
        self.addCleanup(server.close)
        with tempfile.TemporaryDirectory() as folder:
            ready = Path(folder) / "bellwether" / "server.json"
            ready.parent.mkdir()
            about = {"pid": server.process.pid, "grpc": server.address, "http": "127.0.0.1:1", "token": "s3cret"}
            ready.write_text(json.dumps(about))
            self.assertEqual(run("run", "list", env=environment(XDG_STATE_HOME=folder)).returncode, 0)
            home = Path(folder) / "home"
            (home / ".local" / "state").mkdir(parents=True)
            shutil.copytree(ready.parent, home / ".local" / "state" / "bellwether")
            self.assertEqual(run("run", "list", env=environment(XDG_STATE_HOME="", HOME=str(home))).returncode, 0)
            # Where machines share the folder, this one's own.
            own = ready.parent / "hosts" / socket.gethostname() / "server.json"
            own.parent.mkdir(parents=True)
            own.write_text(ready.read_text())
            ready.write_text(json.dumps({**about, "grpc": "unix:/nowhere"}))
            self.assertEqual(run("run", "list", env=environment(XDG_STATE_HOME=folder)).returncode, 0)
            own.unlink()
            # A file left by a server that is gone, and one that is none.
            gone = subprocess.Popen(["true"])
            gone.wait()
            ready.write_text(json.dumps({**about, "pid": gone.pid}))
            self.assertEqual(run("run", "list", env=environment(XDG_STATE_HOME=folder)).returncode, 4)
            ready.write_text("{")
            self.assertEqual(run("run", "list", env=environment(XDG_STATE_HOME=folder)).returncode, 4)

    def test_denied(self) -> None:
        server = Server("--token", "s3cret")
        self.addCleanup(server.close)
        result = run("--server", server.address, "run", "list")
        self.assertEqual((result.returncode, result.stdout), (5, ""))
        self.assertIn("denied", result.stderr)
        with tempfile.TemporaryDirectory() as folder:
            token = Path(folder) / "token"
            token.write_text("wrong\n")
            arguments = ("--server", server.address, "--token-file", str(token), "run", "list")
            self.assertEqual(run(*arguments).returncode, 5)
            watch = ("--server", server.address, "--token-file", str(token), "alert", "watch")
            self.assertEqual(run(*watch).returncode, 5)
            token.write_text("s3cret\n")
            self.assertEqual(run(*arguments).returncode, 0)
            token.write_text(" \n")
            self.assertEqual(run(*arguments).returncode, 2)

    def test_timeout(self) -> None:
        # A port that accepts and says nothing.
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            self.assertEqual(run("--server", address, "--timeout", "300ms", "run", "list").returncode, 4)
        for wrong in ("0", "-1s", "61m", "5h", "soon", "nan"):
            result = run("--timeout", wrong, "run", "list")
            self.assertEqual(result.returncode, 2, wrong)
            self.assertIn("1ms..60m", result.stderr)

    @unittest.skipUnless(shutil.which("openssl"), "needs openssl")
    def test_mutual_tls(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)

            def openssl(*arguments: str) -> None:
                subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder)

            openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-days",
                    "2", "-subj", "/CN=test ca")
            (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
            for who in ("server", "client"):
                openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{who}.key", "-out", f"{who}.csr", "-subj",
                        f"/CN={who}")
                openssl("x509", "-req", "-in", f"{who}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                        "-out", f"{who}.pem", "-days", "2", "-extfile", "names")
            server = Server("--tls-ca", f"{name}/ca.pem", "--tls-cert", f"{name}/server.pem", "--tls-key",
                            f"{name}/server.key")
            self.addCleanup(server.close)
            to = ("--server", server.address, "run", "list", "--tls-ca", f"{name}/ca.pem")
            mine = ("--tls-cert", f"{name}/client.pem", "--tls-key", f"{name}/client.key")
            self.assertEqual(run(*to, *mine).returncode, 0)
            self.assertEqual(run(*to).returncode, 4)
            self.assertEqual(run("--server", server.address, "run", "list").returncode, 4)
            self.assertEqual(run(*to, *mine[:2]).returncode, 2)
            self.assertEqual(run(*to, "--tls-cert", f"{name}/none", *mine[2:]).returncode, 2)


class UsageTest(unittest.TestCase):
    def commands(self, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        """The tree as its help shows it."""
        text = run(*path, "--help").stdout
        if "\nSubcommands:\n" not in text:
            return [path]
        block = text.split("\nSubcommands:\n")[1].split("\n\n")[0]
        names = re.findall(r"(?m)^  (\S+)", block)
        return [leaf for name in names for leaf in self.commands((*path, name))]

    def test_help_is_a_success_with_an_example_for_each_command(self) -> None:
        leaves = self.commands()
        self.assertIn(("run", "list"), leaves)
        self.assertIn(("alert", "silence"), leaves)
        for leaf in leaves:
            result = run(*leaf, "--help")
            self.assertEqual((result.returncode, result.stderr), (0, ""), leaf)
            self.assertRegex(result.stdout, r"Example:\n  .*bellwether " + " ".join(leaf))

    def test_usage_errors(self) -> None:
        for arguments in ((), ("run",), ("walk",), ("run", "get"), ("run", "list", "--nonsense"),
                          ("run", "list", "-o", "xml"), ("run", "list", "--limit", "many"),
                          ("run", "list", "--limit", "-1"), ("matrix", "run"), ("version", "extra"),
                          ("--tls-ca", "/nonexistent", "run", "list"), ("alert", "list", "--severity", "loud")):
            result = run(*arguments)
            self.assertEqual((result.returncode, result.stdout), (2, ""), arguments)
            self.assertNotEqual(result.stderr, "")

    def test_version(self) -> None:
        self.assertRegex(run("version").stdout, r"\Abellwether \d+\.\d+\.\d+ \(gRPC 1\.\d+\.\d+\)\n\Z")
        self.assertEqual(set(json.loads(run("version", "-o", "json").stdout)), {"version", "grpc_version"})

    def test_server_info(self) -> None:
        server = Server()
        self.addCleanup(server.close)
        table = run("--server", server.address, "server", "info").stdout
        self.assertRegex(table, r"(?m)^backend +cpu \(no bank library\)$")
        self.assertRegex(table, r"(?m)^query_points_per_series +10000$")
        rows = list(csv.reader(io.StringIO(run("--server", server.address, "server", "info", "-o", "csv").stdout)))
        self.assertEqual(rows[0], ["FIELD", "VALUE"])
        self.assertEqual(rows.count(["FIELD", "VALUE"]), 1)
        self.assertIn(["query_points_per_series", "10000"], rows)
        info = json.loads(run("--server", server.address, "server", "info", "-o", "json").stdout)
        self.assertEqual(info["revision"], "0123abc")


class ServerBinaryTest(unittest.TestCase):
    """replay and check run bellwetherd, scorecard bellwether-lab; here scripts that print their arguments."""

    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        # A copy: the real one may have the real programs beside it.
        shutil.copy(CLI, self.folder / "bellwether")
        (self.folder / "file").write_text("x")

    def fake(self, folder: Path, code: int) -> None:
        folder.mkdir(exist_ok=True)
        for program, prefix in (("bellwetherd", folder.name), ("bellwether-lab", f"{folder.name} lab")):
            script = folder / program
            script.write_text(f'#!/bin/sh\necho "{prefix}" "$@"\nexit {code}\n')
            script.chmod(0o755)

    def call(self, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(self.folder / "bellwether"), *arguments], capture_output=True, text=True,
                              timeout=TIMEOUT, env=environment(PATH=f"{path or self.folder / 'none'}:/usr/bin:/bin"))

    def test_replay_passes_arguments_output_and_exit_code_through(self) -> None:
        self.fake(self.folder, 3)
        file = str(self.folder / "file")
        result = self.call("replay", file, "--json", "--speed=10")
        self.assertEqual(result.stdout, f"{self.folder.name} replay {file} --json --speed=10\n")
        self.assertEqual(result.returncode, 3)
        self.assertEqual(self.call("replay", str(self.folder / "missing")).returncode, 2)

    def test_scorecard_passes_its_arguments_on(self) -> None:
        self.fake(self.folder, 1)
        folder = str(self.folder)
        result = self.call("scorecard", "--without", "ties", folder, "--without=drift.leak", "--json", "--labels",
                           folder + "/file")
        self.assertEqual(result.stdout, f"{self.folder.name} lab scorecard --json --labels {folder}/file "
                                        f"--without ties --without drift.leak {folder}\n")
        self.assertEqual(result.returncode, 1)
        synthetic = self.call("scorecard", "--synthetic", "--runs", "2", "--seed", "7")
        self.assertEqual(synthetic.stdout, f"{self.folder.name} lab scorecard --synthetic --runs 2 --seed 7\n")
        bars = self.call("scorecard", folder, "--bars")
        self.assertEqual(bars.stdout, f"{self.folder.name} lab scorecard --bars {folder}\n")

    def test_beside_before_path(self) -> None:
        self.fake(self.folder / "elsewhere", 0)
        file = str(self.folder / "file")
        self.assertTrue(self.call("replay", file, path=self.folder / "elsewhere").stdout.startswith("elsewhere "))
        self.fake(self.folder, 0)
        self.assertTrue(self.call("replay", file, path=self.folder / "elsewhere").stdout.startswith(self.folder.name))

    def test_check_config_exits_with_3_on_findings(self) -> None:
        file = str(self.folder / "file")
        for code, expected in ((0, 0), (1, 3), (2, 3)):
            self.fake(self.folder, code)
            result = self.call("check", "config", file)
            self.assertEqual(result.stdout, f"{self.folder.name} --config.check --config.file={file}\n")
            self.assertEqual(result.returncode, expected)

    def test_rules_pass_arguments_output_and_exit_code_through(self) -> None:
        file = str(self.folder / "file")
        for arguments in (
            ("rules", "check", file),
            ("rules", "test", file, file),
            ("rules", "explain", file),
            ("rules", "explain", file, "drift"),
            ("replay", file, "--rules", file),
            ("scorecard", "--rules", file, str(self.folder)),
        ):
            for code in (0, 1, 3):
                self.fake(self.folder, code)
                result = self.call(*arguments)
                lab = "lab " if arguments[0] == "scorecard" else ""
                self.assertEqual(result.stdout, f"{self.folder.name} {lab}{' '.join(arguments)}\n")
                self.assertEqual(result.returncode, code)
        for arguments in (("rules",), ("rules", "check"), ("rules", "check", file + "-missing"), ("rules", "test")):
            self.assertEqual(self.call(*arguments).returncode, 2, arguments)

    def test_no_binary_is_a_failure_that_explains_itself(self) -> None:
        file = str(self.folder / "file")
        for arguments in (("replay", file), ("check", "config", file), ("rules", "check", file)):
            result = self.call(*arguments)
            self.assertEqual((result.returncode, result.stdout), (1, ""))
            self.assertIn("bellwetherd cannot be started", result.stderr)
        self.assertIn("bellwether-lab cannot be started", self.call("scorecard", str(self.folder)).stderr)


if __name__ == "__main__":
    unittest.main()
