"""A disk that fails and loses power, under a real process: the other side of faulty_disk.c.

What a power cut leaves is made of the journal: everything that was synced, and of what was not an
arbitrary choice of 4 KiB pages, lengths and directory entries, by a seed.  That is more than a disk
must keep and less than it usually does.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bellwether_process import BIN

LIBRARY = BIN / "libbellwether_faulty_disk.so"
PAGE = 4096
# As struct Control.
FIELDS = (
    "sync_delay_ms",
    "sync_errno",
    "write_errno",
    "where",
    "free_mb",
    "lies",
    "syncs",
    "refused",
)
EVERYWHERE, WAL, DATABASE = 0, 1, 2
(
    CREATE,
    WRITE,
    TRUNCATE,
    RENAME,
    UNLINK,
    MAKE_DIRECTORY,
    SYNC_BEGIN,
    SYNC_END,
    SYNC_DIRECTORY,
    LINK,
) = range(1, 11)
ZEROS = 1


@dataclass
class Inode:
    now: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    dirty: list[tuple[int, int]] = field(default_factory=list)  # Ranges since the last sync.
    forgotten: int = 0  # Ranges that were synced.
    begun: deque[int] = field(default_factory=deque)  # How many ranges each sync under way covers.

    def write(self, offset: int, data: bytes) -> None:
        if len(self.now) < offset + len(data):
            self.now.extend(bytes(offset + len(data) - len(self.now)))
        self.now[offset : offset + len(data)] = data
        self.dirty.append((offset, offset + len(data)))

    def truncate(self, length: int) -> None:
        self.dirty.append((min(length, len(self.now)), max(length, len(self.now))))
        if length < len(self.now):
            del self.now[length:]
        else:
            self.now.extend(bytes(length - len(self.now)))

    def sync_begins(self) -> None:
        self.begun.append(self.forgotten + len(self.dirty))

    def sync_ends(self) -> None:
        covered = self.begun.popleft() - self.forgotten
        for begin, end in self.dirty[: max(covered, 0)]:
            self._keep(begin, min(end, len(self.now)))
        del self.dirty[: max(covered, 0)]
        self.forgotten += max(covered, 0)
        if not self.dirty:
            del self.durable[len(self.now) :]

    def _keep(self, begin: int, end: int) -> None:
        if end <= begin:
            return
        if len(self.durable) < end:
            self.durable.extend(bytes(end - len(self.durable)))
        self.durable[begin:end] = self.now[begin:end]

    def after_power_cut(self, chance: random.Random) -> bytes:
        pages = {
            page
            for begin, end in self.dirty
            for page in range(begin // PAGE, max(begin, end - 1) // PAGE + 1)
        }
        for page in sorted(pages):
            if chance.random() < 0.5:
                self._keep(page * PAGE, min((page + 1) * PAGE, len(self.now)))
        return bytes(self.durable)


class FaultyDisk:
    """`root` is the folder that fails; its other files lie beside it."""

    def __init__(self, root: Path, journal: bool = False) -> None:
        self.root = root
        self.root.mkdir(parents=True, exist_ok=True)
        self._base = root.with_name(root.name + ".durable")
        self._journal = root.with_name(root.name + ".journal") if journal else None
        control = root.with_name(root.name + ".control")
        control.write_bytes(
            struct.pack(f"{len(FIELDS)}i", *(-1 if name == "free_mb" else 0 for name in FIELDS))
        )
        with open(control, "r+b") as file:
            self._control = mmap.mmap(file.fileno(), 0)
        self.environment = {
            "LD_PRELOAD": str(LIBRARY),
            "FAULTY_DISK_ROOT": str(root),
            "FAULTY_DISK_CONTROL": str(control),
            "FAULTY_DISK_JOURNAL": str(self._journal or ""),
        }
        self._settle()

    def set(self, **values: int) -> None:
        for name, value in values.items():
            struct.pack_into("i", self._control, 4 * FIELDS.index(name), value)

    def get(self, name: str) -> int:
        return int(struct.unpack_from("i", self._control, 4 * FIELDS.index(name))[0])

    def _settle(self) -> None:
        """What the disk holds now is durable, and the journal begins anew."""
        if self._journal is None:
            return
        shutil.rmtree(self._base, ignore_errors=True)
        shutil.copytree(self.root, self._base)
        self._journal.write_bytes(b"")
        self._inodes = {
            path.stat().st_ino: str(path) for path in self.root.rglob("*") if path.is_file()
        }

    def records(self) -> Iterator[tuple[int, int, int, int, int, str, bytes]]:
        """kind, inode, offset, length, flags, path, data; the last one may be cut off."""
        assert self._journal is not None
        with open(self._journal, "rb") as file:
            while len(head := file.read(64)) == 64:
                kind, inode, offset, length, flags, path_bytes, data_bytes, _ = struct.unpack(
                    "8q", head
                )
                rest = file.read(path_bytes + data_bytes)
                if len(rest) < path_bytes + data_bytes:
                    return
                yield (
                    kind,
                    inode,
                    offset,
                    length,
                    flags,
                    rest[:path_bytes].decode(),
                    rest[path_bytes:],
                )

    def cut_power(self, seed: int) -> int:
        """After the process was killed: `root` becomes what the disk holds.  Returns the number of
        pages, lengths and entries that were not synced."""
        chance = random.Random(seed)
        names: dict[str, Inode | None] = {}  # None = a folder.
        for folder, folders, files in os.walk(self._base):
            at = Path(str(self.root) + folder[len(str(self._base)) :])
            names |= {str(at / name): None for name in folders}
            for name in files:
                data = (Path(folder) / name).read_bytes()
                names[str(at / name)] = Inode(bytearray(data), bytearray(data))
        durable = dict(names)
        inodes = {
            inode: node
            for inode, path in self._inodes.items()
            if (node := names.get(path)) is not None
        }
        for kind, inode, offset, length, flags, path, data in self.records():
            if kind == CREATE:
                names[path] = inodes[inode] = Inode()
            elif kind == MAKE_DIRECTORY:
                names[path] = None
            elif kind in (RENAME, LINK):
                begin, end = path.split("\n")
                if begin in names:  # Else it was made past these functions.
                    names[end] = names[begin]
                    if kind == RENAME:
                        del names[begin]
            elif kind == UNLINK:
                names.pop(path, None)
            elif kind == SYNC_DIRECTORY:
                inside = lambda name, path=path: os.path.dirname(name) == path  # noqa: E731
                durable = {name: node for name, node in durable.items() if not inside(name)}
                durable |= {name: node for name, node in names.items() if inside(name)}
            elif inode in inodes:
                node = inodes[inode]
                if kind == WRITE:
                    node.write(offset, bytes(length) if flags & ZEROS else data)
                elif kind == TRUNCATE:
                    node.truncate(length)
                elif kind == SYNC_BEGIN:
                    node.sync_begins()
                elif kind == SYNC_END:
                    node.sync_ends()
        unsynced = sum(len(node.dirty) for node in inodes.values())
        for name in sorted(set(names) | set(durable)):
            if names.get(name, self) is not durable.get(name, self):
                unsynced += 1
                if chance.random() < 0.5:
                    if name in names:
                        durable[name] = names[name]
                    else:
                        del durable[name]
        shutil.rmtree(self.root)
        self.root.mkdir()
        contents: dict[int, bytes] = {}
        for name, node in sorted(durable.items()):
            if not os.path.isdir(os.path.dirname(name)):
                continue  # Its folder is gone.
            if node is None:
                os.mkdir(name, 0o700)
                continue
            if id(node) not in contents:
                contents[id(node)] = node.after_power_cut(chance)
            with open(name, "wb") as file:
                file.write(contents[id(node)])
        self._settle()
        return unsynced
