"""Goal: nn.MultiheadAttention that is asked for its weights is measured whole, and trains the same
bit for bit.
Method: one module with each kind of mask, its statistics against fp64 of q, k and v as its own
projection gives them.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from comparing import compare
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import bellwether

from definitions import of_tensors
from recording import Recording

CAUSAL = torch.ones(9, 9, dtype=torch.bool).triu(1)
PADDED = torch.arange(9) >= torch.tensor([9, 6, 7])[:, None]
BIAS = torch.randn(12, 9, 9, generator=torch.Generator().manual_seed(0))
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"attn_mask": CAUSAL},
    "added": {"attn_mask": torch.zeros(9, 9).masked_fill(CAUSAL, -torch.inf)},
    "each head its own": {"attn_mask": BIAS},
    "padding": {"key_padding_mask": PADDED},
    "both": {"attn_mask": CAUSAL, "key_padding_mask": PADDED},
}


class Block(nn.Module):
    def __init__(self, options: dict[str, Any], **more: Any) -> None:
        super().__init__()
        self.inlet = nn.Linear(32, 32)
        self.attention = nn.MultiheadAttention(32, 4, **more)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        y, weights = self.attention(x, x, x, **self.options)
        return x + y + 0.0 * weights.sum()


def trained(
    model: Block, path: Optional[Path], compiled: bool = False
) -> tuple[list[Tensor], Any, Tensor]:
    """(losses and weights, the monitor, the input of the last step)"""
    monitor = None
    if path is not None:
        monitor = bellwether.attach(
            model, record=str(path), run="multihead", every=1, rows=0, overhead_budget=1e9
        )
    if compiled:
        model.compile(fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, x = [], torch.empty(0)
    for step in range(3):
        x = torch.randn(9, 3, 32, generator=torch.Generator().manual_seed(step))
        x = x.transpose(0, 1) if model.attention.batch_first else x
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        loss = model(x).square().mean()
        loss.backward()
        if step == 2:
            model.before = before  # type: ignore[assignment]
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found + [p.detach() for p in model.parameters()], monitor, x


def expected(model: Block, x: Tensor) -> Any:
    """From the weights of the last step, with the gradient of what the projection gets."""
    known = model.attention
    fresh = Block(
        model.options, batch_first=known.batch_first, add_bias_kv=known.bias_k is not None,
        add_zero_attn=known.add_zero_attn,
    )  # fmt: skip
    fresh.load_state_dict(model.before)  # type: ignore[arg-type]
    a = fresh.attention
    h = fresh.inlet(x)
    h = h.transpose(0, 1) if a.batch_first else h
    q, k, v = (
        t.unflatten(-1, (4, 8)).permute(1, 2, 0, 3)
        for t in F._in_projection_packed(h, h, h, a.in_proj_weight, a.in_proj_bias)  # type: ignore[attr-defined]
    )
    if a.bias_k is not None:
        k, v = (
            torch.cat([t, b.view(1, 4, 1, 8).expand(3, -1, -1, -1)], 2)
            for t, b in ((k, a.bias_k), (v, a.bias_v))
        )
    if a.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    bias = torch.zeros(3, 4, 9, 9)
    mask, padding = model.options.get("attn_mask"), model.options.get("key_padding_mask")
    if mask is not None and mask.dtype == torch.bool:
        bias = bias.masked_fill(mask, -torch.inf)
    elif mask is not None:
        bias = bias + (mask.view(3, 4, 9, 9) if mask.dim() == 3 else mask)
    if padding is not None:
        bias = bias.masked_fill(padding[:, None, None], -torch.inf)
    bias = F.pad(bias, (0, k.shape[2] - 9))
    o = torch.softmax(8**-0.5 * q @ k.mT + bias, -1) @ v
    o.retain_grad()
    y = a.out_proj(o.permute(2, 0, 1, 3).flatten(2))
    (h + y).square().mean().backward()
    assert o.grad is not None
    return of_tensors(q, k, v, o, o.grad, 8**-0.5, False, bias)


def measured(tmp_path: Path, mask: dict[str, Any], compiled: bool = False, **more: Any) -> None:
    """Trains the same bits as without us, and each number is that of fp64."""
    runs = []
    for path in (None, tmp_path / "a.bwrun"):
        torch.manual_seed(1)
        torch._dynamo.reset()
        model = Block(mask, **more)
        runs.append(trained(model, path, compiled))
    (plain, _, _), (watched, monitor, x) = runs
    assert all(torch.equal(a, b) for a, b in zip(plain, watched))
    assert monitor.flush(20)
    status = monitor.status()
    assert status["errors"] == 0 and not status["layers"][0]["notes"], status
    monitor.detach()
    recorded = Recording(tmp_path / "a.bwrun").steps()[2]
    want = expected(model, x)
    for signal in want.values:
        if not signal.startswith("delta_"):  # The output of another computation rounds otherwise.
            compare(signal, recorded[signal][0], want, float(want.values["rows"][0]))
    assert (recorded["key_leak_sum"] <= 1e-5 * recorded["key_gradient_sum"]).all()
    assert (recorded["key_gradient_sum"] > 0).all()
    relative = recorded["delta_error_abs_sum"] / recorded["delta_abs_sum"]
    assert (relative < 1e-5).all(), relative
    assert torch.allclose(torch.tensor(recorded["delta_abs_sum"][0]),
                          want.values["delta_abs_sum"].float(), rtol=1e-4)  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_all_signals_are_measured(name: str, batch_first: bool, tmp_path: Path) -> None:
    measured(tmp_path, MASKS[name], batch_first=batch_first)


@pytest.mark.parametrize("added", ["add_bias_kv", "add_zero_attn", "both"])
def test_added_keys_are_measured_whole(added: str, tmp_path: Path) -> None:
    names = ("add_bias_kv", "add_zero_attn") if added == "both" else (added,)
    measured(tmp_path, MASKS["both"], **dict.fromkeys(names, True))


@pytest.mark.parametrize("name", ["each head its own", "both"])
def test_a_compiled_call_is_measured_whole(name: str, tmp_path: Path) -> None:
    more = {"add_bias_kv": True, "add_zero_attn": True} if name == "both" else {}
    measured(tmp_path, MASKS[name], compiled=True, batch_first=True, **more)


def test_without_weights_its_inner_call_is_seen(tmp_path: Path) -> None:
    class Plain(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inlet(x)
            return x + self.attention(x, x, x, need_weights=False)[0]

    *_, monitor, _ = trained(Plain({}), tmp_path / "a.bwrun")
    assert [layer.fired for layer in monitor.layers] == [3]
    assert monitor.layers[0].seen.kernel != "nn.MultiheadAttention"
    monitor.detach()


def test_errors_of_the_module_are_its_own(tmp_path: Path) -> None:
    model = Block({"attn_mask": torch.zeros(2, 2)})
    monitor = bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="wrong", every=1)
    with pytest.raises(RuntimeError, match="The shape of the 2D attn_mask"):
        model(torch.randn(9, 3, 32))
    assert monitor.status()["errors"] == 0
    monitor.detach()


class Passing(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["none", "both"])
def test_a_call_that_modes_of_torch_make_is_measured_whole(name: str, tmp_path: Path) -> None:
    with torch.device("cpu"), Passing():
        measured(tmp_path, MASKS[name], batch_first=True)


def test_a_call_that_a_mode_keeps_is_not_measured(tmp_path: Path) -> None:
    class Keeping(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function is F.multi_head_attention_forward:
                return args[0], args[0].sum()
            return function(*args, **(kwargs or {}))

    model = Block({})
    with Keeping():
        plain, _, _ = trained(copy.deepcopy(model), None)
        found, monitor, _ = trained(model, tmp_path / "a.bwrun")
    assert all(torch.equal(a, b) for a, b in zip(plain, found) if a is not None)
    assert monitor.status()["errors"] == 0
    assert [layer.fired for layer in monitor.layers] == [0]
    monitor.detach()
