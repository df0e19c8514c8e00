"""Linear layers that multiply in 8 bits: E4M3 forward, E5M2 for gradients, with delayed scaling.

A tensor is multiplied by one scale before it has 8 bits.  The scale puts the largest element of its
last HISTORY steps at the largest number of the format, as Transformer Engine does.  In the first
step it is 1.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

HISTORY = 16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {"x": E4M3, "w": E4M3, "dy": E5M2}


class Scale:
    """Of one tensor.  For faults: `factor` multiplies it, and `follows` False lets it stay."""

    def __init__(self, side: str) -> None:
        self.format, self.factor, self.follows = FORMATS[side], 1.0, True
        self._largest: deque[float] = deque(maxlen=HISTORY)
        self._scale = 1.0

    def quantised(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """(`t` in 8 bits, what these are multiplied by to be `t` again), both detached."""
        most = torch.finfo(self.format).max
        scale = self._scale * self.factor
        q = (t.float() * scale).clamp_(-most, most).to(self.format)
        if self.follows:
            self._largest.append(float(t.abs().amax()))
            largest = max(self._largest)
            # Zeros, or a number that is none, leave the scale where it is.
            if 0 < largest < torch.inf:
                self._scale = most / largest
        return q, torch.tensor(1 / scale, device=t.device)


def _product(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b, where b's columns are made contiguous."""
    b = b.t().contiguous().t()
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scales: dict[str, Scale]) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        (q_x, of_x), (q_w, of_w) = scales["x"].quantised(rows), scales["w"].quantised(weight)
        ctx.save_for_backward(q_x, of_x, q_w, of_w)
        ctx.scale, ctx.shape = scales["dy"], x.shape
        return _product(q_x, of_x, q_w.t(), of_w, x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (d_y,) = gradients
        q_x, of_x, q_w, of_w = ctx.saved_tensors
        q, of = ctx.scale.quantised(d_y.reshape(-1, d_y.shape[-1]))
        d_x = _product(q, of, q_w, of_w, d_y.dtype)
        d_w = _product(q.t().contiguous(), of, q_x, of_x, d_y.dtype)
        return d_x.view(ctx.shape), d_w, None


class Linear8(nn.Linear):
    """No bias."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(inner, outer, bias=False)
        self.scales = {side: Scale(side) for side in FORMATS}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Multiplied.apply(x, self.weight, self.scales)  # type: ignore[no-untyped-call]
        return y
