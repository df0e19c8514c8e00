"""Goal: each call of attention is measured as what it is: its own heads, mask and layout, in the
layer that it belongs to.  What a call is belongs to the call, and which modules make calls is found
where they do.
Method: small modules whose forward makes one call or several, in many ways; the sums of a layer are
compared with those of the same attention as one plain call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bellwether
from bellwether._hook.calls import sdpa_call
from bellwether._hook.calls.call import VIEWS, AttentionCall, Mask
from bellwether._hook.layer import mask_parts, probe_mask
from bellwether._hook.patches import met_calls, registry
from bellwether._native import c_api
from bellwether.tools.doctor import layer_findings

from models import through

HEADS, DIM, WIDTH = 4, 8, 32
KEYS = ("key_leak_sum", "key_gradient_sum", "key_coherence_sum")
Watched = Callable[..., Any]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    attached: list[Any] = []

    def attach(module: nn.Module, **more: Any) -> Any:
        name = f"r{len(attached)}"
        options = {"every": 1, "rows": 0, "overhead_budget": 1e9, **more}
        attached.append(
            bellwether.attach(module, record=str(tmp_path / f"{name}.bwrun"), run=name, **options)
        )
        return attached[-1]

    yield attach
    for monitor in attached:
        assert monitor.status()["errors"] == 0, monitor.status()["last_error"]
        monitor.detach()


def sums(monitor: Any) -> list[dict[str, Tensor]]:
    """Of each layer, what it has added up; then it begins anew."""
    found = []
    memories = {id(x.sums.memory): x.sums.memory for x in monitor.layers if x.sums}
    copies = {key: memory.collect(False) for key, memory in memories.items()}
    for layer in monitor.layers:
        if layer.sums is not None:
            copy = copies[id(layer.sums.memory)]
            names = (*c_api.PROBE_STATS, *KEYS)
            found.append({n: torch.tensor(list(layer.sums.row(copy, n))) for n in names})
            layer.sums.begin_sample()
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor], without: tuple[str, ...] = ()) -> None:
    assert (a["rows"] > 0).all()
    for name, value in a.items():
        if name not in without:
            assert torch.allclose(value, b[name], rtol=1e-5, atol=1e-5), name


def heads_of(x: Tensor, count: int = HEADS) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def merged(y: Tensor) -> Tensor:
    return y.transpose(1, 2).flatten(2)


class Grouped(nn.Module):
    """Repeats its keys when it has a mask, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 16)
        self.v_proj = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor, padded: bool, mask: Optional[Tensor] = None) -> Tensor:
        q = heads_of(self.q_proj(x))
        k, v = (heads_of(p(x), 2) for p in (self.k_proj, self.v_proj))
        if not padded:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        if mask is None:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("first", [False, True])
def test_repeated_keys_belong_to_the_call(first: bool, watched: Watched) -> None:
    torch.manual_seed(1)
    module = Grouped()
    x = torch.randn(2, 12, WIDTH)
    with watched(module) as monitor:
        found = []
        for padded in (first, not first):
            module(x, padded).square().sum().backward()
            found += sums(monitor)
        same(*found)
        (layer,) = monitor.layers
        assert layer.kv_heads == 2 and not layer.notes


