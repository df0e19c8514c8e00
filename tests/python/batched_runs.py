"""Many runs of examples/tiny_transformer.py as one model: every parameter has a run in front.

The loss is summed over the runs, gradients are clipped run by run and Adam works element by
element.  So no run sees another.  The initial weights and the data of each are those of the example
with its seed.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import tiny_transformer as example
from tiny_transformer import LAYERS, TOKENS, WIDTH

import bellwether


@dataclasses.dataclass(frozen=True)
class Kind:
    """How the attention of some runs is computed; mode None is PyTorch's in fp32.  `center`:
    keys are centred before they are rounded, as the example's --center does."""

    mode: str | None
    center: bool = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.mode is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.center:
            k = bellwether.center_keys(k)
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
        return bellwether.attention(q, k, v, causal=True, mode=self.mode).float()


def initial(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: p.detach() for name, p in example.TinyTransformer().named_parameters()}


class Runs:
    """Runs kind by kind, and for each kind seed by seed."""

    def __init__(self, kinds: list[Kind], seeds: list[int]) -> None:
        self.kinds, self.count = kinds, len(kinds) * len(seeds)
        each = [initial(seed) for seed in seeds] * len(kinds)
        self.parameters = {
            name: torch.stack([one[name] for one in each]).requires_grad_() for name in each[0]
        }
        self.data = [example.Data(seed) for seed in seeds]
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=example.LEARNING_RATE, betas=(0.9, 0.95),
            weight_decay=0.0, fused=True,
        )  # fmt: skip
        self.steps = 0

    def _linear(self, name: str, x: Tensor) -> Tensor:
        """x [run, row, in] -> [run, row, out]."""
        return torch.bmm(x, self.parameters[name].mT)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,)) * self.parameters[name][:, None]

    def _block(self, layer: int, x: Tensor) -> Tensor:
        name = f"blocks.{layer}"
        y = self._linear(f"{name}.attention.qkv.weight", self._norm(f"{name}.norm.weight", x))
        heads = y.view(self.count, -1, TOKENS, 3, WIDTH)
        # Kind by kind [seed and sequence, head, token, dim].
        q, k, v = (
            part.reshape(len(self.kinds), -1, 1, TOKENS, WIDTH).unbind()
            for part in heads.unbind(dim=3)
        )
        o = torch.stack([kind.attend(*qkv) for kind, *qkv in zip(self.kinds, q, k, v)])
        return x + self._linear(f"{name}.attention.out.weight", o.view(x.shape))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [run, sequence, token] -> [run, sequence, token, class]."""
        vocabulary = self.parameters["token.weight"]
        first = torch.arange(self.count)[:, None, None] * vocabulary.shape[1]
        x = F.embedding(tokens + first, vocabulary.flatten(0, 1))
        x = (x + self.parameters["position.weight"][:, None]).flatten(1, 2)
        for layer in range(LAYERS):
            x = self._block(layer, x)
        x = self._linear("head.weight", self._norm("norm.weight", x))
        return (x + self.parameters["head.bias"][:, None]).unflatten(1, (-1, TOKENS))

    def _clip_each_run(self) -> None:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = sum(g.flatten(1).square().sum(dim=1) for g in gradients).sqrt()
        factor = (example.GRADIENT_NORM_MAX / (norm + 1e-6)).clamp(max=1)  # As clip_grad_norm_.
        for g in gradients:
            g.mul_(factor.view(-1, *[1] * (g.dim() - 1)))

    def step(self) -> Tensor:
        """One optimizer step of every run; their losses, [run]."""
        for group in self.optimizer.param_groups:
            ramp = min(1.0, (self.steps + 1) / example.WARM_UP_STEPS)
            group["lr"] = example.LEARNING_RATE * ramp
        tokens, target = (
            torch.stack(each).repeat(len(self.kinds), *[1] * each[0].dim())
            for each in zip(*(data.batch() for data in self.data))
        )
        error = example.LOSS_SCALE * (self.forward(tokens) - target)
        losses = (error**2)[:, :, example.SCORED_FROM :].mean(dim=(1, 2, 3))
        losses.sum().backward()
        self._clip_each_run()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return losses.detach()

    def sigma(self) -> Tensor:
        """The largest singular value of W_Q over the layers: [kind, seed]."""
        with torch.no_grad():
            of_layers = [
                torch.linalg.matrix_norm(
                    self.parameters[f"blocks.{layer}.attention.qkv.weight"][:, :WIDTH], ord=2
                )
                for layer in range(LAYERS)
            ]
        return torch.stack(of_layers).amax(dim=0).view(len(self.kinds), -1)
