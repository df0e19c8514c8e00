"""Which partition, and which of several databases, a run belongs to: as the servers count.

partition_of() is server/model/partition.cc, and tests/deploy/test_sizing.py holds it against a
real server's database.  Both are of one CRC, so the database is chosen by what the partition
leaves of it: taken modulo the same number, each of two databases would have half the partitions.

Pure; any thread.
"""

from __future__ import annotations

PARTITIONS = 64


def _table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_CRC_OF_BYTE = _table()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), 0 to 2**32 - 1."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_OF_BYTE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def partition_of(uuid: bytes) -> int:
    """0 to 63.  ValueError: not 16 bytes."""
    if len(uuid) != 16:
        raise ValueError(f"uuid has {len(uuid)} bytes: must have 16")
    return crc32c(uuid) % PARTITIONS


def database_of(uuid: bytes, databases: int) -> int:
    """0 to databases - 1: where runs are spread over several databases."""
    if databases < 1:
        raise ValueError(f"databases = {databases}: must be at least 1")
    return crc32c(uuid) // PARTITIONS % databases
