"""Log-probs of a trainer and of its rollout (mon.rollout), from the call to the step's frame.

Sums are computed in float64 where the log-probs are, and copied without waiting.  Those of a step's
micro-batches are added, so that each counts by its tokens.  What they give are own signals by the
names of verl's metrics, which the server knows.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from .._kernels.memory import capturing
from .own_numbers import OwnNumbers, Told
from .tapped_modules import Arriving

DEVICES = ("cpu", "cuda")
BOUND = 20.0  # Of a log-ratio that is exponentiated, as verl has it.
THRESHOLD = 2.0  # verl's.
TOKENS_MAX = 1 << 30  # Of one call.
CHUNK = 1 << 22  # Tokens that are worked on at once: 32 MiB for each of some ten tensors.

# name -> (sum, what it is divided by, words)
_MEANS = {
    "rollout_corr/kl": ("kl", "tokens", "mean of rollout's log-prob - trainer's"),
    "rollout_corr/k3_kl": ("k3", "tokens", "mean of r - log r - 1, r = trainer / rollout"),
    "rollout_corr/chi2_token": ("chi2", "tokens", "mean of r^2 - 1 over tokens"),
    "rollout_corr/chi2_seq": ("chi2_sequences", "sequences", "mean of r^2 - 1 over sequences"),
    "rollout_corr/rollout_is_mean": ("weights", "tokens", "mean of r"),
    "rollout_corr/rollout_is_ratio_fraction_high": ("high", "tokens", "share of r > threshold"),
    "rollout_corr/rollout_is_ratio_fraction_low": ("low", "tokens", "share of r < 1 / threshold"),
    "training/rollout_probs_diff_mean": ("probs", "tokens", "mean difference of probabilities"),
    "actor/ppo_kl": ("old", "tokens_old", "mean of old log-prob - trainer's"),
    "actor/pg_clipfrac": ("clipped", "tokens_clipped", "share of tokens whose loss is clipped"),
    "actor/clipfrac": ("outside", "tokens_outside", "share of ratios beyond clip"),
    "actor/entropy": ("entropy", "entropies", "of the policy"),
    "critic/advantages/mean": ("advantages", "tokens_advantages", "of tokens"),
    "critic/rewards/mean": ("rewards", "count_rewards", "of sequences"),
}  # fmt: skip
# name -> (sum of weights, sum of their squares, words)
_SIZES = {
    "rollout_corr/ess": ("weights", "squares", "effective sample size, a share, of r"),
    "rollout_corr/rollout_is_eff_sample_size": (
        "cut", "cut_squares", "effective sample size, a share, of r within the threshold"
    ),
}  # fmt: skip
_LARGEST = {
    "training/rollout_probs_diff_max": ("largest_probs", "largest difference of probabilities"),
    "training/rollout_logp_max_abs_diff": ("largest", "largest difference of log-probs"),
    "critic/advantages/max": ("largest_advantage", "of tokens"),
    "critic/rewards/max": ("largest_reward", "of sequences"),
}
_TOKENS = "rollout_corr/tokens"
NAMES = (_TOKENS, *_MEANS, *_SIZES, *_LARGEST)
_TABLES: tuple[Mapping[str, tuple[str, ...]], ...] = (_MEANS, _SIZES, _LARGEST)
_WORDS = {name: entry[-1] for table in _TABLES for name, entry in table.items()}
_WORDS[_TOKENS] = "that count"
_MERGE = {_TOKENS: "sum", **dict.fromkeys(_LARGEST, "max")}
_NO_TOKEN = "the mask leaves no token"


class ToldRollout:
    """What one call said: a micro-batch."""

    name = "rollout"

    def __init__(self, sums: dict[str, Tensor], largest: dict[str, Tensor]) -> None:
        """All [chunks], in float64."""
        self.carried = False  # Of the step before, whose frame was gone.
        self._sums, self._largest = list(sums), list(largest)
        arriving = [torch.stack([t.sum() for t in sums.values()])]
        if largest:
            arriving.append(torch.stack([t.amax() for t in largest.values()]))
        self._arriving = Arriving(arriving)

    def ready(self) -> bool:
        return self._arriving.ready()

    def values(self) -> tuple[dict[str, float], dict[str, float]]:
        """Sums and largest ones, by their names.  Must be ready."""
        found: list[list[float]] = [*self._arriving.values(), []]
        return dict(zip(self._sums, found[0])), dict(zip(self._largest, found[1]))


def _elsewhere(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type != "cpu"


def _tensor(name: str, value: Any, device: Optional[torch.device] = None) -> Tensor:
    """What was given, detached, on the device.  Raises ValueError, TypeError."""
    if isinstance(value, (list, tuple)) and any(_elsewhere(x) for x in value):
        raise TypeError(f"{name}: tensors on a GPU must be one tensor, which is not waited for")
    if value is None or isinstance(value, (str, bytes)):
        raise TypeError(f"{name} must be a tensor, and is {type(value).__name__}")
    if not isinstance(value, Tensor):
        try:
            value = torch.as_tensor(value, dtype=torch.float64, device="cpu")
        except Exception as e:
            raise TypeError(f"{name}: {type(e).__name__}: {e}") from None
    if value.is_complex() or value.device.type not in DEVICES:
        raise TypeError(f"{name} must be real, on {' or '.join(DEVICES)}, and is {value.dtype} on "
                        f"{value.device}")  # fmt: skip
    found: Tensor = value.detach()
    if device is None or found.device == device:
        return found
    if found.device.type != "cpu":
        raise ValueError(f"{name} is on {found.device}, and log_probs on {device}")
    # Out of memory that is not pinned the copy would wait for the device.
    return found.pin_memory().to(device, non_blocking=True)


class _Batch:
    """The tensors of one call, as [rows, tokens]."""

    def __init__(self, log_probs: Tensor) -> None:
        self.log_probs, self.device, self.shape = log_probs, log_probs.device, log_probs.shape
        self.packed = log_probs.dim() == 1
        # Of packed tokens each is a row, so that parts of them are rows, too.
        self.columns = 1 if self.packed else self.shape[-1]
        self.rows = log_probs.numel() // self.columns

    def _refuse(self, name: str, shape: torch.Size, also: str = "") -> ValueError:
        wanted = f"{list(self.shape)}, as log_probs{also}"
        return ValueError(f"{name} has the shape {list(shape)}, must be {wanted}")

    def of_tokens(self, name: str, value: Any) -> Tensor:
        found = _tensor(name, value, self.device)
        if found.shape != self.shape:
            raise self._refuse(name, found.shape)
        return found.reshape(self.rows, self.columns)

    def spread(self, name: str, value: Any) -> Tensor:
        """Of tokens, or one for each sequence, or one number."""
        if isinstance(value, numbers.Real) or (
            isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu"
        ):
            number = torch.full((), float(value), dtype=torch.float64, device=self.device)
            return number.expand(self.rows, self.columns)
        found = _tensor(name, value, self.device)
        if found.numel() == 1:
            return found.reshape(()).expand(self.rows, self.columns)
        if found.shape == self.shape:
            return found.reshape(self.rows, self.columns)
        if not self.packed and found.shape in (self.shape[:-1], (*self.shape[:-1], 1)):
            return found.reshape(self.rows, 1).expand(self.rows, self.columns)
        raise self._refuse(name, found.shape, ", or one for each sequence")

    def of_sequences(self, name: str, value: Any) -> Tensor:
        """[rows, 1], or [rows, tokens] that are to be added.  Of packed tokens: [any number]."""
        found = _tensor(name, value, self.device)
        if self.packed:
            return found.reshape(-1)
        if found.shape in (self.shape[:-1], (*self.shape[:-1], 1)):
            return found.reshape(self.rows, 1)
        if found.shape == self.shape:
            return found.reshape(self.rows, self.columns)
        raise self._refuse(name, found.shape, ", or one for each sequence")


def _clip(clip: Any) -> Optional[tuple[float, float]]:
    if clip is None:
        return None
    low, high = (float(x) for x in (clip if isinstance(clip, (tuple, list)) else (clip, clip)))
    if not (0 <= low < math.inf and 0 <= high < math.inf):
        raise ValueError(f"clip={clip}, must be a number or (low, high), not below 0")
    return low, high


def read(
    log_probs: Any,
    rollout_log_probs: Any,
    mask: Any = None,
    *,
    old_log_probs: Any = None,
    clip: Any = None,
    threshold: float = THRESHOLD,
    entropy: Any = None,
    advantages: Any = None,
    rewards: Any = None,
) -> ToldRollout:
    """Raises ValueError or TypeError for what cannot be read."""
    with torch.no_grad():
        trainer = _tensor("log_probs", log_probs)
        if not trainer.is_floating_point() or not 1 <= trainer.numel() <= TOKENS_MAX:
            raise ValueError(
                f"log_probs: {trainer.numel()} of {trainer.dtype}, must be 1..{TOKENS_MAX} floats"
            )
        if trainer.dim() == 0:
            raise ValueError("log_probs: one number, must be [..., tokens]")
        if trainer.device.type == "cuda" and capturing():
            raise ValueError("a CUDA graph is being captured")
        limits, threshold = _clip(clip), float(threshold)
        if not 1 < threshold < math.inf:
            raise ValueError(f"threshold={threshold}, must be above 1")
        batch = _Batch(trainer)
        of = {
            "trainer": trainer.reshape(batch.rows, batch.columns),
            "rollout": batch.of_tokens("rollout_log_probs", rollout_log_probs),
        }
        if mask is not None:
            of["mask"] = batch.of_tokens("mask", mask)
        if old_log_probs is not None:
            of["old"] = batch.of_tokens("old_log_probs", old_log_probs)
        if entropy is not None:
            of["entropy"] = batch.spread("entropy", entropy)
        if advantages is not None:
            of["advantages"] = batch.spread("advantages", advantages)
        alone: Optional[Tensor] = None  # Rewards that belong to no rows.
        if rewards is not None:
            given = batch.of_sequences("rewards", rewards)
            if batch.packed:
                alone = given
            else:
                of["rewards"] = given
        sums: dict[str, list[Tensor]] = {}
        largest: dict[str, list[Tensor]] = {}
        rows = max(1, CHUNK // batch.columns)
        for begin in range(0, batch.rows, rows):
            part = {name: t[begin : begin + rows] for name, t in of.items()}
            chunk = _Chunk(part, batch.packed)
            chunk.compare(threshold)
            chunk.clip(limits)
            chunk.others()
            for name, one in chunk.sums.items():
                sums.setdefault(name, []).append(one)
            for name, one in chunk.largest.items():
                largest.setdefault(name, []).append(one)
        if alone is not None and alone.numel():
            sums["rewards"] = [alone.double().sum()]
            sums["count_rewards"] = [torch.full_like(sums["rewards"][0], alone.numel())]
            largest["largest_reward"] = [alone.double().amax()]
        return ToldRollout(
            {name: torch.stack(several) for name, several in sums.items()},
            {name: torch.stack(several) for name, several in largest.items()},
        )


class _Chunk:
    """Sums and largest ones of some rows, in float64; what the mask leaves out has no part."""

    def __init__(self, of: dict[str, Tensor], packed: bool) -> None:
        self.sums: dict[str, Tensor] = {}
        self.largest: dict[str, Tensor] = {}
        self._of, self._packed = of, packed
        mask = of.get("mask")
        self._counts = (
            torch.ones_like(of["trainer"], dtype=torch.bool) if mask is None else mask != 0
        )
        self._tokens = self._counts.sum().double()

    def _masked(self, values: Tensor, otherwise: float = 0.0) -> Tensor:
        return values.masked_fill(~self._counts, otherwise)

    def _ratio(self, above: str, below: str) -> Tensor:
        """Of the log-probs; 0 where a token does not count, NaN where one of them is not finite."""
        found = self._of[above].double() - self._of[below].double()
        return self._masked(found.masked_fill(found.isinf(), math.nan))

    def _share(self, log_ratio: Tensor, true: Tensor) -> Tensor:
        """How many are true; NaN if a ratio is."""
        return self._masked(true.double().masked_fill(log_ratio.isnan(), math.nan)).sum()

    def compare(self, threshold: float) -> None:
        """The trainer with the rollout."""
        log_ratio = self._ratio("trainer", "rollout")
        sums, bounded = self.sums, log_ratio.clamp(-BOUND, BOUND)
        above = log_ratio.clamp(max=BOUND)
        sums["tokens"] = self._tokens
        sums["kl"] = 0.0 - log_ratio.sum()  # Not -0.0.
        sums["k3"] = (above.expm1() - above).sum()
        sums["chi2"] = (2 * bounded).expm1().sum()
        ratio = bounded.exp()
        sums["high"] = self._share(log_ratio, ratio > threshold)
        sums["low"] = self._share(log_ratio, ratio < 1 / threshold)
        for name, weights in (("weights", ratio), ("cut", ratio.clamp(1 / threshold, threshold))):
            weights = self._masked(weights)
            sums[name] = weights.sum()
            sums["squares" if name == "weights" else "cut_squares"] = weights.square().sum()
        probs = self._of["trainer"].double().exp() - self._of["rollout"].double().exp()
        probs = self._masked(probs).abs()
        sums["probs"] = probs.sum()
        self.largest["largest_probs"] = probs.amax()
        self.largest["largest"] = log_ratio.abs().amax()
        if not self._packed:
            of_sequences = log_ratio.sum(1).clamp(-BOUND, BOUND)
            sums["sequences"] = self._counts.any(1).sum().double()
            sums["chi2_sequences"] = (2 * of_sequences).expm1().sum()

    def clip(self, limits: Optional[tuple[float, float]]) -> None:
        """The trainer with the policy before; without one, what is clipped is of the rollout."""
        old = "old" in self._of
        if not old and limits is None:
            return
        log_ratio = self._ratio("trainer", "old" if old else "rollout").clamp(-BOUND, BOUND)
        if old:
            self.sums["old"], self.sums["tokens_old"] = 0.0 - log_ratio.sum(), self._tokens
        if limits is None:
            return
        ratio = log_ratio.exp()
        below, above = ratio < 1 - limits[0], ratio > 1 + limits[1]
        advantages = self._of.get("advantages")
        if advantages is None:
            name, true = "outside", below | above
        else:
            name, true = "clipped", ((advantages > 0) & above) | ((advantages < 0) & below)
        self.sums[name] = self._share(log_ratio, true)
        self.sums[f"tokens_{name}"] = self._tokens

    def others(self) -> None:
        if "entropy" in self._of:
            self.sums["entropy"] = self._masked(self._of["entropy"].double()).sum()
            self.sums["entropies"] = self._tokens
        if "advantages" in self._of:
            advantages = self._of["advantages"].double()
            self.sums["advantages"] = self._masked(advantages).sum()
            self.sums["tokens_advantages"] = self._tokens
            self.largest["largest_advantage"] = self._masked(advantages, -math.inf).amax()
        if "rewards" in self._of:
            rewards, there = self._of["rewards"].double(), self._counts.any(1)
            if rewards.shape == self._counts.shape and rewards.shape[1] > 1:
                rewards = self._masked(rewards)
            of_rows = rewards.sum(1)
            self.sums["rewards"] = of_rows.masked_fill(~there, 0.0).sum()
            self.sums["count_rewards"] = there.sum().double()
            self.largest["largest_reward"] = of_rows.masked_fill(~there, -math.inf).amax()


def merged(told: Sequence[ToldRollout]) -> dict[str, float]:
    """What a step's calls give together, by NAMES; empty without a token.  All must be ready."""
    sums: dict[str, float] = {}
    largest: dict[str, float] = {}
    for one in told:
        of_call, tops = one.values()
        if not of_call["tokens"]:
            continue
        for name, value in of_call.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in tops.items():
            before = largest.get(name, -math.inf)
            largest[name] = math.nan if math.isnan(before) else max(value, before)
    if not sums:
        return {}
    found = {_TOKENS: sums["tokens"]}
    for name, (above, below, _) in _MEANS.items():
        if sums.get(below):
            found[name] = sums[above] / sums[below]
    for name, (weights, squares, _) in _SIZES.items():
        found[name] = sums[weights] ** 2 / (sums["tokens"] * sums[squares])
    found.update((name, largest[key]) for name, (key, _) in _LARGEST.items() if key in largest)
    return found


def of_frame(
    told: Sequence[ToldRollout], own: OwnNumbers, leave_out: Callable[[str, Exception], None]
) -> Iterator[Told]:
    """The own numbers of a step's calls; those without a token are left out.  All must be ready."""
    afresh = [one for one in told if not one.carried] or list(told)
    for one in afresh:
        if not one.values()[0]["tokens"]:
            leave_out("rollout", ValueError(_NO_TOKEN))
    for name, value in merged(afresh).items():
        try:
            yield own.read(
                name, value, layer=None, head=None, of="run", merge=_MERGE.get(name, "mean"),
                unit="", help=_WORDS[name], low=None, high=None, heads=0,
            )  # fmt: skip
        except Exception as e:  # The job's own name may be of another kind.
            leave_out(f"log {name}", e)
