"""What a job itself knows of the end of its watching."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Optional


@dataclasses.dataclass(frozen=True)
class Ending:
    step: int  # The last one that was told; -1: none.
    why_off: str  # An error of ours; "" where the watching went on to the end.
    cost: str  # What watching cost, "" where that is not known.
    data: Optional[Path]  # Folder of the private server; None: a server of others, or a file.
    record_path: Optional[str]
    unsent: str = ""  # Why nothing, or nothing more, went out; "" where all of it did.
    sent_some: bool = False  # Before that.
