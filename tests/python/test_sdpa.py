"""Goal: torch.nn.attention activates our attention as its flash implementation, and restores its
own; what cannot be served stays PyTorch's.
Method: fake tensors on a GPU that is not there pass through the real dispatcher, without gradients,
for which PyTorch wants the GPU; numbers and gradients come from the operator's function on the CPU.
On a GPU: test_attention_gpu.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention as slot
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import bellwether
from bellwether import sdpa
from bellwether._attention import dispatch

from attention_reference import inputs, with_gradients

if not sdpa.has_slot():
    pytest.skip("this torch has no such slot", allow_module_level=True)

flash_attention = torch.ops.aten._scaled_dot_product_flash_attention


@pytest.fixture(autouse=True)
def nothing_active() -> Iterator[None]:
    yield
    if slot.current_flash_attention_impl() is not None:
        slot.restore_flash_attention_impl()


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for module in (dispatch, sdpa):
        monkeypatch.setattr(module, "machine_lacks", lambda device: None)


def operators(dim: int = 64, **how: Any) -> set[str]:
    """Those that one call dispatches to."""
    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.add(str(func).split(".")[1])
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), Watch():
        q, k, v = (torch.empty(2, 4, 128, dim, dtype=torch.bfloat16, device="cuda") for _ in "qkv")
        o, lse, *_ = flash_attention(q, k, v, **how)
        assert o.shape == q.shape and lse.shape == q.shape[:3]
    return seen & {OURS, PYTORCHS}


OURS, PYTORCHS = "attention_forward", sdpa.OPERATOR


def test_activated_and_restored(a_gpu: None) -> None:
    sdpa.register()
    assert sdpa.NAME in slot.list_flash_attention_impls()
    assert slot.current_flash_attention_impl() is None
    assert operators(is_causal=True) == {PYTORCHS}
    for _ in range(2):  # Twice is once.
        slot.activate_flash_attention_impl(sdpa.NAME)
        assert slot.current_flash_attention_impl() == sdpa.NAME
        assert operators(is_causal=True) == {OURS}
    slot.restore_flash_attention_impl()
    assert slot.current_flash_attention_impl() is None
    assert operators(is_causal=True) == {PYTORCHS}


def test_unsupported_calls_stay_pytorchs(
    a_gpu: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_said", set())
    caplog.set_level(logging.WARNING, "bellwether")
    sdpa.register()
    slot.activate_flash_attention_impl(sdpa.NAME)
    for _ in range(2):
        assert operators(dropout_p=0.5) == {PYTORCHS}
        assert operators(dim=512) == {PYTORCHS}
    messages = [r.message for r in caplog.records if r.name == "bellwether"]
    assert len(messages) == 2 and "dropout_p is above 0" in messages[0]
    assert "heads have 512 elements" in messages[1]


@pytest.mark.parametrize(("mode", "center"), [("hp", False), ("fa", True)])
def test_provider_computes_what_attention_does(a_gpu: None, mode: str, center: bool) -> None:
    q, k, v, d_o = inputs("sink", heads=4, kv_heads=2)
    provider = sdpa._activate(mode, center)

    def given(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, lse, *_ = provider._flash_attention(q, k, v, is_causal=True, scale=0.3)
        assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
        return o

    def want(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return bellwether.attention(
            q, k, v, causal=True, mode=mode, center=center, scale=0.3, enable_gqa=True
        )

    for a, b in zip(with_gradients(given, (q, k, v), d_o), with_gradients(want, (q, k, v), d_o)):
        assert torch.equal(a, b)
    provider.remove()


def test_errors_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="mode is 'best'"):
        sdpa.register(mode="best")
    sdpa.register()
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match='"bellwether" cannot be activated: torch sees no'):
            slot.activate_flash_attention_impl(sdpa.NAME)
    assert slot.current_flash_attention_impl() is None
    monkeypatch.delattr(slot, "register_flash_attention_impl")
    with pytest.raises(RuntimeError, match=r"use bellwether\.stabilize"):
        sdpa.register()
