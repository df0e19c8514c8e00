"""Which tensors of a checkpoint are W_Q and W_K, and where each head's rows are.

A checkpoint has names and shapes and no code, so the number of heads must be told by its
configuration or by a person; what fits in more than one way is refused, never guessed.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .._util import files
from .._weights import location as locations
from .._weights import names as known
from .._weights.location import Location
from .checkpoints import Checkpoint

LAYOUTS = ("separate", "fused", "grouped")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "nhead")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head",
             "multi_query_group_num")  # fmt: skip
# Of one name and another order of rows than that name has elsewhere.
_LAYOUT_OF_MODEL = {"chatglm": "fused", "internlm2": "grouped", "mpt": "fused", "dbrx": "fused"}
_MAKE = {"fused": locations.fused, "grouped": locations.grouped}
_MODEL_MAX = 32  # Characters, which are at most the 128 bytes that a run may tell.
_AMBIGUOUS = ("wqkv",)  # Whole blocks of q, k and v in gpt-fast, by key head in torchtitan.


class UnknownLayout(ValueError):
    """Which rows belong to which head cannot be told; the text says what is missing."""


@dataclasses.dataclass(frozen=True)
class Told:
    """What a person, or a configuration, says of the heads; None = nothing."""

    heads: Optional[int] = None
    kv_heads: Optional[int] = None
    head_dim: Optional[int] = None
    layout: Optional[str] = None  # One of LAYOUTS.
    model: str = ""
    unread: str = ""  # A configuration that tells nothing, and why.

    def before(self, other: Told) -> Told:
        """What is not said here is taken from `other`."""
        pairs = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return dataclasses.replace(other, **{n: v for n, v in pairs if v})


def _positive(config: dict[str, Any], names: tuple[str, ...]) -> Optional[int]:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def told_by(config: dict[str, Any]) -> Told:
    """What a model's configuration says, in the words of Hugging Face, Llama or nanoGPT."""
    if _positive(config, _HEADS) is None and isinstance(config.get("text_config"), dict):
        config = {**config, **config["text_config"]}
    kv_heads = _positive(config, _KV_HEADS)
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        kv_heads = kv_heads if config.get("multi_query_group_num") else 1
    model = config.get("model_type")
    model = files.one_line(model)[:_MODEL_MAX] if isinstance(model, str) else ""
    return Told(
        heads=_positive(config, _HEADS),
        kv_heads=kv_heads,
        head_dim=_positive(config, ("head_dim", "kv_channels")),
        layout=_LAYOUT_OF_MODEL.get(model),
        model=model,
    )


def read_config(path: Path) -> Told:
    """Raises UnknownLayout if the file is no configuration."""
    try:
        return told_by(files.read_json(path))
    except (OSError, ValueError) as e:
        raise UnknownLayout(f"{path}: {e}") from e


def beside(checkpoint: Path, directory: Path) -> Told:
    """What a config.json or params.json in the checkpoint's folder, or the run's, says.  One that
    cannot be read says nothing, which `unread` tells: a checkpoint may do without."""
    told = Told()
    for folder in dict.fromkeys((checkpoint, checkpoint.parent, directory)):
        for name in ("config.json", "params.json"):
            try:
                if (folder / name).is_file():
                    told = told.before(read_config(folder / name))
            except (OSError, UnknownLayout) as e:
                told = told.before(Told(unread=str(e)))
    return told


class Conv1D(nn.Module):
    """A weight that is kept as [in, out]; projection.py knows it by this name."""

    weight: nn.Parameter


@dataclasses.dataclass(frozen=True)
class ScanLayer:
    """W_Q and W_K of one attention layer of a checkpoint."""

    name: str
    tensors: dict[str, str]  # Name in the module -> name in the checkpoint.
    location: Location
    transposed: bool

    def views(self, checkpoint: Checkpoint) -> Optional[tuple[Tensor, Tensor]]:
        """([heads, dim, width], [kv_heads, dim, width]), read now; None if it has no such layer.
        Raises Unreadable."""
        if not set(self.tensors.values()) <= checkpoint.shapes.keys():
            return None
        module = _module(
            {n: checkpoint.tensor(t) for n, t in self.tensors.items()}, self.transposed
        )
        return self.location.views(module)


def _module(tensors: dict[str, Tensor], transposed: bool) -> nn.Module:
    """A module that holds nothing but these weights."""
    module = nn.Module()
    for name, tensor in tensors.items():
        holder = Conv1D() if transposed else nn.Module()
        holder.weight = nn.Parameter(tensor, requires_grad=False)
        module.add_module(name, holder)
    return module


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _candidates(checkpoint: Checkpoint) -> dict[str, dict[str, str]]:
    """Module -> (name in it -> name of the tensor) of all that is called like a projection."""
    found: dict[str, dict[str, str]] = {}
    for name, shape in checkpoint.shapes.items():
        if len(shape) != 2:
            continue
        owner, _, leaf = name.removesuffix(".weight").rpartition(".")
        if known.is_projection(leaf):
            found.setdefault(owner, {})[leaf] = name
    return {owner: found[owner] for owner in sorted(found, key=_natural)}


