"""Goal: products in 8 bits are those of the rounded numbers, with the scale of earlier steps;
attention in bf16 has FlashAttention's delta with a share of 1, and one that leaks nothing with 0.
Method: single calls beside the same in fp64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from instabilities.fp8 import FORMATS, HISTORY, Linear8
from instabilities.rounding import RoundedAttention


def multiplied(module: Linear8, x: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = module(x)
    d_x, d_w = torch.autograd.grad(y, (x, module.weight), d_y)
    return y.detach(), d_x, d_w


def in_8_bits(t: Tensor, side: str, largest: float, factor: float = 1.0) -> Tensor:
    """What is multiplied in its place, by PyTorch's own rounding."""
    most = torch.finfo(FORMATS[side]).max
    scale = factor * most / largest
    return (t.detach() * scale).clamp(-most, most).to(FORMATS[side]).double() / scale


@pytest.mark.parametrize("factor", [1.0, 8.0, 1e-5])
def test_products_are_those_of_8_bits(factor: float) -> None:
    torch.manual_seed(0)
    module = Linear8(32, 48)
    x, d_y = torch.randn(2, 16, 32), 1e-4 * torch.randn(2, 16, 48)
    for step in range(HISTORY + 2):
        # The largest ones are forgotten behind HISTORY steps.
        multiplied(module, x * (3 if step == 0 else 1), d_y)
    for side in FORMATS:
        module.scales[side].factor = factor
    got = multiplied(module, 0.5 * x, d_y)
    q_x = in_8_bits(0.5 * x, "x", float(x.abs().max()), factor).view(-1, 32)
    q_w = in_8_bits(module.weight, "w", float(module.weight.detach().abs().max()), factor)
    q_d = in_8_bits(d_y, "dy", float(d_y.abs().max()), factor).view(-1, 48)
    for mine, wanted in zip(got, (q_x @ q_w.T, q_d @ q_w, q_d.T @ q_x)):
        assert torch.allclose(mine.double().view_as(wanted), wanted, rtol=1e-5, atol=1e-5 * float(
            wanted.abs().max()))  # fmt: skip


def test_a_scale_that_stays_is_that_of_its_step() -> None:
    module = Linear8(16, 16)
    scale = module.scales["x"]
    for step, size in enumerate((1.0, 2.0, 4.0)):
        scale.follows = step < 1
        _, of = scale.quantised(torch.full((4, 16), size))
        assert float(of) == pytest.approx(1.0 if step == 0 else 1 / 448)


def test_the_share_of_the_rounding_is_that_of_delta() -> None:
    torch.manual_seed(1)
    kernel = RoundedAttention()
    # Keys with a common mode, and values of one sign: many rows have a maximum that comes again.
    q, k, v = (torch.randn(2, 1, 64, 32) for _ in range(3))
    k, v = k + 40, v.abs()
    q, k, v = (t.bfloat16().requires_grad_() for t in (q, k, v))
    d_o = torch.randn(2, 1, 64, 32).bfloat16()
    leaks, outputs = [], []
    for share in (0.0, 1.0):
        kernel.share = share
        o = kernel(q, k, v)
        outputs.append(o)
        (d_k,) = torch.autograd.grad(o, k, d_o)
        # Row sums of dS are 0 where delta fits, and with them the sum of dK over the keys.
        leaks.append(float(d_k.double().sum(2).norm() / d_k.double().norm()))
    assert torch.equal(*outputs)
    assert 3 * leaks[0] < leaks[1], leaks
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(t.double() for t in (q, k, v)), is_causal=True
    )
    assert torch.allclose(outputs[0].double(), exact, rtol=2**-7, atol=2**-7)
