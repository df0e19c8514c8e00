"""Attributes of modules that are computed from parameters when they are asked for
(torch.nn.utils.parametrize).

Their code belongs to the host.  In training it may change its buffers (spectral_norm) or draw
random numbers.  So it is asked as a copy, in evaluation, that shares the parameters alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList


def _computing(module: nn.Module, name: str) -> Any:
    lists = vars(module).get("_modules", {}).get("parametrizations")
    found = vars(lists).get("_modules", {}).get(name) if isinstance(lists, nn.Module) else None
    return found if isinstance(found, ParametrizationList) else None


def _copy(module: nn.Module) -> nn.Module:
    """Without the hooks, and with buffers of its own."""
    made: nn.Module = type(module).__new__(type(module))
    nn.Module.__init__(made)
    hooks = {name for name in vars(made) if name.endswith("hooks") or "_hooks_" in name}
    own = {name: value for name, value in vars(module).items() if name not in hooks}
    vars(made).update(own, training=False)
    copied = {n: None if b is None else b.detach().clone() for n, b in module._buffers.items()}
    inner = {n: None if m is None else _copy(m) for n, m in module._modules.items()}
    vars(made).update(_parameters=dict(module._parameters), _buffers=copied, _modules=inner)
    return made


def attribute(item: object, name: str) -> object:
    """What getattr() gives, None where there is none; the host does not notice."""
    computing = _computing(item, name) if isinstance(item, nn.Module) else None
    if computing is None:
        return getattr(item, name, None)
    parameters = list(computing.parameters())
    devices = {p.device.index for p in parameters if p.device.type == "cuda"}
    with torch.random.fork_rng(devices), torch.no_grad():
        value = _copy(computing)()
    if not isinstance(value, Tensor):
        return None
    # Whether it is trained is asked of a weight.
    return value.detach().requires_grad_(any(p.requires_grad for p in parameters))
