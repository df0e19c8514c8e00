"""Sound trainings that law_sweep.py judges by the laws outside attention.

    ARCHITECTURE PRECISION WAY   one of architectures.py, trained in one of its modes
    gpt PRECISION WAY            a small GPT; WAY is what is special about it

A GPT's parts, loss, gradients and optimizer are changed by one of WAYS at a time.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import architectures

STEPS = 5
VOCABULARY, WIDTH, HEADS, TOKENS = 128, 64, 2, 48
# fp16 and autocast16 with a GradScaler, fp16raw without; medium: products of float32 in bf16.
PRECISIONS = ("fp32", "bf16", "autocast", "autocast16", "fp16raw", "medium", "fp64")
TYPES = {"bf16": torch.bfloat16, "fp16raw": torch.float16, "fp64": torch.float64}
AUTO = {"autocast": torch.bfloat16, "autocast16": torch.float16}
MODES = ("train", "checkpoint", "reentrant")


class Whole(NamedTuple):
    model: str  # gpt, or an architecture's.
    precision: str
    way: str

    def __str__(self) -> str:
        return " ".join(self)


@dataclasses.dataclass(frozen=True)
class Training:
    model: nn.Module
    step: Callable[[int], None]


# ---- a GPT, and what may be special about it


@dataclasses.dataclass
class Way:
    """Of a GPT; what is not told is plain."""

    norm: str = "layer"  # layer, unbiased, rms, shifted, none, batch
    tied: bool = False
    bias: bool = True
    head_bias: bool = False
    heads: int = 1  # lm_heads.
    cap: float = 0.0  # Of the logits.
    logit_scale: float = 1.0
    dropout: float = 0.0
    experts: int = 0
    twice: bool = False  # Each block is called twice.
    inside: Optional[str] = None  # Of a block's MLP.
    checkpoint: Optional[str] = None
    first: float = 1.0  # The weights are this many times as large.
    loss: Callable[[Tensor, Tensor], Tensor] = lambda z, y: F.cross_entropy(z, y)
    ignored: float = 0.0  # Part of the labels.
    factor: float = 1.0  # Of the loss.
    batch: int = 2
    tokens: int = TOKENS
    microbatches: int = 1
    fused: int = 0  # Chunks of a loss that takes the weight.
    prepare: Callable[[nn.Module], Any] = lambda model: None
    optimizer: Optional[Callable[[list[Tensor]], Any]] = None  # AdamW
    between: Callable[[nn.Module, int], Any] = lambda model, step: None  # Behind the step.
    before: Callable[[nn.Module], Any] = lambda model: None  # The optimizer's step.
    data: Callable[[Tensor], Tensor] = lambda ids: ids
    scaler: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    passes: int = 1  # Of SAM, two.


class ShiftedNorm(nn.RMSNorm):
    """As Gemma's, in torch's module: it stores the gain less one."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


def _norm(kind: str, width: int) -> nn.Module:
    if kind == "rms":
        return nn.RMSNorm(width, eps=1e-6)
    if kind == "rms_default":
        return nn.RMSNorm(width)
    if kind == "large_eps":
        return nn.LayerNorm(width, eps=1.0)
    if kind == "bare":
        return nn.LayerNorm(width, elementwise_affine=False)
    if kind == "shifted":
        norm = ShiftedNorm(width, eps=1e-6)
        nn.init.zeros_(norm.weight)
        return norm
    return nn.LayerNorm(width, bias=kind != "unbiased")


