"""Goal: code that calls, compares, overrides, traces, exports or copies
scaled_dot_product_attention does not see what watches it, in an attached module in a sampled step
and beside one.
Method: PyTorch's own sample inputs of the function (its OpInfo), forward and backward, bit for bit
as without us.  What torch.jit, fx, make_fx and export write down is compared word for word.  Masks
of torch.nn.attention.bias compare the function with its name.
"""

from __future__ import annotations

import ast
import copy
import math
import pickle
import re
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_methods_invocations as invocations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import bellwether
from bellwether._hook.compiled import compiled_taps
from bellwether._hook.patches import class_patches, met_calls

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


MATH = torch.nn.attention.SDPBackend.MATH
Attend = Callable[[Tensor, Tensor], Tensor]  # Of a weight and an input.


class Attends(nn.Module):
    """Its attention is `attend`; torch.autograd sees one weight."""

    def __init__(self, attend: Attend, shape: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        self.attend = attend
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, math.prod(shape)).reshape(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.weight, x)

    def calls(self) -> None:
        F.scaled_dot_product_attention  # noqa: B018  What attach() looks for.


def keys_are_queries(w: Tensor, x: Tensor) -> Tensor:
    t = w * x
    return F.scaled_dot_product_attention(t, t, t)


def keys_are_queries_by_math(w: Tensor, x: Tensor) -> Tensor:
    t = w * x
    with torch.nn.attention.sdpa_kernel(MATH):
        return F.scaled_dot_product_attention(t, t, t) + t * t


