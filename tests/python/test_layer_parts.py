"""Goal: each part of a layer does its work by itself: what counts passes, what reads calls, what
hears gradients, what has the weights and what searches for them.
Method: a part alone, with a few lines in the place of its host; no model is attached to.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Optional

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bellwether._hook.calls import sdpa_call
from bellwether._hook.calls.call import AttentionCall
from bellwether._hook.law_turns import LawTurn
from bellwether._hook.layer.gradients import Gradients
from bellwether._hook.layer.kept import Kept, tensors_of
from bellwether._hook.layer.law_calls import LawCalls
from bellwether._hook.layer.notes import Notes
from bellwether._hook.layer.passes import Passes
from bellwether._hook.layer.seen_calls import SeenCalls
from bellwether._hook.layer.weight_search import WeightSearch
from bellwether._hook.layer.weights import Weights
from bellwether._kernels.memory import Memories
from bellwether._kernels.probe import Spectra
from bellwether.settings import Settings

HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 8, 16


class Host:
    """A sampled step."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.memories = Memories()
        self.memories.begin_step(True, 0)
        self.lock = contextlib.nullcontext()
        self.hook_seconds = 0.0
        self.capture = None
        self.sampled, self.backward, self.first_step = True, False, True
        self.told: list[int] = []

    def live(self) -> bool:
        return True

    def reads_calls(self) -> bool:
        return not self.numbered() or self.samples_step()

    def numbered(self) -> bool:
        return not self.first_step

    def model(self) -> Optional[nn.Module]:
        return None

    def measures(self, part: str) -> bool:
        return True

    def cannot_measure_on(self, device: str) -> Optional[str]:
        return None

    def samples_step(self) -> bool:
        return self.sampled

    def samples_call(self, calls_before: int) -> bool:
        return self.sampled and calls_before == 0

    def captures_call(self, calls_before: int) -> bool:
        return False

    def row_seed(self, layer: int) -> int:
        return layer

    def law_turn(self, layer: int, device: str) -> LawTurn:
        return LawTurn(True)

    def weights_in_backward(self) -> bool:
        return False

    def in_backward(self) -> bool:
        return self.backward

    def passes(self, count: int) -> None:
        self.told.append(count)

    def forward_begins(self) -> None: ...

    def centring_changed(self, step: Optional[int] = None) -> None: ...


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * DIM, bias=False)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * DIM, bias=False)


class Other(Tensor):
    """Of a library that makes its own."""


@pytest.fixture
def host() -> Host:
    return Host()


def call_of(heads: int, key_heads: int, tokens: int = 6) -> AttentionCall:
    torch.manual_seed(heads + tokens)
    sizes = (heads, key_heads, key_heads)
    qkv = tuple(torch.randn(1, size, tokens, DIM, requires_grad=True) for size in sizes)
    call = sdpa_call.read(F.scaled_dot_product_attention, qkv, {"enable_gqa": True})
    assert isinstance(call, AttentionCall)
    return call


def seen_by(host: Host, module: Optional[nn.Module] = None) -> tuple[SeenCalls, Notes, list[Any]]:
    notes, told = Notes(), list[Any]()
    module = module or Projections()
    seen = SeenCalls(
        host,
        notes,
        weakref.ref(module),
        lambda *layout: told.append(layout),
        lambda q, k: None,
    )
    return seen, notes, [told, module]


def test_a_recomputation_is_no_forward(host: Host) -> None:
    passes = Passes(host, Notes())
    passes.forward()
    host.backward = True
    passes.forward()
    passes.backward(False)
    assert (passes.calls, passes.calls_in_step, passes.fired, host.told) == (
        2,
        1,
        1,
        [1, 1],
    )
    passes.begin_step()
    assert not passes.in_step() and (passes.calls, passes.fired) == (2, 1)


def test_a_pass_of_an_unsampled_step_is_only_counted(host: Host) -> None:
    passes = Passes(host, Notes())
    assert not passes.only_counted(1)
    host.sampled = host.first_step = False
    assert passes.only_counted(2) and host.told == [2]


def test_the_first_call_tells_the_layout(host: Host) -> None:
    seen, notes, (told, _) = seen_by(host)
    assert seen.observe(call_of(HEADS, KV_HEADS)) == 1
    assert seen.observe(call_of(HEADS, KV_HEADS, tokens=9)) == 1
    assert told == [(HEADS, KV_HEADS, DIM, DIM)] and seen.seq_len == 9 and seen.sums is not None
    assert seen.observe(call_of(2 * HEADS, KV_HEADS)) is None
    assert "heads differ from those of the first call: not measured" in notes


