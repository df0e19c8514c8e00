"""What a command remembers from one call to the next, in the user's state folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Optional

from .._util import files
from . import private_server


class StateFile:
    """One JSON object, for whatever `identity` names."""

    def __init__(self, kind: str, *identity: str) -> None:
        name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        self._no_folder = ""  # Why there is none.
        folder = Path()
        try:
            folder = private_server.state_folder()
        except private_server.ServerError as e:
            self._no_folder = str(e)
        self.path = folder / kind / f"{name}.json"

    def read(self) -> Optional[dict[str, Any]]:
        """None: nothing was remembered yet, or nothing that can be read."""
        if self._no_folder:
            return None
        try:
            return files.read_json(self.path)
        except (OSError, ValueError):
            return None

    def write(self, told: dict[str, Any]) -> None:
        """Whole or not at all.  Raises OSError."""
        if self._no_folder:
            raise OSError(self._no_folder)
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with files.replacing(self.path) as part:
            part.write_text(json.dumps(told), encoding="utf-8")
