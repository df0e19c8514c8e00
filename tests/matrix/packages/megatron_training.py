"""Megatron-Core's GPT with its local spec, on a CPU: what of it asks for CUDA is replaced."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Optional
from unittest import mock

import torch
from torch import Tensor, nn

import projections
from capture import as_given, copied
from definitions import Call
from training import STEPS, VOCABULARY, Training, job_of_one, tokens

LENGTH = 20


class _NoRandomStates:
    def fork(self, *_: Any) -> Any:
        return contextlib.nullcontext()


def _causal_mask(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).triu(1)


def _window_mask(rows: int, keys: int, window: tuple[int, int]) -> Tensor:
    far = torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows - window[0])
    return ~far.tril(keys - rows + window[1])


class _TorchOnACpu:
    """PyTorch for a file that says device="cuda"."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*args: Any, **given: Any) -> Tensor:
        return torch.zeros(*args, **{**given, "device": "cpu"})


def on_a_cpu() -> None:
    import megatron.core.fusions.fused_softmax as softmax
    import megatron.core.pipeline_parallel.schedules as schedules

    schedules.torch = _TorchOnACpu()
    softmax.get_default_causal_mask = _causal_mask
    softmax.get_sliding_window_causal_mask = _window_mask
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron") and hasattr(module, "get_cuda_rng_tracker"):
            module.get_cuda_rng_tracker = lambda *_, **__: _NoRandomStates()
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]


def by_group(module: Any, heads: int, kv_heads: int, dim: int) -> Optional[projections.Pair]:
    """Of linear_qkv: the queries of a group, its key, its value, then the next group."""
    weight = copied(module.get_submodule("linear_qkv").weight).double()
    group = weight.reshape(kv_heads, -1, dim, weight.shape[-1])
    return group[:, :-2].reshape(heads, dim, -1), group[:, -2]


def captured(training: Training) -> Any:
    """Core attention is no function that other packages share."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    plain = DotProductAttention.forward

    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], *args: Any,
                **kwargs: Any) -> Any:  # fmt: skip
        assert training.calls is not None
        bhtd = [copied(x.permute(1, 2, 0, 3)) for x in (q, k, v)]
        name = training.calls.names[id(self)].rpartition(".")[0]
        scale = self.softmax_scale * (self.scale_mask_softmax.scale or 1)
        call = Call(name, *bhtd, bhtd[0], scale, kv_heads=k.shape[2])
        hidden = mask
        if self.scale_mask_softmax.window_size is not None:
            hidden = _window_mask(q.shape[0], k.shape[0], self.scale_mask_softmax.window_size)
        elif mask is None:
            hidden = _causal_mask(q.shape[0])
        assert hidden is not None
        call.allowed = ~hidden
        if self.softmax_offset is not None:
            call.sinks = copied(self.softmax_offset)
        with as_given(call, k, lambda x: x.permute(1, 2, 0, 3)) as own:
            o = plain(self, q, own, v, mask, *args, **kwargs)

        def view(x: Tensor) -> Tensor:  # [tokens, batch, heads * dim]
            return copied(x.unflatten(-1, (q.shape[2], -1)).permute(1, 2, 0, 3))

        def arrived(gradient: Tensor) -> None:
            call.d_o = view(gradient)

        call.o = view(o)
        o.register_hook(arrived)
        training.calls.found.append(call)
        return o

    return mock.patch.object(DotProductAttention, "forward", forward)


class Norm(nn.LayerNorm):
    """Megatron's own is no PyTorch's where the tokens are split."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def gpt(first: bool = True, last: bool = True, **options: Any) -> nn.Module:
    """A small one, or a stage of it."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    dtype = options.pop("dtype", torch.float32)
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2,
        use_cpu_initialization=True, attention_dropout=0.0, hidden_dropout=0.0,
        pipeline_dtype=dtype, params_dtype=dtype,
        gradient_accumulation_fusion=False, bias_activation_fusion=False,
        masked_softmax_fusion=False, init_method_std=0.19, **options,
    )  # fmt: skip
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    layers = TransformerBlockSubmodules(
        [layer] * (config.num_layers // config.pipeline_model_parallel_size), Norm
    )
    model: nn.Module = GPTModel(
        config, layers, VOCABULARY, LENGTH, pre_process=first, post_process=last
    )
    return model.to(dtype).train()


def _train(training: Training, mask: Optional[Tensor] = None, **options: Any) -> None:
    job_of_one()
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(1)
    on_a_cpu()
    model = gpt(**options)
    training.reader = by_group
    training.begins(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    positions = torch.arange(LENGTH).expand(2, -1)
    capture = contextlib.nullcontext() if training.watched else captured(training)
    with capture:
        for step in range(STEPS):
            x = tokens(step, length=LENGTH)
            loss = model(x, positions, mask, labels=x).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            training.step(loss.item())
    training.ends()


def causal(training: Training) -> None:
    _train(training)


def window(training: Training) -> None:
    _train(training, window_size=(3, 0))


def documents(training: Training) -> None:
    mask = _causal_mask(LENGTH)
    mask[8:, :8] = True
    _train(training, mask[None, None])


def scaled(training: Training) -> None:
    _train(training, apply_query_key_layer_scaling=True, attention_softmax_in_fp32=True)


def sinks(training: Training) -> None:
    _train(training, softmax_type="learnable")
