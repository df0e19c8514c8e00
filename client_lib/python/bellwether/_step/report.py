"""What a person is told of the layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .._hook.layer import Layer


def layer_status(layer: Layer) -> dict[str, Any]:
    """What became of one candidate: called, fired, its layout, and why not if not."""
    return {
        "name": layer.name,
        "index": layer.index,
        "watched": layer.watched,
        "calls": layer.calls,
        "fired": layer.fired,
        "heads": layer.heads,
        "kv_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "weights": layer.location.how if layer.location else None,
        "notes": dict(layer.notes),
    }
