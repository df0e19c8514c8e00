"""The laws of RMSNorm and LayerNorm over the last dimension.

With r^2 = mean x^2 + eps, a gain g and y = g x / r, for each row

    <x, dx> = <y, dy> eps / r^2               the result does not change with the scale of x

and for each feature g dg = sum of y dy.  LayerNorm has x - mean and y - b instead, and the sum of a
row's dx is zero.  Some modules store g - 1, and a name does not tell whether the mean is taken off:
which one it is, is told by y.  What the mean is taken off is rounded as numbers of its size are.

PyTorch's LayerNorm for CPUs keeps mean and 1 / r of tensors in 16 bits in that type, and adds up dg
in it.  So dg is off by 0.5 to 36 % of its absolute values (2.13, bf16), and is left out there.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor, nn

from .edge_tap import Gradients, Laws, VectorLaw
from .row_sums import CHUNK, power_of_two, significand_bits

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


def _squares(parts: list[Tensor], here: slice, n: int) -> Tensor:
    """Of the distances of neighbours, added over the parts."""
    found: Any = 0.0
    for part in parts:
        rows = part.reshape(-1, n)[here]
        found = found + (power_of_two(rows) * 2.0 ** -significand_bits(rows)).double().square()
    return found  # type: ignore[no-any-return]


def norm_laws(module: nn.Module, x: Tensor, y: Tensor, got: Gradients) -> Laws:
    """None where it is none of those."""
    n = x.shape[-1]
    weight = module._parameters.get("weight")
    bias = module._parameters.get("bias")
    if y.shape != x.shape or (weight is not None and weight.shape != (n,)):
        return None
    gains = [x.new_ones(n)] if weight is None else [weight.detach(), 1 + weight.detach().float()]
    both = not isinstance(module, (nn.LayerNorm, nn.RMSNorm))
    means = (False, True) if both else (isinstance(module, nn.LayerNorm),)
    forms = [
        (gain.double(), eps, centred)
        for gain in gains for eps in _eps(module, x) for centred in means
    ]  # fmt: skip
    shift = x.new_zeros(n).double() if bias is None else bias.detach().double()
    laws, unlike = [], []
    in_16_bits = isinstance(module, nn.LayerNorm) and x.dtype in _INSIDE_16
    for gain, eps, centred in forms:
        form = _Form(n, gain, shift, eps, centred, _INSIDE_16[x.dtype] if in_16_bits else None)
        step = max(1, CHUNK // n)
        for at in range(0, x.numel() // n, step):
            form.add(slice(at, at + step), x, y, got)
        laws.append(form.laws(got.get("weight")))
        unlike.append(form.unlike())
    return laws, torch.stack(unlike), None, False


class _Form:
    def __init__(
        self, n: int, gain: Tensor, shift: Tensor, eps: float, centred: bool,
        inside_16: Optional[float],
    ) -> None:  # fmt: skip
        self.n, self.gain, self.shift, self.eps, self.centred = n, gain, shift, eps, centred
        self.in_16_bits = inside_16 is not None
        self.inside = INSIDE if inside_16 is None else inside_16
        self.count = 0
        self.rows: list[Tensor] = []  # [3, rows] of each chunk.
        self.means: list[Tensor] = []
        self.features = gain.new_zeros(3, n)
        self.sizes = gain.new_zeros(n)
        self.rest = gain.new_zeros(2)

    def add(self, here: slice, x: Tensor, y: Tensor, got: Gradients) -> None:
        """Some rows."""
        n = self.n
        d_x: Any = sum(part.reshape(-1, n)[here].double() for part in got["x"])
        d_y: Any = sum(part.reshape(-1, n)[here].double() for part in got["y"])
        rows, made = x.reshape(-1, n)[here].double(), y.reshape(-1, n)[here]
        mean = rows.mean(1, keepdim=True) if self.centred else rows.new_zeros(len(rows), 1)
        rows = rows - mean
        squares = rows.square().mean(1) + self.eps
        # x / r and mean / r, of which only the difference is left, are as many times larger.
        taken_off = mean.abs() / squares.sqrt()[:, None]
        within = self.inside * (1 + 2 * taken_off[:, 0])
        made_ulp = _squares([y], here, n)
        without = made.double() - self.shift
        product = without * d_y
        small = self.eps / squares
        d_x_ulp = _squares(got["x"], here, n)
        # What dx is made of: sums of these sizes cancel in it.
        size = (self.gain * d_y).norm(dim=1) / squares.sqrt()
        variance = (rows.square() * d_x_ulp).sum(1)
        d_y_ulp = _squares(got["y"], here, n)
        # dx is the gradient less its mean and its part along x, by r, each product flushed.
        flushed = _FLUSHED * (1 + 2 / squares.sqrt())
        along = _FLUSHED / squares
        inside = (d_y.square() * made_ulp + without.square() * d_y_ulp).sum(1)
        self.rows.append(
            torch.stack([
                (rows * d_x).sum(1) - product.sum(1) * small,
                (variance + small.square() * inside) / 12,
                within * rows.norm(dim=1) * size
                + flushed * rows.abs().sum(1) + along * rows.square().sum(1),
            ])
        )  # fmt: skip
        if self.centred:
            otherwise = within * n**0.5 * size + flushed * n + along * rows.abs().sum(1)
            self.means.append(torch.stack([d_x.sum(1), d_x_ulp.sum(1) / 12, otherwise]))
        # A product may be rounded before it is added up.
        rounded = product.abs().to(y.dtype)
        product_ulp = (power_of_two(rounded) * 2.0 ** -significand_bits(rounded)).double().square()
        self.count += len(product)
        self.sizes += product.abs().sum(0)
        self.features += torch.stack([
            product.sum(0),
            (d_y.square() * made_ulp + product_ulp).sum(0) / 12,
            # Features may be alike in all rows, and be added up one by one.
            (d_y.abs() * made_ulp.sqrt() + product_ulp.sqrt()).sum(0) / 2
            + INSIDE * (2 * taken_off * self.gain.abs() * d_y.abs()).sum(0),
        ])  # fmt: skip
        expected = rows / squares.sqrt()[:, None] * self.gain + self.shift
        self.rest += torch.stack([
            (made.double() - expected).square().sum(), made.double().square().sum(),
        ])  # fmt: skip

    def unlike(self) -> Tensor:
        return self.rest[0] / self.rest[1].clamp(min=torch.finfo(torch.float64).tiny)

    def laws(self, d_gain: Optional[list[Tensor]]) -> list[VectorLaw]:
        found = [VectorLaw("dx:scale", *torch.cat(self.rows, 1))]
        if self.means:
            found.append(VectorLaw("dx:mean", *torch.cat(self.means, 1)))
        if d_gain is not None and not self.in_16_bits:
            total: Any = sum(part.double() for part in d_gain)
            ulp = _squares(d_gain, slice(None), self.n)[0]
            difference, variance, alike = self.features
            found.append(
                VectorLaw(
                    "y=dg", self.gain * total - difference,
                    variance + self.gain.square() * ulp / 12,
                    alike + max(INSIDE, _FP32 * self.count) * self.sizes
                    + _FLUSHED * self.count * (1 + self.gain.abs()),
                )
            )  # fmt: skip
        return found
