"""What a run says of itself when its stream begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import torch

from .._hook.model.parallel import Parallel
from .._native.run_client import RunOptions
from .._util.launch import launch_unix_ms
from .._util.ranks import rank_and_world
from ..settings import Settings

if TYPE_CHECKING:
    from .._hook.layer.layer import Layer

_SCORES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_KERNELS_BYTES = 64  # That the server takes.


def _kernels(layers: list[Layer]) -> str:
    """The kernels of the layers, in the order in which they are met."""
    names = list(dict.fromkeys(layer.seen.kernel for layer in layers))
    text = ", ".join(names)
    return text if len(text.encode()) <= _KERNELS_BYTES else f"{names[0]} and others"


def run_options(
    settings: Settings,
    layers: list[Layer],
    unmeasured: int,
    parallel: Parallel,
    server: Optional[str],
    record_path: Optional[str],
    *,
    actions_mask: int,
    ranks_agree: bool,
    layers_needed: int = 0,
    **more: Any,
) -> RunOptions:
    """`layers` are those that report, in order, and behind them so many as are `unmeasured`: they
    are layers of the run that nothing judges.  `more` are fields of RunOptions."""
    first = layers[0] if layers else None
    heads = max((layer.heads for layer in layers), default=1)
    same = len({(layer.heads, layer.kv_heads) for layer in layers}) <= 1
    kv_heads = first.kv_heads if first and same else heads
    rank, world = rank_and_world()
    return RunOptions(
        run=settings.run,
        run_uuid=settings.run_uuid,
        attempt=settings.attempt,
        launch_unix_ms=launch_unix_ms(),
        layers=max(1, parallel.layers or len(layers) + unmeasured, layers_needed),
        heads=heads * parallel.tensor[1],
        kv_heads=kv_heads * parallel.tensor[1],
        head_dim=first.head_dim if first else 0,
        seq_len=max((layer.seen.seq_len for layer in layers), default=0),
        rank=rank,
        world=world,
        actions_mask=actions_mask,
        ranks_agree=ranks_agree,
        reporters=min(world, parallel.shards) if settings.ranks == "dp0" else world,
        server=server,
        record_path=record_path,
        tls_ca=settings.tls_ca,
        tls_cert=settings.tls_cert,
        tls_key=settings.tls_key,
        token_file=settings.token_file,
        log_path=settings.log_path,
        spool_dir=settings.spool_dir if server else None,
        spool_bytes=settings.spool_bytes,
        attention_kernel=_kernels(layers),
        centred=any(layer.seen.centred for layer in layers),
        qk_norm=any(layer.search.normalizes for layer in layers),
        score_dtype=_SCORES.get(
            first.seen.dtype if first and first.seen.dtype else torch.float32, "fp32"
        ),
        causal=any(layer.seen.causal for layer in layers),
        **more,
    )
