"""The architectures of the matrix: a tiny configuration of each, and what goes together with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import projections

TOKENS = 24  # Of a sequence.
WINDOW = 6  # Tokens that a row sees in the batch "window".
WIDE = 64  # More than a sequence has.
VOCABULARY = 64

IMPLEMENTATIONS = ("sdpa", "eager", "flex_attention", "bellwether")
BATCHES = ("plain", "padded_left", "padded_right", "packed", "mixed", "window")
MODES = ("train", "checkpoint", "reentrant", "compile")
PRECISIONS = ("float32", "bfloat16", "autocast")

_TEXT = ("plain", "padded_left", "padded_right", "mixed")
_DECODER = (*_TEXT, "packed")
_NO_FLEX = ("sdpa", "eager", "bellwether")


@dataclasses.dataclass(frozen=True)
class Architecture:
    name: str
    family: str  # decoder, encoder, encoder-decoder, vision, audio, two towers
    config: str  # Classes of transformers.
    model: str
    options: Mapping[str, Any]  # Of the configuration.
    implementations: tuple[str, ...] = IMPLEMENTATIONS
    batches: tuple[str, ...] = _TEXT
    modes: tuple[str, ...] = MODES
    precisions: tuple[str, ...] = PRECISIONS
    window: tuple[str, ...] = ()  # Options that hold the width of its window or chunk.
    weights: projections.Reader = projections.separate
    kind: str = ""  # What is special about its attention.
    written: bool = False  # Its attention stands in its own forward; else it calls a function.

    def build(self, implementation: str, windowed: bool) -> nn.Module:
        """The model with weights by which scores differ, as after some training."""
        import transformers

        options = dict(self.options)
        for option in self.window:
            options[option] = WINDOW if windowed else WIDE
        config = getattr(transformers, self.config)(**options)
        cls = getattr(transformers, self.model)
        model: nn.Module = cls._from_config(config, attn_implementation=implementation)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, 0.19)
                elif name.endswith("sinks"):
                    parameter.normal_(0.0, 1.0)
        return model.train()


def _decoder(name: str, stem: str, /, model: str = "", **options: Any) -> Architecture:
    special = {n: options.pop(n) for n in _FIELDS if n in options}
    sizes = dict(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, use_cache=False,
    )  # fmt: skip
    batches = (*_DECODER, "window") if special.get("window") else _DECODER
    special.setdefault("batches", batches)
    return Architecture(
        name, "decoder", f"{stem}Config", model or f"{stem}ForCausalLM", {**sizes, **options},
        **special,
    )  # fmt: skip


def _encoder(name: str, stem: str, /, model: str = "", **options: Any) -> Architecture:
    special = {n: options.pop(n) for n in _FIELDS if n in options}
    sizes = dict(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=128, pad_token_id=0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    special.setdefault("batches", (*_TEXT, "window") if special.get("window") else _TEXT)
    return Architecture(
        name, "encoder", f"{stem}Config", model or f"{stem}ForMaskedLM", {**sizes, **options},
        **special,
    )  # fmt: skip


def _vision(name: str, stem: str, /, model: str = "", **options: Any) -> Architecture:
    special = {n: options.pop(n) for n in _FIELDS if n in options}
    sizes = dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        image_size=16, patch_size=4, num_labels=5, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    special.setdefault("batches", ("plain",))
    return Architecture(
        name, "vision", f"{stem}Config", model or f"{stem}ForImageClassification",
        {**sizes, **options}, **special,
    )  # fmt: skip


_FIELDS = {
    "implementations",
    "batches",
    "modes",
    "precisions",
    "window",
    "weights",
    "kind",
    "written",
}
_SEQ2SEQ = dict(
    vocab_size=VOCABULARY, d_model=64, encoder_layers=2, decoder_layers=2,
    encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96,
    max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=1, use_cache=False, forced_eos_token_id=None,
)  # fmt: skip
_SPEECH = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2, attention_dropout=0.0, layerdrop=0.0, mask_time_prob=0.0,
    vocab_size=VOCABULARY, pad_token_id=0, num_feat_extract_layers=2,
)  # fmt: skip
_TOWER = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
)  # fmt: skip
_TWO_TOWERS = dict(
    text_config=dict(
        **_TOWER, vocab_size=VOCABULARY, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, projection_size=64,
    ),
    vision_config=dict(**_TOWER, image_size=16, patch_size=4),
)  # fmt: skip
_MLA = dict(
    num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=16, v_head_dim=12, moe_intermediate_size=32, n_routed_experts=4,
    num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
    weights=projections.latent, kind="MLA",
)  # fmt: skip
_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2, kind="MoE")
# In 16 bits the scores do not show the mask, of which the test knows no more.  Compiled, what a
# module writes out is not followed: sigma alone is measured.
_WRITTEN = dict(
    written=True, implementations=("eager",), precisions=("float32",), kind="written out",
    modes=("train", "checkpoint", "reentrant"),
)  # fmt: skip
_MAMBA = dict(
    mamba_n_heads=4, mamba_d_head=32, mamba_d_state=8, mamba_n_groups=1, mamba_expand=2,
    mamba_d_conv=4, mamba_chunk_size=8, kind="hybrid",
)  # fmt: skip

ALL = (
    # ---- decoders, dense ----
    _decoder("llama", "Llama"),
    _decoder(
        "gpt2", "GPT2", model="GPT2LMHeadModel", n_embd=64, n_head=4, n_layer=2, n_positions=128,
        attn_pdrop=0.0, implementations=_NO_FLEX, weights=projections.fused,
    ),
    _decoder("mistral", "Mistral", window=("sliding_window",), kind="window"),
    _decoder("qwen2", "Qwen2", window=("sliding_window",), use_sliding_window=True,
             max_window_layers=1, kind="window"),
    _decoder("qwen3", "Qwen3", head_dim=16, kind="q/k norm"),
    _decoder("gemma", "Gemma", head_dim=32),
    _decoder("gemma2", "Gemma2", head_dim=16, query_pre_attn_scalar=16, attn_logit_softcapping=2.0,
             window=("sliding_window",),
             # PyTorch's portable flex_attention is not deterministic with a softcap.
             implementations=("eager", "bellwether"), kind="softcap, window"),
    _decoder("gemma3", "Gemma3Text", model="Gemma3ForCausalLM", head_dim=16,
             query_pre_attn_scalar=16, window=("sliding_window",),
             layer_types=["sliding_attention", "full_attention"], kind="window, q/k norm"),
    _decoder("phi", "Phi", attention_dropout=0.0, kind="partial rope"),
    _decoder("phi3", "Phi3", window=("sliding_window",), weights=projections.fused,
             kind="fused, window"),
    _decoder("gpt_neox", "GPTNeoX", weights=projections.by_head, attention_dropout=0.0,
             kind="fused by head"),
    _decoder("gpt_bigcode", "GPTBigCode", n_embd=64, n_head=4, n_layer=2, n_positions=128,
             n_inner=96, attn_pdrop=0.0, implementations=_NO_FLEX, weights=projections.fused,
             kind="multi-query"),
    _decoder("gpt_bigcode_mha", "GPTBigCode", n_embd=64, n_head=4, n_layer=2, n_positions=128,
             n_inner=96, attn_pdrop=0.0, multi_query=False, implementations=_NO_FLEX,
             weights=projections.by_head, kind="fused by head"),
    _decoder("starcoder2", "Starcoder2", window=("sliding_window",), kind="window"),
    _decoder("opt", "OPT", ffn_dim=96, word_embed_proj_dim=64, attention_dropout=0.0),
    _decoder("falcon", "Falcon", implementations=("sdpa",), new_decoder_architecture=False,
             multi_query=True, attention_dropout=0.0, weights=projections.fused,
             kind="multi-query"),
    _decoder("falcon_alibi", "Falcon", implementations=("sdpa",), alibi=True,
             new_decoder_architecture=False, multi_query=False, attention_dropout=0.0,
             weights=projections.by_head, kind="ALiBi",
             batches=("plain", "padded_left", "padded_right", "mixed")),
    _decoder("bloom", "Bloom", n_layer=2, n_head=4,
             attention_dropout=0.0, weights=projections.by_head, batches=_TEXT,
             **{**_WRITTEN, "kind": "ALiBi, written out"}),
    _decoder("mpt", "Mpt", d_model=64, n_heads=4, n_layers=2, max_seq_len=128,
             weights=projections.fused, batches=_TEXT,
             **{**_WRITTEN, "kind": "ALiBi, written out"}),
    _decoder("gptj", "GPTJ", n_embd=64, n_head=4, n_layer=2, n_positions=128, n_inner=96,
             rotary_dim=8, attn_pdrop=0.0, batches=_TEXT, **_WRITTEN),
    _decoder("stablelm", "StableLm", implementations=_NO_FLEX),
    _decoder("olmo2", "Olmo2", kind="q/k norm"),
    _decoder("olmo3", "Olmo3", window=("sliding_window",),
             layer_types=["sliding_attention", "full_attention"], kind="window, q/k norm"),
    _decoder("cohere2", "Cohere2", window=("sliding_window",),
             layer_types=["sliding_attention", "full_attention"], kind="window"),
    _decoder("glm4", "Glm4", head_dim=16, kind="partial rope"),
    _decoder("smollm3", "SmolLM3", no_rope_layers=[1, 0]),
    _decoder("granite", "Granite", attention_multiplier=0.2, kind="scale"),
    _decoder("nemotron", "Nemotron", head_dim=16),
    _decoder("exaone4", "Exaone4", window=("sliding_window",), sliding_window_pattern=2,
             kind="window"),
    _decoder("persimmon", "Persimmon", implementations=_NO_FLEX, weights=projections.by_head,
             attention_dropout=0.0, kind="fused by head"),
    _decoder("modernbert_decoder", "ModernBertDecoder", window=("sliding_window",),
             layer_types=["sliding_attention", "full_attention"], kind="window"),
    # ---- decoders, experts ----
    _decoder("mixtral", "Mixtral", window=("sliding_window",), **_EXPERTS),
    _decoder("qwen3_moe", "Qwen3Moe", head_dim=16, num_experts=4, num_experts_per_tok=2,
             moe_intermediate_size=32, kind="MoE"),
    _decoder("olmoe", "Olmoe", num_experts=4, num_experts_per_tok=2, implementations=_NO_FLEX,
             kind="MoE, q/k norm"),
    _decoder("gpt_oss", "GptOss", head_dim=16, window=("sliding_window",),
             layer_types=["sliding_attention", "full_attention"],
             implementations=("eager", "bellwether"), **{**_EXPERTS, "kind": "sinks, window"}),
    _decoder("llama4", "Llama4Text", model="Llama4ForCausalLM", head_dim=16,
             intermediate_size_mlp=96, window=("attention_chunk_size",), no_rope_layers=[1, 0],
             implementations=_NO_FLEX,  # What PyTorch makes of its block mask does not compile.
             **{**_EXPERTS, "kind": "chunks"}),
    _decoder("deepseek_v2", "DeepseekV2", **_MLA),
    _decoder("deepseek_v3", "DeepseekV3", **_MLA),
    _decoder("granitemoe", "GraniteMoe", **_EXPERTS),
    _decoder("dbrx", "Dbrx", d_model=64, n_heads=4, n_layers=2, max_seq_len=128,
             attn_config=dict(kv_n_heads=2, attn_pdrop=0.0, clip_qkv=8.0, rope_theta=1e4),
             ffn_config=dict(ffn_hidden_size=96, moe_num_experts=4, moe_top_k=2, hidden_size=64),
             weights=projections.fused, kind="MoE, fused",
             precisions=("float32", "bfloat16")),  # Its experts know no autocast.
    # ---- decoders, with layers that are no attention ----
    _decoder("qwen3_next", "Qwen3Next", head_dim=16, num_experts=4, num_experts_per_tok=2,
             moe_intermediate_size=32, shared_expert_intermediate_size=32,
             linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
             linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"],
             implementations=_NO_FLEX, weights=projections.gated, kind="hybrid, gated",
             modes=("train", "checkpoint", "reentrant")),  # What PyTorch compiles of it fails.
    _decoder("bamba", "Bamba", attn_layer_indices=[1], implementations=_NO_FLEX, **_MAMBA),
    _decoder("falcon_h1", "FalconH1", mamba_d_ssm=64, implementations=_NO_FLEX,
             **{**_MAMBA, "mamba_d_head": 16}),
    _decoder("lfm2", "Lfm2", layer_types=["conv", "full_attention"], kind="hybrid, q/k norm"),
    # ---- encoders ----
    _encoder("bert", "Bert"),
    _encoder("roberta", "Roberta"),
    _encoder("albert", "Albert", embedding_size=32, kind="shared layers",
             modes=("train", "compile")),  # It knows no checkpoints.
    _encoder("distilbert", "DistilBert", dim=64, hidden_dim=96, n_layers=2, n_heads=4,
             attention_dropout=0.0),
    _encoder("electra", "Electra", embedding_size=32),
    _encoder("modernbert", "ModernBert", attention_dropout=0.0, weights=projections.fused,
             window=("local_attention",), layer_types=["sliding_attention", "full_attention"],
             reference_compile=False, kind="window, fused"),
    _encoder("nomic_bert", "NomicBert", kind="rope"),
    _encoder("esm", "Esm", position_embedding_type="rotary", mask_token_id=3,
             emb_layer_norm_before=False, token_dropout=False, kind="rope"),
    # ---- encoders with decoders ----
    Architecture(
        "t5", "encoder-decoder", "T5Config", "T5ForConditionalGeneration",
        dict(vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=96, num_layers=2,
             num_decoder_layers=2, num_heads=4, dropout_rate=0.0, pad_token_id=0, eos_token_id=2,
             decoder_start_token_id=0, use_cache=False),
        implementations=_NO_FLEX,  # Its bias has one sequence, flex_attention asks for each one's.
        kind="bias",
    ),
    Architecture("bart", "encoder-decoder", "BartConfig", "BartForConditionalGeneration", _SEQ2SEQ),
    Architecture("marian", "encoder-decoder", "MarianConfig", "MarianMTModel", _SEQ2SEQ),
    # ---- vision ----
    _vision("vit", "ViT"),
    _vision("deit", "DeiT"),
    _vision("dinov2", "Dinov2", mlp_ratio=2),
    _vision("beit", "Beit", use_relative_position_bias=True, drop_path_rate=0.0,
            implementations=_NO_FLEX, kind="bias"),
    Architecture(
        "swin", "vision", "SwinConfig", "SwinForImageClassification",
        dict(image_size=16, patch_size=2, embed_dim=64, depths=[2], num_heads=[4], window_size=4,
             num_labels=5, attention_probs_dropout_prob=0.0, drop_path_rate=0.0),
        implementations=_NO_FLEX, batches=("plain",), modes=("train", "checkpoint", "compile"),
        kind="windows of images, bias",
    ),
    # ---- two towers ----
    Architecture("clip", "two towers", "CLIPConfig", "CLIPModel",
                 dict(**_TWO_TOWERS, projection_dim=64), batches=("plain", "padded_right",
                 "mixed")),
    Architecture("siglip", "two towers", "SiglipConfig", "SiglipModel", _TWO_TOWERS,
                 batches=("plain", "padded_right", "mixed")),
    # ---- audio ----
    Architecture(
        "whisper", "audio", "WhisperConfig", "WhisperForConditionalGeneration",
        {**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64,
         "begin_suppress_tokens": None},
        batches=("plain", "padded_left", "padded_right", "mixed"),
    ),
    Architecture("wav2vec2", "audio", "Wav2Vec2Config", "Wav2Vec2ForCTC", _SPEECH,
                 batches=("plain", "padded_right", "mixed")),
    Architecture("hubert", "audio", "HubertConfig", "HubertForCTC", _SPEECH,
                 batches=("plain", "padded_right", "mixed")),
)  # fmt: skip

BY_NAME = {architecture.name: architecture for architecture in ALL}

Batch = dict[str, Tensor]


def batch(architecture: Architecture, kind: str, seed: int) -> Batch:
    """One batch of two sequences; `kind` is one of BATCHES but "mixed"."""
    made = torch.Generator().manual_seed(seed)

    def tokens() -> Tensor:
        return torch.randint(3, VOCABULARY, (2, TOKENS), generator=made)

    family = architecture.family
    if family == "vision":
        labels = torch.randint(0, 5, (2,), generator=made)
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=made), "labels": labels}
    if architecture.name in ("wav2vec2", "hubert"):
        found = {"input_values": torch.randn(2, 400, generator=made)}
        found["labels"] = torch.randint(3, VOCABULARY, (2, 4), generator=made)
        if kind == "padded_right":
            found["attention_mask"] = torch.ones(2, 400, dtype=torch.long)
            found["attention_mask"][1, 240:] = 0
        return found
    if architecture.name == "whisper":
        found = {"input_features": torch.randn(2, 8, 32, generator=made)}
        found["decoder_input_ids"], found["labels"] = tokens(), tokens()
        mask = _padding(kind)
        if mask is not None:
            found["decoder_attention_mask"] = mask
            found["labels"][mask == 0] = -100
        return found
    found = {"input_ids": tokens()}
    mask = _padding(kind)
    if mask is not None:
        found["attention_mask"] = mask
        found["input_ids"][mask == 0] = 0
    if family == "two towers":
        found["pixel_values"] = torch.randn(2, 3, 16, 16, generator=made)
        found["return_loss"] = True  # type: ignore[assignment]
        return found
    if family == "encoder-decoder":
        found["decoder_input_ids"], found["labels"] = tokens(), tokens()
        if mask is not None:
            found["decoder_attention_mask"] = mask
    else:
        found["labels"] = found["input_ids"].clone()
    if mask is not None:
        found["labels"][mask == 0] = -100
    if kind == "packed":
        parts = ((7, 11, TOKENS - 18), (3, TOKENS - 3))
        found["position_ids"] = torch.stack(
            [torch.cat([torch.arange(n) for n in lengths]) for lengths in parts]
        )
    return found


def _padding(kind: str) -> Tensor | None:
    if kind not in ("padded_left", "padded_right"):
        return None
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    if kind == "padded_left":
        mask[0, :9] = 0
    else:
        mask[1, TOKENS - 7 :] = 0
    return mask


def microbatches(architecture: Architecture, kind: str, step: int) -> list[Batch]:
    """Those of one step of the optimizer."""
    kinds = [kind]
    if kind == "mixed":
        padded = [k for k in ("padded_left", "padded_right") if k in architecture.batches]
        kinds = ["plain", padded[step % len(padded)]]
        if step % 2:
            kinds.reverse()
    return [batch(architecture, k, 1000 + 10 * step + i) for i, k in enumerate(kinds)]
