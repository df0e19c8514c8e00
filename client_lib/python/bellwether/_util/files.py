"""Files that people name or that others have written: never waited for, never read without an end,
and written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Optional, Union

AnyPath = Union[str, "os.PathLike[str]"]

SECRET_BYTES_MAX = 1 << 20  # Tokens, certificates, small files of settings.
JSON_BYTES_MAX = 64 << 20
_LINE_MAX = 400
_COUNT_SECONDS = 0.1


def one_line(text: object) -> str:
    """What others may have written, for a line of a terminal or a log: neither long nor able to
    steer either."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return line if len(line) <= _LINE_MAX else f"{line[: _LINE_MAX - 3]}..."


def _kind(mode: int) -> Optional[str]:
    if stat.S_ISREG(mode):
        return None
    kinds = ((stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"), (stat.S_ISDIR, "a folder"),
             (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"))  # fmt: skip
    found = next((name for fits, name in kinds if fits(mode)), "of an unknown kind")
    return f"it is {found}, must be a regular file"


def why_no_file(path: AnyPath) -> Optional[str]:
    """None if a regular file is there or could be, else what is there."""
    try:
        return _kind(os.stat(path).st_mode)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:  # ValueError: a zero in the path.
        return (e.strerror if isinstance(e, OSError) else None) or str(e)


def open_regular(path: AnyPath) -> BinaryIO:
    """To read it.  Raises OSError, also for what is no regular file: a FIFO would have to be waited
    for, and a device may have no end."""
    why = why_no_file(path)  # Before it is opened: that alone may wake a FIFO's writer.
    if why is None:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        file = open(descriptor, "rb")  # noqa: SIM115 (it is the caller's)
        why = _kind(os.fstat(descriptor).st_mode)
        if why is None:
            return file
        file.close()
    raise OSError(errno.EINVAL, why, os.fspath(path))


def read(path: AnyPath, bytes_max: int) -> bytes:
    """All of a regular file.  Raises OSError, also where it has more bytes."""
    with open_regular(path) as file:
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise OSError(errno.EFBIG, f"it has more than {bytes_max} bytes", os.fspath(path))
    return content


def read_text(path: AnyPath, bytes_max: int = SECRET_BYTES_MAX) -> str:
    """Raises OSError, ValueError."""
    content = read(path, bytes_max)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as e:
        line = content.count(b"\n", 0, e.start) + 1
        raise ValueError(
            f"{os.fspath(path)}:{line}: byte {content[e.start]} is no UTF-8: the file must be text "
            "in UTF-8"
        ) from None


def json_object(text: Union[str, bytes]) -> dict[str, Any]:
    """Raises ValueError, whatever the text is."""
    try:
        told = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(told, dict):
        raise ValueError(f"it holds a {type(told).__name__}, no object")
    return told


def read_json(path: AnyPath, bytes_max: int = JSON_BYTES_MAX) -> dict[str, Any]:
    """The object of a file.  Raises OSError, ValueError."""
    return json_object(read(path, bytes_max))


def folder_bytes(folder: Path) -> Optional[int]:
    """What the files in it take on the disk; None: there are too many to count in a moment."""
    found, deadline = 0, time.monotonic() + _COUNT_SECONDS
    for place, _, names in os.walk(folder):
        if time.monotonic() > deadline:
            return None
        for name in names:
            with contextlib.suppress(OSError):  # It is gone again.
                found += os.lstat(os.path.join(place, name)).st_blocks * 512
    return found


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A path beside `target` to write to, which takes its name when the block ends well; else it
    is removed, and what was there stays.  Raises OSError."""
    real = Path(os.path.realpath(target))
    why = why_no_file(target)
    if why is not None:
        raise OSError(errno.EINVAL, why, os.fspath(target))
    part = real.with_name(f".{real.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    try:
        yield part
        os.replace(part, real)
    finally:
        part.unlink(missing_ok=True)
