"""A kernel of attention that is wrong, and scores that grow."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..settings import Setting
from ..training import Training
from .base import SLOW, Fault, Place


class _Wrong(torch.autograd.Function):
    """Attention of which one tensor of one head is `factor` times what it should be.

    All else is right: whatever the type is, it computes in fp32 and rounds its results once, since
    products and a delta in 16 bits would be a fault of their own.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, tensor: str, head: int, factor: float
    ) -> Tensor:
        group = q.shape[1] // k.shape[1]
        wide_k, wide_v = (t.float().repeat_interleave(group, 1) for t in (k, v))
        tokens = q.shape[2]
        hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
        scores = q.shape[-1] ** -0.5 * (q.float() @ wide_k.mT)
        p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        o = p @ wide_v
        if tensor == "o":
            o[:, head] *= factor
        ctx.save_for_backward(q, wide_k, wide_v, p)
        ctx.group, ctx.wrong = group, (tensor, head, factor)
        return o.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, k, v, p = ctx.saved_tensors
        dtype, q, d_o = q.dtype, q.float(), gradients[0].float()
        d_p = d_o @ v.mT
        d_s = q.shape[-1] ** -0.5 * p * (d_p - (p * d_p).sum(-1, keepdim=True))
        found = {"dq": d_s @ k, "dk": d_s.mT @ q, "dv": p.mT @ d_o}
        tensor, head, factor = ctx.wrong
        if tensor in found:
            found[tensor][:, head] *= factor
        dk, dv = (found[t].unflatten(1, (-1, ctx.group)).sum(2) for t in ("dk", "dv"))
        return found["dq"].to(dtype), dk.to(dtype), dv.to(dtype), None, None, None


class Kernel(nn.Module):
    """In the place of F.scaled_dot_product_attention."""

    def __init__(self, tensor: str, head: int) -> None:
        super().__init__()
        self.wrong, self.factor = (tensor, head), 1.0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y: Tensor = _Wrong.apply(q, k, v, *self.wrong, self.factor)  # type: ignore[no-untyped-call]
        return y


class FaultyKernel(Fault):
    def prepared(self, draw: random.Random, setting: Setting) -> Setting:
        self.strength = self.drawn_strength(draw, 1e-4, 1.0)
        self.variant = draw.choice(("o", "dq", "dk", "dv"))
        self.place = Place(layer=draw.randrange(setting.layers), head=draw.randrange(setting.heads))
        return setting.changed(sinks=False)

    def built(self, training: Training) -> None:
        import bellwether

        assert self.place.layer is not None and self.place.head is not None
        kernel = Kernel(self.variant, self.place.head)
        bellwether.wrap_attention(
            kernel, layout="bhtd", causal=True, kernel="own", arithmetic="fused"
        )
        training.model.blocks()[self.place.layer].self_attn.kernel = kernel

    def begins(self, training: Training) -> None:
        assert self.place.layer is not None and self.strength is not None
        kernel = training.model.blocks()[self.place.layer].self_attn.kernel
        assert isinstance(kernel, Kernel)
        kernel.factor = 1 + self.strength if self.is_on(training) else 1.0


class RoundingDrift(Fault):
    """Delta has the error of an O that was rounded to bf16; the strength is the share of it.

    The twin's attention rounds the same, and its delta is exact.  The first of the two layers can
    do the task by itself, so it is the second one whose queries drift.
    """

    kind = SLOW
    usual: ClassVar[dict[str, Any]] = {"steps": 5000}

    def prepared(self, draw: random.Random, setting: Setting) -> Setting:
        self.onset = 0
        self.strength = self.drawn_strength(draw, 0.05, 2.0)
        self.place = Place(layer=1, head=0)
        return setting.changed(
            layers=2, heads=1, kv_heads=1, qk_norm=False, sinks=False, gated=False, latent=False,
            experts=0, mlp="none", tied=False, dtype="float32", attention="bf16", task="classes",
            lr=4e-3, warmup=100, decay=False, weight_decay=0.0, clip=1.0,
        )  # fmt: skip

    def built(self, training: Training) -> None:
        assert self.strength is not None
        for block in training.model.blocks():
            assert block.self_attn.rounded is not None
            block.self_attn.rounded.share = self.strength


class LogitGrowth(Fault):
    """W_Q and W_K of a layer grow by a factor a step: a weight decay of the wrong sign."""

    kind = SLOW

    def prepared(self, draw: random.Random, setting: Setting) -> Setting:
        self.strength = self.drawn_strength(draw, 2e-3, 5e-2)
        self.place = Place(layer=draw.randrange(setting.layers))
        return setting.changed(qk_norm=False)

    def apart(self, training: Training) -> list[str]:
        of = f"layers.{self.place.layer}.self_attn"
        return [f"{of}.q_proj.weight", f"{of}.k_proj.weight"]

    def begins(self, training: Training) -> None:
        grow(self, training)


def grow(fault: Fault, training: Training) -> None:
    """The parameters apart are multiplied by 1 + strength in each step of the optimizer."""
    if not fault.is_on(training):
        return
    assert fault.strength is not None
    for optimizer in training.optimizers:
        for group in optimizer.param_groups:
            if group["apart"]:
                group["weight_decay"] = -fault.strength / group["lr"]
