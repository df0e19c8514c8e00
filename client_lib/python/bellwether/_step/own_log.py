"""mon.log(): which step the job's own numbers belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional, Union

import torch

from .._util import log as messages
from .._util.guard import harmless
from .._util.integers import step as step_number
from .._util.ranks import ASIDE, rank_and_world
from . import rollouts, sequence_losses
from .frames import local
from .own_numbers import ToldOnce
from .steps import Steps

NOT_TOLD = 'this rank does not report: attach(ranks="all")'


class OwnLog:
    """What a Monitor takes of the job's own numbers."""

    steps: Steps
    _ranks_said = False  # That other ranks' are left out, if they are.

    def live(self) -> bool:
        raise NotImplementedError

    def _tells(self, call: str) -> bool:
        """Whether this rank reports.  What it does not report is counted.  That others do not
        report is said once, as this rank cannot know whether their numbers differ."""
        steps = self.steps
        if steps.silent or steps.health.why_off in ASIDE:
            steps.reporter.frames.count_left_out(f"{call}: {NOT_TOLD}")
            return False
        if not self.live():
            return False
        if not self._ranks_said:
            self._ranks_said = True
            reporting, ranks = reporting_ranks(steps)
            if reporting < ranks:
                messages.warning(
                    f"log(), losses(), rollout(): {reporting} of {ranks} ranks report, and what "
                    'the others say is left out: attach(ranks="all") takes it, too (not needed '
                    "where all say the same)"
                )
        return True

    @harmless("log()")
    def log(
        self,
        numbers: Union[str, Mapping[str, Any]],
        value: Any = None,
        *,
        layer: Optional[int] = None,
        head: Optional[int] = None,
        of: Optional[str] = None,
        merge: Optional[str] = None,
        unit: str = "",
        help: str = "",
        low: Optional[float] = None,
        high: Optional[float] = None,
        step: Optional[int] = None,
    ) -> None:
        """Numbers of your own, by names of your own: log({"reward": r, "kl": k}), or one at a
        time: log("router_z", values, layer=3).

        A value is a number, or a tensor of one on any device, which is never waited for.  Several
        come in a sequence or tensor.  One dimension is layers, or the heads or experts of `layer`;
        two are [layers][heads or experts].

        of     what a value is of: run, layer, head, expert or rank; guessed if not said
        merge  of ranks, and of several calls in one step: mean (if not said), sum or max
        unit, help  for people; at most 32 and 256 bytes
        low, high   a value beyond them is wrong
        step   the running one (if not said), or the one that mon.step() has just ended

        The first values of a name say for the whole run what it is of and how it merges.  Names are
        lower case; other characters than letters, digits and _ . / - become _.  Of two names that
        become one the first is taken.  A mean over ranks weighs them alike, however many tokens or
        sequences each has: give sums of both and divide, where that matters.

        They are of the running step, which lasts until the next forward.  Behind mon.step(), until
        the next forward, they are of the step that it has ended.  What cannot be taken is left out,
        said once and counted in status()["numbers_left_out"].  So are numbers of ranks that do not
        report: only attach(ranks="all") merges those of all copies of the model.
        """
        if not self._tells("log()"):
            return
        said = {"layer": layer, "head": head, "of": of, "merge": merge, "unit": unit, "help": help,
                "low": low, "high": high}  # fmt: skip
        if isinstance(numbers, Mapping):
            for name, each in numbers.items():
                _log(self.steps, name, each, step, **said)
        else:
            _log(self.steps, numbers, value, step, **said)

    @harmless("log_alike()")
    def log_alike(self, numbers: Mapping[str, Any], *, step: Optional[int] = None) -> None:
        """For frameworks: as log(), of numbers that all ranks have alike."""
        if self.live():
            for name, each in numbers.items():
                _log(self.steps, name, each, step, **_NOTHING_SAID)

    @harmless("numbers()")
    def numbers(
        self, *, loss: Any = None, grad_norm: Any = None, lr: Any = None, tokens: Any = None,
    ) -> None:  # fmt: skip
        """What mon.step() takes, for a loop that does not call it, as a framework's logger knows
        them now and then.  They are of the running step, which lasts until the next forward."""
        if self.live() and not self.steps.ends.explicit:
            told = {"loss": loss, "grad_norm": grad_norm, "learning_rate": lr, "tokens": tokens}
            given = {name: value for name, value in told.items() if value is not None}
            self.steps.reporter.frames.said.update(given)

    @harmless("losses()")
    def losses(
        self,
        losses: Any,
        *,
        ids: Any = None,
        labels: Optional[torch.Tensor] = None,
        ignore_index: int = -100,
        allow_ids: bool = False,
        step: Optional[int] = None,
    ) -> None:
        """The losses of the sequences of one micro-batch; several calls in a step add up.

        losses  floats, one for each sequence, on any device; they are never waited for
        ids     one for each: texts or integers of yours, by which the largest losses are named
        labels  integers [..., tokens]: how many count, and how many repeat the one before
        ignore_index  the label that does not count
        allow_ids  ids are sent as they are, 64 characters at most; default: hashed, 16 hexadecimal
                digits of hashlib.blake2b(str(id).encode(), digest_size=8)
        step    as for log()

        What cannot be taken is left out, said once and counted in status()["numbers_left_out"].  So
        are losses of ranks that do not report: attach(ranks="all") adds those of all up.
        """
        if not self._tells("losses()"):
            return
        try:
            told = sequence_losses.read(local(losses), ids, labels, ignore_index, allow_ids is True)
            _place(self.steps, told, step)
        except Exception as e:  # Whatever the trainer gave.
            self.steps.reporter.frames.leave_out("losses", e)

    @harmless("rollout()")
    def rollout(
        self,
        log_probs: Any,
        rollout_log_probs: Any,
        mask: Any = None,
        *,
        old_log_probs: Any = None,
        clip: Union[float, tuple[float, float], None] = None,
        threshold: float = rollouts.THRESHOLD,
        entropy: Any = None,
        advantages: Any = None,
        rewards: Any = None,
        step: Optional[int] = None,
    ) -> None:
        """How far the policy that is trained is from the one that sampled, of a micro-batch: own
        signals by verl's names (rollout_corr/kl, k3_kl, chi2_token, chi2_seq, ess, ...).

        log_probs          of the trainer for the sampled tokens, [sequences, tokens]; or [tokens],
                           packed, which have no sequences; on a CPU or GPU, never waited for
        rollout_log_probs  of the same tokens, as the engine that sampled them said
        mask               of the same shape: tokens that count are not 0; default: all
        old_log_probs      of the policy that the loss holds the trainer against: ppo_kl
        clip               the loss clips the ratio to 1 - clip and 1 + clip, or (low, high): the
                           share clipped; against rollout_log_probs without old_log_probs
        threshold          weights beyond it, and below its reciprocal, are counted
        entropy, advantages  of tokens or sequences, or one number
        rewards            one for each sequence, or of tokens, which are added
        step               as for log()

        Calls of one step count by their tokens.  What cannot be taken is left out, said once and
        counted in status()["numbers_left_out"]; so is a mask without tokens, and what ranks say
        that do not report.
        """
        if not self._tells("rollout()"):
            return
        try:
            told = rollouts.read(
                local(log_probs), local(rollout_log_probs), local(mask),
                old_log_probs=local(old_log_probs), clip=clip, threshold=threshold,
                entropy=local(entropy), advantages=local(advantages), rewards=local(rewards),
            )  # fmt: skip
            _place(self.steps, told, step)
        except Exception as e:  # Whatever the trainer gave.
            self.steps.reporter.frames.leave_out("rollout", e)


