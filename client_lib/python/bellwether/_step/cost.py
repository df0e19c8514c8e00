"""What watching costs, and the line that tells it to the person at the terminal."""

from __future__ import annotations

from typing import Optional

import torch

from .._kernels.memory import capturing
from .._util.counted import counted
from .price import Price
from .volume import Volume

SAMPLES_TOLD = 8  # That count; then the price is told, ...
# ... on a GPU later: the first samples of a compiled job cost it half as much again.
SAMPLES_TOLD_ON_GPU = 20
PRICE_NEWS = 5e-4  # ... and again if it is so far from what was told, in shares of the time.
PRICES_TOLD_MAX = 4
MUCH, SHORT_STEP_SECONDS = 0.01, 0.1  # A share that wants a reason, and steps that are one.


class Cost:
    def __init__(self, byte_budget: int = 0) -> None:
        self.price, self.volume = Price(), Volume(byte_budget)
        self._told: list[tuple[float, int]] = []  # Share, samples: of each line about it.

    def count(
        self, hook_seconds: float, kernel_seconds: float, step_seconds: float, sampled: bool,
        gpu: Optional[torch.device],
    ) -> None:  # fmt: skip
        """One step; `gpu`: where the layers' memory is, if on one."""
        if gpu is None:
            self.price.clock.add(step_seconds, sampled)
        elif not capturing():
            self.price.clock.mark(gpu, sampled)
        if sampled:
            self.price.sampled(hook_seconds, kernel_seconds, step_seconds, gpu is not None)
        else:
            self.price.between(hook_seconds)

    def line(self, period: int, layers: int, on_gpu: bool) -> Optional[str]:
        """Once, and again when it turns out to be another one."""
        enough = SAMPLES_TOLD_ON_GPU if on_gpu else SAMPLES_TOLD
        if not self.price.known() or self.price.samples < enough:
            return None
        share, measured = self.price.share(period), self.price.measured()
        if self._told:
            told, over = self._told[-1]
            news = abs(share - told) > max(told / 4, PRICE_NEWS) and measured >= 2 * over
            if not news or len(self._told) >= PRICES_TOLD_MAX:
                return None
        self._told.append((share, measured))
        every_step = self.price.every_step(period)
        most = f"; each step pays {100 * every_step:.2f} %" if every_step > share / 2 else ""
        rate = "step" if period == 1 else f"{period} steps"
        return (
            f"watching {counted(layers, 'attention layer')} costs about {100 * share:.2f} % "
            f"of the training time, measured over {counted(measured, 'sample')}"
            f"{self.why_much(period)}; "
            f"a sample every {rate}, by overhead_budget{most}"
        )

    def why_much(self, period: int) -> str:
        """ ", as steps are short: ..." where that is why it costs so large a share."""
        step, sample = self.price.seconds()
        if step is None or step > SHORT_STEP_SECONDS or self.price.share(period) < MUCH:
            return ""
        return (
            f", as steps are short: {1000 * step:.3g} ms, and a sample takes "
            f"{1000 * sample:.3g} ms whatever a step takes"
        )

    def sentence(self, period: int) -> str:
        """For the end; "" while nothing is known."""
        if not self.price.known() or not self.price.samples:
            return ""
        share = 100 * self.price.share(period)
        return f"watching cost about {share:.2f} % of the time{self.why_much(period)}"
