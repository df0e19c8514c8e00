"""The numbers of reinforcement learning, by the names that TRL and verl give them.

import bellwether.rl
bellwether.rl.log_metrics(mon, metrics)     # what verl's loop gives its logger

bellwether.hf.Callback does so with what a Trainer logs, so TRL's trainers need no line more.
mon.rollout() makes such numbers of log-probs.
"""

from __future__ import annotations

import fnmatch
import numbers
from collections.abc import Mapping
from typing import Any, Optional, Protocol

# Names that are taken; * is any number of characters.
NAMES = (
    # TRL: GRPO, RLOO, KTO, SFT
    "reward", "reward_std", "frac_reward_zero_std", "rewards/*", "kl", "entropy", "entropy_coef",
    "clip_ratio", "clip_ratio/*", "cispo_clip_ratio", "vespo/*", "sampling/*", "completions/*",
    "tools/*", "policy_loss", "aux_loss", "mean_token_accuracy",
    # TRL: DPO, ORPO, CPO, reward models
    "logps/*", "logits/*", "nll_loss", "log_odds_ratio", "log_odds_chosen",
    "accuracy", "margin", "mean_reward", "min_reward", "max_reward",
    # TRL: PPO
    "objective/*", "policy/*", "val/*", "loss/*",
    # verl
    "actor/*", "critic/*", "rollout_corr/*", "training/rollout_*", "response/*",
    "response_length/*", "response_length_non_aborted/*", "prompt_length/*", "num_turns/*",
    "tool_call_counts/*",
)  # fmt: skip
METRICS_MAX = 128  # Of one call.


class Log(Protocol):
    def __call__(self, numbers: Mapping[str, Any], *, step: Optional[int] = None) -> None: ...


class TakesNumbers(Protocol):
    def log(self, numbers: Mapping[str, Any], *, step: Optional[int] = None) -> None: ...


def is_number(value: Any) -> bool:
    """A number, or an array or tensor of one, wherever it is."""
    if isinstance(value, numbers.Real):
        return True
    return hasattr(value, "dtype") and tuple(getattr(value, "shape", (0,))) == ()


def metrics_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Those that NAMES has and that are one number, the first METRICS_MAX of them."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        known = isinstance(name, str) and any(fnmatch.fnmatchcase(name, each) for each in NAMES)
        if known and is_number(value) and len(found) < METRICS_MAX:
            found[name] = value
    return found


def log_metrics(
    monitor: TakesNumbers, metrics: Mapping[str, Any], *, step: Optional[int] = None
) -> None:
    """Gives `monitor` (of attach) what NAMES has of `metrics`, as mon.log() takes it.

    Others are left alone: loss, grad_norm and lr are mon.step()'s.  Of several for one step each
    name merges as its mean.  Never raises.

    step  as mon.log() has it
    """
    give(monitor.log, metrics, step=step)


def give(log_numbers: Log, metrics: Mapping[str, Any], *, step: Optional[int] = None) -> None:
    """The same to `log_numbers`, for frameworks."""
    try:
        found = metrics_of(metrics)
    except Exception as e:  # A mapping of the trainer's own may raise anything.
        from ._util import log

        log.warning(f"rl.log_metrics: {type(e).__name__} (training is not affected)")
        return
    if found:
        log_numbers(found, step=step)
