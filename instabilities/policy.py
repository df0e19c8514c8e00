"""A policy gradient as small as it can be: a bandit at each position of a text.

At every position the rollout samples one byte.  The reward is 1 where its class is that of the
text's next byte.  There is one action a position, so a rollout is one forward pass.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .settings import Setting

KL = 0.02  # What the divergence from the policy at the start counts.
CLASSES = (str.islower, str.isupper, str.isdigit, str.isspace)


def class_of_byte() -> Tensor:
    """[256]: lower, upper, digit, space, the rest."""
    return torch.tensor(
        [
            next((i for i, test in enumerate(CLASSES) if test(chr(b))), len(CLASSES))
            for b in range(256)
        ]
    )


class Rollout:
    """The copy of the policy that samples, and the losses of what it has sampled."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        # The list hides them from the model's own modules.
        self._copies = [copy.deepcopy(model).requires_grad_(False) for _ in range(2)]
        self.trained = model
        self.classes = class_of_byte()
        self.follows = True

    @property
    def sampler(self) -> nn.Module:
        return self._copies[0]

    @torch.no_grad()
    def follow(self, model: nn.Module) -> None:
        if self.follows:
            self.sampler.load_state_dict(model.state_dict())

    def loss(
        self, tokens: Tensor, labels: Tensor, seed: int
    ) -> tuple[Tensor, float, dict[str, Any]]:
        """(the loss, the mean reward, numbers for mon.log by the names of TRL and verl)."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            sampled_from = self.sampler(tokens).float().log_softmax(-1)
            uniform = torch.rand(sampled_from.shape, generator=generator)
            action = (sampled_from - (-uniform.log()).log()).argmax(-1, keepdim=True)
            rollout = sampled_from.gather(-1, action)[..., 0]
            reference = self._copies[1](tokens).float().log_softmax(-1)
            reward = (self.classes[action[..., 0]] == self.classes[labels]).float()
            advantage = reward - reward.mean()
        logs = self.trained(tokens).float().log_softmax(-1)
        trained = logs.gather(-1, action)[..., 0]
        divergence = (logs.exp() * (logs - reference)).sum(-1).mean()
        loss = -(advantage * trained).mean() + KL * divergence
        with torch.no_grad():
            entropy = -(logs.exp() * logs).sum(-1).mean()
            apart = rollout - trained
            probs = (rollout.exp() - trained.exp()).abs()
            told = {
                "reward": reward.mean().item(), "kl": divergence.item(), "entropy": entropy.item(),
                "rollout_corr/kl": apart.mean().item(),
                "rollout_corr/k3_kl": (torch.expm1(-apart) + apart).mean().item(),
                "training/rollout_probs_diff_mean": probs.mean().item(),
                "training/rollout_probs_diff_max": probs.max().item(),
            }  # fmt: skip
        return loss, reward.mean().item(), told
