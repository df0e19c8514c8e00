"""Pickles looked at before they are loaded: what no unpickler guards itself against."""

from __future__ import annotations

import io
import pickletools
from typing import Any, BinaryIO

BYTES_MAX = 64 << 20
_DEPTH_MAX = 64  # Of tuples in tuples; the hash of one recurses in C, where that ends the process.
_FIRST = 5  # Of a torch.save file of before 2020, in front of the tensors' bytes.
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_MARK = -1


def check(content: bytes) -> None:
    """Raises ValueError for a pickle whose tuples are nested too deeply, or that is none."""
    if len(content) > BYTES_MAX:
        raise ValueError(f"a pickle in it has more than {BYTES_MAX} bytes")
    _check(io.BytesIO(content))


def check_first(content: bytes) -> None:
    """As check(), for the pickles that a file begins with."""
    stream = io.BytesIO(content)
    for _ in range(_FIRST):
        _check(stream)


def _check(stream: BinaryIO) -> None:
    """Follows how deep the tuples on the stack are; all else counts as none."""
    stack: list[int] = []
    memo: dict[Any, int] = {}
    try:
        for operation, argument, _ in pickletools.genops(stream):
            name = operation.name
            if name in _PUTS:
                memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
            elif name in _GETS:
                stack.append(memo[argument])
            elif name == "MARK":
                stack.append(_MARK)
            else:
                depth = _take(stack, operation)
                stack.extend([depth] * len(operation.stack_after))
                if depth > _DEPTH_MAX:
                    raise ValueError(f"its tuples are nested more than {_DEPTH_MAX} deep")
    except (IndexError, KeyError) as e:
        raise ValueError(f"it is no pickle: {type(e).__name__}: {e}") from e


def _take(stack: list[int], operation: pickletools.OpcodeInfo) -> int:
    """Takes from the stack what the operation does; the depth of what it puts there."""
    before = operation.stack_before
    taken: list[int] = []
    if pickletools.markobject in before:
        while (top := stack.pop()) != _MARK:
            taken.append(top)
        before = before[: before.index(pickletools.markobject)]
    taken += [stack.pop() for _ in before]
    if "TUPLE" in operation.name:
        return 1 + max(taken, default=0)
    return taken[0] if operation.name == "DUP" else 0
