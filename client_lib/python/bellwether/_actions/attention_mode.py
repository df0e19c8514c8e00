"""attention.mode and attention.center_k: the attention of some layers, switched in flight.

What is in force is the applied actions, one upon the other, so any of them can be taken back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Optional

from torch import Tensor

from .._attention import stabilizer
from .._attention.center_keys import center_keys
from .._hook import attention_switch
from .._hook.calls.contract import contract_of
from .._hook.calls.kernel_choice import NAMES as KERNEL_NAMES
from .._hook.calls.kernel_choice import SDPA
from .._hook.layer.layer import Layer
from .._hook.patches import intercept
from ..actions import MODES, Action
from .applier import Applier, layer_number, layers_in, unknown_place
from .host import ActionHost

# torch.compile gives up on a piece of code that it has compiled 8 times; some are its own.
VARIANTS_MAX = 6


def _functions() -> dict[str, Callable[..., Any]]:
    """What a module's word can stand for."""

    def by_mode(mode: str) -> Callable[..., Any]:
        def attention(query: Tensor, key: Tensor, value: Tensor, *a: Any, **k: Any) -> Tensor:
            return stabilizer.stabilized(mode, False, query, key, value, *a, **k)

        return attention

    functions = {mode: by_mode(mode) for mode in MODES if mode != "sdpa"}
    functions["sdpa"] = SDPA
    functions[attention_switch.CENTRED] = center_keys
    return functions


class Held(NamedTuple):
    """An action that is in force, and where."""

    action: Action
    layers: list[Layer]


