"""Goal: Megatron-Core's attention is watched whole on two GPUs, each head and layer by the process
that has it, and trains the same bits as without us.
Method: megatron_ranks.py with NCCL.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import gpu_results
import pytest
import torch
import two_processes

import matrix

REQUIRED = os.environ.get("BELLWETHER_REQUIRE_GPU") == "2"  # That many GPUs.
pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2 and not REQUIRED, reason="no two GPUs"
)


@pytest.mark.parametrize("way", ["tensor", "pipeline"])
def test_both_processes_tell_what_they_have(way: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    for result in two_processes.megatron(sys.executable, "cuda", way, tmp_path):
        gpu_results.note(result, "megatron-core", result["outcome"] == "full")
        assert result["outcome"] == "full", matrix.describe(result)
