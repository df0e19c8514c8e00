"""Tensors in 8 bits in a sampled step: those that torch._scaled_mm multiplies for modules that have
a weight, as torchao's Float8Linear and one's own.  Of modules of Transformer Engine, whose products
are not torch's, the scales that they keep in `fp8_meta`.

Modules take turns, TOGETHER or more in a sample: each has had one within TURNS samples.  Left out,
and said in Monitor.status(): compiled models, modules whose products are of other tensors, formats
but E4M3 and E5M2.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor, nn

from .._hook.hosts import LinearHost
from .._hook.layer.fp8_tap import Fp8Tap, Quantised, Runs, new_quantised, read_meta
from .._hook.layer.linear_tap import Held
from .._hook.model.parallel import Parallel
from .fp8_sample import Ages, Fp8Sample
from .scaled_products import listen
from .tapped_modules import TappedModules
from .tensor_rows import global_name

TURNS = 16
TOGETHER = 4
MODULES_MAX = 4096
NONE = "no module with a weight has a forward of its own, as those with products in 8 bits have"
NO_SCALE = "it keeps no scales: only delayed scaling does"
MANY = f"there are more than {MODULES_MAX} modules"


def may_have_products(module: nn.Module) -> bool:
    """Whether a module may multiply its weight in 8 bits: a plain linear layer does not."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or isinstance(module, nn.Embedding):
        return False
    plain = type(module).forward is nn.Linear.forward and "forward" not in vars(module)
    return not plain or type(weight) not in (Tensor, nn.Parameter)


class Fp8(TappedModules[Quantised]):
    whole_weights = False

    def __init__(
        self, host: LinearHost, model: Callable[[], Optional[nn.Module]], placed: Parallel
    ) -> None:
        super().__init__(host, model)
        self._placed = placed
        self._runs = Runs(host)
        self._ages = Ages()
        self._modules: list[weakref.ref[nn.Module]] = []
        self._tapped: list[tuple[int, Fp8Tap]] = []
        # Modules that keep their scales, in the running step.
        self._kept: list[tuple[int, weakref.ref[nn.Module], dict[str, Quantised]]] = []
        self._ends: Optional[Callable[[], None]] = None
        self.rows: set[str] = set()  # Modules of which something was measured.

    def _find(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if not may_have_products(module):
                continue
            name = global_name(name, self._placed)
            if len(self.names) >= MODULES_MAX:
                self.leave_out(name, MANY)
                break
            self.names.append(name)
            self._modules.append(weakref.ref(module))
        if not self.names:
            self.not_measured = NONE

    def _tap(self, held: Held) -> None:
        turns = max(1, min(TURNS, len(self._modules) // TOGETHER))
        turn, self._turn = self._turn % turns, self._turn + 1
        devices: dict[torch.device, list[tuple[int, nn.Module]]] = {}
        for row in range(turn, len(self._modules), turns):
            module = self._modules[row]()
            weight = module._parameters.get("weight") if module is not None else None
            if module is not None and weight is not None:
                devices.setdefault(weight.device, []).append((row, module))
        for device, modules in devices.items():
            for of, (row, module) in zip(new_quantised([r for r, _ in modules], device), modules):
                self._measured += of.values()
                if hasattr(module, "fp8_meta"):
                    self._kept.append((row, weakref.ref(module), of))
                    continue
                tap = Fp8Tap(self._runs, module, of)
                self._taps.add(module, tap)
                self._tapped.append((row, tap))
        if self._tapped:
            self._ends = listen(self._runs.product)

    def stop(self) -> None:
        """No module is looked at any more."""
        super().stop()
        ends, self._ends = self._ends, None
        if ends is not None:
            ends()
        tapped, self._tapped, self._kept = self._tapped, [], []
        for row, tap in tapped:
            if tap.left_out is not None:
                self._left_out_row(row, tap.left_out)

    def sample(self) -> Optional[Fp8Sample]:
        """What was measured in this step."""
        for row, module, kept in self._kept:
            if not read_meta(getattr(module(), "fp8_meta", None), kept):
                self._left_out_row(row, NO_SCALE)
        self._kept = []
        measured = [of for of in self._taken() if of.calls]
        self.rows |= {self.names[of.row] for of in measured}
        return Fp8Sample(self.names, measured, self._ages) if measured else None