_NOTHING_SAID: dict[str, Any] = {
    "layer": None, "head": None, "of": None, "merge": None, "unit": "", "help": "",
    "low": None, "high": None,
}  # fmt: skip


def reporting_ranks(steps: Steps) -> tuple[int, int]:
    """How many ranks report, of how many."""
    placed = steps.parallel
    ranks = max(rank_and_world()[1], placed.shards * placed.data[1])
    return (ranks if steps.settings.ranks == "all" else min(placed.shards, ranks)), ranks


def _log(steps: Steps, name: Any, value: Any, step: Optional[int], **said: Any) -> None:
    """One of the numbers: it costs itself where it cannot be read."""
    if steps.silent:
        return
    frames = steps.reporter.frames
    try:
        heads = max((layer.heads for layer in steps.layers), default=0)
        told = frames.own.read(name, local(value), heads=heads, **said)
        _place(steps, told, step)
    except Exception as e:  # Whatever the trainer gave.
        frames.leave_out(f"log {str(name)[:64]}", e)


def _place(steps: Steps, told: ToldOnce, step: Optional[int]) -> None:
    """With the step that it is of.  Raises ValueError where that is not under way."""
    frames = steps.reporter.frames
    running = steps.current_step()
    ended = running - 1
    at = ended if steps.ends.between else running
    if step is not None:
        at = step_number(step)
    if at == ended and steps.ends.explicit:
        frames.keeps_newest = True
        if frames.add_to(ended, told):
            return
        if step is None:  # The first ones: from now on the newest frame waits for them.
            told.carried, at = True, running
    if at != running:
        raise ValueError(f"step {at} is not under way: that is {running}")
    frames.own.add(told)
