"""Goal: a bit of a weight that flips between an optimizer's step and the next sampled forward is
named, with its element.  What a trainer changes itself is no flip, and training stays the same.
Method: each bit flipped in tensors of all types; trainings in which one bit is flipped behind
autograd's back, and trainers that change weights between steps, read back from their recordings.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from torch import Tensor, nn

import bellwether
from bellwether._kernels.bits import CHUNK, INTEGERS, sum_of_bits
from bellwether._step.at_rest import FLIPS_MAX, AtRest, flipped

from models import Model, Shape, batch
from recording import Recording, replayed_alerts

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def flip(tensor: Tensor, at: int, bit: int) -> None:
    """As a broken memory would: no version counter of torch knows."""
    bits = tensor.data.view(-1).view(INTEGERS[tensor.element_size()])
    top = 8 * tensor.element_size() - 1
    bits[at] ^= (1 << bit) if bit < top else -(1 << top)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_bit_is_found_from_the_difference_of_sums(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    values = torch.randn(5000).to(dtype)
    before = sum_of_bits(values)
    for at in (0, 17, 4999):
        for bit in range(8 * values.element_size()):
            flip(values, at, bit)
            assert flipped(values, sum_of_bits(values) - before) == (at, bit)
            flip(values, at, bit)


def test_two_changed_elements_are_no_flip() -> None:
    torch.manual_seed(1)
    values = torch.randn(5000)
    before = sum_of_bits(values)
    for change in (values[:2].neg_, values.sort, lambda: values.mul_(1.0001)):
        change()
        difference = sum_of_bits(values) - before
        assert not difference or flipped(values, difference) is None


def test_each_element_has_its_turn_within_sixteen_samples() -> None:
    model = nn.Sequential(*(nn.Linear(700, 800, bias=False) for _ in range(9)))
    rest = AtRest(lambda: model)
    total = sum(p.numel() for p in model.parameters())
    for sample in range(16):
        rest.optimizer_stepped()
        assert rest.pending and rest.forward_begins() == []
        assert rest.compared <= (sample + 1) * (total // 16 + CHUNK)
    assert rest.elements == total <= rest.compared


def rows_of(rest: AtRest, between: Callable[[], Any] = lambda: None) -> dict[str, float]:
    """A sample: what the server gets, by parameter."""
    rest.optimizer_stepped()
    between()
    rest.forward_begins()
    sample = rest.sample()
    rows = [] if sample is None else sample.law_rows()
    assert all(row.law == "W:at-rest" for row in rows)
    return {row.place: row.difference for row in rows}


def test_a_parameter_that_held_is_told_as_right() -> None:
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False))
    rest = AtRest(lambda: model)
    weight = model[0].weight
    assert rows_of(rest) == {}
    assert rows_of(rest, lambda: flip(weight, 7, 30)) == {"0.weight": 1.0}
    assert rows_of(rest, lambda: flip(weight, 8, 30)) == {"0.weight": 1.0}
    # Each time, so that the server hears of it as long as it may still wait.
    for _ in range(3):
        assert rows_of(rest) == {"0.weight": 0.0}
    assert rows_of(rest, lambda: flip(weight, 7, 30)) == {"0.weight": 1.0}


def test_only_the_piece_that_flipped_speaks_for_itself() -> None:
    model = nn.Sequential(nn.Linear(1000, 1000, bias=False))
    rest = AtRest(lambda: model)
    turns = -(-model[0].weight.numel() // max(1 << 18, CHUNK))
    assert turns > 1
    assert rows_of(rest, lambda: flip(model[0].weight, 3, 30)) == {"0.weight": 1.0}
    for _ in range(turns - 1):
        assert rows_of(rest) == {}
    assert rows_of(rest) == {"0.weight": 0.0}


def test_flips_of_a_trainer_that_changes_weights_are_taken_back() -> None:
    model = nn.Sequential(nn.Linear(100, 100, bias=False))
    rest = AtRest(lambda: model)
    assert rows_of(rest, lambda: flip(model[0].weight, 7, 30)) == {"0.weight": 1.0}
    assert rows_of(rest, lambda: model[0].weight.data.mul_(2)) == {"0.weight": 0.0}
    assert rest.not_measured == "0.weight is changed between steps"
    assert rows_of(rest) == {"0.weight": 0.0}


def test_flipped_parameters_that_are_told_are_bounded() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(FLIPS_MAX + 3)))
    rest = AtRest(lambda: model)

    def flip_all() -> None:
        for layer in model:
            flip(layer.weight, 7, 30)

    assert len(rows_of(rest, flip_all)) == FLIPS_MAX
    assert set(rows_of(rest).values()) == {0.0}


def test_a_model_that_is_gone_is_not_looked_at() -> None:
    model: Optional[nn.Module] = nn.Linear(100, 100)
    reference = weakref.ref(model)
    rest = AtRest(lambda: reference())
    rest.optimizer_stepped()
    del model
    assert rest.forward_begins() == []
    rest.optimizer_stepped()
    assert not rest.pending


def trained(
    path: Path, between: Callable[[nn.Module, int], Any], every: int = 1, explicit: bool = True,
    **settings: Any,
) -> tuple[nn.Module, Any]:  # fmt: skip
    """A training of 7 steps with something done between them, and its status."""
    torch.manual_seed(0)
    shape = Shape(fused=False)
    model = Model(shape)
    monitor = bellwether.attach(
        model, run="rest", record=str(path), every=every, overhead_budget=1e9, **settings
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(7):
        loss = model(batch(shape, step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if explicit:
            monitor.step(loss=float(loss.detach()))
        between(model, step)
    status = monitor.status()
    assert status["errors"] == 0 and status["live"], status["last_error"]
    monitor.detach()
    return model, status["rest"]


def damage(at: int) -> Callable[[nn.Module, int], None]:
    def between(model: nn.Module, step: int) -> None:
        if step == at:
            flip(model.blocks[1].attention.out.weight, 70, 30)  # type: ignore[index,union-attr]

    return between


@pytest.mark.parametrize(
    "every, at, explicit", [(1, 3, True), (3, 2, True), (3, 5, False), (1, 2, False)]
)
def test_a_flipped_bit_is_told_before_it_is_used(
    every: int, at: int, explicit: bool, tmp_path: Path
) -> None:  # fmt: skip
    _, rest = trained(tmp_path / "a.bwrun", damage(at), every, explicit)
    name = "blocks.1.attention.out.weight"
    assert list(rest["flips"]) == [name]
    assert rest["flips"][name].startswith("bit 30 of element [")
    recording = Recording(tmp_path / "a.bwrun", ended=True)
    (event,) = [e for e in recording.events if "has flipped at rest" in e.text]
    assert event.text.startswith(f"{name}: bit 30")
    assert event.step in (at, at + 1)
    told = [step for step, signals in recording.steps().items() if "law_difference" in signals]
    assert at + 1 in told
    told = [a for a in replayed_alerts(tmp_path / "a.bwrun") if a["rule"] == "arithmetic"]
    assert len({alert["key"] for alert in told}) == 1  # What follows from it is told with it.
    assert f"{name}: W" in told[0]["summary"]


def test_a_trainers_own_changes_are_no_flips(tmp_path: Path) -> None:
    def counted(model: nn.Module, step: int) -> None:
        with torch.no_grad():
            model.blocks[0].attention.out.weight[0, 0] += 1  # type: ignore[index,union-attr]

    def hidden(model: nn.Module, step: int) -> None:
        for p in model.parameters():
            p.data.clamp_(-0.05, 0.05)

    def restored(model: nn.Module, step: int) -> None:
        model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()})

    for number, between in enumerate((counted, hidden, restored)):
        _, rest = trained(tmp_path / f"{number}.bwrun", between)
        assert rest["flips"] == {}
        assert (rest["not_measured"] is not None) == (between is hidden)


def test_training_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    def nothing(model: nn.Module, step: int) -> None:
        pass

    watched, rest = trained(tmp_path / "a.bwrun", nothing)
    assert rest["compared"] > 0 and rest["flips"] == {} and rest["not_measured"] is None
    other, rest = trained(tmp_path / "b.bwrun", nothing, stats="drift")
    assert rest["compared"] == 0
    for a, b in zip(watched.parameters(), other.parameters()):
        assert torch.equal(a, b)
