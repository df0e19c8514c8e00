"""A command on a terminal of a given width: what a person sees of it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path
from typing import Union


def on_terminal(
    command: list[Union[str, Path]], columns: int, env: dict[str, str], seconds: float = 60
) -> tuple[int, str]:
    """(exit code, what stands there, stderr as well, without colours)."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=env)
    os.close(child)
    text = b""
    try:
        while data := os.read(parent, 1 << 16):
            text += data
    except OSError:
        pass  # The other side has closed.
    os.close(parent)
    code = process.wait(seconds)
    return code, re.sub(r"\x1b\[[0-9;]*m", "", text.decode()).replace("\r\n", "\n")
