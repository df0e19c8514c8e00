"""W_Q and W_K of one attention module under watch: where they are, and when they are measured.

At the optimizer step, behind it; where the weights are sharded, in the backward, the only time at
which they are whole.
"""

from __future__ import annotations

import weakref
from typing import Optional

import torch
from torch import Tensor, nn

from .._kernels.probe import Spectrum, Unsupported
from . import weights
from .hosts import StepHost


class LayerWeights:
    """What a Layer knows of its module and the module's weights."""

    def __init__(
        self, host: StepHost, name: str, module: nn.Module, paths: Optional[tuple[str, str]]
    ) -> None:
        self.host = host
        self.name = name
        self.module: weakref.ref[nn.Module] = weakref.ref(module)
        self.module_class = type(module)
        self.paths = paths
        self.notes: dict[str, int] = {}  # Why something was not measured, how often.
        self.heads = self.kv_heads = self.head_dim = 0
        self.location: Optional[weights.Location] = None
        self.wq: Optional[Spectrum] = None
        self.wk: Optional[Spectrum] = None

    def note(self, reason: str) -> None:
        self.notes[reason] = self.notes.get(reason, 0) + 1

    def set_layout(self, heads: int, kv_heads: int, dim: int) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim
        module = self.module()
        if module is not None:
            self.location = weights.locate(module, heads, kv_heads, dim, self.paths)
        if self.location is None or module is None:
            self.note("W_Q and W_K not found: no spectral signals (give weights=)")
            return
        views = self.location.views(module)
        assert views is not None  # locate() tried.
        device = views[0].device
        missing = self.host.cannot_measure_on(device.type)
        if missing is not None:
            self.note(f"{missing}: no spectral signals")
            return
        memory = self.host.memories.of(device)
        self.wq = Spectrum(memory, device, heads, dim)
        self.wk = Spectrum(memory, device, kv_heads, dim)

    def watch_weights(self) -> None:
        """Watches the weights alone, without ever having seen a call."""
        module = self.module()
        layout = weights.layout_of(module, self.paths) if module is not None else None
        if layout is None:
            self.note("W_Q and W_K not found: no spectral signals (give weights=)")
            return
        if not layout.told:
            self.note("the module does not say its heads: W_Q and W_K are taken as one head each")
        self.set_layout(layout.heads, layout.kv_heads, layout.dim)

    def measure_weights(self) -> None:
        if self.wq is None or self.wk is None or self.wq.measured:
            return
        if self.host.weights_in_backward():
            return
        self._measure_weights()

    def measure_whole_weights(self) -> None:
        if self.host.measures("sigma") and self.wq is not None and not self.wq.measured:
            self.note("sharded weights: sigma is that of before the step")
            self._measure_weights()

    def _measure_weights(self) -> None:
        module = self.module()
        if self.location is None or module is None or self.wq is None or self.wk is None:
            return
        views = self.location.views(module)
        if views is None:
            self.note("the weights changed their shape: no spectral signals")
            return
        if any(type(w) not in (Tensor, nn.Parameter) for w in views):
            self.note(f"{type(views[0]).__name__} as a weight: no spectral signals")
            return
        if any(w.device != self.wq.device for w in views):
            self.note("the weights moved to another device: no spectral signals")
            return
        try:
            self.wq.measure(views[0])
            self.wk.measure(views[1])
        except Unsupported as e:
            self.note(str(e))

    def weight_copies(self) -> Optional[tuple[Tensor, Tensor]]:
        """fp32 copies of W_Q and W_K, for the rank of their change until the next sample."""
        module = self.module()
        views = self.location.views(module) if self.location and module is not None else None
        if views is None or any(w.device.type != "cpu" for w in views):
            return None
        wq, wk = (w.detach().to(torch.float32, copy=True).contiguous() for w in views)
        return wq, wk
