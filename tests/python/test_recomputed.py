"""Goal: a checkpointed region that computes something else the second time is named, and one that
does so by intention is left alone.  No bit of the training changes.
Method: small trainings with checkpoints of both kinds, whose forward is damaged once.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

import bellwether
from bellwether._hook.layer.linear_tap import Held, LinearTap, Taps
from bellwether._step import linears
from bellwether._step.linears import Recomputations

from recording import Recording
from tap_host import Host

WIDTH, STEPS = 48, 40
KINDS = ("reentrant", "non-reentrant")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.flip = False  # A bit of what goes into `down`, in the next forward.

    def forward(self, x: Tensor) -> Tensor:
        inner = self.drop(torch.relu(self.up(self.norm(x))))
        if self.flip:
            self.flip = False
            with torch.no_grad():
                inner.detach().view(-1)[7] += 1
        return x + self.down(inner)  # type: ignore[no-any-return]


def through(block: Block, x: Tensor, kind: str, **how: Any) -> Tensor:
    found: Tensor = checkpoint(block, x, use_reentrant=kind == "reentrant", **how)
    return found


def asked(block: Block, x: Tensor, kind: str, calls: int = 1, **how: Any) -> list[bool]:
    """Whether the inputs of `up` and `down` were the same."""
    host, found = Host(), []
    taps = Taps(host)
    for row, layer in enumerate((block.up, block.down)):
        tap = LinearTap(
            host, row, layer, Held(1 << 30), lambda _: None, lambda *_: None,
            recomputed=lambda row, same: found.append((row, bool(same))),
        )  # fmt: skip
        taps.add(layer, tap)
    for _ in range(calls):
        x = through(block, x, kind, **how)
    x.float().sum().backward()
    taps.close()
    assert not host.errors
    return [same for _, same in sorted(found)]


def some(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, 8, WIDTH).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_region_computes_the_same_twice(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert asked(Block().to(dtype), some(dtype), kind) == [True, True]
    assert asked(Block(0.3).to(dtype), some(dtype), kind) == [True, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_element_that_differs_is_seen(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    block = Block().to(dtype)
    block.flip = True
    assert asked(block, some(dtype), kind) == [True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_random_numbers_that_are_not_kept_differ(kind: str) -> None:
    torch.manual_seed(0)
    assert asked(Block(0.3), some(), kind, preserve_rng_state=False) == [True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_is_called_again_is_left_out(kind: str) -> None:
    assert asked(Block(), some(), kind, calls=2) == []


def test_calls_outside_of_regions_are_left_out() -> None:
    host, block, found = Host(), Block(), []
    taps = Taps(host)
    taps.add(block.up, LinearTap(
        host, 0, block.up, Held(1 << 30), lambda _: None, lambda *_: None,
        recomputed=lambda *told: found.append(told),
    ))  # fmt: skip
    block(some()).sum().backward()
    taps.close()
    assert not found and not host.errors


def test_selective_checkpoints_stay_as_they_are() -> None:
    """What they keep they count by the operations that are called."""
    if not hasattr(checkpoints, "create_selective_checkpoint_contexts"):
        pytest.skip("this torch has none")
    kept = functools.partial(
        checkpoints.create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]
    )

    def gradients(watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        block, x = Block(), some()
        if watched:
            assert asked(block, x, "non-reentrant", context_fn=kept) == []
        else:
            through(block, x, "non-reentrant", context_fn=kept).sum().backward()
        return [p.grad for p in (x, *block.parameters()) if p.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(gradients(False), gradients(True)))


def test_a_difference_counts_behind_inputs_that_were_the_same() -> None:
    job = Recomputations()
    for _ in range(job.SAME_LEAST):
        assert job.judged({"a": True}) == {"a": True}
    assert job.judged({"a": False, "b": True, "c": False}) == {"a": False, "b": True}
    early = Recomputations()
    assert early.judged({"a": True}) and early.judged({"b": False}) == {} and not early.ended
    assert early.judged({"a": False}) == {} and early.ended
    assert early.judged({"a": True}) == {}


def train(
    kind: str, path: Optional[Path], flip_at: Optional[int], **how: Any
) -> tuple[list[Tensor], Any]:
    torch.manual_seed(3)
    blocks = nn.ModuleList(Block(0.3 if how else 0.0) for _ in range(2))
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.01)
    handle, status = None, None
    if path is not None:
        handle = bellwether.attach(
            blocks, record=str(path), run="again", every=1, overhead_budget=1e9
        )
    for step in range(STEPS):
        x = some()
        for block in blocks:
            assert isinstance(block, Block)
            block.flip = flip_at is not None and step >= flip_at
            x = through(block, x, kind, **how)
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if handle is not None:
            handle.step()
    if handle is not None:
        assert handle.why_off == "", handle.why_off
        status = handle.status()["linear"]
        handle.detach()
    return [p.detach() for p in blocks.parameters()], status


@pytest.mark.parametrize("kind", KINDS)
def test_a_flip_in_the_forward_is_told(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recomputations, "SAME_LEAST", 16)
    path = tmp_path / "a.bwrun"
    (plain, _), (watched, status) = train(kind, None, 25), train(kind, path, 25)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched))
    assert set(status["faults"]) == {"0.down", "1.down"}
    assert all(text == linears.DIFFERS for text in status["faults"].values())
    told = [
        message.event.text
        for message in Recording(path, ended=True).messages
        if message.WhichOneof("body") == "event" and linears.DIFFERS in message.event.text
    ]
    assert len(told) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_region_that_never_computes_the_same_is_let_alone(kind: str, tmp_path: Path) -> None:
    how = {"preserve_rng_state": False}
    (plain, _), (watched, status) = (
        train(kind, None, None, **how), train(kind, tmp_path / "a.bwrun", None, **how),
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(plain, watched))
    assert not status["faults"] and status["recomputed"] > 0
    left_out = {f"{block}.down: {linears.NOT_THE_SAME}" for block in (0, 1)}
    assert {why for why in status["left_out"] if linears.NOT_THE_SAME in why} == left_out
