"""The laws of RMSNorm and LayerNorm over the last dimension.

With r^2 = mean x^2 + eps, a gain g and y = g x / r, for each row

    <x, dx> = <y, dy> eps / r^2               the result does not change with the scale of x

and for each feature g dg = sum of y dy.  LayerNorm has x - mean and y - b instead, and the sum of a
row's dx is zero.  Some modules store g - 1, and a name does not tell whether the mean is taken off:
which one it is, is told by y.  What the mean is taken off is rounded as numbers of its size are.

PyTorch's LayerNorm for CPUs keeps mean and 1 / r of tensors in 16 bits in that type, and adds up dg
in it.  So dg is off by 0.5 to 36 % of its absolute values (2.13, bf16), and is left out there.

Some cast fp32 to the type of autocast inside, as Nemotron's does on GPUs.  Their gradients come in
fp32, with the roundings of 16 bits.  So all is taken in the type of y where that has 16 bits.
"""

from __future__ import annotations

import itertools
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..._kernels.memory import Memory
from ..._kernels.modules import PARTS_MAX, NormSums, norm_sums
from .edge_tap import Gradients, Laws, VectorLaw
from .row_sums import power_of_two, significand_bits

# Sums and roots are made in float32: what they may add, of the product of the norms.
INSIDE = 2.0**-20
# The same where mean and 1 / r are kept in 16 bits.
_INSIDE_16 = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
_FP32 = 2.0**-24
# What a product or a quotient in float32 may lose by underflow: all of it, where that is flushed.
_FLUSHED = 2.0**-126


def is_norm(module: nn.Module) -> bool:
    """Those of torch and of transformers, by their names: _laws_of tells what they do."""
    of = type(module)
    if not of.__module__.startswith(("torch.nn.modules.normalization", "transformers.")):
        return False
    kinds = ("RMSNorm", "LayerNorm", "LayerNorm1P")
    if not of.__name__.endswith(kinds) or "forward" in vars(module):
        return False
    shape = getattr(module, "normalized_shape", None)
    return not isinstance(shape, (tuple, list)) or len(shape) == 1  # Some have a number.


def _eps(module: nn.Module, x: Tensor) -> list[float]:
    for name in ("eps", "variance_epsilon", "epsilon"):
        if hasattr(module, name):
            eps: Any = getattr(module, name)
            if eps is not None:
                return [float(eps)]
    return [torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps]


def _squares(parts: list[Tensor]) -> Tensor:
    """Of the distances of neighbours, added over the parts."""
    found: Any = sum(
        (power_of_two(part) * 2.0 ** -significand_bits(part)).double().square() for part in parts
    )
    return found  # type: ignore[no-any-return]


def norm_laws(
    memory: Memory, module: nn.Module, x: Tensor, y: Tensor, got: Gradients,
    form: Optional[int] = None,
) -> Laws:  # fmt: skip
    """None where it is none of those.

    form  which one it is of those that it may have, in their order; None = all are asked
    """
    n = x.shape[-1]
    weight = module._parameters.get("weight")
    bias = module._parameters.get("bias")
    if y.shape != x.shape or (weight is not None and weight.shape != (n,)):
        return None
    parts = {name: got.get(name, []) for name in ("x", "y")}
    tensors = [x, y, *parts["x"], *parts["y"]]
    if any(t.device != x.device or t.numel() != x.numel() for t in tensors):
        return None
    if not all(1 <= len(of) <= PARTS_MAX for of in parts.values()):
        return None
    if any(p is not None and p.device != x.device for p in (weight, bias)):
        return None
    if x.element_size() > y.element_size() == 2:
        x, got = x.to(y.dtype), {k: [t.to(y.dtype) for t in of] for k, of in got.items()}
        parts = {name: got.get(name, []) for name in ("x", "y")}
    one = torch.ones(n, dtype=torch.float64, device=x.device)
    gains = [one] if weight is None else [weight.detach().double()]
    torchs = (nn.LayerNorm, nn.RMSNorm)
    if weight is not None and type(module) not in torchs:  # Nemotron's is a LayerNorm with 1 + w.
        gains.append((1 + weight.detach().float()).double())
    of_torch = isinstance(module, torchs)
    means = (isinstance(module, nn.LayerNorm),) if of_torch else (False, True)
    forms = list(itertools.product(gains, _eps(module, x), means))
    forms = forms if form is None else forms[form : form + 1]
    shift = torch.zeros_like(one) if bias is None else bias.detach().double()
    kept_16 = isinstance(module, nn.LayerNorm) and x.dtype in _INSIDE_16
    inside = _INSIDE_16[x.dtype] if kept_16 else INSIDE
    x_rows, y_rows = x.reshape(-1, n), y.reshape(-1, n)
    d_x, d_y = ([part.reshape(-1, n) for part in parts[name]] for name in ("x", "y"))
    d_gain = None if kept_16 else got.get("weight")
    laws, rests = [], []
    for gain, eps, centred in forms:
        sums = norm_sums(memory, x_rows, y_rows, d_x, d_y, gain, shift, eps, centred, inside)
        laws.append(_laws(sums, gain, centred, d_gain, x_rows.shape[0]))
        rests.append(sums.rest)
    rest = torch.stack(rests, 1)
    unlike = rest[0] / rest[1].clamp(min=torch.finfo(torch.float64).tiny)
    return laws, unlike, None, False


def _laws(
    sums: NormSums, gain: Tensor, centred: bool, d_gain: Optional[list[Tensor]], rows: int
) -> list[VectorLaw]:
    """Of one form that the module may have.  d_gain  parts of the gain's gradient"""
    found = [VectorLaw.of("dx:scale", sums.scale)]
    if centred:
        found.append(VectorLaw.of("dx:mean", sums.mean))
    if d_gain is not None:
        total: Any = sum(part.double() for part in d_gain)
        difference, variance, alike, sizes = sums.features
        found.append(
            VectorLaw(
                "y=dg", gain * total - difference,
                variance + gain.square() * _squares(d_gain) / 12,
                alike + max(INSIDE, _FP32 * rows) * sizes + _FLUSHED * rows * (1 + gain.abs()),
            )
        )  # fmt: skip
    return found
