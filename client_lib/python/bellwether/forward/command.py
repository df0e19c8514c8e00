"""python -m bellwether forward RUN: a run's signals in TensorBoard, W&B, trackio, MLflow or an
OpenTelemetry collector, from outside."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

from .._util.counted import counted
from ..query import QueryError, add_client_arguments, client_of
from .loggers import LOGGERS, Logger, Missing, Start, package
from .otlp import Otlp
from .reader import Away, Batch, Place, Reader

OK, FAILED, USAGE, UNREACHABLE, INTERRUPTED = 0, 1, 2, 4, 130
EVERY_SECONDS = 10.0
TARGETS_MAX = 8
TARGETS = {**LOGGERS, "otlp": Otlp}

_EPILOG = """\
examples:
  python -m bellwether forward llama --to tensorboard:runs/llama
  python -m bellwether forward llama --to wandb:team/pretraining --follow
  python -m bellwether forward llama --to otlp:http://collector:4318 --follow
  python -m bellwether forward llama --to mlflow:sqlite:///mlflow.db#pretraining --to tensorboard:tb

exit codes:
  0    everything was forwarded; with --follow: the run ended, or Ctrl-C or SIGTERM came
  1    the server refuses, or a package is missing; the text says what to install
  2    wrong usage
  4    the server could not be reached, or a logger did not take what it was given
  130  ended by Ctrl-C without --follow
What a logger has taken is remembered and is not sent again: run the same command to go on.

