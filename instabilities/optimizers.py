"""AdamW whose second moments may be kept in 16 bits, Muon, and the learning rate of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .settings import Setting

BETA1 = 0.9
LR_END = 0.1  # Of the largest, at the end of the cosine.


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW with second moments in a type of 16 bits, where small ones underflow to 0."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        beta2: float,
        eps: float,
        moments: torch.dtype,
    ) -> None:
        defaults = {"lr": lr, "betas": (BETA1, beta2), "eps": eps, "weight_decay": 0.0}
        super().__init__(groups, defaults)
        self.moments = moments

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), eps = group["betas"], group["eps"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=self.moments)
                state["step"] += 1
                step = float(state["step"])
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                v = state["exp_avg_sq"].float().lerp_(p.grad.float() ** 2, 1 - beta2)
                state["exp_avg_sq"].copy_(v)
                v = state["exp_avg_sq"].float() / (1 - beta2**step)
                m = state["exp_avg"] / (1 - beta1**step)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_((group["lr"] * m / (v.sqrt() + eps)).to(p.dtype))


def orthogonalized(matrix: Tensor) -> Tensor:
    """Newton and Schulz: about U V^T of the matrix (Jordan et al., Muon)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x: Tensor = matrix.float()
    x = x / (x.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum for matrices; each step as long as one of AdamW."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, momentum: float = 0.95) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                momentum = state["momentum_buffer"].mul_(group["momentum"]).add_(p.grad)
                update = orthogonalized(p.grad + group["momentum"] * momentum)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_((group["lr"] * 0.2 * max(p.shape) ** 0.5 * update).to(p.dtype))


def groups_of(
    model: nn.Module, setting: Setting, apart: Iterable[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(those for AdamW, those for Muon).  Parameters in `apart` have groups of their own."""
    apart = set(apart)
    adam: dict[tuple[bool, bool], list[Tensor]] = {}
    muon: dict[tuple[bool, bool], list[Tensor]] = {}
    for name, p in model.named_parameters():
        inner = p.dim() == 2 and "embed" not in name and "lm_head" not in name
        into = muon if setting.optimizer == "muon" and inner else adam
        into.setdefault((p.dim() == 2, name in apart), []).append(p)

    def listed(found: dict[tuple[bool, bool], list[Tensor]]) -> list[dict[str, Any]]:
        decay = setting.weight_decay
        return [
            {"params": params, "weight_decay": decay if matrix else 0.0, "apart": own}
            for (matrix, own), params in found.items()
        ]

    return listed(adam), listed(muon)


def optimizers_of(
    model: nn.Module, setting: Setting, apart: Iterable[str] = ()
) -> list[torch.optim.Optimizer]:
    adam, muon = groups_of(model, setting, apart)
    found: list[torch.optim.Optimizer] = []
    if muon:
        found.append(Muon(muon, setting.lr))
    if setting.moments != "float32":
        moments = getattr(torch, setting.moments)
        found.append(RoundedAdamW(adam, setting.lr, setting.beta2, setting.eps, moments))
    else:
        betas = (BETA1, setting.beta2)
        found.append(torch.optim.AdamW(adam, setting.lr, betas, setting.eps, fused=True))
    return found


def rate(setting: Setting, step: int) -> float:
    """Warm-up, then a cosine, or the same for ever."""
    if step < setting.warmup:
        return setting.lr * (step + 1) / setting.warmup
    if not setting.decay:
        return setting.lr
    done = (step - setting.warmup) / max(setting.steps - setting.warmup, 1)
    return setting.lr * (LR_END + (1 - LR_END) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))
