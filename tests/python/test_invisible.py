"""Goal: what watches scaled_dot_product_attention is seen by nobody who calls, compares, overrides,
traces, exports or copies it, in an attached module in a sampled step and beside one.
Method: PyTorch's own sample inputs of the function (its OpInfo), forward and backward, bit for bit
as without us; what torch.jit, fx, make_fx and export write down, word for word; masks of
torch.nn.attention.bias, which compare the function with its name.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_methods_invocations as invocations
from torch.utils._python_dispatch import TorchDispatchMode

import bellwether
from bellwether import intercept

BARE = F.scaled_dot_product_attention
KNOWN_TO_ALL = {BARE: "the function"}  # As an override is registered: at import, by the object.
OPINFO = next(op for op in invocations.op_db if op.name.endswith(".scaled_dot_product_attention"))
DTYPES = sorted(OPINFO.supported_dtypes("cpu"), key=str)


class Call(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return F.scaled_dot_product_attention(*args, **kwargs)


class Projected(nn.Module):
    """What is traced and exported: three dimensions in, projections of its own."""

    def __init__(self, mask: Optional[Callable[[int, int], Any]] = None) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(q.shape[2], k.shape[2]))
        return y.transpose(1, 2).flatten(2)


class Logged(torch.Tensor):
    """A subclass that overrides by the identity of the function."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(KNOWN_TO_ALL.get(func, getattr(func, "__name__", "?")))
        return super().__torch_function__(func, types, args, kwargs or {})


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


Watched = Callable[[nn.Module], AbstractContextManager[Any]]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    """bellwether.attach with each step a sample; whatever has gone wrong inside fails the test."""
    attached: list[bellwether.Monitor] = []

    def attach(module: nn.Module) -> bellwether.Monitor:
        name = f"r{len(attached)}"
        attached.append(
            bellwether.attach(module, record=str(tmp_path / f"{name}.bwrun"), run=name, every=1)
        )
        return attached[-1]

    yield attach
    for monitor in attached:
        assert monitor.why_off in ("", "detached") and monitor.status()["errors"] == 0


