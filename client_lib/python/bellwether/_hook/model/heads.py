"""The layers of a model that make logits of words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from torch import nn

# What they are called; the second ones only where a list of blocks lies before them.
_NAMES = ("lm_head", "lm_logits", "embed_out", "output_layer", "to_logits", "vocab_head")
_GENERAL = ("head", "output", "output_projection", "output_proj", "unembed", "unembedding")
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_heads(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """By their names, in the model's order.

    A head is what the model names as its output, what has the weight of an embedding, or as many
    outputs as one has rows.  The last stage of a pipeline has no embedding, and a head may be
    padded beyond it.  So where no layer is one, names count.  Of a classifier with as many classes
    as features the same laws hold.
    """
    words = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    output = getattr(model, "get_output_embeddings", lambda: None)()
    found = [(n, m) for n, m in model.named_modules() if is_head(n, m, words, output)]
    return found or _by_name(model)


def is_head(
    name: str, module: nn.Module, words: Sequence[nn.Embedding], output: Optional[nn.Module]
) -> bool:
    """Whether a module makes logits of words.

    words   the model's embeddings
    output  what the model itself says
    """
    weight = module._parameters.get("weight")
    if module is output or (weight is not None and any(weight is m.weight for m in words)):
        return not isinstance(module, nn.Embedding)
    if getattr(module, "out_features", None) not in {m.num_embeddings for m in words}:
        return False
    return not _repeats(name)


def _repeats(name: str) -> bool:
    """Whether it lies in blocks that repeat: they have layers as wide as there are positions."""
    return any(part.isdigit() for part in name.split(".")[:-1])


def _by_name(model: nn.Module) -> list[tuple[str, nn.Module]]:
    modules = dict(model.named_modules())
    names = list(modules)
    found = []
    for at, (name, module) in enumerate(modules.items()):
        outer, _, own = name.rpartition(".")
        if _repeats(name) or not _widens(module):
            continue
        prefix = outer + "." if outer else ""
        beside = [n for n in names[:at] if n and n.startswith(prefix) and not _repeats(n)]
        lists = any(isinstance(modules[n], _LISTS) for n in beside)
        if own in _NAMES or (own in _GENERAL and lists):
            found.append((name, module))
    return found


def _widens(module: nn.Module) -> bool:
    """Whether it has as many outputs as inputs, or more."""
    given: Any = getattr(module, "in_features", None)
    made: Any = getattr(module, "out_features", None)
    return isinstance(given, int) and isinstance(made, int) and made >= given > 0
