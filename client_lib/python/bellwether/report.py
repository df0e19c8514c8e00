"""What a person, or another logger, is told of the layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .layer import Layer


def summary(layers: list[Layer]) -> dict[str, float]:
    """The newest sample, one number for each layer and signal."""
    found: dict[str, float] = {}
    for layer in layers:
        prefix = f"layer{layer.index}/"
        sums = layer.sums
        if sums is not None and sums.probed:
            pairs = zip(sums.row("common_mode_sum"), sums.row("spread_sum"))
            found[prefix + "drift_ratio_max"] = max(
                (c / s if s else float("nan") for c, s in pairs), default=float("nan")
            )
            pairs = zip(sums.row("tied_rows_bf16"), sums.row("rows"))
            found[prefix + "tied_fraction_bf16_max"] = max(
                (t / r if r else 0.0 for t, r in pairs), default=0.0
            )
            found[prefix + "logit_max"] = max(sums.row("logit_max"))
        if sums is not None and sums.leaked:
            pairs = zip(sums.row("key_leak_sum"), sums.row("key_gradient_sum"))
            found[prefix + "key_leak_max"] = max((a / b if b else 0.0 for a, b in pairs))
        if layer.wq is not None and layer.wk is not None and layer.wq.samples:
            found[prefix + "wq_sigma_max"] = max(layer.wq.sigma)
            found[prefix + "wk_sigma_max"] = max(layer.wk.sigma)
    return found


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
