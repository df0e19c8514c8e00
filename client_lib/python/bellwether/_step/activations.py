"""Activations at the boundaries of transformer blocks, in a sampled step.

Behind each block, behind its attention, and the product that its gated MLP projects back.  Of each
block the gradient at its input, too.  Around the blocks what embeddings give, and the logits.

Blocks take turns: a sample looks at every fourth of them, and every fifth sample at what is around
them, which costs most.  Those that have no turn have no taps.  A model of few blocks is told whole.

Left out, and said in Monitor.status(): compiled models, checkpointed regions, CUDA graphs, blocks
that are in no list of modules.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Optional

import torch
from torch import nn

from .._hook.hosts import LinearHost
from .._hook.layer.activation_tap import Activation, ActivationTap, BeginTap, new_activations
from .._hook.layer.gate_law import gate_children
from .._hook.layer.layer import Layer
from .._hook.layer.linear_tap import Held
from .._hook.model.averaging import ddp_around, divided_by
from .._hook.model.blocks import find_blocks
from .._hook.model.heads import find_heads
from .._hook.model.parallel import Parallel
from .._util.ranks import rank_and_world
from .activation_sample import ActivationSample
from .tapped_modules import TappedModules
from .tensor_rows import global_name

ROWS_MAX = 4096
# Samples until each activation had its turn.  Odd: a rank that watches more rarely takes every
# second, fourth or eighth of another's samples, and so it comes by all of them, too.
TURNS = 5
TOLD_WHOLE = 4  # Blocks: where there are no more, all have their turn in each sample.
NO_BLOCKS = "no attention module lies in a list of blocks"
MANY = f"there are more than {ROWS_MAX} activations"
PART = "its logits may be of some of the words: tensor parallelism"
PRODUCT = "product"  # Behind the name of a gated MLP.
GIVEN = "input"  # Behind the name of lm_head.


class _Row:
    """
    begins     the module's forward may be the first that is seen of a step
    of_logits  it returns the logits of all words
    of_mean    the mean over tokens is measured, too
    turn       which of the samples of a turn has it
    """

    def __init__(
        self, module: nn.Module, of_input: bool = False, gradients: bool = False,
        begins: bool = False, of_logits: bool = False, of_mean: bool = False,
    ) -> None:  # fmt: skip
        self.module, self.turn = weakref.ref(module), 0
        self.of_input, self.gradients, self.begins = of_input, gradients, begins
        self.of_logits, self.of_mean = of_logits, of_mean


class Activations(TappedModules[Activation]):
    """layers  candidates; those that report are known behind the first step"""

    whole_weights = False

    def __init__(
        self, host: LinearHost, model: Callable[[], Optional[nn.Module]], layers: Sequence[Layer],
        placed: Parallel,
    ) -> None:  # fmt: skip
        super().__init__(host, model)
        self._layers, self._placed = layers, placed
        self._rows: list[_Row] = []
        self.blocks, self.turns = 0, 1
        self._samples = 0  # Before that of the running step.
        self._wrapper: Optional[weakref.ref[Any]] = None  # DDP around the model.
        # By what the ranks' gradients are divided when they are added up; None: not known.
        self.divided_by: Optional[float] = None

    def _find(self, model: nn.Module) -> None:
        reporting = [layer.module() for layer in self._layers if layer.index >= 0]
        attention = [module for module in reporting if module is not None]
        blocks = find_blocks(model, attention)
        self.blocks = len(blocks)
        if not blocks:
            self.not_measured = NO_BLOCKS
            return
        self._add_around(model, [block for _, block in blocks])
        self.turns = TURNS if len(blocks) > TOLD_WHOLE else 1
        first = 1 if self._rows and self.turns > 1 else 0  # Behind the turn of what is around.
        known = {id(module) for module in attention}
        for at, (name, block) in enumerate(blocks):
            before = len(self._rows)
            self._add_block(name, block, known)
            for row in self._rows[before:]:
                row.turn = first + at % (self.turns - first)

    def _add_block(self, name: str, block: nn.Module, attention: set[int]) -> None:
        """attention  ids of the modules"""
        self._add(name, _Row(block, gradients=True, begins=True))
        for inner, module in block.named_modules():
            if id(module) in attention and module is not block:
                self._add(f"{name}.{inner}", _Row(module))
            # One expert of many has few of the tokens, and there are thousands.
            expert = any(part.isdigit() for part in inner.split("."))
            gate = None if expert else gate_children(module)
            if gate is not None:
                whole = f"{name}.{inner}" if inner else name
                self._add(f"{whole} {PRODUCT}", _Row(gate[2], of_input=True))

    def _add_around(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        inside = {id(module) for block in blocks for module in block.modules()}
        words = [m for m in model.modules() if isinstance(m, nn.Embedding) and id(m) not in inside]
        heads = {id(module) for _, module in find_heads(model)}
        for name, module in model.named_modules():
            if id(module) in inside:
                continue
            if any(module is embedding for embedding in words):
                self._add(name, _Row(module, begins=True))
            elif id(module) in heads:
                whole = self._placed.tensor[1] == 1
                if not whole:
                    self.leave_out(name, PART)
                self._add(name, _Row(module, of_logits=whole))
                self._add(f"{name} {GIVEN}", _Row(module, of_input=True, of_mean=True))

    def _add(self, name: str, row: _Row) -> None:
        place, space, what = name.partition(" ")
        name = global_name(place, self._placed) + space + what
        if name in self.names:  # A list of blocks lies in another one.
            return
        if len(self._rows) >= ROWS_MAX:
            self.leave_out(name, MANY)
            return
        self.names.append(name)
        self._rows.append(row)

    def counts(self, samples: int) -> None:
        """So many samples came before that of the step which begins, as all ranks count them."""
        self._samples = samples

    def expect(self, begins: Callable[[], None]) -> None:
        """The next forward of a block, or an embedding, begins a sampled step: `begins` is then
        called.  The first attention would be too late for what comes before it."""
        if not self._taps_fit():
            return
        for row in self._rows:
            module = row.module()
            if row.begins and module is not None:
                self._taps.add(module, BeginTap(begins, partial(self._taps.input, module)))

    def forward_begins(self) -> None:
        """DDP may be around the model that was attached to: it shows while it runs."""
        if self._wrapper is not None or not self._watching:
            return
        model = self._model()
        wrapper = None if model is None else ddp_around(model)
        if wrapper is not None:
            self._wrapper = weakref.ref(wrapper)

    def _learn_division(self) -> None:
        if self.divided_by is not None:
            return
        model, world = self._model(), rank_and_world()[1]
        if model is None or world == 1:
            self.divided_by = 1.0
            return
        wrapper = None if self._wrapper is None else self._wrapper()
        self.divided_by = divided_by(model, wrapper)
        if self.divided_by is None and wrapper is None and self._placed.shards >= world:
            self.divided_by = 1.0

    def _tap(self, held: Held) -> None:
        devices: dict[torch.device, list[int]] = {}
        turn = self._samples % self.turns
        for at, row in enumerate(self._rows):
            module = row.module() if row.turn == turn else None
            device = None if module is None else _device_of(module)
            if device is not None and self._host.cannot_measure_on(device.type) is None:
                devices.setdefault(device, []).append(at)
        for device, rows in devices.items():
            of_logits = {at for at in rows if self._rows[at].of_logits}
            of_mean = {at for at in rows if self._rows[at].of_mean}
            for into in new_activations(rows, device, of_logits, of_mean):
                row = self._rows[into.row]
                module = row.module()
                if module is not None:
                    tap = ActivationTap(self._host, into, row.of_input, row.gradients)
                    self._taps.add(module, tap)
                    self._measured.append(into)

    def sample(self) -> Optional[ActivationSample]:
        """What was measured in this step."""
        measured = self._taken()
        self._learn_division()
        for of in measured:
            if of.left_out is not None:
                self._left_out_row(of.row, of.left_out)
        measured = [of for of in measured if of.calls or of.gradients]
        return ActivationSample(self.names, measured, self.divided_by or 1.0) if measured else None


def _device_of(module: nn.Module) -> Optional[torch.device]:
    return next((p.device for p in module.parameters()), None)
