"""What is measured of the weights in a sampled step: their norms, the rank of their change, and
the Gram matrices that the server asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

from torch import nn

from .._hook.layer.layer import Layer
from .._hook.model import parallel
from .._hook.model.parallel import Parallel
from .._kernels.probe import Spectra
from .grams import GramBatch, Grams
from .increments import Increments
from .replicas import Replicas, ReplicaSample


class StepWeights:
    """
    model     gives the model, None once it is gone
    compared  all ranks report, so that the server can compare their copies
    """

    def __init__(
        self, gram_bytes: int, placed: Parallel, model: Callable[[], Optional[nn.Module]],
        compared: bool,
    ) -> None:  # fmt: skip
        self._model = model
        self._ranks = Increments()
        self._grams = Grams(gram_bytes, placed)
        self.copies = Replicas(model, compared)
        self._sharded: Optional[bool] = None
        self._done = False  # In the running step; what was found:
        self.increments: dict[int, Any] = {}
        self.gram_batch: Optional[GramBatch] = None
        self.replicas: Optional[ReplicaSample] = None

    def begin_step(self) -> None:
        self._done = False
        self.increments = {}
        self.gram_batch = self.replicas = None

    def changed(self, layers: Sequence[Layer]) -> None:
        """By an optimizer, after they were measured in this step."""
        if self._done and not self.whole_in_backward_only():
            self._done = False
            for layer in layers:
                for spectrum in (layer.wq, layer.wk):
                    if spectrum is not None:
                        spectrum.begin_sample()

    def measure(self, layers: Sequence[Layer], step: int) -> None:
        """Once, until an optimizer changes them again."""
        if self._done:
            return
        self._done = True
        self.replicas = self.copies.measure(step)
        found = [layer for layer in layers if layer.watched and layer.weights.location is not None]
        together = Spectra()
        for layer in found:
            layer.weights.measure(together)
        together.measure()
        if not self.whole_in_backward_only():
            self.increments = self._ranks.measure(found)
            self.gram_batch = self._grams.measure(found)

    def whole_in_backward_only(self) -> bool:
        """Whether the weights are whole while gradients are computed only (FSDP, ZeRO-3)."""
        if self._sharded is None:
            model = self._model()
            self._sharded = model is not None and parallel.is_fully_sharded(model)
        return self._sharded

    def forget(self) -> None:
        """They were changed by an action: what differs from before is not the optimizer's doing."""
        self._ranks.forget()
        self._grams.forget()

    def ask(self, deeper: Any, heads: int) -> None:
        """The server wants Gram matrices of these heads."""
        self._grams.ask(deeper, heads)