def _fused(name: str, owner: str, shape: tuple[int, ...], told: Told) -> tuple[Location, bool]:
    plain = known.plain(name)
    if told.layout is None and told.unread:
        raise UnknownLayout(
            f"{owner}.{name}: the order of its rows is not sure ({told.unread}): give --layout"
        )
    layout = told.layout or ("grouped" if plain in known.GROUPED else "fused")
    heads, kv_heads = told.heads, told.kv_heads
    assert heads is not None
    where = f"{owner}.{name} {list(shape)}"
    found: list[tuple[Location, bool]] = []
    for rows, width, transposed in ((shape[0], shape[1], False), (shape[1], shape[0], True)):
        key_heads = kv_heads
        if key_heads is None and told.head_dim:
            key_heads = (rows // told.head_dim - heads) // 2
        if key_heads is None and rows == 3 * width:
            key_heads = heads
        if not key_heads or key_heads < 1 or rows % (heads + 2 * key_heads):
            continue
        dim = rows // (heads + 2 * key_heads)
        if told.head_dim in (None, dim):
            location = _MAKE[layout](name, heads, key_heads, dim)
            # A square of heads is what most models have; else the longer side holds the rows.
            found.append((location, transposed))
            if dim * heads == width:
                return location, transposed
    if not found:
        kv = f" and {kv_heads} key heads" if kv_heads else " and key heads that nobody told"
        raise UnknownLayout(
            f"{where} does not fit {heads} heads{kv}: give --heads, --kv-heads and --head-dim"
        )
    if len(found) > 1 and shape[0] < shape[1]:
        return found[1]
    return found[0]


def _separate(
    names: tuple[str, str], owner: str, shapes: tuple[tuple[int, ...], ...], told: Told
) -> tuple[Location, bool]:
    heads = told.heads
    assert heads is not None
    rows, key_rows = shapes[0][0], shapes[1][0]
    dim = told.head_dim or rows // heads
    key_heads = key_rows // dim if dim else 0
    fits = dim > 0 and rows == heads * dim and key_rows == key_heads * dim and key_heads > 0
    if not fits or heads % key_heads or told.kv_heads not in (None, key_heads):
        kv = f", {told.kv_heads} key heads" if told.kv_heads else ""
        raise UnknownLayout(
            f"{owner}: {names[0]} {list(shapes[0])} and {names[1]} {list(shapes[1])} do not fit "
            f"{heads} heads{kv}: give --heads, --kv-heads and --head-dim"
        )
    return locations.separate(names, heads, key_heads, dim), False


def layers_of(checkpoint: Checkpoint, told: Told, pattern: Optional[str] = None) -> list[ScanLayer]:
    """The attention layers in order.  Raises UnknownLayout with a sentence that says what to do."""
    candidates = {
        owner: names
        for owner, names in _candidates(checkpoint).items()
        if pattern is None or re.search(pattern, owner)
    }
    found: list[ScanLayer] = []
    for owner, names in candidates.items():
        with torch.device("meta"):
            module = _module(
                {n: torch.empty(checkpoint.shapes[t]) for n, t in names.items()}, False
            )
        fused, query, key = known.projections(module)
        separate = query is not None and key is not None and told.layout in (None, "separate")
        if not separate and fused is None:
            continue  # Holds a query alone, or something that is called like one.
        if told.heads is None:
            raise UnknownLayout(
                f"{checkpoint.path}: it has {len(candidates)} modules such as {owner!r} with "
                f"{', '.join(sorted(names))}, but nothing tells the number of heads: "
                "give --heads (and --kv-heads), or --config with the model's config.json"
                + (f" ({told.unread})" if told.unread else "")
            )
        if separate:
            assert query is not None and key is not None
            used: tuple[str, ...] = (query, key)
            shapes = tuple(checkpoint.shapes[names[n]] for n in used)
            location, transposed = _separate((query, key), owner, shapes, told)
        else:
            assert fused is not None
            used = (fused,)
            if fused in _AMBIGUOUS and told.layout is None:
                raise UnknownLayout(
                    f"{owner}.{fused}: models differ in the order of its rows: give --layout fused "
                    "(all queries, all keys, all values) or --layout grouped (by key head)"
                )
            location, transposed = _fused(fused, owner, checkpoint.shapes[names[fused]], told)
        tensors = {n: names[n] for n in used}
        found.append(ScanLayer(owner, tensors, location, transposed))
    if not found:
        examples = sorted(n for n, shape in checkpoint.shapes.items() if len(shape) == 2)[:3]
        raise UnknownLayout(
            f"{checkpoint.path}: no module holds W_Q and W_K under a name that is known here "
            f"(q_proj and k_proj, c_attn, qkv_proj, query_key_value, ...); it has "
            f"{', '.join(examples) or 'no matrix at all'}"
        )
    return found