class Experts(nn.Module):
    def __init__(self, way: Way, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList(Mlp(dataclasses.replace(way, experts=0)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weight, chosen = self.router(rows).float().softmax(-1).topk(2)
        y = torch.zeros_like(rows)
        for at, expert in enumerate(self.experts):
            row, place = (chosen == at).nonzero(as_tuple=True)
            out = expert(rows[row]) * weight[row, place, None].to(rows.dtype)
            y = y.index_add(0, row, out.to(y.dtype))
        return y.view_as(x)


class Mlp(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(a, b, bias=way.bias) for a, b in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
        )
        self.inside = way.inside

    def forward(self, x: Tensor) -> Tensor:
        y, inside = self.up(x), self.inside
        if inside == "in place":
            y = F.relu(y, inplace=True)
        elif inside == "added in place":
            y = y.add_(1).mul_(0.5).relu()
        elif inside == "relu2":
            y = y.relu().square()
        elif inside == "sparse":
            y = y * (y > y.detach().amax(-1, keepdim=True) * 0.7)
        elif inside == "rounded":  # As a straight-through estimator of 8 bits.
            y = y + ((y * 8).round() / 8 - y).detach()
        elif inside == "transposed":
            y = y.transpose(-1, -2).contiguous().transpose(-1, -2).relu()
        elif inside == "detached":
            y = y.detach().relu() + 0 * y
        elif inside == "chunks":
            return torch.cat([self.down(F.gelu(part)) for part in y.chunk(3, 1)], 1)
        else:
            y = F.gelu(y)
        return self.down(y)


class Block(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.norms = nn.ModuleList(_norm(way.norm, WIDTH) for _ in range(2))
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=way.bias)
        self.out = nn.Linear(WIDTH, WIDTH, bias=way.bias)
        self.mlp = Experts(way, way.experts) if way.experts else Mlp(way)
        self.dropout = nn.Dropout(way.dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(y))
        return x + self.dropout(self.mlp(self.norms[1](x)))


class ChunkedLoss(torch.autograd.Function):
    """Logits, loss and gradients in chunks, as fused losses make them; dW in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, chunks: int) -> Tensor:
        d_w = torch.zeros_like(weight, dtype=torch.float32)
        d_x, total = [], x.new_zeros((), dtype=torch.float32)
        for rows, label in zip(x.chunk(chunks), labels.chunk(chunks)):
            z = (rows @ weight.t()).float().requires_grad_()
            with torch.enable_grad():
                loss = F.cross_entropy(z, label, reduction="sum") / len(labels)
            dz = torch.autograd.grad(loss, z)[0].to(x.dtype)
            d_w += (dz.t() @ rows).float()
            d_x.append(dz @ weight)
            total += loss.detach()
        ctx.save_for_backward(torch.cat(d_x), d_w.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> Any:  # type: ignore[override]
        d_x, d_w = ctx.saved_tensors
        return d_x * d_loss.to(d_x.dtype), d_w * d_loss.to(d_w.dtype), None, None


class Gpt(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block(way) for _ in range(2))
        self.norm = _norm(way.norm, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=way.head_bias)
        self.more = nn.ModuleList(
            nn.Linear(WIDTH, VOCABULARY, bias=False) for _ in range(way.heads - 1)
        )
        if way.tied:
            self.head.weight = self.embed.weight
            for head in self.more:
                head.weight = self.embed.weight
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() == 2:
                    spread = 0.3 if "embed" in name or "places" in name else 1.2
                    weight.normal_(0, way.first * spread / math.sqrt(WIDTH))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        way = self.way
        x = self.embed(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            for _ in range(1 + way.twice):
                if way.checkpoint:
                    x = checkpoint(block, x, use_reentrant=way.checkpoint == "reentrant")
                else:
                    x = block(x)
        x = self.norm(x)
        if way.fused:
            weight = self.head.weight.to(x.dtype)
            return ChunkedLoss.apply(  # type: ignore[no-any-return, no-untyped-call]
                x.flatten(0, 1), weight, labels.flatten(), way.fused
            )
        loss: Any = 0.0
        for head in (self.head, *self.more):
            z = head(x).flatten(0, 1) * way.logit_scale
            if way.cap:
                z = way.cap * (z / way.cap).tanh()
            loss = loss + way.loss(z.float() if z.dtype != torch.float64 else z, labels.flatten())
        return loss  # type: ignore[no-any-return]


def _z_loss(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y) + 1e-3 * z.logsumexp(-1).square().mean()


def _distilled(z: Tensor, y: Tensor) -> Tensor:
    at = torch.arange(z.numel(), dtype=z.dtype, device=z.device)
    teacher = (torch.sin(at).view_as(z) * 3).softmax(-1)
    return F.kl_div(z.log_softmax(-1), teacher, reduction="batchmean")


def _squares(z: Tensor, y: Tensor) -> Tensor:
    return (z - F.one_hot(y, z.shape[-1]).to(z.dtype)).square().mean()


def _focal(z: Tensor, y: Tensor) -> Tensor:
    one = F.cross_entropy(z, y, reduction="none")
    return ((1 - (-one).exp()).square() * one).mean()


def _binary(z: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(z, F.one_hot(y, z.shape[-1]).to(z.dtype))


def _by_class(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, weight=torch.linspace(0, 3, z.shape[-1]).to(z))


def _policy(z: Tensor, y: Tensor) -> Tensor:
    """Of a policy gradient: advantages of both signs."""
    advantage = torch.cos(torch.arange(len(y), dtype=z.dtype, device=z.device))
    return (advantage * F.cross_entropy(z, y, reduction="none")).mean()


def _preferred(z: Tensor, y: Tensor) -> Tensor:
    """As DPO: a sequence against another."""
    one = F.cross_entropy(z, y, reduction="none").view(2, -1).sum(1)
    return -F.logsigmoid(0.1 * (one[1] - one[0]))


def _entropy(z: Tensor, y: Tensor) -> Tensor:
    logs = z.log_softmax(-1)
    return F.cross_entropy(z, y) + 0.1 * (logs.exp() * logs).sum(-1).mean()


def _sure(z: Tensor, y: Tensor) -> Tensor:
    """As where a text is known by heart: half of the rows are right."""
    right = torch.arange(len(y), device=y.device) % 2 == 0
    return F.cross_entropy(z, torch.where(right, z.detach().argmax(1), y))


def _in_16_bits(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.bfloat16(), y)


def _label_probabilities(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, (F.one_hot(y, z.shape[-1]) * 0.8 + 0.2 / z.shape[-1]).to(z.dtype))


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * 2  # type: ignore[no-any-return]


def _lora(model: Any) -> None:
    model.requires_grad_(False)
    for block in model.blocks:
        block.mix, block.out = Lora(block.mix), Lora(block.out)


def _frozen(model: Any) -> None:
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].norms.requires_grad_(False)


def _frozen_weights(model: Any) -> None:
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.endswith("bias") or "norm" in name)


def _biases_frozen(model: Any) -> None:
    for name, weight in model.named_parameters():
        weight.requires_grad_(not name.endswith("bias"))


def _outputs_changed(model: Any) -> None:
    for block in model.blocks:
        block.mlp.up.register_forward_hook(lambda m, i, o: o * 0.5)
        block.out.register_forward_hook(lambda m, i, o: o.clone().add_(1))
        block.norms[1].register_forward_hook(lambda m, i, o: o + 0.1)


def _inputs_changed(model: Any) -> None:
    for block in model.blocks:
        block.mlp.up.register_forward_pre_hook(lambda m, i: (i[0] * 0.5,))
        block.norms[1].register_forward_pre_hook(lambda m, i: (i[0] + 0.1,))


def _gradients_changed(model: Any) -> None:
    for block in model.blocks:
        block.mlp.up.register_full_backward_hook(lambda m, i, o: (i[0] * 0.5,))
        block.norms[1].register_full_backward_hook(lambda m, i, o: (i[0] * 2,))
        block.out.register_full_backward_pre_hook(lambda m, o: (o[0] * 3,))
        block.norms[0].register_full_backward_pre_hook(lambda m, o: (o[0] * 3,))
    model.head.register_full_backward_hook(lambda m, i, o: (i[0].clamp(-1e-3, 1e-3),))
    model.head.register_full_backward_pre_hook(lambda m, o: (o[0].clamp(-1e-4, 1e-4),))


def _weight_gradients_changed(model: Any) -> None:
    for weight in model.parameters():
        weight.register_hook(lambda g: g * 0.5)


def _output_gradients_changed(model: Any) -> None:
    def clip(m: Any, i: Any, o: Tensor) -> None:
        o.register_hook(lambda g: g.clamp(-1e-4, 1e-4))

    for block in model.blocks:
        for module in (block.mlp.up, block.out, block.norms[1]):
            module.register_forward_hook(clip)
    model.head.register_forward_hook(clip)


def _input_gradients_changed(model: Any) -> None:
    def clip(m: Any, i: Any) -> None:
        if i[0].requires_grad:
            i[0].register_hook(lambda g: g.clamp(-1e-4, 1e-4))

    for block in model.blocks:
        for module in (block.mlp.up, block.out, block.norms[1]):
            module.register_forward_pre_hook(clip)


def _weight_norm(model: Any) -> None:
    for block in model.blocks:
        nn.utils.parametrizations.weight_norm(block.mlp.up)
        nn.utils.parametrizations.spectral_norm(block.out)


def _norms_in_fp32(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            module.float()
            module.register_forward_pre_hook(lambda m, i: (i[0].float(),))
            module.register_forward_hook(lambda m, i, o: o.to(model.head.weight.dtype))


def _norms_of_narrow(model: Any) -> None:
    """A norm of float32 weights that is given 16 bits."""
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            module.float()


def _gain(size: float) -> Callable[[Any], None]:
    def prepare(model: Any) -> None:
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and module.weight is not None:
                    module.weight.mul_(torch.randn_like(module.weight)).mul_(size)

    return prepare


def _zero_weights(model: Any) -> None:
    with torch.no_grad():
        for block in model.blocks:
            block.out.weight.zero_()
            block.mlp.down.weight.zero_()
        model.head.weight.zero_()


def _outlier(model: Any) -> None:
    with torch.no_grad():
        model.embed.weight[:, 3] = 60


def _offset(model: Any) -> None:
    """The mean of what comes to the norms is many times its deviation."""
    with torch.no_grad():
        model.embed.weight.mul_(0.3).add_(20)


def _equal(model: Any) -> None:
    with torch.no_grad():
        model.embed.weight[:] = model.embed.weight[:1]
        model.places.weight.zero_()


class _Swapped:
    """A moving average of the weights, in use for a forward between two steps."""

    def __init__(self) -> None:
        self.average: Optional[list[Tensor]] = None

    @torch.no_grad()
    def __call__(self, model: nn.Module, step: int) -> None:
        weights = list(model.parameters())
        if self.average is None:
            self.average = [w.clone() for w in weights]
        for mean, weight in zip(self.average, weights):
            mean.lerp_(weight, 0.1)
        for mean, weight in zip(self.average, weights):
            mean.data, weight.data = weight.data, mean.data
        ids = torch.arange(40, device=weights[0].device)[None]
        model(ids, ids)
        for mean, weight in zip(self.average, weights):
            mean.data, weight.data = weight.data, mean.data


@torch.no_grad()
def _copied(model: nn.Module, step: int) -> None:
    before = copy.deepcopy(model.state_dict())
    for weight in model.parameters():
        weight.mul_(0.5)
    model.load_state_dict(before)


def _clamped(model: nn.Module, step: int) -> None:
    for weight in model.parameters():
        weight.data.clamp_(-0.3, 0.3)


def _clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def _muon(weights: list[Tensor]) -> Any:
    return _Several(
        torch.optim.Muon([w for w in weights if w.dim() == 2], lr=1e-3),
        torch.optim.AdamW([w for w in weights if w.dim() != 2], lr=1e-3),
    )


class _Several:
    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def _adafactor(weights: list[Tensor]) -> Any:
    from transformers.optimization import Adafactor

    return Adafactor(weights)


def _gloo() -> None:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )


def _sharded(model: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    _gloo()
    for block in model.blocks:
        fully_shard(block, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))


def _compile_block(model: Any) -> None:
    model.blocks[1].mlp.compile(backend="eager")


def _optimizer(name: str, rate: float = 1e-3, **options: Any) -> Way:
    return Way(optimizer=lambda weights: getattr(torch.optim, name)(weights, lr=rate, **options))


WAYS: dict[str, Way] = {
    "plain": Way(),
    # ---- parts
    "tied": Way(tied=True),
    "tied-two-heads": Way(tied=True, heads=2),
    "two-heads": Way(heads=2),
    "unbiased": Way(norm="unbiased", bias=False),
    "rms": Way(norm="rms", bias=False),
    "rms-default": Way(norm="rms_default", bias=False),
    "shifted": Way(norm="shifted", bias=False),
    "large-eps": Way(norm="large_eps"),
    "bare-norm": Way(norm="bare"),
    "head-bias": Way(head_bias=True),
    "experts": Way(experts=4),
    "softcap": Way(cap=3.0),
    "logit-scale": Way(logit_scale=20.0),
    "logit-scale-small": Way(logit_scale=0.01),
    "dropout": Way(dropout=0.2),
    "twice": Way(twice=True),
    "twice-checkpoint": Way(twice=True, checkpoint="not"),
    "checkpoint": Way(checkpoint="not"),
    "reentrant": Way(checkpoint="reentrant"),
    "checkpoint-dropout": Way(checkpoint="not", dropout=0.2),
    "large-weights": Way(first=6.0),
    "small-weights": Way(first=0.01),
    "zero-weights": Way(prepare=_zero_weights),
    "outlier": Way(prepare=_outlier, norm="rms"),
    "outlier-layer": Way(prepare=_outlier),
    "offset": Way(prepare=_offset),
    "offset-rms": Way(prepare=_offset, norm="rms"),
    "gain-large": Way(prepare=_gain(30.0)),
    "gain-small": Way(prepare=_gain(0.01), norm="rms"),
    "gain-rms": Way(prepare=_gain(3.0), norm="rms"),
    "norms-fp32": Way(prepare=_norms_in_fp32),
    "norms-fp32-rms": Way(prepare=_norms_in_fp32, norm="rms"),
    "norms-of-narrow": Way(prepare=_norms_of_narrow, norm="rms"),
    **{
        "inside-" + name.replace(" ", "-"): Way(inside=name)
        for name in ("in place", "added in place", "relu2", "sparse", "rounded", "transposed",
                     "detached", "chunks")
    },
    "frozen": Way(prepare=_frozen),
    "frozen-weights": Way(prepare=_frozen_weights),
    "frozen-biases": Way(prepare=_biases_frozen, head_bias=True),
    "lora": Way(prepare=_lora),
    "lora-checkpoint": Way(prepare=_lora, checkpoint="not"),
    "outputs-changed": Way(prepare=_outputs_changed),
    "inputs-changed": Way(prepare=_inputs_changed),
    "inputs-changed-rms": Way(prepare=_inputs_changed, norm="rms"),
    "gradients-changed": Way(prepare=_gradients_changed),
    "gradients-changed-rms": Way(prepare=_gradients_changed, norm="rms"),
    "weight-gradients-changed": Way(prepare=_weight_gradients_changed),
    "output-gradients-changed": Way(prepare=_output_gradients_changed),
    "input-gradients-changed": Way(prepare=_input_gradients_changed),
    "parametrized": Way(prepare=_weight_norm),
    "equal-tokens": Way(prepare=_equal),
    "equal-tokens-rms": Way(prepare=_equal, norm="rms"),
    "sharded": Way(prepare=_sharded),
    "block-compiled": Way(prepare=_compile_block),
    "replicated": Way(),  # DistributedDataParallel.
    # ---- losses
    "smoothed": Way(loss=lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1)),
    "by-class": Way(loss=_by_class),
    "by-class-tied": Way(loss=_by_class, tied=True),
    "ignored": Way(ignored=0.5),
    "all-but-one-ignored": Way(ignored=0.99),
    "z-loss": Way(loss=_z_loss),
    "z-loss-tied": Way(loss=_z_loss, tied=True),
    "sum": Way(loss=lambda z, y: F.cross_entropy(z, y, reduction="sum")),
    "distilled": Way(loss=_distilled),
    "squares": Way(loss=_squares),
    "focal": Way(loss=_focal),
    "binary": Way(loss=_binary),
    "policy": Way(loss=_policy),
    "preferred": Way(loss=_preferred),
    "entropy": Way(loss=_entropy),
    "sure": Way(loss=_sure, first=3.0, prepare=_gain(5.0)),
    "sure-scaled": Way(loss=_sure, logit_scale=7.0),
    "sure-16-bits": Way(loss=lambda z, y: _sure(z.bfloat16(), y), prepare=_gain(10.0)),
    "loss-in-16-bits": Way(loss=_in_16_bits),
    "probabilities": Way(loss=_label_probabilities),
    "fused": Way(fused=4),
    "fused-tied": Way(fused=4, tied=True),
    # ---- sizes of gradients
    **{f"gradients-1e{n}": Way(factor=10.0**n)
       for n in (-42, -40, -38, -36, -34, -32, -30, -27, -24, -21, -18, -15, -12, -9, -6, -4, 4,
                 15, 20, 25, 30, 33, 35)},
    **{f"gradients-1e{n}-rms": Way(factor=10.0**n, norm="rms", bias=False, tied=True)
       for n in (-42, -40, -38, -36, -34, -32, -30, -24, -18, -12, -6, 30, 35)},
    **{f"gradients-1e{n}-fused": Way(factor=10.0**n, fused=3)
       for n in (-40, -38, -36, -34, -30, -24, -18, 25)},
    "gradients-0": Way(factor=0.0),
    "gradients-0-fused": Way(factor=0.0, fused=3),
    "saturated": Way(first=8.0, logit_scale=10.0),
    "one-sequence": Way(batch=1),
    "one-token": Way(batch=1, tokens=1),
    "two-tokens": Way(batch=2, tokens=1),
    "one-word": Way(data=lambda ids: torch.full_like(ids, 7)),
    "few-words": Way(data=lambda ids: ids % 3),
    "long": Way(batch=8, tokens=256),
    "long-few-words": Way(batch=8, tokens=256, data=lambda ids: ids % 3),
    "long-rms": Way(batch=8, tokens=256, norm="rms", tied=True, bias=False),
    # ---- optimizers, and what is between steps
    "sgd": _optimizer("SGD", 0.1, momentum=0.9, weight_decay=0.1),
    "adam-fused": _optimizer("AdamW", fused=True, weight_decay=0.3),
    "adam-foreach": _optimizer("Adam", foreach=True),
    "adam-large": _optimizer("AdamW", 0.3),
    "no-rate": _optimizer("SGD", 0.0),
    **{name.lower(): _optimizer(name) for name in
       ("RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")},
    "muon": Way(optimizer=_muon),
    "adafactor": Way(optimizer=_adafactor),
    "lbfgs": Way(optimizer=lambda weights: torch.optim.LBFGS(weights, lr=0.1, max_iter=2)),
    "accumulated": Way(microbatches=3),
    "clipped": Way(before=_clipped),
    "clamped": Way(between=_clamped),
    "copied": Way(between=_copied),
    "sharpness": Way(passes=2),
    "scale-small": Way(scaler=dict(init_scale=2.0**-20, growth_interval=1)),
    "scale-grows": Way(scaler=dict(init_scale=2.0**4, growth_interval=1, growth_factor=16.0)),
    "scale-overflows": Way(scaler=dict(init_scale=2.0**30, backoff_factor=2.0**-6)),
    "scale-none": Way(scaler=dict(init_scale=1.0, growth_interval=1000)),
}  # fmt: skip
_IN_MEDIUM = (
    "plain", "tied", "rms", "experts", "fused", "fused-tied", "equal-tokens", "one-word", "long",
    "long-few-words", "saturated", "large-weights", "z-loss", "squares",
)  # fmt: skip
WAYS["averaged"] = Way()  # Its average is made anew for each training.


def _data(way: Way) -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, VOCABULARY, (way.batch, way.tokens))
    ids[:, 1::2] = ids[:, : way.tokens // 2 * 2 : 2]
    ids = way.data(ids)
    labels = ids.roll(-1, 1).clone()
    if way.ignored:
        labels[torch.rand(labels.shape) < way.ignored] = -100
        labels[0, 0] = ids[0, 0]
    return ids, labels


@contextlib.contextmanager
def _auto(precision: str, device: str) -> Iterator[None]:
    auto = AUTO.get(precision)
    before = torch.get_float32_matmul_precision()
    if precision == "medium":
        torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast(device, auto or torch.bfloat16, enabled=auto is not None):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _adam(setup: Whole, weights: list[Tensor]) -> torch.optim.Optimizer:
    eps = 1e-4 if setup.precision == "fp16raw" else 1e-8  # Which is 0 in fp16.
    return torch.optim.AdamW(weights, 1e-3, eps=eps, weight_decay=0.1)


def _gpt(setup: Whole, device: str) -> Training:
    way = WAYS[setup.way]
    if setup.way == "averaged":
        way = dataclasses.replace(way, between=_Swapped())
    model: nn.Module = Gpt(way).to(device, TYPES.get(setup.precision, torch.float32)).train()
    way.prepare(model)
    if setup.way.startswith("lora"):
        model.to(device, TYPES.get(setup.precision, torch.float32))
    if setup.way == "replicated":
        _gloo()
        model = nn.parallel.DistributedDataParallel(model)
    weights = [w for w in model.parameters() if w.requires_grad]
    optimizer = way.optimizer(weights) if way.optimizer else _adam(setup, weights)
    scales = setup.precision == "autocast16"
    scaler = torch.amp.GradScaler(device, **{"init_scale": 1024.0, **way.scaler}, enabled=scales)

    def backward() -> Tensor:
        loss = torch.zeros((), device=device)
        for _ in range(way.microbatches):
            ids, labels = (t.to(device) for t in _data(way))
            with _auto(setup.precision, device):
                loss = model(ids, labels) * way.factor
                loss = loss / way.microbatches
                # The products of the backward, too.
                scaler.scale(loss).backward()
        return loss

    def step(number: int) -> None:
        with _auto(setup.precision, device):
            if isinstance(optimizer, torch.optim.LBFGS):

                def closure() -> Tensor:
                    optimizer.zero_grad()
                    return backward()

                optimizer.step(closure)
            else:
                backward()
                if way.passes == 2:
                    weights = [w for w in model.parameters() if w.grad is not None]
                    moves = [w.grad.sign() * 1e-3 for w in weights if w.grad is not None]
                    with torch.no_grad():
                        torch._foreach_add_(weights, moves)
                    optimizer.zero_grad()
                    backward()
                    with torch.no_grad():
                        torch._foreach_sub_(weights, moves)
                way.before(model)
                if scales:
                    for one in getattr(optimizer, "optimizers", (optimizer,)):
                        scaler.step(one)
                    scaler.update()
                else:
                    optimizer.step()
            optimizer.zero_grad()
        with torch.autocast(device, enabled=False):
            way.between(model, number)

    return Training(model, step)


# ---- transformers


def _tables(model: nn.Module) -> list[nn.Module]:
    """The embedding of words; some versions name none of a model that has two towers."""
    try:
        return [model.get_input_embeddings()]  # type: ignore[operator]
    except NotImplementedError:
        found = [m for m in model.modules() if isinstance(m, nn.Embedding)]
        return [max(found, key=lambda m: m.num_embeddings)] if found else []


def _of_transformers(setup: Whole, device: str) -> Training:
    architecture = architectures.BY_NAME[setup.model]
    # As it is initialised: scores differ enough for what is judged here.
    implementation = next(i for i in architecture.implementations if i in ("sdpa", "eager"))
    model = architecture.build(implementation, "window" in architecture.batches)
    model = model.to(device, TYPES.get(setup.precision, torch.float32))
    if setup.way in ("checkpoint", "reentrant"):
        model.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={"use_reentrant": setup.way == "reentrant"}
        )
        if setup.way == "reentrant":
            model.enable_input_require_grads()  # type: ignore[operator]
    if setup.way == "embeddings-frozen":
        for table in _tables(model):
            table.requires_grad_(False)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = _adam(setup, weights)
    scales = setup.precision == "autocast16"
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, enabled=scales)

    def step(number: int) -> None:
        kind = "mixed" if "mixed" in architecture.batches else "plain"
        for batch in architectures.microbatches(architecture, kind, number):
            given = {
                name: x.to(device, TYPES.get(setup.precision)) if isinstance(x, Tensor)
                and x.is_floating_point() else x.to(device) if isinstance(x, Tensor) else x
                for name, x in batch.items()
            }  # fmt: skip
            with _auto(setup.precision, device):
                output = model(**given)
                loss = getattr(output, "loss", None)
                if loss is None:
                    loss = output[0].float().square().mean()
                scaler.scale(loss.float()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Training(model, step)


def build(setup: Whole, device: str) -> Training:
    return (_gpt if setup.model == "gpt" else _of_transformers)(setup, device)


def _trained(way: str, precision: str) -> bool:
    if way.startswith("scale-"):
        return precision == "autocast16"
    if precision == "fp16raw" and WAYS[way].optimizer is not None:
        return False  # Whose eps is 0 there.
    if precision in ("fp16raw", "autocast16") and WAYS[way].factor > 1:
        return False  # No step is taken.
    if precision == "fp64":  # No law is asked.
        return way == "plain"
    return precision != "medium" or way.startswith("gradients-") or way in _IN_MEDIUM


def setups(device: str) -> list[Whole]:
    found = [Whole("gpt", precision, way) for precision in PRECISIONS for way in WAYS
             if _trained(way, precision)]  # fmt: skip
    for architecture in architectures.ALL:
        for precision in PRECISIONS[:5]:
            if precision.startswith("autocast") and "autocast" not in architecture.precisions:
                continue
            found.append(Whole(architecture.name, precision, "train"))
        for mode in ("checkpoint", "reentrant"):
            if mode in architecture.modes:
                found.append(Whole(architecture.name, "bf16", mode))
                if "autocast" in architecture.precisions:
                    found.append(Whole(architecture.name, "autocast", mode))
        found.append(Whole(architecture.name, "bf16", "embeddings-frozen"))
    random.Random(0).shuffle(found)  # A part of them has all kinds.
    return found
