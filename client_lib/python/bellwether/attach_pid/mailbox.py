"""The private folder through which a command and the process that it enters talk.

request.json    what is asked; the first to rename it decides: the process takes it, the
                command withdraws it
arrived         the process has come to the line that it was handed, and imports the package
queued          the process has read the request and waits for an optimizer step; its text
                names what is in the way so far
report.json     what came of it
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Optional

REQUEST, TAKEN, WITHDRAWN = "request.json", "taken.json", "withdrawn.json"
ARRIVED, QUEUED, REPORT = "arrived", "queued", "report.json"


class Mailbox:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def create(cls, uid: int, gid: int, request: dict[str, Any]) -> Mailbox:
        """A folder that only its owner can enter, which is to be the process's user."""
        box = cls(Path(tempfile.mkdtemp(prefix="bellwether-attach-")))
        box.write(REQUEST, json.dumps(request))
        if uid != os.geteuid():
            for path in (box.folder / REQUEST, box.folder):
                os.chown(path, uid, gid)
        return box

    def write(self, name: str, text: str) -> None:
        """Whole or not at all, for the owner's eyes only."""
        temporary = self.folder / f"{name}.{os.getpid()}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.rename(self.folder / name)

    def read(self, name: str) -> Optional[str]:
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except OSError:
            return None

    def request(self) -> Optional[dict[str, Any]]:
        """What is asked, or None when it was withdrawn or taken."""
        text = self.read(REQUEST)
        return None if text is None else dict(json.loads(text))

    def _decide(self, name: str) -> bool:
        try:
            (self.folder / REQUEST).rename(self.folder / name)
        except OSError:
            return False
        return True

    def take(self) -> bool:
        """Whether the request was still there: from now on the process acts on it."""
        return self._decide(TAKEN)

    def withdraw(self) -> bool:
        """Whether the request was not taken: from now on it will not be."""
        return self._decide(WITHDRAWN)

    def report(self, **told: Any) -> None:
        self.write(REPORT, json.dumps(told))

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