def a_weight_is_all(w: Tensor, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(w, w, w)


def weights_that_autocast_keeps(w: Tensor, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return sum(F.scaled_dot_product_attention(n * x, w, w) for n in (1, 2, 3)).float()  # type: ignore[union-attr]


def changed_in_place(which: int) -> Attend:
    def attend(w: Tensor, x: Tensor) -> Tensor:
        q, k, v = w * x, w * x * 2, w * x * 3
        with torch.nn.attention.sdpa_kernel(MATH):
            y = F.scaled_dot_product_attention(q, k, v)
        return (q, k, y)[which].mul_(2) + y

    return attend


def twice_differentiated(w: Tensor, x: Tensor) -> Tensor:
    with torch.nn.attention.sdpa_kernel(MATH):
        y = F.scaled_dot_product_attention(w * x, w * x * 2, w * x * 3)
    (g,) = torch.autograd.grad(y.square().sum(), w, create_graph=True)
    return y * g


def several_gradients(w: Tensor, x: Tensor) -> Tensor:
    y = F.scaled_dot_product_attention(w * x, w * x * 2, w * x * 3)
    (g,) = torch.autograd.grad(
        y, w, torch.stack([y, 2 * y]).detach(), is_grads_batched=True, retain_graph=True
    )
    return y * g.sum()


def forward_mode(w: Tensor, x: Tensor) -> Tensor:
    with forward_ad.dual_level(), torch.nn.attention.sdpa_kernel(MATH):
        t = forward_ad.make_dual(w * x, torch.ones_like(x))
        y = F.scaled_dot_product_attention(t, 2 * t, t + 1)
        return forward_ad.unpack_dual(y).tangent.detach() + w


def of_a_size(*size: int, **options: Any) -> Attend:
    def attend(w: Tensor, x: Tensor) -> Tensor:
        t = w * torch.ones(size)
        return F.scaled_dot_product_attention(t, t * 2, t * 3, **options) + w.sum()

    return attend


def no_keys(w: Tensor, x: Tensor) -> Tensor:
    k = w * x[:, :, :0]
    return F.scaled_dot_product_attention(w * x, k, k + 1) + w


def nested(w: Tensor, x: Tensor) -> Tensor:
    t = torch.nested.as_nested_tensor([w * x[0], w * x[1][:, :3]])
    y = F.scaled_dot_product_attention(t, t * 2, t * 3)
    return torch.nested.to_padded_tensor(y, 0.0)


def checkpointed(w: Tensor, x: Tensor) -> Tensor:
    """The attention saves last, so that the recomputation ends in its tap."""
    return F.scaled_dot_product_attention(w * x, w * x * 2, w * x * 3)


ODD: dict[str, tuple[Attend, tuple[int, ...]]] = {
    "keys are queries and values": (keys_are_queries, (1,)),
    "so they are by math": (keys_are_queries_by_math, (1,)),
    "a weight is all three": (a_weight_is_all, (2, 4, 6, 8)),
    "a weight that autocast casts once": (weights_that_autocast_keeps, (2, 4, 6, 8)),
    **{f"{name} changed": (changed_in_place(i), (1,)) for i, name in enumerate("qky")},
    "double backward": (twice_differentiated, (1,)),
    "gradients in a batch": (several_gradients, (1,)),
    "forward mode": (forward_mode, (1,)),
    "no batch": (of_a_size(0, 4, 6, 8), (1,)),
    "no heads": (of_a_size(2, 0, 6, 8), (1,)),
    "no tokens": (of_a_size(2, 4, 0, 8), (1,)),
    "no dimensions": (of_a_size(2, 4, 6, 0), (1,)),
    "no keys": (no_keys, (1,)),
    "scale 0": (of_a_size(2, 4, 6, 8, scale=0.0), (1,)),
    "scale inf": (of_a_size(2, 4, 6, 8, scale=math.inf), (1,)),
    "nested": (nested, (1,)),
}


def trained(model: Callable[[Tensor], Tensor], weight: Tensor) -> list[Any]:
    torch.manual_seed(3)
    weight.grad = None
    output = model(torch.randn(2, 4, 6, 8))
    output.square().sum().backward()
    return [bits(output), bits(weight.grad)]


@pytest.mark.parametrize("name", ODD)
def test_rare_calls_stay_bitwise_the_same_and_watched(name: str, watched: Watched) -> None:
    module = Attends(*ODD[name])
    before = trained(module, module.weight)
    with watched(module) as monitor:
        assert trained(module, module.weight) == before
        assert monitor.live() and monitor.layers[0].calls
        monitor.step(loss=1.0)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_whose_last_saved_tensors_are_the_attentions(
    reentrant: bool, early_stop: bool, watched: Watched
) -> None:
    module = Attends(checkpointed)

    def model(x: Tensor) -> Tensor:
        options = {} if reentrant else {"early_stop": early_stop}
        y = checkpoint(module, x.requires_grad_(), use_reentrant=reentrant, **options)
        assert isinstance(y, Tensor)
        return y

    before = trained(model, module.weight)
    with watched(module) as monitor:
        for fired in (1, 2):
            assert trained(model, module.weight) == before
            assert monitor.layers[0].fired == fired
            monitor.step(loss=1.0)


def test_an_error_of_a_recomputation_is_the_hosts(watched: Watched) -> None:
    """Swallowed, it would be followed by a second recomputation into what the first has left."""
    module = Attends(checkpointed)
    fails = [False]

    def failing(x: Tensor) -> Tensor:
        if fails[0]:
            raise MemoryError("the host's")
        y: Tensor = module(x)
        return y

    with watched(module):
        y = checkpoint(failing, torch.randn(2, 4, 6, 8).requires_grad_(), use_reentrant=False)
        assert isinstance(y, Tensor)
        fails[0] = True
        with pytest.raises(MemoryError, match="the host's"):
            y.sum().backward()


def test_hooks_on_saved_tensors_that_fail_for_ours_alone(watched: Watched) -> None:
    module = Attends(checkpointed)
    counts: list[int] = []

    def pack(t: Tensor) -> Tensor:
        counts[0] += 1
        if counts[0] > counts[1]:
            raise ValueError("one tensor too many")
        return t

    def model(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y: Tensor = module(x)
        return y

    counts[:] = [0, 99]
    before = trained(model, module.weight)
    with watched(module) as monitor:
        counts[:] = [0, counts[0]]
        assert trained(model, module.weight) == before
        assert any("one tensor too many" in note for note in monitor.layers[0].notes)


class OfNothing:
    """Binds in a way of its own."""

    def __get__(self, module: Any, cls: Any = None) -> Any:
        return self if module is None else lambda *args: BARE(*args)

    def __call__(self) -> None:
        BARE  # noqa: B018


def no_attribute(self: nn.Module, name: str) -> Any:
    raise KeyError(name)


@pytest.mark.parametrize(
    "body",
    [
        {"forward": BARE}, {"forward": staticmethod(BARE)},
        {"forward": staticmethod(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))},
        {"forward": classmethod(lambda c, q, k, v: F.scaled_dot_product_attention(q, k, v))},
        {"forward": property(lambda self: BARE), "named": BARE},
        {"forward": OfNothing(), "named": BARE},
        {"forward": lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v),
         "__getattr__": no_attribute},
    ],
    ids=["C", "static C", "static", "class", "property", "descriptor", "no attribute"],
)  # fmt: skip
def test_a_forward_that_is_no_plain_method(body: dict[str, Any], watched: Watched) -> None:
    module: Any = type("Odd", (nn.Module,), dict(body))()

    def call() -> Any:
        torch.manual_seed(4)
        return module(*torch.randn(3, 1, 2, 4, 8, requires_grad=True))

    before = bits(call())
    with watched(module) as monitor:
        assert bits(call()) == before
        assert monitor.layers[0].calls == 1
    assert bits(call()) == before and vars(type(module))["forward"] is body["forward"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_default_dtype_and_device_do_not_change_measurements(dtype: Any, watched: Watched) -> None:
    """Buffers of the kernels are float32 on their device, whatever the host makes its own of."""
    module = Projected()
    x = torch.randn(2, 6, 16)
    found = []
    for kind, device in ((torch.float32, "cpu"), (dtype, "meta")):
        try:
            torch.set_default_dtype(kind)
            torch.set_default_device(device)
            with watched(module) as monitor:
                module(x).square().sum().backward()
                monitor.step(loss=1.0)
                found.append({k: v for k, v in monitor.metrics().items() if "/layer" in k})
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        assert monitor.layers[0].wq._direction.dtype is torch.float32
    assert found[0] == found[1] and len(found[0]) > 4


def test_every_tensor_of_ours_says_its_type_and_its_device() -> None:
    makers = {f"torch.{x}" for x in ("arange", "empty", "full", "ones", "tensor", "zeros")}
    package = Path(bellwether.__file__).parent
    hooks = [package / f"{name}.py" for name in
             ("_actions/agreement", "_actions/head_rows", "_actions/qk_clip", "_kernels/memory",
              "_kernels/probe", "_step/frames", "_step/grad_scale", "_step/grams",
              "monitor")]  # fmt: skip
    for path in [*hooks, *(package / "_hook").rglob("*.py")]:
        name = path.relative_to(package)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in makers:
                said = {keyword.arg for keyword in node.keywords}
                assert {"dtype", "device"} <= said, (name, ast.unparse(node))


def test_errors_are_the_functions_own(watched: Watched) -> None:
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    module = Call()
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((q, q), {}), ((q, q, 1), {}), ((q, q, q), {"causal": True}), ((), {}),
        ((q, q[..., :4], q), {}), ((q, q, q, torch.ones(4, 4), 0.0, True), {}),
        ((q, q.double(), q), {}), ((q, q, q), {"dropout_p": 2.0}),
        ((q, q, q, None, 0.0, True, 0.5), {}), ((q, q, q), {"query": q}),
    ]  # fmt: skip

    def told(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return bits(function(*args, **kwargs))
        except Exception as e:
            return type(e), str(e)

    bare = [told(BARE, *each) for each in wrong]
    with watched(module):
        assert [told(module, *each) for each in wrong] == bare


def test_overrides_of_the_function_see_the_original(watched: Watched) -> None:
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
    assert met_calls.sdpa._users == 0 and BARE.__self__ is torch._C._nn


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


def test_saved_models_contain_nothing_of_ours(watched: Watched) -> None:
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
    module: Any = Projected()
    x = torch.randn(2, 6, 16)
    want = bits(module(x))
    with watched(module) as monitor:
        module.handle = monitor  # Where many keep it.
        assert copy.deepcopy(module).handle is monitor is copy.copy(monitor)
        assert pickle.loads(pickle.dumps(module)).handle is None
        del module.handle
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


def changed_behind(w: Tensor, x: Tensor) -> Tensor:
    y = F.scaled_dot_product_attention(w * x, w * x * 2, w * x * 3, dropout_p=0.5)
    return y.mul_(2).add_(x)


def keys_are_values(w: Tensor, x: Tensor) -> Tensor:
    t = w * x
    return F.scaled_dot_product_attention(t * 2, t, t) + t * t


def wrong_scale_that_is_caught(w: Tensor, x: Tensor) -> Tensor:
    try:
        return F.scaled_dot_product_attention(w * x, w * x, w * x, scale="1")  # type: ignore[arg-type]
    except TypeError:
        return w * x


@pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < compiled_taps.TORCH_MIN,
    reason="compiled modules are not watched with this torch",
)
@pytest.mark.parametrize(
    "attend",
    [
        keys_are_queries, keys_are_values, a_weight_is_all, changed_behind,
        wrong_scale_that_is_caught, of_a_size(2, 4, 6, 0), of_a_size(2, 4, 6, 8, scale=math.inf),
    ],
    ids=["keys are queries", "keys are values", "a weight is all", "changed behind", "wrong scale",
         "no dimensions", "scale inf"],
)  # fmt: skip
def test_rare_calls_compile_to_the_same_result(attend: Attend, watched: Watched) -> None:
    shape = (2, 4, 6, 8) if attend is a_weight_is_all else (1,)
    module = Attends(attend, shape)
    whole = attend is not wrong_scale_that_is_caught

    def found() -> list[Any]:
        torch._dynamo.reset()
        compiled: Any = torch.compile(module, fullgraph=whole, backend="aot_eager")
        return trained(compiled, module.weight)

    before = found()
    with watched(module):
        assert found() == before
    torch._dynamo.reset()


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It does not say what is checkpointed."""
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu126")
    module = Call()
    monitor = bellwether.attach(module, record=str(tmp_path / "a.bwrun"), run="old")
    assert monitor.why_off == "torch 2.7.1+cu126 is here: 2.8 or newer is needed"
    assert not monitor.live() and not class_patches.users


def test_a_free_threaded_python_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = sysconfig.get_config_var
    monkeypatch.setattr(
        sysconfig, "get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else real(name)
    )
    monitor = bellwether.attach(Call(), record=str(tmp_path / "a.bwrun"), run="free")
    assert monitor.why_off.startswith("this Python is free-threaded")
    assert not monitor.live() and not class_patches.users


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
        assert layer.seen.causal and not layer.notes.keys() - {"W_Q and W_K not found"}


@pytest.mark.parametrize(
    ("mask", "queries", "keys", "rows"),
    [
        (causal_upper_left, 4, 6, 4),
        (causal_lower_right, 6, 4, 4),  # Two rows see no key.
        (causal_lower_right, 4, 6, 4),
        (None, 4, 6, 4),
        (None, 6, 4, 6),
    ],
)
def test_causal_masks_at_both_ends_are_measured(
    mask: Any, queries: int, keys: int, rows: int, watched: Watched
) -> None:
    module = Call()
    q, k, v = (torch.randn(1, 2, n, 8, requires_grad=True) for n in (queries, keys, keys))
    told = {"is_causal": True} if mask is None else {"attn_mask": mask(queries, keys)}
    bare = bits(BARE(q, k, v, **told))
    with watched(module) as monitor:
        output = module(q, k, v, **told)
        assert bits(output) == bare
        output.nan_to_num().sum().backward()
        (layer,) = monitor.layers
        assert layer.sums is not None and layer.sums.leaked == layer.sums.probed == 1
        found = layer.sums.row(layer.sums.memory.collect(False), "rows")
        assert list(found) == [rows, rows]