Of each layer it forwards the worst head's drift ratio, key-gradient leak, sigma(W_Q), largest
logit, entropy ratio and share of tied rows.  Of the run it forwards its stage, the steps that are
left and how many alerts fire.  Each stands at its own training step.  A change of an alert is a
text.
"""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _target(text: str) -> tuple[str, str]:
    kind, _, where = text.partition(":")
    if kind not in TARGETS or not where:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be tensorboard:DIR, wandb:PROJECT, trackio:PROJECT, "
            "mlflow:URI[#EXPERIMENT] or otlp:URL"
        )
    return kind, str(Path(where).resolve()) if kind == "tensorboard" else where


def _parse(arguments: Optional[list[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bellwether forward",
        description="Forwards the signals of a run that a server holds to other experiment "
        "loggers, from outside.  The training process is not touched and pays nothing.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="the run's name (the newest of that name) or uuid")
    add(
        "--to", action="append", required=True, type=_target, metavar="LOGGER:WHERE",
        help="tensorboard:DIR, wandb:PROJECT (or ENTITY/PROJECT), trackio:PROJECT, "
        "mlflow:URI[#EXPERIMENT] or otlp:URL of an OpenTelemetry collector (http://host:4318); "
        f"may be given {TARGETS_MAX} times",
    )  # fmt: skip
    add_client_arguments(parser)
    add("--follow", action="store_true", help="go on with what is new, until the run ends")
    add(
        "--every", type=float, default=EVERY_SECONDS, metavar="SECONDS",
        help=f"with --follow, how often the server is asked ({EVERY_SECONDS:g})",
    )  # fmt: skip
    add(
        "--alerts", action="store_true",
        help="a warning or more that fires is an alert of W&B's or trackio's, too, also an old one",
    )  # fmt: skip
    add("--again", action="store_true", help="forward everything once more, to new runs there")
    given = parser.parse_args(arguments)
    if not 0.1 <= given.every <= 3600:
        parser.error(f"--every: {given.every:g} is outside of 0.1 to 3600 seconds")
    if len(given.to) > TARGETS_MAX:
        parser.error(f"--to: given {len(given.to)} times: at most {TARGETS_MAX}")
    if len(set(given.to)) < len(given.to):
        parser.error("--to: the same one is given twice")
    return given


class _Target:
    """One logger, and how far it has got."""

    def __init__(self, kind: str, where: str, start: Start, again: bool) -> None:
        self.name = f"{kind}:{where}"
        self.place = Place(start.uuid, self.name)
        if again:
            self.place.forget()
        self._kind, self._where = kind, where
        self._start = dataclasses.replace(start, resume=self.place.resume)
        self._logger: Optional[Logger] = None
        self.away = 0  # How often in a row it did not take a batch.
        self.steps = self.changes = 0  # That it was given.

    def take(self, batch: Batch) -> None:
        entries = batch.after(self.place)
        try:
            if self._logger is None:
                self._logger = TARGETS[self._kind](self._where, self._start)
                self.place.resume = self._logger.resume
            self._logger.write(entries)
        except Exception as e:  # Whatever somebody else's package raises.
            self.away += 1
            if self.away == 1:
                say(f"{self.name}: not taken: {type(e).__name__}: {e}")
            return
        if self.away:
            say(f"{self.name}: takes again, after {self.away} failed tries")
        self.away = 0
        self.place.advance(batch)
        self.steps += len(entries)
        self.changes += sum(len(entry.told) for entry in entries)

    def close(self, ended: bool) -> None:
        if self._logger is None:
            return
        try:
            self._logger.close(ended)
        except Exception as e:
            say(f"{self.name}: not closed: {type(e).__name__}: {e}")


class _Ending:
    """Ctrl-C and SIGTERM, which wait until a logger has taken its batch and that is remembered;
    the second time they do not."""

    def __init__(self) -> None:
        self._writing = self._asked = False

    def __call__(self, *_: Any) -> None:
        at_once = self._asked or not self._writing
        self._asked = True
        if at_once:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def later(self) -> Iterator[None]:
        self._writing = True
        try:
            yield
        finally:
            self._writing = False
        if self._asked:
            raise KeyboardInterrupt


class _Command:
    def __init__(self, given: argparse.Namespace, ending: _Ending) -> None:
        self._given, self._ending = given, ending
        for kind in {kind for kind, _ in given.to} & LOGGERS.keys():
            package(kind)
        self._reader = Reader(client_of(given), given.run)
        self.targets: list[_Target] = []
        self.ended = False
        self._away = 0  # How often in a row the server did not answer.

    def _open(self, run: dict[str, Any]) -> None:
        of, shape = run["description"], run["description"]["layout"]
        facts = {name: of[name] for name in ("framework", "model") if of[name]}
        facts |= {name: shape[name] for name in ("layers", "heads", "kv_heads", "head_dim")}
        start = Start(of["name"], self._reader.uuid, facts, "", self._given.alerts)
        for kind, where in self._given.to:
            self.targets.append(_Target(kind, where, start, self._given.again))

    def _once(self) -> None:
        """Raises Away, QueryError."""
        run = self._reader.run()
        if not self.targets:
            self._open(run)
        step = min(target.place.step for target in self.targets)
        transition = min(target.place.transition for target in self.targets)
        taking = list(self.targets)
        for batch in self._reader.batches(run, step, transition):
            for target in taking:
                with self._ending.later():
                    target.take(batch)
            # One that missed a batch gets it, and what is behind it, the next time.
            taking = [target for target in taking if not target.away]
        self.ended = run["ended"] and not any(target.away for target in self.targets)

    def _report(self) -> None:
        for target in self.targets:
            changes = counted(target.changes, "change")
            say(f"{target.name}: {counted(target.steps, 'step')}, {changes} of alerts")

    def run(self) -> int:
        if not self._given.follow:
            try:
                self._once()
            except Away as e:
                say(f"forward: {self._given.page}: {e}")
                return UNREACHABLE
            return UNREACHABLE if any(target.away for target in self.targets) else OK
        while True:
            try:
                self._once()
                if self._away:
                    say(f"the server is back, after {self._away} failed tries")
                self._away = 0
            except Away as e:
                self._away += 1
                if self._away == 1:
                    say(f"{self._given.page}: {e}; waiting for it")
            if self.ended:
                return OK
            time.sleep(self._given.every)

    def close(self) -> None:
        for target in self.targets:
            target.close(self.ended)
        self._report()


def main(arguments: Optional[list[str]] = None) -> int:
    given = _parse(arguments)
    ending = _Ending()
    before = {each: signal.signal(each, ending) for each in (signal.SIGINT, signal.SIGTERM)}
    command: Optional[_Command] = None
    try:
        command = _Command(given, ending)
        return command.run()
    except KeyboardInterrupt:
        say("ended; the same command goes on from here")
        return OK if given.follow else INTERRUPTED
    except (Missing, QueryError, ValueError, OSError) as e:
        say(f"forward: {e}")
        return FAILED
    finally:
        if command is not None:
            command.close()
        for each, handler in before.items():
            signal.signal(each, handler)