class AttentionSwitch(Applier):
    def __init__(self, host: ActionHost) -> None:
        super().__init__(host)
        self._held: dict[str, Held] = {}  # Oldest first.
        self._variants: set[tuple[str, ...]] = set()  # What all layers carried, each time.
        self._prepared = False

    def prepare(self) -> None:
        """Before the model is compiled: the branch that a switch takes later."""
        serving = attention_switch.Serving(stabilizer.lacks, stabilizer.compute)
        attention_switch.prepare(_functions(), serving)
        self._prepared = True
        for layer in self.host.layers:
            module = layer.module()
            if module is not None:
                attention_switch.put(module, "")

    def end(self) -> None:
        self._held.clear()
        if self._prepared:
            for layer in self.host.layers:
                attention_switch.take(layer.module())

    # ---- what can be had ----

    def impossible(self, kind: str) -> Optional[str]:
        if not self._prepared:
            return "the forward pass is not patched: only the weights are watched"
        layers = [layer for layer in self.host.layers if layer.index >= 0]
        if not layers:
            return "no layer calls attention here"
        reasons = [self._unfit(layer, kind, "hp") for layer in layers]
        return None if None in reasons else reasons[0]

    def _fixed(self, layer: Layer) -> Optional[str]:
        """Why nothing of this layer can be switched."""
        module = layer.module()
        if module is None:
            return "it is gone"
        if any(contract_of(inner) is not None for inner in module.modules()):
            return "it has attention of its own (wrap_attention)"
        if layer.seen.graphed:
            return "it was captured in a CUDA graph, which replays what it captured"
        if sum(other.module() is module for other in self.host.layers) > 1:
            return "it is one of several calls of its module"
        return None

    def _unfit(self, layer: Layer, kind: str, mode: str) -> Optional[str]:
        """Why this layer cannot be switched so."""
        reason = self._fixed(layer)
        calls_sdpa = layer.seen.kernel in KERNEL_NAMES
        if reason is None and kind == "attention.center_k" and not calls_sdpa:
            reason = (
                f"its attention is {layer.seen.kernel}, and scaled_dot_product_attention is served"
            )
        elif reason is None and kind == "attention.mode" and not (mode == "sdpa" and calls_sdpa):
            reason = layer.seen.unserved
            if reason is None and mode == "sdpa" and layer.seen.own_mode:
                reason = "mode is sdpa, and the model calls bellwether.attention, which has none"
        number = layer_number(self.host, layer)
        return None if reason is None else f"layer {number}: {reason}"

    def _places(self, action: Action) -> tuple[list[Layer], list[str]]:
        """(the layers that are switched, why others stay as they are).  It is all or none if the
        scope names layers, and for centring: some centred layers make the run a centred one."""
        layers = layers_in(self.host, action)
        reasons = [self._unfit(layer, action.kind, action.mode) for layer in layers]
        stay = [reason for reason in reasons if reason is not None]
        if stay and (action.layers or action.heads or action.kind == "attention.center_k"):
            return [], stay
        return [layer for layer, reason in zip(layers, reasons) if reason is None], stay

    def refusal(self, action: Action) -> Optional[str]:
        if action.undoes:
            held = self._held.get(action.undoes)
            for layer in held.layers if held is not None else ():
                why = self._fixed(layer)
                if why is not None:
                    return f"layer {layer_number(self.host, layer)}: {why}"
            return None
        why = self.impossible(action.kind) or unknown_place(self.host, action)
        if why is not None:
            return why
        layers, stay = self._places(action)
        if not layers and stay:
            return stay[0]
        if action.kind == "attention.center_k" and layers:
            own = [
                layer for layer in layers if layer.seen.centred and not self._centred_here(layer)
            ]
            if action.value and len(own) == len(layers):
                return "the model centres these keys itself"
            if not action.value and own:
                number = layer_number(self.host, own[0])
                return f"the model centres the keys of layer {number} itself"
        new = self._words({**self._held, action.id: Held(action, layers)})
        compiled = any(layer.seen.compiled for layer in self.host.layers)
        if compiled and new not in self._variants and len(self._variants) >= VARIANTS_MAX:
            return f"{VARIANTS_MAX} variants were compiled, and torch.compile ends at 8"
        return None

    # ---- what is in force ----

    @staticmethod
    def _centred_here(layer: Layer) -> bool:
        module = layer.module()
        return module is not None and attention_switch.of(module).endswith(attention_switch.CENTRED)

    def _words(self, held: dict[str, Held]) -> tuple[str, ...]:
        """What each layer of the monitor is to carry."""
        modes = dict.fromkeys(map(id, self.host.layers), "")
        centred = dict.fromkeys(map(id, self.host.layers), False)
        for action, layers in held.values():
            for layer in layers:
                if action.kind == "attention.mode":
                    modes[id(layer)] = action.mode
                else:
                    centred[id(layer)] = bool(action.value)
        words = []
        for layer in self.host.layers:
            module, mode = layer.module(), modes[id(layer)]
            if mode == "sdpa" and module is not None and intercept.is_plain(module):
                mode = ""  # The graph that it was compiled to at first.
            words.append(attention_switch.word(mode, centred[id(layer)]))
        return tuple(words)

    def _carry(self, words: tuple[str, ...]) -> None:
        for layer, text in zip(self.host.layers, words):
            module = layer.module()
            if module is not None and attention_switch.of(module) != text:
                before = self._centred_here(layer)
                attention_switch.put(module, text)
                layer.seen.unheld = None  # Until its next call.
                after = self._centred_here(layer)
                layer.seen.centred = after if before != after else layer.seen.centred

    def _change(self, held: dict[str, Held], kind: str, step: int) -> None:
        before = tuple(
            attention_switch.of(module) if (module := layer.module()) is not None else ""
            for layer in self.host.layers
        )
        self._variants |= {before, self._words(held)}
        try:
            self._carry(self._words(held))
        except Exception:
            self._carry(before)
            raise
        self._held = held
        if kind == "attention.mode":
            self.host.tell(step, "attention_mode", self._kernel())
        else:
            self.host.centring_changed(step)

    def _kernel(self) -> str:
        """What the layers are computed with, in a word."""
        for action, _ in reversed(self._held.values()):
            if action.kind == "attention.mode" and action.mode != "sdpa":
                return f"bellwether-{action.mode}"
        return next((layer.seen.kernel for layer in self.host.layers if layer.index >= 0), "sdpa")

    def holds(self, action: Action) -> bool:
        """Whether some layer of it is computed so.  A later action of the kind may be upon it, and
        a layer may be gone or have calls that stay as they are."""
        held = self._held.get(action.id)
        if held is None:
            return False
        upon = {
            id(layer)
            for other, layers in list(self._held.values())[list(self._held).index(action.id) + 1 :]
            if other.kind == action.kind
            for layer in layers
        }
        return not held.layers or any(
            id(layer) not in upon
            and layer.module() is not None
            and (action.kind != "attention.mode" or layer.seen.unheld is None)
            for layer in held.layers
        )

    def apply(self, action: Action, step: int) -> str:
        layers, stay = self._places(action)
        self._change({**self._held, action.id: Held(action, layers)}, action.kind, step)
        if not stay:
            return ""
        return f"{len(layers)} of {len(layers) + len(stay)} layers; {stay[0]}"

    def undo(self, action: Action, step: int) -> None:
        held = {id: one for id, one in self._held.items() if id != action.id}
        self._change(held, action.kind, step)
