"""What is known of the calls that one attention module makes: their layout, and what they have."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..._kernels.memory import capturing
from ..._kernels.probe import DTYPES, Sums
from ..._util import log
from ..._util.guard import in_words
from ..._weights import locate
from .. import attention_switch
from ..calls import known_kernels
from ..calls.call import AttentionCall
from ..calls.kernel_choice import unseen
from ..calls.sdpa_call import NOT_TOLD
from ..hosts import CallsHost
from ..model.softmax_code import shows_one_head
from .notes import TRANSFORMED, Notes

_told: set[str] = set()  # Entries of the table of known kernels, of this process.


def _copies(k: Tensor, heads: int) -> bool:
    """Whether k [batch, heads, tokens, dim] is so many heads, each repeated in a row."""
    copies, left = divmod(k.shape[1], heads)
    if left or not copies:
        return False
    return copies == 1 or torch.equal(k[:, 0].detach(), k[:, copies - 1].detach())


class SeenCalls:
    def __init__(
        self, host: CallsHost, notes: Notes, module: weakref.ref[nn.Module],
        learned: Callable[[int, int, int, int], None], shown: Callable[[Tensor, Tensor], None],
    ) -> None:  # fmt: skip
        """learned  gets heads, key heads, their dimension and that of values from the first call
        shown    gets each call's q [batch, heads, tokens, dim] and k"""
        self._host, self._notes, self._module = host, notes, module
        self._learned, self._shown = learned, shown
        self.heads = self.kv_heads = 0  # 0 = no call was seen.
        self.seq_len = 0
        self.causal = False
        self.dtype: Optional[torch.dtype] = None
        self.kernel = "sdpa"  # Which implementation PyTorch picks, as far as it says.
        self.known = known_kernels.Met()  # What is known to be wrong with it.
        self.centred = False  # The keys come from center_keys(), as the last call had them.
        self.graphed = False  # A CUDA graph was captured with one inside.
        self.compiled = False  # They are known by what torch.compile made of them.
        # Why our attention cannot take the place of some call; the mode of a call that is ours.
        self.unserved: Optional[str] = None
        self.own_mode = ""
        self.unheld: Optional[str] = None  # Why a mode in force did not hold for the last call.
        # Key heads that a call is given -> copies of each of the layer's own among them.
        self._groups: dict[int, int] = {}
        self.sums: Optional[Sums] = None  # Where their statistics are added up.

    def readable(self, *tensors: Any) -> bool:
        """Whether these are tensors that the kernels can read."""
        for t in tensors:
            if type(t) not in (Tensor, nn.Parameter):
                self._notes.add(f"{type(t).__name__} instead of a plain tensor: not measured")
                return False
            if t.is_nested:
                self._notes.add("a nested tensor: not measured")
                return False
            missing = self._host.cannot_measure_on(t.device.type)
            if missing is not None:
                self._notes.add(f"{missing}: not measured")
                return False
            if t.dtype not in DTYPES:
                self._notes.add(f"{t.dtype}: not measured")
                return False
            if t.numel() == 0:
                self._notes.add("an empty tensor: not measured")
                return False
        if len({t.device for t in tensors}) > 1:
            self._notes.add("q, k and v on several devices: not measured")
            return False
        if capturing() and self.sums is None:
            self._notes.add("first called while a CUDA graph was captured: not measured")
            return False
        if torch._C._are_functorch_transforms_active():
            self._notes.add(TRANSFORMED)
            return False
        if forward_ad._current_level >= 0:
            self._notes.add("forward-mode differentiation: not measured")
            return False
        return True

    def observe(self, call: AttentionCall) -> Optional[int]:
        """Learns the layout from the first call.  How many copies of each key head the call has;
        None if it does not fit the layout."""
        host = self._host
        with torch.no_grad(), unseen():
            q, k, v = call.q_view(call.q), call.k_view(call.k), call.v_view(call.v)
        if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
            self._notes.add("q, k and v are not [batch, heads, tokens, dim]: not measured")
            return None
        heads, seen, dim = q.shape[1], k.shape[1], q.shape[3]
        module = self._module()
        if call.one_head and not (module is not None and shows_one_head(module, dim)):
            self._notes.add(f"3 dimensions: {NOT_TOLD}")
            return None
        if q.shape[0] != k.shape[0] or heads % seen or v.shape[1] != seen:
            self._notes.add("batch or heads of q, k and v do not fit: not measured")
            return None
        if self.heads == 0:
            kv_heads = self._kv_heads(heads, k, dim)
            self._groups[seen] = seen // kv_heads
            self.sums = Sums(host.memories.of(q.device), heads, kv_heads)
            self.kernel = known_kernels.kernel(call) or "custom"
            if host.numbered():
                self._notes.add("first called after the first step: not reported")
            self.heads, self.kv_heads = heads, kv_heads
            self._learned(heads, kv_heads, dim, v.shape[3])
        elif self.sums is None or self.sums.memory is not host.memories.of(q.device):
            self._notes.add("another device than that of the first call: not measured")
            return None
        elif heads != self.heads or (seen not in self._groups and not self._repeats(k)):
            self._notes.add("heads differ from those of the first call: not measured")
            return None
        self.seq_len = max(self.seq_len, k.shape[2])
        if attention_switch.users:
            self._learn_switch(call)
        self.causal = self.causal or call.mask.causal
        self.dtype = call.cast or q.dtype  # As the kernel gets it.
        self._look_up(call, q, k, v)
        self._shown(q, k)
        return self._groups[seen]

    def _look_up(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Says once in a process what is known of the kernel of such calls."""
        try:
            new = self.known.meet(call, q, k, v)
        except Exception as e:  # A hint, for which no watching ends.
            self._notes.add(f"whether the kernel is known to be wrong is not known ({in_words(e)})")
            return
        for entry in new:
            if entry.id not in _told:
                _told.add(entry.id)
                log.warning(
                    f"{entry}. First met by: {self.known.found[entry.id]}. It is a hint: "
                    "python -m bellwether doctor --kernels tells"
                )

    def _learn_switch(self, call: AttentionCall) -> None:
        """Whether a mode can serve the layer's calls, and whether one that is in force does."""
        if self.unserved is None:
            self.unserved = attention_switch.lacks(call)
            self.own_mode = getattr(call.ours, "mode", "")
        module = self._module()
        self.unheld = attention_switch.not_held(module, call) if module is not None else None
        if self.unheld is not None:
            self._notes.add(self.unheld)

    def _kv_heads(self, heads: int, k: Tensor, dim: int) -> int:
        """Key heads that are apart, of those that the first call is given."""
        module, seen = self._module(), k.shape[1]
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
