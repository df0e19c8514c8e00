"""Tests that need a GPU are skipped without one, unless BELLWETHER_REQUIRE_GPU=1."""

from __future__ import annotations

import os

import pytest
import torch

from bellwether._attention.attention_op import machine_lacks

LACKS = "no GPU"
if torch.cuda.is_available():
    LACKS = machine_lacks(torch.device("cuda", 0)) or ""
SKIPPED = LACKS != "" and os.environ.get("BELLWETHER_REQUIRE_GPU") != "1"

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(SKIPPED, reason=LACKS or "there is one")),
]
