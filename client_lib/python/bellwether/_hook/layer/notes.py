"""Why something of a layer was not measured, in words for people, and what helps."""

from __future__ import annotations

from collections.abc import Iterable

from ..calls.call import AttentionCall

NO_KEY_GRADIENT = "no gradient reaches the keys: there is no leak to measure"
NO_LEAK = "softcap, sinks or changed scores: the keys' gradients need not add up to 0"
WITHOUT_LEAK = frozenset({NO_KEY_GRADIENT, NO_LEAK})  # Nothing is missing that could be measured.
NO_PROJECTION = "the queries or the keys are parameters: no W_Q and W_K make them"
WITHOUT_NORM = frozenset({NO_PROJECTION})
FROZEN = "no gradient reaches the attention (frozen upstream)"
TRANSFORMED = "torch.func transforms: not measured"
OTHER_CALL = "another call of a module: its weights are not told apart, no spectral signals"
CALLED_AGAIN = (
    'called again before its backward: of such calls one is measured (microbatches="all")'
)
# Words of a layer's note, and what a person can do about it.
_HELP = (
    ("dimensions: which", "bellwether.wrap_attention() takes a module of one's own"),
    ("never calls", 'transformers: attn_implementation="sdpa"; else bellwether.wrap_attention()'),
    ("torch.func transforms", "no vmap around the call; backward() in place of torch.func.grad"),
    ("torch.float64", "float32, or 16 bits"),
    ("checkpoint() inside", "checkpoint the whole attention module"),
)


class Notes(dict[str, int]):
    """Of one layer: each reason, and how often it came."""

    def add(self, reason: str) -> None:
        self[reason] = self.get(reason, 0) + 1

    def add_parts_of(self, call: AttentionCall) -> None:
        """What of a call's statistics is left out."""
        if call.unread is not None:
            self.add(f"{call.unread}: only the key-gradient leak is measured")
        if call.dropout:
            self.add("dropout in the attention: its delta statistics are not measured")


def why(notes: Iterable[str], calls: int = 1) -> str:
    """The reasons, and what helps where something does."""
    notes = [note for note in notes if note not in WITHOUT_LEAK | WITHOUT_NORM]
    if not calls:
        notes.append("it never calls scaled_dot_product_attention")
    reasons = "; ".join(notes) or "nothing of it was seen in the sampled steps"
    helps = dict.fromkeys(help for words, help in _HELP if any(words in note for note in notes))
    return f"{reasons}. What helps: {'; '.join(helps)}" if helps else reasons