def test_repeated_key_heads_are_told_by_the_weights(host: Host) -> None:
    seen, _, (told, _) = seen_by(host)
    call = call_of(HEADS, KV_HEADS)
    call.k, call.v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (call.k, call.v))
    assert seen.observe(call) == HEADS // KV_HEADS and told == [(HEADS, KV_HEADS, DIM, DIM)]


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [(torch.zeros(1, dtype=torch.int64), "torch.int64"), (torch.zeros(0), "an empty tensor"),
     (torch.zeros(1).as_subclass(Other), "Other instead of a plain tensor")],
)  # fmt: skip
def test_unreadable_tensors_are_noted(host: Host, tensor: Tensor, reason: str) -> None:
    seen, notes, _ = seen_by(host)
    assert not seen.readable(tensor) and list(notes) == [f"{reason}: not measured"]


def test_gradients_add_the_first_call_of_a_sampled_step(host: Host) -> None:
    seen, notes, _ = seen_by(host)
    laws, passes = LawCalls(host, seen), Passes(host, notes)
    gradients = Gradients(host, notes, passes, seen, laws, lambda: None)
    call = call_of(HEADS, KV_HEADS)
    group = seen.observe(call)
    assert group is not None and seen.sums is not None
    kept, o = Kept(gradients, call, group), call.run(call.q, call.k, call.v).detach()
    saved = (
        o,
        *(t.detach() for t in (call.q, call.k, call.v)),
        *tensors_of(call).values(),
    )
    assert gradients.output_wanted(kept)
    gradients.output_gradient(kept, saved, torch.ones_like(o))
    kept.leaks = True
    gradients.input_gradient(kept, torch.ones_like(call.k), "k", True)
    assert (seen.sums.probed, seen.sums.leaked) == (1, 1)
    assert not gradients.output_wanted(kept)
    (copy,) = host.memories.collect(False).values()
    leak, whole = (list(seen.sums.row(copy, f"key_{n}_sum")) for n in ("leak", "gradient"))
    assert leak == pytest.approx(whole) and min(leak) > 0  # All of it is a common part.
    assert not notes


def search_in(module: nn.Module, host: Host) -> tuple[WeightSearch, Weights, Notes]:
    """A call has shown the layout."""
    notes = Notes()
    weights = Weights(host, notes)
    search = WeightSearch(
        host, notes, "attn", weakref.ref(module), None, weights, lambda module: None
    )
    search.begin(HEADS, KV_HEADS, DIM)
    return search, weights, notes


class Latent(nn.Module):
    """It does not say how many rows have no position."""

    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj = nn.Linear(WIDTH, HEADS * DIM)
        self.kv_b_proj = nn.Linear(WIDTH, HEADS * (DIM - 2 + 6))


def test_a_narrow_value_tells_the_rows_of_latent_attention(host: Host) -> None:
    module = Latent()
    notes = Notes()
    search = WeightSearch(
        host,
        notes,
        "attn",
        weakref.ref(module),
        None,
        Weights(host, notes),
        lambda module: None,
    )
    assert not search.unsure_projections(HEADS, HEADS, DIM, 6)
    assert search.unsure_projections(HEADS, HEADS, DIM, 0)


def test_weights_are_found_and_measured(host: Host) -> None:
    module = Projections()
    _, weights, notes = search_in(module, host)
    together = Spectra()
    weights.measure(together)
    together.measure()
    assert weights.wq is not None and weights.wk is not None and not notes
    (copy,) = host.memories.collect(False).values()
    for spectrum, weight in (
        (weights.wq, module.q_proj.weight),
        (weights.wk, module.k_proj.weight),
    ):
        true = torch.linalg.matrix_norm(weight.detach().view(-1, DIM, WIDTH), 2)
        assert list(spectrum.row(copy, "sigma")) == pytest.approx(true.tolist(), rel=0.02)
    pair = weights.of_head(3)
    assert pair is not None and torch.equal(pair[0], module.q_proj.weight[3 * DIM :])
    assert torch.equal(pair[1], module.k_proj.weight[DIM:])


def test_a_module_without_projections_is_noted(host: Host) -> None:
    module = nn.Sequential(nn.ReLU())
    _, weights, notes = search_in(module, host)
    assert weights.found() is None and "not found" in next(iter(notes))


def test_rows_of_other_heads_are_given_up(host: Host) -> None:
    module = Projections()
    search, weights, notes = search_in(module, host)
    search.listen()
    x = torch.randn(1, 6, WIDTH)
    q, k = (p(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for p in (module.q_proj, module.k_proj))
    search.check(torch.randn_like(q), k)
    search.heard()
    assert (
        weights.checked and weights.found() is None and "are not those of the heads" in str(notes)
    )
