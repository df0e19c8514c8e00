"""Goal: adapters of peft, and FlashAttention 4 by transformers, are watched whole on a GPU.
Method: trainings.py's there; what FlashAttention 4 tells is compared with PyTorch's own function.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import gpu_results
import pytest
import torch
import transformers

import matrix
import training
import trainings
from cell import prepare
from gpu import LACKS, SKIPPED
from transformers_training import trained

pytestmark = pytest.mark.skipif(SKIPPED, reason=LACKS)

DEVICE = "cuda"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        prepare(tmp_path_factory.mktemp("trainings"), patch.setenv, DEVICE)
        patch.setattr(training, "device", DEVICE)
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["peft_lora", "peft_dora"])
def test_a_training_on_a_gpu_has_every_signal(name: str, prepared: None, tmp_path: Path) -> None:
    pytest.importorskip(trainings.ALL[name][0])
    result = dataclasses.asdict(trainings.run(name, tmp_path))
    gpu_results.note(result, trainings.ALL[name][0], result["outcome"] == "full")
    assert result["outcome"] == "full", matrix.describe(result)


def _batch(kind: str) -> dict[str, Any]:
    x = training.tokens(1, 3, 40)
    if kind == "packed":
        lengths = (30, 63, 27)
        positions = torch.cat([torch.arange(n) for n in lengths])[None].to(DEVICE)
        flat = x.reshape(1, -1)
        # As transformers' collator tells them.  (Found by itself, the longest is a tensor, which
        # flash-attn-4 4.0.0b36 refuses.)
        offsets = torch.tensor((0, *lengths)).cumsum(0).to(DEVICE, torch.int32)
        return {
            "input_ids": flat, "labels": flat, "position_ids": positions,
            "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets,
            "max_length_q": max(lengths), "max_length_k": max(lengths),
        }  # fmt: skip
    mask = torch.ones_like(x)
    if kind == "padded":
        mask[1, 28:], mask[2, :9] = 0, 0
    return {"input_ids": x, "labels": x.masked_fill(mask == 0, -100), "attention_mask": mask}


def _trained(implementation: str, kind: str, path: Optional[Path]) -> tuple[list[float], Any]:
    """(losses, what the monitor says of the layers)."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=training.VOCABULARY, hidden_size=256, intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM._from_config(
        config, attn_implementation=implementation, dtype=torch.bfloat16
    )
    return trained(model.to(DEVICE), _batch(kind), path, **training.WATCH)


@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
def test_flash_attention_4_by_transformers_is_measured_whole(
    kind: str, prepared: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flash_attn.cute")
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
    alone = [_trained("flash_attention_4", kind, None)[0] for _ in range(2)]
    losses, found = _trained("flash_attention_4", kind, tmp_path / "a.bwrun")
    if alone[0] == alone[1]:  # Whether it repeats its bits is the package's affair.
        assert losses == alone[0]
    _, by_sdpa = _trained("sdpa", kind, tmp_path / "b.bwrun")
    assert found.keys() == by_sdpa.keys() and len(found) == 12
    if kind == "padded":
        return  # Each has a way of its own with rows of padding.
    for name, value in found.items():
        if "tied" not in name and "leak" not in name and "delta" not in name:  # Of the last bits.
            assert math.isclose(value, by_sdpa[name], rel_tol=0.02, abs_tol=1e-3), name
