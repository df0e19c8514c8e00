"""The host of a tap, without a monitor."""

from __future__ import annotations

import threading

import torch

from bellwether._kernels.memory import Memories


class Host:
    def __init__(self) -> None:
        self.lock, self.hook_seconds, self.memories = threading.RLock(), 0.0, Memories()
        self.left_out: list[str] = []
        self.errors: list[Exception] = []

    def live(self) -> bool:
        return True

    def in_backward(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def trouble(self, error: Exception, where: str) -> None:
        self.errors.append(error)
