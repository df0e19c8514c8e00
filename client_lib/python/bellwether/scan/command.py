"""python -m bellwether scan DIR: watches a run from outside, by the checkpoints that it writes."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any, Optional

from .. import __version__, settings
from .._kernels.probe import KernelError, available
from .._native import c_api
from .._native.run_client import ClientError, RunOptions
from .._server import private_server
from .._server.private_server import ServerError
from .._util import files
from . import checkpoints, scan_layout
from .checkpoints import Unreadable
from .scan import NotSent, Progress, Result, Scan
from .scan_layout import LAYOUTS, Told, UnknownLayout

OK, FAILED, USAGE, UNREACHABLE, INTERRUPTED = 0, 1, 2, 4, 130
SETTLE_SECONDS = 5.0
TIMEOUT_SECONDS = 30.0

_EPILOG = """\
exit codes:
  0    everything was sent; with --follow: it was ended by Ctrl-C or SIGTERM
  1    no checkpoint was found, or some were skipped: each is named with the reason, then counted
  2    wrong usage
  4    the server did not take a sample in time, or there is none
  130  ended by Ctrl-C without --follow
What was sent is durable and is not sent again: run the same command to go on.
A checkpoint that cannot be read or understood is skipped, whatever is wrong with it; the others
are measured.  With --follow it is read again once its files have changed.