def bits(value: Any) -> Any:
    if isinstance(value, Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return value.dtype, tuple(value.shape), value.requires_grad, bytes(data.tolist())
    return value


def outcome(function: Callable[..., Any], sample: Any) -> list[Any]:
    """The output and the gradients, or the error that came instead."""
    inputs = [sample.input, *sample.args]
    fresh = [
        t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t
        for t in inputs
    ]
    torch.manual_seed(7)
    try:
        output = function(*fresh, **sample.kwargs)
    except Exception as e:
        return [type(e), str(e)]
    found = [bits(output)]
    if output.requires_grad:
        torch.manual_seed(8)
        output.backward(torch.randn_like(output))
        found += [bits(t.grad) for t in fresh if isinstance(t, Tensor)]
    return found


def test_a_sample_of_each_kind(watched: Watched) -> None:
    measured = samples = 0
    for dtype in DTYPES:
        torch.manual_seed(1)
        found = list(OPINFO.sample_inputs("cpu", dtype, requires_grad=True))
        for sample in found:
            samples += 1
            bare = outcome(F.scaled_dot_product_attention, sample)
            module = Call()
            with watched(module) as monitor:
                assert outcome(F.scaled_dot_product_attention, sample) == bare
                assert outcome(module, sample) == bare, sample
                (layer,) = monitor.layers
                assert layer.calls == 1
                measured += layer.fired
    assert samples > 50 and measured > samples // 4  # Not fp64, nor three dimensions.


def test_errors_are_the_functions_own(watched: Watched) -> None:
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    module = Call()
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((q, q), {}), ((q, q, 1), {}), ((q, q, q), {"causal": True}), ((), {}),
        ((q, q[..., :4], q), {}), ((q, q, q, torch.ones(4, 4), 0.0, True), {}),
        ((q, q.double(), q), {}), ((q, q, q), {"dropout_p": 2.0}),
    ]  # fmt: skip

    def told(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return bits(function(*args, **kwargs))
        except Exception as e:
            return type(e), str(e)

    bare = [told(BARE, *each) for each in wrong]
    with watched(module):
        assert [told(module, *each) for each in wrong] == bare


def test_who_overrides_the_function_finds_it(watched: Watched) -> None:
    module = Call()
    plain = [torch.randn(2, 2, 8, 8, requires_grad=True) for _ in range(3)]
    logged = [t.detach().as_subclass(Logged).requires_grad_() for t in plain]

    def seen() -> list[Any]:
        Logged.seen.clear()
        with Functions() as functions, Operators() as operators:
            output = module(*plain)
        with Functions() as others:
            module(*logged)
        output.sum().backward()
        return [functions.seen, operators.seen, others.seen, list(Logged.seen)]

    before = seen()
    assert before[0] == [BARE] and "the function" in before[3]
    with watched(module) as monitor:
        assert seen() == before
        assert monitor.layers[0].fired == 1
        assert F.scaled_dot_product_attention is BARE and torch.nn.functional.__dict__
    assert intercept._calls._users == 0 and BARE.__self__ is torch._C._nn


def test_the_function_is_itself_while_a_module_runs(watched: Watched) -> None:
    class Looks(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            assert F.scaled_dot_product_attention is BARE
            assert pickle.loads(pickle.dumps(BARE)) is BARE and copy.deepcopy(BARE) is BARE
            assert repr(BARE) == "<built-in function scaled_dot_product_attention>"
            assert not torch.overrides.has_torch_function((q,))
            return F.scaled_dot_product_attention(q, q, q)

    module = Looks()
    with watched(module) as monitor:
        module(torch.randn(1, 2, 4, 8, requires_grad=True)).sum().backward()
        assert monitor.layers[0].fired == 1


def test_transforms_and_calls_with_other_weights(watched: Watched) -> None:
    module, call = Projected(), Call()
    x = torch.randn(3, 2, 6, 16)
    q = torch.randn(3, 2, 2, 6, 8)
    other = {name: p.detach() + 0.1 for name, p in module.named_parameters()}

    def found() -> list[Any]:
        loss = lambda w, z: torch.func.functional_call(module, w, (z,)).square().sum()  # noqa: E731
        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(other, x)
        return [
            bits(torch.vmap(call)(q, q, q)), bits(torch.vmap(module)(x)),
            [bits(g) for g in gradients.values()],
            bits(torch.func.functional_call(module, other, (x[0],))),
        ]  # fmt: skip

    before = found()
    model = nn.ModuleList([module, call])
    with watched(model):
        assert found() == before


def written(module: nn.Module, x: Tensor) -> dict[str, str]:
    """The module as each tracer writes it down."""
    export = torch.export.export

    def graph(of: Any) -> str:  # It numbers the names of the classes through the process.
        return re.sub(r"___torch_mangle_\d+\.", "", str(of))

    return {
        "jit.trace": graph(torch.jit.trace(module, x).graph),
        "jit.trace inlined": graph(torch.jit.trace(module, x).inlined_graph),
        "jit.script": str(torch.jit.script(Scripted()).graph),
        "fx": torch.fx.symbolic_trace(Plain()).code,
        "make_fx": make_fx(module)(x).code,
        "export": export(module, (x,)).graph_module.code,
        "export, strict": export(module, (x,), strict=True).graph_module.code,
    }


class Plain(nn.Module):
    """For symbolic_trace, which unpacks no generators."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class Scripted(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x) + 1


def test_what_is_written_down_is_the_model_alone(watched: Watched) -> None:
    module = Projected()
    x = torch.randn(2, 6, 16)
    before = written(module, x)
    # Instances of these classes are watched, which is what patches their forward.
    model = nn.ModuleList([module, Plain(), Scripted()])
    with watched(model) as monitor:
        assert written(module, x) == before
        # Attached and watched afterwards.
        module(x).square().sum().backward()
        layer = monitor.layers[0]
        assert layer.fired == 1 and layer.sums is not None and layer.sums.probed == 1


def test_copies_are_the_models(watched: Watched) -> None:
    module = Projected()
    x = torch.randn(2, 6, 16)
    want = bits(module(x))
    with watched(module):
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert bits(twin(x)) == want
            assert vars(twin).keys() - {"_bellwether_mark"} == vars(Projected()).keys()


def test_a_function_that_is_compiled_inside_a_module(watched: Watched) -> None:
    """Compiled once, however samples come and go, with functions that a mode would be in the way
    of."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def split(x: Tensor) -> Tensor:
        return x.unflatten(-1, (2, 8)).transpose(1, 2)

    class Inside(Projected):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (split(t) for t in self.qkv(x).chunk(3, -1))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    module = Inside()
    x = torch.randn(2, 6, 16)
    want = bits(module(x))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with watched(module) as monitor:
        for _ in range(3):
            output = module(x)
            assert bits(output) == want
            output.sum().backward()
            monitor.step()
        assert monitor.layers[0].fired == 3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It does not say what is checkpointed."""
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu126")
    module = Call()
    monitor = bellwether.attach(module, record=str(tmp_path / "a.bwrun"), run="old")
    assert monitor.why_off == "torch 2.7.1+cu126 is here: 2.8 or newer is needed"
    assert not monitor.live() and not intercept._class_users


# ---- masks that compare the function with its name ----


@pytest.mark.parametrize("mask", [causal_lower_right, causal_upper_left])
def test_a_mask_that_compares_the_function_with_its_name(mask: Any, watched: Watched) -> None:
    """In the watched module, and in another of the process while it is watched.  (What is measured
    then: test_statistics.py.)"""
    module, other = Projected(mask), Projected(mask)
    x = torch.randn(2, 6, 16)

    def found(model: nn.Module) -> list[Any]:
        model.zero_grad()
        output = model(x)
        output.square().sum().backward()
        return [bits(output), *(bits(p.grad) for p in model.parameters())]

    before = found(module), found(other)
    with watched(module) as monitor:
        assert (found(module), found(other)) == before
        (layer,) = monitor.layers
        assert layer.sums is not None and layer.sums.probed == layer.sums.leaked == 1
        assert layer.causal and not layer.notes.keys() - {"W_Q and W_K not found"}


@pytest.mark.parametrize(
    ("mask", "queries", "keys", "note"),
    [
        (causal_upper_left, 4, 6, "causal from the top left"),
        (causal_lower_right, 6, 4, "rows that see no key"),
        (causal_lower_right, 4, 6, None),
        (None, 4, 6, "causal from the top left"),
    ],
)
def test_what_a_mask_leaves_is_said(
    mask: Any, queries: int, keys: int, note: Optional[str], watched: Watched
) -> None:
    module = Call()
    q, k = (torch.randn(1, 2, n, 8, requires_grad=True) for n in (queries, keys))
    told = {"is_causal": True} if mask is None else {"attn_mask": mask(queries, keys)}
    bare = bits(BARE(q, k, k, **told))
    with watched(module) as monitor:
        output = module(q, k, k, **told)
        assert bits(output) == bare
        output.nan_to_num().sum().backward()
        (layer,) = monitor.layers
        assert layer.sums is not None and layer.sums.leaked == 1
        assert layer.sums.probed == (note is None)
        assert (note is None) == (not any("mask" in x or "causal" in x for x in layer.notes))
        assert note is None or any(note in x for x in layer.notes)