def test_calls_are_read_in_sampled_steps_alone(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, read = Grouped(), []
    plain = sdpa_call.read

    def counted(*args: Any) -> Any:
        read.append(monitor.steps.current_step())
        return plain(*args)

    monkeypatch.setattr(sdpa_call, "read", counted)
    with watched(module, every=3) as monitor:
        for step in range(7):
            module(torch.randn(2, 8, WIDTH), padded=step > 1).square().sum().backward()
            monitor.step()
        (layer,) = monitor.layers
        assert read == [0, 3, 6] and layer.calls == 7 and layer.fired == 3


class Shared(nn.Module):
    """Layers with one mask, which may be written to behind the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Grouped() for _ in range(3))

    def forward(self, x: Tensor, masks: list[Tensor]) -> Tensor:
        for layer, mask in zip(self.layers, masks):
            x = x + merged(layer(x, padded=True, mask=mask))
        return x


def masks_of(how: str) -> list[Tensor]:
    """Of three layers; keys 0 to 3 are hidden in some."""
    full = torch.ones(2, 1, 8, 8, dtype=torch.bool)
    half = full.index_fill(3, torch.arange(4), 0)
    if how == "views":  # As many libraries cut it in each layer.
        return [half[..., :8] for _ in range(3)]
    return [half, half, half] if how == "one" else [half, full, half.clone()]


@pytest.mark.parametrize(("how", "looks"), [("one", 1), ("views", 1), ("several", 3)])
def test_a_shared_mask_is_looked_at_once_in_a_step(
    how: str, looks: int, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, plain = [], probe_mask.visible_keys
    monkeypatch.setattr(
        probe_mask, "visible_keys", lambda *args: looked.append(None) or plain(*args)
    )
    torch.manual_seed(3)
    module = Shared()
    x = torch.randn(2, 8, WIDTH)
    with watched(module) as monitor:
        for step in range(1, 3):
            module(x, masks_of(how)).square().sum().backward()
            found = sums(monitor)
            assert len(looked) == step * looks
            monitor.step()
    with watched(module) as monitor:  # Each with a mask of its own.
        module(x, [mask.clone() for mask in masks_of(how)]).square().sum().backward()
        for a, b in zip(sums(monitor), found):
            same(a, b)


def test_a_mask_that_is_written_to_is_looked_at_again() -> None:
    q = torch.randn(2, HEADS, 8, DIM)
    sampled = probe_mask.Sampled(1.0, 0, 0)

    def seen(mask: Tensor) -> int:
        found = probe_mask.probe_mask(Mask(tensor=mask), q, q, sampled, shared=True)
        assert found.visible is not None
        return int(found.visible.sum())

    mask_parts.forget()
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    assert [seen(mask), seen(mask)] == [8, 8]
    mask[..., :3] = False
    assert seen(mask) == 5
    for hidden in range(1, 20):  # One that is gone may lie where the next one does.
        mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
        mask.view(-1).numpy()[:] = 0
        mask[..., : hidden % 8] = True
        assert seen(mask) == hidden % 8
    assert len(mask_parts._entries) <= mask_parts.ENTRIES_MAX
    assert all(entry.storages[0].expired() for entry in mask_parts._entries[:-1])


@pytest.mark.parametrize("dims", [2, 3, 4])
def test_masks_are_cut_to_the_sampled_sequences(dims: int, watched: Watched) -> None:
    torch.manual_seed(4)
    tensors = [torch.randn(3, HEADS, 9, DIM, requires_grad=True) for _ in range(3)]
    shape = (3, HEADS, 9, 9)[4 - dims :]
    mask = torch.rand(shape) < 0.6

    class Call(nn.Module):
        def forward(self, count: int) -> Tensor:
            q, k, v = (t[:count] for t in tensors)
            of = mask[:count] if dims == 4 else mask
            return F.scaled_dot_product_attention(q, k, v, attn_mask=of)

    found = []
    for count, sequences in ((3, 2), (2, 0)):
        module = Call()
        with watched(module, sequences=sequences) as monitor:
            module(count).square().sum().backward()
            found += sums(monitor)
    same(*found, without=KEYS[:2])


class Several(nn.Module):
    """One forward, several attentions."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(count))

    def forward(self, x: Tensor, count: Optional[int] = None) -> Tensor:
        for part in list(self.parts)[:count]:
            q, k, v = (heads_of(t) for t in part(x).chunk(3, -1))
            x = x + merged(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x


def test_each_call_of_a_forward_is_a_layer(watched: Watched) -> None:
    torch.manual_seed(1)
    module, x = Several(3), torch.randn(2, 9, WIDTH)
    with watched(module) as monitor:
        module(x).square().sum().backward()
        found = sums(monitor)
        names = [layer.name for layer in monitor.layers]
        assert names == ["", "(call 2)", "(call 3)"]
        monitor.step(loss=1.0)
        assert [layer.index for layer in monitor.layers] == [0, 1, 2]
    for part, its_sums in zip(module.parts, found):
        alone = Several(1)
        alone.parts[0].load_state_dict(part.state_dict())
        with watched(alone) as monitor:
            alone(x).square().sum().backward()
            same(sums(monitor)[0], its_sums, KEYS + c_api.PROBE_STATS[-4:])
        with torch.no_grad():
            x = alone(x)


def test_more_calls_than_in_the_first_step_are_counted(watched: Watched) -> None:
    module, x = Several(3), torch.randn(2, 9, WIDTH)
    with watched(module) as monitor:
        module(x, 1).sum().backward()
        monitor.step(loss=1.0)
        for _ in range(2):
            module(x, 3).sum().backward()
        (layer,) = monitor.layers
        (times,) = [n for note, n in layer.notes.items() if "more calls in one forward" in note]
        assert times == 4 and layer.fired == 3


def test_calls_of_a_shared_module_are_counted_in_a_note(watched: Watched) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Several(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(self.block(x)))

    for which, times in (("first", [2]), ("all", [])):
        module = Shared()
        with watched(module, microbatches=which) as monitor:
            module(torch.randn(2, 9, WIDTH)).square().sum().backward()
            (layer,) = monitor.layers
            assert [n for note, n in layer.notes.items() if "called again" in note] == times
            assert layer.sums.probed == (1 if which == "first" else 3)


class Tower(nn.Module):
    """One image after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
        q, k, v = (heads_of(t).contiguous() for t in self.qkv(x).chunk(3, -1))
        images = zip(*(t.split(lengths, 2) for t in (q, k, v)))
        return torch.cat([F.scaled_dot_product_attention(*image) for image in images], 2)


def test_parts_of_one_tensor_are_one_layer(watched: Watched) -> None:
    module, x = Tower(), torch.randn(1, 12, WIDTH)
    with watched(module, microbatches="all") as monitor:
        for lengths in ((5, 7), (3, 4, 5), (12,)):
            module(x, lengths).square().sum().backward()
            (found,) = sums(monitor)
            assert found["rows"].tolist() == [12.0] * HEADS
            monitor.step(loss=1.0)
        assert not [note for note in monitor.layers[0].notes if "calls" in note]


class Differential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(t).contiguous() for t in self.mix(x).chunk(3, -1))
        a, b = (
            F.scaled_dot_product_attention(q[:, h], k[:, h], v[:, h])
            for h in (slice(0, 2), slice(2, 4))
        )
        return a - b


def test_other_heads_of_one_tensor_are_another_layer(watched: Watched) -> None:
    module = Differential()
    with watched(module) as monitor:
        module(torch.randn(1, 12, WIDTH)).square().sum().backward()
        assert [layer.heads for layer in monitor.layers] == [2, 2]


def test_three_dimensions_are_not_measured_and_said(watched: Watched) -> None:
    class Flat(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, 2 * q, 3 * q)

    module = Flat()
    with watched(module) as monitor:
        module(torch.randn(HEADS, 6, DIM, requires_grad=True)).sum().backward()
        (layer,) = monitor.layers
        assert layer.calls == 1 and layer.heads == 0
        assert any("which are batch and which are heads is not told" in n for n in layer.notes)


class Gates(nn.Module):
    """Changes its output in place, which the products of attention do not need."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(p(x)) for p in (self.q, self.k, self.v))
        o = torch.softmax(q @ k.mT, -1) @ v
        o.mul_(heads_of(x).sigmoid())
        return merged(o).sin()


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_outputs_that_are_changed_in_place_are_said(
    reentrant: Optional[bool], watched: Watched
) -> None:
    module, x = Gates(), torch.randn(2, 6, WIDTH, requires_grad=True)
    with watched(module) as monitor:
        for _ in range(2):
            plain = reentrant is None
            y = module(x) if plain else checkpoint(module, x, use_reentrant=reentrant)
            y.square().sum().backward()
        (layer,) = monitor.layers
        (found,) = sums(monitor)
        assert found["rows"].tolist() == [0.0] * HEADS and (found["key_gradient_sum"] > 0).all()
        assert any("changed in place" in note for note in layer.notes), layer.notes


class OneHead(nn.Module):
    """Three dimensions, or the same as four."""

    def __init__(self, width: int = DIM) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, width) for _ in range(3))

    def forward(self, x: Tensor, mask: Optional[Tensor], dims: int) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if dims == 4:
            q, k, v = (t.unsqueeze(1) for t in (q, k, v))
            mask = mask.unsqueeze(-3) if mask is not None else None
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)


