"""Goal: no law of modules is broken by a sound training of a known model, whose bits stay the same.
Method: small models of transformers, each trained with and without us, in three types.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

import bellwether
from bellwether._hook.layer.gate_law import OTHER_GATE
from bellwether._hook.layer.lookup_law import OTHER_LOOKUP
from bellwether._hook.layer.router_law import OTHER_ROUTER

pytest.importorskip("transformers")
import transformers
from transformers import AutoModelForCausalLM

WORDS = 128
_SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS: dict[str, Any] = {
    "Llama": {},
    "Gemma": {"tie_word_embeddings": True},
    "GPT2": {
        "vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, **_EXPERTS, "norm_topk_prob": True},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV2": {
        "n_routed_experts": 4, "n_shared_experts": 1, **_EXPERTS, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
}  # fmt: skip
WAYS = ("fp32", "bf16", "autocast")


def made(name: str) -> Any:
    kind = getattr(transformers, f"{name}Config")
    config = kind(**(CONFIGS[name] if name == "GPT2" else {**_SIZES, **CONFIGS[name]}))
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def trained(name: str, way: str, path: Optional[Path], steps: int = 12) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model = made(name).train()
    if way == "bf16":
        model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle, status = None, None
    if path is not None:
        handle = bellwether.attach(
            model, record=str(path), run="models", every=1, overhead_budget=1e9
        )
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        words = torch.randint(3, WORDS, (2, 48), generator=generator)
        words[0, 40:] = 0
        cast = torch.autocast("cpu", torch.bfloat16) if way == "autocast" else None
        with cast or contextlib.nullcontext():
            loss = model(
                input_ids=words, labels=words.masked_fill(words == 0, -100), use_cache=False
            ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if handle is not None:
            handle.step(loss=loss.detach())
    if handle is not None:
        assert handle.why_off == "", handle.why_off
        status = handle.status()
        handle.detach()
    return [p.detach() for p in model.parameters()], status


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_sound_training_breaks_no_law_and_keeps_its_bits(
    name: str, way: str, tmp_path: Path
) -> None:
    (plain, _), (watched, status) = trained(name, way, None), trained(name, way, tmp_path / "a")
    assert all(torch.equal(a, b) for a, b in zip(plain, watched))
    assert status["errors"] == 0, status["last_error"]
    assert not status["linear"]["faults"]
    assert status["linear"]["embeddings"] == 1 + (name == "GPT2")
    routers = {"Mixtral": 2, "Qwen3Moe": 2, "GptOss": 2, "DeepseekV2": 1}
    assert status["linear"]["routers"] == routers.get(name, 0)
    reasons = (OTHER_ROUTER, OTHER_GATE, OTHER_LOOKUP)
    assert not [why for why in status["linear"]["left_out"] if why.endswith(reasons)]
