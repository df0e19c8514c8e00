"""The stream of a run: to a server, into a file, or nowhere."""

from __future__ import annotations

import time
import urllib.parse
from pathlib import Path
from typing import Optional

from .._native import c_api
from .._native.run_client import ClientError, RunClient, RunOptions
from .._util import log
from ..settings import Settings
from .frames import Frames

FLUSH_SECONDS_MAX = 1e6
DEVICE_WAIT_SECONDS = 1.0  # At the end, for the last numbers on their way from a GPU.


def seen_from_here(page_url: str, server: str) -> str:
    """A page that listens on every address is at that of its server."""
    parts = urllib.parse.urlsplit(page_url)
    if parts.hostname not in ("0.0.0.0", "::"):
        return page_url
    host, _, _ = server.removeprefix("dns:///").rpartition(":")
    return parts._replace(netloc=f"{host or '127.0.0.1'}:{parts.port}").geturl()


class Link:
    def __init__(self, settings: Settings) -> None:
        self.server: Optional[str] = settings.server
        self.record_path = settings.record
        self.page_url = ""
        self.data: Optional[Path] = None  # Folder of a private server.
        self.client: Optional[RunClient] = None
        self.why_not = ""
        self.named = 0  # Tensors of which the server has the names.
        self.begun = False  # The layout was told, or would have been: it does not change any more.

    def open(self, options: RunOptions) -> None:
        """Where it fails nothing is sent, and `why_not` says why."""
        try:
            self.client = RunClient(options)
        except (ClientError, c_api.LibraryError) as e:
            log.warning(f"nothing is {'recorded' if self.server is None else 'sent'}: {e}")
            self.why_not = str(e)

    def unsent(self) -> tuple[str, bool]:
        """Why nothing, or nothing more, goes out, "" while it does; whether something went."""
        if self.client is None:
            return self.why_not, False
        counters = self.client.counters()
        why = counters.error if counters.link == "failed" else ""
        return why, counters.frames_acked > 0

    def name_tensors(self, names: list[str]) -> None:
        """Before the first sample has values of them."""
        if self.client is not None and self.named < len(names):
            new = names[self.named :]
            self.named += self.client.push_names(c_api.TENSOR, new, self.named)

    def known_page_url(self) -> str:
        client = self.client
        if self.page_url or client is None:
            return self.page_url
        return seen_from_here(client.counters().page_url, self.server or "")

    def flush(self, frames: Frames, timeout: float) -> bool:
        """Whether everything is durable within `timeout` seconds."""
        if self.client is None:
            return False
        try:
            timeout = min(max(0.0, float(timeout)), FLUSH_SECONDS_MAX)  # Not a number: no wait.
        except Exception as e:  # Whatever the trainer gave.
            frames.leave_out("timeout", e)
            return False
        deadline = time.monotonic() + timeout
        arrived = frames.drain(self.client, timeout)
        left = max(0.0, deadline - time.monotonic())
        return self.client.flush(left) and arrived

    def say_goodbye(self, frames: Frames, step: int) -> None:
        """step  the last one that was told"""
        if self.client is not None:
            frames.drain(self.client, DEVICE_WAIT_SECONDS)
            self.client.push_event(step, "detach")

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
            self.client = None
