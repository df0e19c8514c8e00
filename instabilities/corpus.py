"""Text by bytes: the source of the standard library that runs this program."""

from __future__ import annotations

import functools
import random
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

BYTES_MAX = 4 << 20
VOCABULARY = 256
PARTS = ("modules", "packages")


@functools.cache
def text(part: str) -> Tensor:
    """[length] int64.  "modules": files at the top of the library; "packages": those below it."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = folder.glob("*.py") if part == "modules" else folder.glob("*/*.py")
    files = [path for path in sorted(found) if path.parent.name != "site-packages"]
    random.Random(part).shuffle(files)
    content = bytearray()
    for path in files:
        content += path.read_bytes()
        if len(content) >= BYTES_MAX:
            break
    return torch.frombuffer(content[:BYTES_MAX], dtype=torch.uint8).long()


def batch(part: str, seed: int, number: int, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(tokens, labels) of batch `number`, both of `shape`; the same for the same arguments."""
    tokens = text(part)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    start = torch.randint(0, len(tokens) - shape[1] - 1, (shape[0], 1), generator=generator)
    window = tokens[start + torch.arange(shape[1] + 1)]
    return window[:, :-1], window[:, 1:].clone()
