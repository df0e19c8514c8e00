"""Addresses of functions in another process, from the files that it has mapped."""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Iterable
from pathlib import Path

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_PT_LOAD = 1
_SHT_DYNSYM = 11
_PAGE = 4096


@dataclasses.dataclass(frozen=True)
class Mapping:
    """One line of /proc/PID/maps that has a file."""

    start: int
    offset: int  # In the file.
    path: str


def mappings(text: str) -> list[Mapping]:
    found = []
    for line in text.splitlines():
        match = re.match(r"([0-9a-f]+)-[0-9a-f]+ \S+ ([0-9a-f]+) \S+ \d+ +(/.*)", line)
        if match:
            path = match[3].removesuffix(" (deleted)")
            found.append(Mapping(int(match[1], 16), int(match[2], 16), path))
    return found


def _symbols(image: bytes, wanted: set[str]) -> dict[str, int]:
    """Values of the exported symbols, as the file has them."""
    (sections_at,) = struct.unpack_from("<Q", image, 40)
    (count,) = struct.unpack_from("<H", image, 60)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", image, sections_at + 64 * i) for i in range(count)
    ]
    found: dict[str, int] = {}
    for _, kind, _, _, offset, size, link, _, _, _ in sections:
        if kind != _SHT_DYNSYM:
            continue
        names_at = sections[link][4]
        for at in range(offset, offset + size, 24):
            name_at, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", image, at)
            if not section:  # Only used here, defined elsewhere.
                continue
            begin = names_at + name_at
            name = image[begin : image.index(b"\0", begin)].decode("ascii", "replace")
            if name in wanted:
                found[name] = value
    return found


def _first_address(image: bytes) -> int:
    """Where the file itself says that its first byte is loaded: 0 unless it is fixed."""
    (headers_at,) = struct.unpack_from("<Q", image, 32)
    (count,) = struct.unpack_from("<H", image, 56)
    for i in range(count):
        kind, _, offset, address, _, _, _, _ = struct.unpack_from(
            "<IIQQQQQQ", image, headers_at + 56 * i
        )
        if kind == _PT_LOAD and offset < _PAGE:
            return int(address - offset)
    return 0


def addresses(root: Path, mapping: Mapping, names: Iterable[str]) -> dict[str, int]:
    """{name: address in the process} of those functions that the file exports.

    root     the process's root folder
    mapping  of the file's beginning
    """
    try:
        image = Path(f"{root}{mapping.path}").read_bytes()
    except OSError:
        return {}
    if not image.startswith(_MAGIC):
        return {}
    shift = mapping.start - _first_address(image)
    return {name: shift + value for name, value in _symbols(image, set(names)).items()}
