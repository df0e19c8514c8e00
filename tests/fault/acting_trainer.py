"""One rank of a training job that does as it is told: for tests of what is killed around it.

It steps 100 times a second, applies each action once at its step, writes each application to a file
before it answers, and answers a repeated action as it did before.  Ends on SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "client_lib/python"))

from bellwether.client import Block, RunClient, RunOptions

CENTER_K = 2  # ActionKind of actions.proto


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--server", "--run", "--log"):
        parser.add_argument(name, required=True)
    for name in ("--rank", "--world", "--attempt", "--late"):
        parser.add_argument(name, type=int, default=0)
    given = parser.parse_args()
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    options = RunOptions(
        run=given.run, layers=2, heads=2, server=given.server, rank=given.rank, world=given.world or 1,
        attempt=given.attempt, actions_mask=1 << CENTER_K,
    )  # fmt: skip
    answers: dict[str, tuple[int, bool, str]] = {}
    waiting: dict[str, Any] = {}
    with RunClient(options) as client, open(given.log, "a") as log:
        step = 0
        while not ended:
            step += 1
            client.push(step, [Block("loss", [1.0])])
            for payload in client.poll()[1]:
                action = json.loads(payload)
                if action["id"] in answers:
                    at, applied, why = answers[action["id"]]
                    client.push_action_result(action["id"], at, applied, why)
                else:
                    waiting[action["id"]] = action
            for id, action in list(waiting.items()):
                at = int(action.get("apply_at_step", 0)) or step
                if step < at:
                    continue
                del waiting[id]
                if step > at or given.late:
                    answers[id] = (step, False, f"late: step {step}")
                else:
                    answers[id] = (step, True, "")
                    line = {"id": id, "rank": given.rank, "attempt": given.attempt, "step": step}
                    log.write(json.dumps(line | {"undoes": action.get("undoes", "")}) + "\n")
                    log.flush()
                client.push_action_result(id, *answers[id])
            time.sleep(0.01)


if __name__ == "__main__":
    main()
