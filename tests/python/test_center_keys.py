"""Goal: center_keys is the projection it says, with its gradient, on every path.
Method: against its definition in double; softmax must not notice.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Optional

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import bellwether
from bellwether._attention import center_keys as center_keys_module

from models import Attention, Model, Shape, batch
from recording import Recording

CU = torch.tensor([0, 0, 3, 4, 11], dtype=torch.int64)


def keys(dtype: torch.dtype, batch: int = 1) -> Tensor:
    torch.manual_seed(2)
    return (torch.randn(batch, 3, 11, 5) + 4).to(dtype)


def defined(k: Tensor, cu: Optional[Tensor]) -> Tensor:
    bounds = [0, k.shape[2]] if cu is None else cu.tolist()
    parts = [k[:, :, a:b].double() for a, b in zip(bounds, bounds[1:])]
    return torch.cat([p - p.mean(dim=2, keepdim=True) if p.shape[2] else p for p in parts], dim=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("cu", [None, CU, CU.int()])
def test_is_its_definition_rounded_once(dtype: torch.dtype, cu: Optional[Tensor]) -> None:
    k = keys(dtype)
    got = bellwether.center_keys(k, cu)
    assert got.dtype == dtype
    want = defined(k, cu)
    torch.testing.assert_close(got.double(), want.to(dtype).double(), rtol=0, atol=1e-6)
    # The composition, which other devices run, differs by its fp32 mean at most.
    composed = center_keys_module._composed(k, None if cu is None else cu.int())
    torch.testing.assert_close(composed.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("cu", [None, CU])
def test_the_gradient_passes_through_the_mean(cu: Optional[Tensor]) -> None:
    for dtype in (torch.float32, torch.float64):
        k = keys(dtype).requires_grad_()
        gradient = torch.randn_like(k)
        bellwether.center_keys(k, cu).backward(gradient)
        assert k.grad is not None
        torch.testing.assert_close(k.grad, defined(gradient, cu).to(dtype))
    assert torch.autograd.gradcheck(
        lambda k: bellwether.center_keys(k, cu), keys(dtype).requires_grad_()
    )


def test_softmax_does_not_notice() -> None:
    k = keys(torch.float32, batch=2)
    q, v = torch.randn_like(k), torch.randn_like(k)
    for causal in (False, True):
        want = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        got = F.scaled_dot_product_attention(q, bellwether.center_keys(k), v, is_causal=causal)
        torch.testing.assert_close(got, want)


def test_compiles_whole_and_takes_any_strides() -> None:
    k = keys(torch.bfloat16, batch=2)
    torch._dynamo.reset()
    compiled = torch.compile(bellwether.center_keys, fullgraph=True, backend="aot_eager")
    want = bellwether.center_keys(k)
    for other in (k, k.transpose(1, 2).contiguous().transpose(1, 2), k.mT.contiguous().mT):
        assert torch.equal(bellwether.center_keys(other), want)
        assert torch.equal(compiled(other), want)


def test_mismatched_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="3 dimensions"):
        bellwether.center_keys(torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match="batch is 2"):
        bellwether.center_keys(keys(torch.float32, batch=2), CU)
    with pytest.raises(ValueError, match=r"cu_seqlens is \[1\], but must be \[sequences \+ 1\]"):
        bellwether.center_keys(keys(torch.float32), CU[:1])
    with pytest.raises(ValueError, match="cu_seqlens is on cpu, but must be on meta"):
        bellwether.center_keys(keys(torch.float32).to("meta"), CU)
    assert bellwether.center_keys(torch.zeros(2, 3, 0, 5)).shape == (2, 3, 0, 5)


def test_without_a_kernel_pytorch_computes_and_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    center_keys_module._warn_once.cache_clear()
    caplog.set_level(logging.WARNING, "bellwether")
    k = keys(torch.float32)
    want = bellwether.center_keys(k)
    assert caplog.messages == []
    monkeypatch.setattr(
        center_keys_module, "machine_lacks", lambda device: "the library is missing"
    )
    torch._dynamo.reset()
    compiled = torch.compile(bellwether.center_keys, fullgraph=True, backend="aot_eager")
    for function in (bellwether.center_keys, compiled):
        torch.testing.assert_close(function(k), want)
    assert caplog.messages == [
        "keys are centred by PyTorch's operations, not by one kernel: the library is missing"
    ]


class Centring(Attention):
    centres = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        k = bellwether.center_keys(k) if Centring.centres else k
        return super().attend(q, k, v, gqa)


def test_a_watched_run_tells_whether_its_keys_are_centred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel goes on leaking, but what leaks does not reach the weights: no drift."""
    shape = Shape(layers=2)
    model = Model(shape, kind=Centring)
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="c") as monitor:
        for step, centres in enumerate((True, True, False, False, True)):
            monkeypatch.setattr(Centring, "centres", centres)
            model(batch(shape, step)).sum().backward()
            monitor.step()
    recording = Recording(tmp_path / "a.bwrun", ended=True)
    assert recording.hello.run.attention.centred
    kinds = {value: name for name, value in recording.event_names.items()}
    told = [(e.step, kinds[e.kind]) for e in recording.events if "CENTRING" in kinds[e.kind]]
    assert told == [(2, "EVENT_KIND_CENTRING_OFF"), (4, "EVENT_KIND_CENTRING_ON")]
