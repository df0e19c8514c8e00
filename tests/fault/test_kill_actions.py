"""Goal: an action is applied once, by all ranks at one step or by none, and its history tells what
happened, whichever of server and trainer is killed between any two of its changes.
Method: the real server, and ranks that are processes of their own with the real client
(acting_trainer.py), which write down what they apply; SIGKILL between the words of an action's life.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, Server, wait_for

RUN = "acting"
CENTRING = {"kind": "ACTION_KIND_CENTER_K", "value": 1}


class Job:
    """Its ranks, and what they applied."""

    def __init__(self, server: Server, folder: Path, world: int = 1) -> None:
        self.server, self.world, self.attempt = server, world, 0
        self.log = folder / "applied.jsonl"
        self.ranks: list[subprocess.Popen[bytes]] = []

    def start(self, late: int = -1) -> None:
        trainer = Path(__file__).with_name("acting_trainer.py")
        for rank in range(self.world):
            words = [f"--server={self.server.grpc}", f"--run={RUN}", f"--log={self.log}", f"--rank={rank}",
                     f"--world={self.world}", f"--attempt={self.attempt}", f"--late={int(rank == late)}"]  # fmt: skip
            environment = dict(os.environ, BELLWETHER_LIB_DIR=str(BIN))
            self.ranks.append(
                subprocess.Popen([sys.executable, str(trainer), *words], env=environment)
            )

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        self.ranks.clear()

    def restart(self) -> None:
        self.kill()
        self.attempt += 1
        self.start()

    def __enter__(self) -> Job:
        self.start()
        self.wait_for_steps()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait_for_steps(self) -> None:
        def steps() -> bool:
            try:
                run = self.server.call("GetRun", run=RUN)
            except urllib.error.HTTPError:
                return False
            return int(run["description"]["attempt"]) == self.attempt and int(run["step"]) > 2

        wait_for("the ranks train", steps, 60)

    def applied(self) -> list[dict[str, Any]]:
        return (
            [json.loads(line) for line in self.log.read_text().splitlines()]
            if self.log.exists()
            else []
        )


def actions(server: Server) -> list[dict[str, Any]]:
    return list(server.call("ListActions", run=RUN)["actions"])


def states(action: dict[str, Any]) -> list[str]:
    return [change["state"].removeprefix("ACTION_STATE_") for change in action["history"]]


def wait_for_state(server: Server, id: str, *wanted: str) -> dict[str, Any]:
    def found() -> Any:
        for action in actions(server):
            if action["id"] == id and states(action)[-1] in wanted:
                return action
        return None

    return dict(wait_for(f"action {id} is {wanted}", found, 60))


def undo_of(server: Server, id: str) -> dict[str, Any]:
    """The newest; it is told of behind what it undoes."""

    def found() -> list[dict[str, Any]]:
        return [a for a in actions(server) if a["undoes"] == id]

    return dict(wait_for(f"{id} is undone", found)[-1])


@pytest.mark.parametrize("victims", ["server", "rank", "both"])
@pytest.mark.parametrize("when", ["proposed", "approved", "applied"])
def test_one_rank_applies_it_once_and_the_history_says_so(
    tmp_path: Path, when: str, victims: str
) -> None:
    with Server(tmp_path) as server, Job(server, tmp_path) as job:

        def disaster(now: str) -> None:
            if now != when:
                return
            if victims != "server":
                job.kill()
            if victims != "rank":
                server.kill()
                server.start()
            if victims != "server":
                job.restart()
                if now == "applied":
                    job.wait_for_steps()

        id = server.call("ProposeAction", run=RUN, action=CENTRING, by="alice")["id"]
        disaster("proposed")
        if when == "proposed" and victims != "server":
            job.wait_for_steps()
            # If the job's death came before its next attempt, the run had ended, and its proposals.
            if states(next(a for a in actions(server) if a["id"] == id))[-1] != "PROPOSED":
                id = server.call("ProposeAction", run=RUN, action=CENTRING, by="alice")["id"]
        server.call("ApproveAction", run=RUN, id=id, by="bob")
        disaster("approved")
        wait_for_state(server, id, "APPLIED")
        disaster("applied")
        wait_for("it is in force in the newest attempt",
                 lambda: any(line["attempt"] == job.attempt for line in job.applied()), 60)  # fmt: skip
        action = wait_for_state(server, id, "APPLIED")
        told = [(line["id"], line["attempt"]) for line in job.applied()]
        assert len(set(told)) == len(told), "never twice in one attempt"
        assert {line[0] for line in told} == {id}
        history = states(action)
        assert history[:2] == ["PROPOSED", "APPROVED"]
        assert [change["by"] for change in action["history"][:2]] == ["alice", "bob"]
        assert all(a["id"] == id or "APPROVED" not in states(a) for a in actions(server))
        if victims == "server":
            # As if nobody had been killed.
            assert history == ["PROPOSED", "APPROVED", "SENT", "APPLIED"]
        if victims != "server" and when == "applied":
            assert history == ["PROPOSED", "APPROVED", "SENT", "APPLIED", "SENT", "APPLIED"]
        # A rank may have applied it just before it died, with or without a word of it.
        assert 1 <= history.count("APPLIED") <= len({line["attempt"] for line in job.applied()})


@pytest.mark.parametrize("when", ["approved", "sent"])
def test_two_ranks_apply_at_one_step_over_server_kill(tmp_path: Path, when: str) -> None:
    with Server(tmp_path) as server, Job(server, tmp_path, world=2) as job:
        id = server.call("ProposeAction", run=RUN, action=CENTRING, by="alice", approve=True)["id"]
        if when == "sent":
            wait_for_state(server, id, "SENT", "APPLIED")
        server.kill()
        server.start()
        action = wait_for_state(server, id, "APPLIED", "REFUSED")
        lines = [line for line in job.applied() if line["id"] == id]
        if states(action)[-1] == "APPLIED":
            assert sorted(line["rank"] for line in lines) == [0, 1]
            assert len({line["step"] for line in lines}) == 1
        else:  # It came too late to one of them while the server was away: nobody keeps it.
            for line in lines:
                assert wait_for_state(server, undo_of(server, id)["id"], "KEPT")
                taken_back = {x["rank"] for x in job.applied() if x["undoes"] == id}
                assert line["rank"] in taken_back


@pytest.mark.parametrize("victims", ["a rank", "ranks", "all"])
@pytest.mark.parametrize("when", ["approved", "sent", "applied"])
def test_restarted_ranks_apply_an_action_at_one_step(
    tmp_path: Path, when: str, victims: str
) -> None:
    with Server(tmp_path) as server, Job(server, tmp_path, world=2) as job:
        id = server.call("ProposeAction", run=RUN, action=CENTRING, by="alice", approve=True)["id"]
        if when != "approved":
            wait_for_state(server, id, "SENT" if when == "sent" else "APPLIED", "APPLIED")
        if victims == "a rank":
            job.ranks[1].kill()  # The launcher ends the other, some time later.
            job.ranks[1].wait()
            server.call("ListActions", run=RUN)
        elif victims == "all":
            job.kill()
            server.kill()
            server.start()
        job.restart()

        def lines() -> list[dict[str, Any]]:
            return [line for line in job.applied() if line["attempt"] == job.attempt]

        wait_for("both ranks have it", lambda: len(lines()) >= 2, 60)
        wait_for_state(server, id, "APPLIED")
        assert sorted(line["rank"] for line in lines()) == [0, 1]
        assert len({line["step"] for line in lines()}) == 1
        assert {line["id"] for line in lines()} == {id}
        told = [(line["id"], line["rank"], line["attempt"]) for line in job.applied()]
        assert len(set(told)) == len(told), "never twice in one attempt"


def test_a_late_rank_makes_the_other_take_it_back(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        job = Job(server, tmp_path, world=2)
        try:
            job.start(late=1)
            job.wait_for_steps()
            id = server.call("ProposeAction", run=RUN, action=CENTRING, by="alice", approve=True)[
                "id"
            ]
            refused = wait_for_state(server, id, "REFUSED")
            assert "partial" in refused["history"][-1]["reason"]
            undo = undo_of(server, id)
            wait_for_state(server, undo["id"], "KEPT")
            lines = job.applied()
            assert [(line["rank"], line["undoes"]) for line in lines] == [(0, ""), (0, id)]
        finally:
            job.kill()