The step of a checkpoint is the number in its name behind "step", "iter", "checkpoint" or "ckpt".
Without one it is what its content tells, else the last number in its name.  It must be an integer
of 0 to 2^53.
"""


def _parse(arguments: Optional[list[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bellwether scan",
        description="Measures the checkpoints of a run and streams one sample for each: head by "
        "head sigma(W_Q), sigma(W_K), their stable rank and the rank of their change.  The "
        "training process is not touched.  Reads safetensors, torch.save and distributed "
        "checkpoints (DCP); nothing in them is executed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="holds the checkpoints, or is one")
    add("--follow", action="store_true", help="wait for new ones, until Ctrl-C")
    add("--server", help="host:port or unix:/path; default: a private server")
    add("--record", help="write a .bwrun file, instead of a server or beside one")
    add("--run", help="the run's name; default: the folder's")
    add(
        "--config", type=Path, metavar="FILE",
        help="the model's config.json; default: what lies beside or in the checkpoints",
    )  # fmt: skip
    add("--heads", type=int, help="query heads of a layer")
    add("--kv-heads", type=int, help="key heads of a layer")
    add("--head-dim", type=int, help="rows of a head")
    add(
        "--layout", choices=LAYOUTS,
        help="the order of rows; separate: queries and keys have matrices of their own; fused: all "
        "queries, all keys, all values; grouped: by key head its queries, its key, its value",
    )  # fmt: skip
    add("--layers", metavar="REGEX", help="only modules whose name it fits")
    add(
        "--settle", type=float, default=SETTLE_SECONDS, metavar="SECONDS",
        help="with --follow, a checkpoint is read when its files have not changed for so long "
        f"({SETTLE_SECONDS:g})",
    )  # fmt: skip
    add(
        "--timeout", type=float, default=TIMEOUT_SECONDS, metavar="SECONDS",
        help=f"for the server to take one sample ({TIMEOUT_SECONDS:g})",
    )  # fmt: skip
    add(
        "--spool-dir", metavar="DIR",
        help="where samples wait that the server has not taken a minute after the scan has ended; "
        "the next one with the same folder sends them [$BELLWETHER_SPOOL_DIR]",
    )  # fmt: skip
    add(
        "--spool-bytes", type=int, metavar="BYTES",
        help="most of them (1 GiB) [$BELLWETHER_SPOOL_BYTES]",
    )  # fmt: skip
    add("--again", action="store_true", help="send all of them once more, as another attempt")
    add("--json", action="store_true", help="one JSON object a checkpoint on stdout, all heads")
    given = parser.parse_args(arguments)
    for name in ("heads", "kv_heads", "head_dim"):
        value = getattr(given, name)
        if value is not None and not 1 <= value <= c_api.HEADS_MAX:
            flag = name.replace("_", "-")
            parser.error(f"--{flag}: {value} is outside of 1 to {c_api.HEADS_MAX}")
    if not 0 <= given.settle <= 3600:
        parser.error(f"--settle: {given.settle:g} is outside of 0 to 3600 seconds")
    if not 0 < given.timeout <= 3600:
        parser.error(f"--timeout: {given.timeout:g} is outside of 0 to 3600 seconds")
    least, most = settings.SPOOL_BYTES
    if given.spool_bytes is not None and not least <= given.spool_bytes <= most:
        parser.error(f"--spool-bytes: {given.spool_bytes} is outside of {least} to {most}")
    if not given.directory.is_dir():
        parser.error(f"DIR: {given.directory} is no folder")
    try:
        re.compile(given.layers or "")
    except re.error as e:
        parser.error(f"--layers: {given.layers!r} is no regular expression: {e}")
    return given


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run_options(given: argparse.Namespace) -> RunOptions:
    """Raises ValueError, ServerError."""
    folder = given.directory.resolve()
    run = given.run or os.environ.get("BELLWETHER_RUN") or folder.name or "checkpoints"
    told = settings.resolve({
        "server": given.server, "record": given.record, "run": run,
        "spool_dir": given.spool_dir, "spool_bytes": given.spool_bytes,
    })  # fmt: skip
    why = files.why_no_file(told.record) if told.record else None
    if why is not None:
        raise ValueError(f"--record {told.record}: {why}")
    server = told.server
    if server is None and told.record is None:
        private = private_server.join_or_start()
        server = private.grpc
        say(f"run {told.run}: {private.page_url(told.run)}")
    return RunOptions(
        run=told.run, layers=1, heads=1, server=server, record_path=told.record,
        run_uuid=told.run_uuid, tls_ca=told.tls_ca, tls_cert=told.tls_cert, tls_key=told.tls_key,
        token_file=told.token_file, log_path=told.log_path or os.devnull,
        spool_dir=told.spool_dir if server else None, spool_bytes=told.spool_bytes,
        framework=f"checkpoints, bellwether {__version__}"[:64],
    )  # fmt: skip


def _row(value: float) -> Optional[float]:
    return value if math.isfinite(value) else None  # JSON has no NaN.


def _tell(result: Result, as_json: bool) -> None:
    if as_json:
        told: dict[str, Any] = {"checkpoint": str(result.path), "step": result.step}
        told["layers"] = [
            {"name": name, **{s: [_row(v) for v in rows[i]] for s, rows in result.values.items()}}
            for i, name in enumerate(result.layers)
        ]
        print(json.dumps(told), flush=True)
        return
    value, layer, head = result.largest("wq_sigma")
    key_value, key_layer, key_head = result.largest("wk_sigma")
    print(
        f"step {result.step:8d}  sigma(W_Q) {value:.4g} (layer {layer} head {head}; median "
        f"{result.median('wq_sigma'):.4g})  sigma(W_K) {key_value:.4g} (layer {key_layer} head "
        f"{key_head})  {files.one_line(result.path.name)}",
        flush=True,
    )


class _Watch:
    """When a checkpoint has last changed, by our own clock: that of a file server may be off."""

    def __init__(self, settle: float) -> None:
        self._settle = settle
        self._seen: dict[Path, tuple[str, float]] = {}

    def settled(self, path: Path, signature: str) -> bool:
        now = time.monotonic()
        known = self._seen.get(path)
        if known is None or known[0] != signature:
            self._seen[path] = (signature, now)
            return self._settle == 0
        return now - known[1] >= self._settle


def _reason(path: Path, error: Exception) -> str:
    """What a person is told; the errors of our own are sentences that may begin with the path."""
    own = isinstance(error, (Unreadable, UnknownLayout, KernelError, ClientError))
    text = str(error) if own else f"{type(error).__name__}: {error}"
    return files.one_line(text.removeprefix(f"{path}: "))


class _Command:
    def __init__(self, given: argparse.Namespace, options: RunOptions, told: Told) -> None:
        self._given = given
        progress = Progress(
            given.directory, options.run, options.server or str(options.record_path)
        )
        if given.again:
            progress.forget()
        self.scan = Scan(
            options, progress, told,
            lambda checkpoint, all_told: scan_layout.layers_of(checkpoint, all_told, given.layers),
            given.directory, given.timeout,
        )  # fmt: skip
        self._watch = _Watch(given.settle)
        self.skipped: dict[Path, str] = {}  # By the signature that could not be read.
        self.unreachable = False
        self._told_page = False
        self._trouble = ""  # The newest that was said of anything but a checkpoint.

    def _waiting(self) -> list[tuple[Path, str]]:
        """Checkpoints that were not sent, by their steps as far as names tell."""
        found = []

        def refuse(path: Path, error: Exception) -> None:
            """One that cannot be looked at: its signature is why."""
            if self.skipped.get(path) != str(error):
                self._skip(path, str(error), error)

        for path in checkpoints.find(self._given.directory, refuse):
            try:
                signature = checkpoints.signature(path)
            except FileNotFoundError:  # It was deleted since.
                continue
            except OSError as e:
                refuse(path, e)
                continue
            if self.scan.progress.has(path, signature) or self.skipped.get(path) == signature:
                continue
            found.append((path, signature))
        return sorted(found, key=lambda each: (checkpoints.step_of_name(each[0]) or 0, each[0]))

    def _skip(self, path: Path, signature: str, error: Exception) -> None:
        """Nothing that is wrong with one checkpoint is in the way of another."""
        self.skipped[path] = signature
        again = "; waiting for it to change" if self._given.follow else ""
        say(f"skipped {files.one_line(path)}: {_reason(path, error)}{again}")

    def _say_once(self, trouble: str) -> None:
        if trouble and trouble != self._trouble:
            say(files.one_line(trouble))
        self._trouble = trouble

    def once(self) -> int:
        """One look at the folder; how many were sent."""
        try:
            waiting = self._waiting()
        except OSError as e:
            if not self._given.follow:
                raise
            self._say_once(f"{self._given.directory}: {e}; waiting for it")
            return 0
        if self._given.follow:
            waiting = [each for each in waiting if self._watch.settled(*each)]
        sent = 0
        for number, (path, signature) in enumerate(waiting, 1):
            say(f"{number}/{len(waiting)} {files.one_line(path.name)}")
            try:
                self.scan.resume()
                result = self.scan.take(path, signature)
            except NotSent as e:
                say(str(e))
                self.unreachable = True
                break
            except Exception as e:  # Of its bytes, which are anybody's.
                self._skip(path, signature, e)
                continue
            self.skipped.pop(path, None)
            self.unreachable = False
            sent += 1
            trouble = self.scan.progress.trouble
            self._say_once(f"what was sent cannot be remembered: {trouble}" if trouble else "")
            if result is None:
                say(f"{files.one_line(path.name)}: its step was sent already")
            else:
                _tell(result, self._given.json)
            if not self._told_page and self.scan.page_url():
                say(self.scan.page_url())
                self._told_page = True
        return sent

    def run(self) -> int:
        sent = self.once()
        if not self._given.follow:
            if not sent and not self.scan.progress.sent and not self.skipped:
                say(f"{self._given.directory}: no checkpoint was found in it")
                return FAILED if not self.unreachable else UNREACHABLE
            return UNREACHABLE if self.unreachable else FAILED if self.skipped else OK
        say(f"waiting for new checkpoints in {self._given.directory} (Ctrl-C ends it)")
        while True:
            time.sleep(min(1.0, max(0.05, self._given.settle / 4)))
            self.once()

    def close(self) -> None:
        self.scan.close()
        if self.skipped:
            count = len(self.skipped)
            say(f"{count} checkpoint{'s were' if count > 1 else ' was'} skipped")


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def main(arguments: Optional[list[str]] = None) -> int:
    given = _parse(arguments)
    missing = available()
    try:
        c_api.client()
    except c_api.LibraryError as e:
        missing = missing or str(e)
    if missing is not None:
        say(f"scan: {missing}")
        return FAILED
    before = signal.signal(signal.SIGTERM, _interrupt)
    command: Optional[_Command] = None
    try:
        told = Told(given.heads, given.kv_heads, given.head_dim, given.layout)
        if given.config is not None:
            told = told.before(scan_layout.read_config(given.config))
        command = _Command(given, _run_options(given), told)
        return command.run()
    except KeyboardInterrupt:
        say("ended; the same command goes on from here")
        return OK if given.follow else INTERRUPTED
    except ServerError as e:
        say(f"scan: {e}")
        return UNREACHABLE
    except (UnknownLayout, ClientError, ValueError, OSError) as e:
        say(f"scan: {e}")
        return FAILED
    finally:
        if command is not None:
            command.close()
        signal.signal(signal.SIGTERM, before)