@pytest.mark.parametrize("shape", [(), (6, 6), (1, 6, 6), (3, 1, 6), (3, 6, 6)])
def test_three_dimensions_are_one_head_where_weights_say_so(
    shape: tuple[int, ...], watched: Watched
) -> None:
    module, x, found = OneHead(), torch.randn(3, 6, WIDTH), []
    mask = torch.randn(shape) if shape else None
    for dims in (3, 4):
        with watched(module) as monitor:
            module(x, mask, dims).square().sum().backward()
            found += sums(monitor)
            (layer,) = monitor.layers
            assert layer.heads == 1 and not layer.notes
    same(*found, without=("delta_bias_sum", "delta_bias_sumsq", "delta_error_abs_sum"))


@pytest.mark.parametrize("says", ["more rows", "a number"])
def test_folded_heads_are_not_taken_for_one(says: str, watched: Watched) -> None:
    module = OneHead(2 * DIM if says == "more rows" else DIM)
    if says == "a number":
        module.num_heads = 2
    wide = module(torch.randn(2, 6, WIDTH), None, 3).shape[-1]

    class Folded(OneHead):
        def forward(self, x: Tensor, mask: Optional[Tensor], dims: int) -> Tensor:
            q, k, v = (
                heads_of(p(x), wide // DIM).flatten(0, 1)
                for p in (self.q_proj, self.k_proj, self.v_proj)
            )
            return F.scaled_dot_product_attention(q, k, v)

    module.__class__ = Folded
    with watched(module) as monitor:
        module(torch.randn(2, 6, WIDTH), None, 3).square().sum().backward()
        (layer,) = monitor.layers
        assert layer.heads == 0
        assert any("which are batch and which are heads is not told" in n for n in layer.notes)


def test_a_mask_that_was_changed_leaves_the_leak_alone(watched: Watched) -> None:
    class Reused(nn.Module):
        def forward(self, q: Tensor, mask: Tensor) -> Tensor:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return F.scaled_dot_product_attention(q, 2 * q, 3 * q, attn_mask=mask)

    module, mask = Reused(), torch.ones(6, 6, dtype=torch.bool).tril()
    with watched(module) as monitor:
        y = module(torch.randn(1, HEADS, 6, DIM, requires_grad=True), mask)
        mask.fill_(True)
        y.sum().backward()
        (layer,) = monitor.layers
        assert (layer.sums.probed, layer.sums.leaked) == (0, 1)
        assert any("the mask" in note and "changed in place" in note for note in layer.notes)


# ---- modules that are found where they call ----

ATTEND = getattr(F, "_attention".join(("scaled_dot_product", "")))


class Hidden(nn.Module):
    """Its code names neither projections nor the function."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.call = "_attention".join(("scaled_dot_product", ""))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(t) for t in self.mix(x).chunk(3, -1))
        return x + merged(getattr(F, self.call)(q, k, v, is_causal=True))


class Named(Several):
    def __init__(self) -> None:
        super().__init__(1)


class Stack(nn.Module):
    def __init__(self, checkpointing: Optional[str]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Hidden(), Named(), Hidden()])
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        return through(self.blocks, x, self.checkpointing)


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
def test_modules_are_found_where_they_call(checkpointing: Optional[str], watched: Watched) -> None:
    def train(monitored: bool) -> list[Tensor]:
        torch.manual_seed(2)
        model = Stack(checkpointing)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = watched(model) if monitored else None
        for step in range(3):
            x = torch.randn(2, 9, WIDTH, requires_grad=True)
            model(x).square().mean().backward()
            if monitor is not None:
                probed = [x.sums is not None and x.sums.probed for x in monitor.layers]
                assert probed == [1, 1, 1] or (step == 0 and checkpointing is not None)
            optimizer.step()
            optimizer.zero_grad()
        if monitor is not None:
            monitor.step(loss=1.0)
            names = [(layer.name, layer.index) for layer in monitor.layers]
            assert names == [(f"blocks.{i}", i) for i in range(3)]
        return [p.detach() for p in model.parameters()]

    plain, seen = train(False), train(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, seen))
    assert not registry.seekers and met_calls.sdpa._users == 0


def test_nothing_of_the_search_is_left_behind(watched: Watched) -> None:
    forward = Stack.forward
    model = Stack(None)
    with watched(model):
        model(torch.randn(1, 4, WIDTH)).sum().backward()
        assert Stack.forward is not forward and registry.seekers
    assert Stack.forward is forward and not registry.seekers and not registry.roots


class Recurrent(nn.Module):
    """Called like attention, without a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.q_proj(x).sigmoid() * self.k_proj(x).cumsum(1)


def test_a_layer_without_softmax_is_no_failure(watched: Watched) -> None:
    model = nn.Sequential(nn.Sequential(Recurrent()), nn.Sequential(Several(1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model) as monitor:
        for _ in range(2):
            model(torch.randn(2, 9, WIDTH)).square().mean().backward()
            optimizer.step()
        status = monitor.status()
        assert [layer["attention"] for layer in status["layers"]] == [False, True]
        findings = layer_findings(status)
        said = "no softmax in its code: nothing to watch, unless it writes one by exp"
        assert said in findings[0].text
        assert findings[0].ok is None
        assert status["layers"][0]["not_judged_by"] == []


@torch.jit.script
def scripted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> Any:
        inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            output = F.scaled_dot_product_attention(*inputs, is_causal=True)
        return torch.autograd.grad(output, inputs, d_o)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def around(function: Any) -> Any:
    return lambda q, k, v: function(q, k, v)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return ByHand.apply(q, k, v)


class Holds(nn.Module):
    """Its own code says nothing of attention."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y: Tensor = self.function(q, k, v)
        return x + y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: written_out(q, k, v),
        functools.partial(written_out),
        scripted,
        around(scripted),
        around(written_out),
        by_hand,
        lambda q, k, v: checkpoint(around(written_out), q, k, v, use_reentrant=True),
    ],
)
def test_attention_that_a_module_holds_is_no_recurrence(function: Any, watched: Watched) -> None:
    model = nn.Sequential(Holds(function))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model) as monitor:
        model(torch.randn(2, 9, WIDTH)).square().mean().backward()
        optimizer.step()
        (finding,) = layer_findings(monitor.status())
    assert finding.ok is False and "attention that is written out" in finding.text


@pytest.mark.parametrize("double", [False, True])
def test_why_calls_were_not_measured_is_in_the_log(
    double: bool, watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if double:
            return F.scaled_dot_product_attention(q, k, v)
        one = functools.partial(F.scaled_dot_product_attention, is_causal=True)
        return torch.vmap(one, 1, 1)(q, k, v)

    model = nn.Sequential(Holds(attention)).to(torch.float64 if double else torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model) as monitor:
        model(torch.randn(2, 9, WIDTH, dtype=model[0].q.weight.dtype)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step()
    said = "torch.float64: not measured" if double else "torch.func transforms: not measured"
    assert f"no attention was measured in the first step. 0 (Holds): {said}" in caplog.text


def test_calls_with_nested_tensors_are_named(watched: Watched) -> None:
    class Jagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q = self.a(x).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q).transpose(1, 2)

    model = nn.Sequential(Jagged())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model) as monitor:
        parts = [torch.randn(n, WIDTH) for n in (3, 5)]
        model(torch.nested.nested_tensor(parts, layout=torch.jagged)).values().sum().backward()
        optimizer.step()
        (finding,) = layer_findings(monitor.status())
    assert finding.ok is False and "NestedTensor instead of a plain tensor" in finding.text


def test_one_key_head_that_is_expanded_is_one(watched: Watched) -> None:
    class OneKeyHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, DIM)

        def forward(self, x: Tensor) -> Tensor:
            k = self.b(x).unsqueeze(1).expand(-1, HEADS, -1, -1)
            return x + merged(F.scaled_dot_product_attention(heads_of(self.a(x)), k, k))

    model = OneKeyHead()
    with watched(model) as monitor:
        model(torch.randn(2, 9, WIDTH)).square().mean().backward()
        (layer,) = monitor.status()["layers"]
    assert (layer["heads"], layer["kv_heads"]) == (HEADS, 1)


def test_a_frozen_layer_below_those_that_train_is_no_failure(watched: Watched) -> None:
    model = nn.Sequential(Several(1).requires_grad_(False), Several(1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with watched(model) as monitor:
        model(torch.randn(2, 9, WIDTH)).square().mean().backward()
        optimizer.step()
        monitor.step()
        findings = layer_findings(monitor.status())
    assert [finding.ok for finding in findings] == [None, True]
    assert "frozen upstream" in findings[0].text


# ---- calls of other functions ----


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor] = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Other(nn.Module):
    """Calls a function of its own, as an adapter would divert it."""

    def __init__(self, function: Any, read: Any) -> None:
        super().__init__()
        self.function, self.read, self.attend = function, read, F.scaled_dot_product_attention

    def forward(self, *args: Any) -> Any:
        return met_calls.function(self.function, self.read, args, {})


def found_of(watched: Watched, module: nn.Module, *args: Any) -> tuple[dict[str, Tensor], Any]:
    with watched(module) as monitor:
        output = module(*args)
        output.square().sum().backward()
        (layer,) = monitor.layers
        return sums(monitor)[0], layer


def test_packed_documents_equal_a_mask_of_documents(watched: Watched) -> None:
    torch.manual_seed(3)
    qkv = torch.randn(14, 3, HEADS, DIM, requires_grad=True)
    offsets = torch.tensor([0, 4, 9, 14], dtype=torch.int32)
    document = torch.arange(3).repeat_interleave(offsets.diff())
    dense = (document[:, None] == document) & torch.ones(14, 14, dtype=torch.bool).tril()
    thd = VIEWS["thd"]

    def packed(qkv: Tensor) -> Tensor:
        q, k, v = (thd(qkv.select(1, i)) for i in range(3))
        return plain(q, k, v, dense)[0].transpose(0, 1)

    def read(function: Any, args: Any, kwargs: Any) -> AttentionCall:
        views = [lambda x, i=i: thd(x.select(1, i)) for i in range(3)]
        return AttentionCall(
            qkv, qkv, qkv, *views, thd, lambda q, k, v: function(k), DIM**-0.5,
            Mask(causal=True, q_offsets=offsets, k_offsets=offsets), packed=True,
        )  # fmt: skip

    found, layer = found_of(watched, Other(packed, read), qkv)
    q, k, v = (thd(qkv.detach().select(1, i)).clone().requires_grad_() for i in range(3))

    class Dense(nn.Module):
        def forward(self) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=dense)

    want, _ = found_of(watched, Dense())
    same(want, found)
    assert found["key_gradient_sum"].min() > 0 and not [n for n in layer.notes if "W_Q" not in n]


class PackedCore(nn.Module):
    """A core of one's own, whose heads lie side by side in what it returns."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        document = torch.arange(len(cu_seqlens) - 1).repeat_interleave(cu_seqlens.diff())
        mask = document[:, None] == document
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return y[0].transpose(0, 1).flatten(1)


def test_a_wrapped_core_of_packed_sequences_is_measured(watched: Watched) -> None:
    q = torch.randn(14, HEADS, DIM, requires_grad=True)
    k, v = (torch.randn(14, 2, DIM, requires_grad=True) for _ in range(2))
    offsets = torch.tensor([0, 4, 9, 14], dtype=torch.int32)
    core = bellwether.wrap_attention(PackedCore(), layout="thd")
    with watched(core) as monitor:
        core(q, k, v, cu_seqlens=offsets).square().sum().backward()
        (found,), (layer,) = sums(monitor), monitor.layers
    bellwether.unwrap_attention(core)
    with watched(core) as monitor:
        core(q, k, v, cu_seqlens=offsets).square().sum().backward()
        (want,) = sums(monitor)
    same(want, found)
    assert layer.kv_heads == 2 and found["key_gradient_sum"].min() > 0


@pytest.mark.parametrize(
    ("more", "leak"),
    [({}, True), ({"softcap": 20.0}, False), ({"sinks": torch.zeros(HEADS)}, False),
     ({"cancels": False}, False), ({"dropout": 0.1}, True), ({"unread": "a thing"}, True)],
    ids=["plain", "softcap", "sinks", "changed", "dropout", "unread"],
)  # fmt: skip
def test_signals_without_a_law_are_left_out_and_said(
    more: dict[str, Any], leak: bool, watched: Watched
) -> None:
    def read(function: Any, args: Any, kwargs: Any) -> AttentionCall:
        view = VIEWS["bhtd"]
        return AttentionCall(
            *args, view, view, view, view, function, DIM**-0.5, Mask(), **more
        )  # fmt: skip

    q, k, v = (torch.randn(2, HEADS, 6, DIM, requires_grad=True) for _ in range(3))
    found, layer = found_of(watched, Other(plain, read), q, k, v)
    assert bool((found["key_gradient_sum"] > 0).all()) == leak
    assert bool((found["delta_abs_sum"] > 0).all()) == (not more.keys() & {"dropout", "unread"})
    assert bool((found["rows"] > 0).all()) == ("unread" not in more)
    said = [note for note in layer.notes if "W_Q" not in note]
    assert bool(said) == bool(more)
