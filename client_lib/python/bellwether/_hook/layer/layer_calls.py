"""What is known of one attention module's calls: their layout, and what keeps one from being
measured."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..._kernels.memory import capturing
from ..._kernels.probe import DTYPES, Sums
from ..._weights import locate
from ..._weights.names import KEY_NORMS, QUERY_NORMS, plain
from .. import attention_switch
from ..calls.call import AttentionCall, View
from ..calls.kernel_choice import unseen
from ..hosts import StepHost
from ..model.candidates import is_attention
from .layer_weights import LayerWeights
from .notes import CALLED_AGAIN, TRANSFORMED


def _copies(k: Tensor, heads: int) -> bool:
    """Whether k [batch, heads, tokens, dim] is so many heads, each repeated in a row."""
    copies, left = divmod(k.shape[1], heads)
    if left or not copies:
        return False
    return copies == 1 or torch.equal(k[:, 0].detach(), k[:, copies - 1].detach())


class LayerCalls(LayerWeights):
    """What a Layer knows of the calls that its module makes."""

    def __init__(
        self,
        host: StepHost,
        name: str,
        module: nn.Module,
        watched: bool,
        paths: Optional[tuple[str, str]],
    ) -> None:
        super().__init__(host, name, module, paths)
        self.watched = watched
        self.index = -1  # Set once it is known which modules really call.
        self.calls = 0  # Of scaled_dot_product_attention, with gradients on.
        self.fired = 0  # Backward passes through the output tap.
        self.fired_in_step = self.calls_in_step = 0
        self.captured = 0  # Of them, those in a row that went into a CUDA graph.
        self.seq_len = 0
        self.causal = False
        self.dtype: Optional[torch.dtype] = None
        self.kernel = "sdpa"  # Which implementation PyTorch picks, as far as it says.
        names = {plain(n) for n, _ in module.named_children()}
        self.centred = False  # The keys come from center_keys(), as the last call had them.
        self.graphed = False  # A CUDA graph was captured with it inside.
        self.compiled = False  # Its forward is known by what torch.compile made of it.
        # Of the call whose output's gradient came last: how its keys are read.
        self._compiled_keys: Optional[tuple[View, int]] = None
        # Why our attention cannot take the place of some call; the mode of a call that is ours.
        self.unserved: Optional[str] = None
        self.own_mode = ""
        self.normalizes = bool(names & QUERY_NORMS) and bool(names & KEY_NORMS)
        # Key heads that a call is given -> copies of each of the layer's own among them.
        self._groups: dict[int, int] = {}
        self.sums: Optional[Sums] = None

    def __deepcopy__(self, memo: Any) -> LayerCalls:
        return self  # Reached through a live graph only; there is one per module.

    def unmeasured(self) -> bool:
        """Whether it is attention that is trained, given that it reports nothing."""
        module = self.module()
        if not self.watched or module is None or not self.is_attention():
            return False
        return self._trains() or (self.calls > 0 and next(module.parameters(), None) is None)

    def _trains(self) -> bool:
        module = self.module()
        return module is not None and any(p.requires_grad for p in module.parameters())

    def is_attention(self) -> bool:
        """Whether it is more than called like one."""
        module = self.module()
        if self.calls > 0 or module is None:
            return True
        return not self.lends and is_attention(module)

    def _forwards(self) -> int:
        """Of this step, with the one that runs: a recomputation is none."""
        return self.calls_in_step + (not self.host.in_backward())

    def _pass_begins(self, count: int) -> None:
        self.host.passes(max(self.fired_in_step, count))

    def _count(self) -> None:
        self.calls += 1
        if not self.host.in_backward():
            one = self.host.settings.microbatches == "first" and self.host.samples_step()
            if one and self.calls_in_step > self.fired_in_step:
                self.note(CALLED_AGAIN)
            self._pass_begins(self._forwards())
            self.calls_in_step += 1

    def _note_call(self, call: AttentionCall) -> None:
        if call.unread is not None:
            self.note(f"{call.unread}: only the key-gradient leak is measured")
        if call.dropout:
            self.note("dropout in the attention: its delta statistics are not measured")

    def _plain(self, *tensors: Any) -> bool:
        """Whether these are tensors that the kernels can read."""
        for t in tensors:
            if type(t) not in (Tensor, nn.Parameter):
                self.note(f"{type(t).__name__} instead of a plain tensor: not measured")
                return False
            if t.is_nested:
                self.note("a nested tensor: not measured")
                return False
            missing = self.host.cannot_measure_on(t.device.type)
            if missing is not None:
                self.note(f"{missing}: not measured")
                return False
            if t.dtype not in DTYPES:
                self.note(f"{t.dtype}: not measured")
                return False
            if t.numel() == 0:
                self.note("an empty tensor: not measured")
                return False
        if len({t.device for t in tensors}) > 1:
            self.note("q, k and v on several devices: not measured")
            return False
        if capturing() and self.sums is None:
            self.note("first called while a CUDA graph was captured: not measured")
            return False
        if torch._C._are_functorch_transforms_active():
            self.note(TRANSFORMED)
            return False
        if forward_ad._current_level >= 0:
            self.note("forward-mode differentiation: not measured")
            return False
        return True

    def _observe(self, call: AttentionCall) -> Optional[int]:
        """Learns the layout from the first call.  How many copies of each key head the call has;
        None if it does not fit the layout."""
        host = self.host
        with torch.no_grad(), unseen():
            q, k, v = call.q_view(call.q), call.k_view(call.k), call.v_view(call.v)
        if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
            self.note("q, k and v are not [batch, heads, tokens, dim]: not measured")
            return None
        heads, seen, dim = q.shape[1], k.shape[1], q.shape[3]
        if q.shape[0] != k.shape[0] or heads % seen or v.shape[1] != seen:
            self.note("batch or heads of q, k and v do not fit: not measured")
            return None
        if self.heads == 0:
            kv_heads = self._kv_heads(heads, k, dim)
            self._groups[seen] = seen // kv_heads
            self.sums = Sums(host.memories.of(q.device), heads, kv_heads)
            self.kernel = call.kernel() or "custom"
            if host.numbered():
                self.note("first called after the first step: not reported")
            self.set_layout(heads, kv_heads, dim, v.shape[3])
        elif self.sums is None or self.sums.memory is not host.memories.of(q.device):
            self.note("another device than that of the first call: not measured")
            return None
        elif heads != self.heads or (seen not in self._groups and not self._repeats(k)):
            self.note("heads differ from those of the first call: not measured")
            return None
        self.seq_len = max(self.seq_len, k.shape[2])
        if attention_switch.users and self.unserved is None:
            self.unserved = attention_switch.lacks(call)
            self.own_mode = getattr(call.ours, "mode", "")
        self.causal = self.causal or call.mask.causal
        self.dtype = call.cast or q.dtype  # As the kernel gets it.
        self.check_split(q, k)
        return self._groups[seen]

    def _kv_heads(self, heads: int, k: Tensor, dim: int) -> int:
        """Key heads that are apart, of those that the first call is given."""
        module, seen = self.module(), k.shape[1]
        by_weight = locate.kv_heads_of(module, heads, dim) if module is not None else None
        if by_weight is not None and by_weight < seen and _copies(k, by_weight):
            return by_weight
        return 1 if k.stride(1) == 0 else seen  # One head, expanded to all.

    def _repeats(self, k: Tensor) -> bool:
        """Whether these are the layer's key heads, repeated; or, if the first call had them
        repeated, without."""
        if capturing() or not _copies(k, self.kv_heads):
            return False
        self._groups[k.shape[1]] = k.shape[1] // self.kv_heads
        return True
