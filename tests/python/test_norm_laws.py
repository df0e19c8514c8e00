"""Goal: the gradients of norms agree with their laws in healthy trainings, which stay the same bit
for bit, and one that is wrong is named.
Method: calls of norms of torch and transformers, healthy and damaged where no tap sees it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bellwether
from bellwether._hook.layer import edge_tap
from bellwether._hook.layer.edge_tap import EdgeTap, edges
from bellwether._hook.layer.linear_tap import Held, Taps
from bellwether._hook.layer.norm_laws import is_norm, norm_laws
from bellwether._laws import balance
from bellwether._step.balances import BalanceSample, ModuleLaws

from models import Model, Shape, batch
from tap_host import Host

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def classes() -> dict[str, Callable[[int], nn.Module]]:
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    return {
        "torch": nn.RMSNorm, "layer": nn.LayerNorm, "llama": llama.LlamaRMSNorm,
        "gemma": gemma.GemmaRMSNorm,
    }  # fmt: skip


NAMES = ("torch", "layer", "llama", "gemma")


def measured(
    module: nn.Module, run: Callable[[], Any], host: Optional[Host] = None, room: int = 1 << 30
) -> tuple[Optional[ModuleLaws], dict[str, str]]:
    """The laws of the module's first call in run(), and what is told of them."""
    host, found = host or Host(), []
    taps, left_out = Taps(host), host.left_out
    tap = EdgeTap(
        host, 0, module, Held(room), norm_laws, found.append, lambda _, why: left_out.append(why)
    )
    taps.add(module, tap)
    run()
    taps.close()
    assert not host.errors
    sample = BalanceSample(["it"], found, lambda _, why: left_out.append(why))
    return sample.laws().get("it"), sample.faults(1)


def test_a_known_form_is_asked_alone_until_it_misfits() -> None:
    torch.manual_seed(0)
    forms: dict[int, int] = {}
    asked = []
    for name, wrong in (("gemma", ""), ("gemma", ""), ("llama", balance.OTHER_FORM), ("llama", "")):
        module, run = case(name, torch.float32)
        found: list[Any] = []
        taps = Taps(Host())
        measure = functools.partial(norm_laws, form=forms.get(0))
        taps.add(module, EdgeTap(Host(), 0, module, Held(1 << 30), measure, found.append, print))
        run()
        taps.close()
        asked.append(len(found[0].laws))
        laws = BalanceSample(["it"], found, lambda *_: None, forms).laws()["it"]
        assert laws.not_judged.get("y", "") == wrong
    assert asked == [4, 1, 1, 4]


def case(
    name: str, dtype: torch.dtype, values: str = "plain"
) -> tuple[nn.Module, Callable[[], Any]]:
    module = classes()[name](48)
    x, u = torch.randn(512, 48), torch.randn(4, 128, 48)
    if values == "small":
        x = 1e-3 * x
    elif values == "an outlier":
        x[:, 3] = 50
    elif values == "repeated":
        x, u = x[torch.randint(0, 20, (512,))], u[:, :1]
    with torch.no_grad():
        module.weight.add_(0.5 * torch.randn(48))  # type: ignore[operator]
    module = module.to(dtype)
    x = x.to(dtype).view(4, 128, 48).requires_grad_()

    def run() -> None:
        # The input goes on beside the norm, as in a residual stream.
        inner = 1 * x
        (module(inner).float() * u + inner.float()).mean().mul(64).backward()

    return module, run


@pytest.mark.parametrize("values", ("plain", "small", "an outlier", "repeated"))
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", NAMES)
def test_rounding_alone_breaks_no_law(name: str, dtype: torch.dtype, values: str) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        laws, faults = measured(*case(name, dtype, values))
        assert laws is not None and not laws.not_judged and not faults
        expected = {"dx:scale"} | ({"dx:mean"} if name == "layer" else set())
        if name != "layer" or dtype == torch.float32:
            expected.add("y=dg")
        assert set(laws.laws) == expected
        assert all(law.z() < 4 for law in laws.laws.values())


@pytest.mark.parametrize("dtype", TYPES[1:])
@pytest.mark.parametrize("n", (48, 768))
@pytest.mark.parametrize("kind", ("rms", "layer"))
def test_a_norm_that_casts_its_input_breaks_no_law(kind: str, n: int, dtype: torch.dtype) -> None:
    """Nemotron's under autocast on a GPU was 1e5 times beyond rounding."""

    class Casting(nn.RMSNorm if kind == "rms" else nn.LayerNorm):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            x, weight = x.to(dtype), self.weight.to(dtype)
            if kind == "rms":
                return F.rms_norm(x, self.normalized_shape, weight, self.eps)
            return F.layer_norm(x, self.normalized_shape, weight, self.bias.to(dtype), self.eps)

    torch.manual_seed(n)
    module, x = Casting(n), (3 * torch.randn(512, n) + 0.5).requires_grad_()
    u = torch.randn(512, n)
    laws, faults = measured(module, lambda: (module(1 * x).float() * u).mean().backward())
    assert laws is not None and not faults and "dx:scale" in laws.laws
    assert all(law.z() < 4 for law in laws.laws.values())


@pytest.mark.parametrize("size", (1e-33, 1e-35, 1e-37, 1e-39, 1e-41))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", NAMES)
def test_gradients_that_underflow_break_no_law(
    name: str, dtype: torch.dtype, size: float
) -> None:  # fmt: skip
    torch.manual_seed(3)
    module, x = classes()[name](48).to(dtype), 10 * torch.randn(512, 48)
    u, x = size * torch.randn(512, 48), x.to(dtype).requires_grad_()
    laws, faults = measured(module, lambda: module(1 * x).float().backward(u))
    assert laws is not None and not faults
    assert all(law.z() < 4 for law in laws.laws.values())


@pytest.mark.parametrize("of", (8.0, 32.0, 128.0, 1000.0))
@pytest.mark.parametrize("n", (64, 768))
@pytest.mark.parametrize("name", NAMES)
def test_a_direction_that_underflows_in_fp16_breaks_no_law(name: str, n: int, of: float) -> None:
    """What some elements' gradients take off along x is less than half of the least number."""
    torch.manual_seed(1)
    module, x = classes()[name](n).half(), torch.randn(256, n).half().requires_grad_()
    u = torch.zeros(256, n)
    u[:, :4] = of * 2.0**-24
    laws, faults = measured(module, lambda: module(1 * x).float().backward(u))
    assert laws is not None and not faults
    assert all(law.z() < 4 for law in laws.laws.values())


@pytest.mark.parametrize("rows", (2, 512))
@pytest.mark.parametrize("offset", (1.0, 30.0, 1000.0))
@pytest.mark.parametrize("dtype", TYPES)
def test_a_mean_that_is_taken_off_breaks_no_law(
    dtype: torch.dtype, offset: float, rows: int
) -> None:  # fmt: skip
    """Both are rounded as large numbers, and what is left is small."""
    for seed in range(4):
        torch.manual_seed(seed)
        module = nn.LayerNorm(64)
        with torch.no_grad():
            module.weight.normal_()
            module.bias.normal_()
        module, x = module.to(dtype), offset + torch.randn(rows, 64)
        u, x = torch.randn(rows, 64), x.to(dtype).requires_grad_()
        laws, faults = measured(module, lambda: module(1 * x).float().backward(u))  # noqa: B023
        assert laws is not None and not faults
        assert all(law.z() < 4 for law in laws.laws.values())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ("Cohere", "Nemotron"))
def test_the_result_tells_which_norm_it_is(name: str, dtype: torch.dtype) -> None:
    """Cohere's takes off the mean, Nemotron's stores the gain less one."""
    cohere = pytest.importorskip("transformers.models.cohere.modeling_cohere")
    nemotron = pytest.importorskip("transformers.models.nemotron.modeling_nemotron")
    kinds = {"Cohere": cohere.CohereLayerNorm, "Nemotron": nemotron.NemotronLayerNorm1P}
    torch.manual_seed(1)
    module, x = kinds[name](64).to(dtype), 0.2 * torch.randn(48, 64).to(dtype)
    assert is_norm(module)
    u, x = torch.randn(48, 64), x.requires_grad_()

    def run() -> None:
        made = module(1 * x)
        (made.float() * u + 0.5 * made.float().square()).sum().backward()

    laws, faults = measured(module, run)
    assert laws is not None and not faults and {"dx:scale", "dx:mean"} <= set(laws.laws)
    assert all(law.z() < 4 for law in laws.laws.values())


def damaged(output: Tensor, x: Tensor, damage: Callable[[Tensor], Any]) -> None:
    """The gradient that the call returns for its input is another."""
    found = edges(output, {"x": x})
    assert found is not None
    node, at = found["x"][0]

    def hook(inputs: Any, outputs: Any) -> Any:
        changed = list(inputs)
        changed[at] = changed[at].clone()
        damage(changed[at].view(-1, changed[at].shape[-1]))
        return tuple(changed)

    node.register_hook(hook)


def one_element(d_x: Tensor) -> None:
    d_x[5, 7] = 100 * d_x.abs().max()


def rows_not_written(d_x: Tensor) -> None:
    d_x[64:128, :16] = 0


def part_of_a_row_negated(d_x: Tensor) -> None:
    d_x[:, :24].neg_()


@pytest.mark.parametrize("damage", (one_element, rows_not_written, part_of_a_row_negated))
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_gradient_of_the_input_is_named(
    name: str, dtype: torch.dtype, damage: Any
) -> None:
    torch.manual_seed(2)
    module = classes()[name](48).to(dtype)
    x, u = torch.randn(512, 48).to(dtype).requires_grad_(), torch.randn(512, 48)

    def run() -> None:
        inner = 1 * x
        y = module(inner)
        damaged(y, inner, damage)
        (y.float() * u).mean().mul(64).backward()

    laws, faults = measured_behind(module, run)
    assert laws is not None and faults["it"].startswith("dx is wrong")


def measured_behind(module: nn.Module, run: Callable[[], Any]) -> Any:
    """As measured(), with hooks behind those of run()."""
    host, found, later = Host(), [], []
    tap = EdgeTap(host, 0, module, Held(1 << 30), norm_laws, found.append, lambda *_: None)
    forward = module.forward

    def called(x: Tensor) -> Tensor:
        y: Tensor = forward(x)
        later.append((x, y))
        return y

    backward = Tensor.backward

    def before(loss: Tensor) -> None:
        tap.output((later[0][0],), later[0][1])
        backward(loss)

    module.forward = called  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "backward", before)
        run()
    assert not host.errors
    sample = BalanceSample(["it"], found, lambda _, why: None)
    return sample.laws().get("it"), sample.faults(1)


class FaultyGain(torch.autograd.Function):
    """The gain's gradient lacks half of the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, gain = ctx.saved_tensors
        return gradients[0] * gain, (gradients[0] * x)[: len(x) // 2].sum(0)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_damaged_gradient_of_the_gain_is_named(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    module = nn.RMSNorm(48, eps=1e-6).to(dtype)

    def forward(x: Tensor) -> Tensor:
        numbers = x.float()
        scaled = numbers * (numbers.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return FaultyGain.apply(scaled.to(dtype), module.weight)  # type: ignore[no-any-return]

    module.forward = forward  # type: ignore[method-assign]
    x, u = torch.randn(512, 48).to(dtype).requires_grad_(), torch.randn(512, 48)
    _, faults = measured(module, lambda: (module(1 * x).float() * u).mean().mul(64).backward())
    assert faults["it"].startswith("y or the gain's gradient is wrong")


def test_other_modules_are_no_norms() -> None:
    class Other(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x.square()

    torch.manual_seed(0)
    module, x, host = Other(16), torch.randn(8, 16, requires_grad=True), Host()
    assert (
        not is_norm(module) and not is_norm(nn.BatchNorm1d(4)) and not is_norm(nn.GroupNorm(2, 4))
    )
    assert all(is_norm(make(16)) for make in classes().values())
    own = type("OwnLayerNorm", (nn.Module,), {"__module__": "transformers.own"})()
    own.normalized_shape = 16
    assert is_norm(own)
    _, faults = measured(module, lambda: module(1 * x).sum().backward(), host)
    assert not faults and host.left_out == [balance.OTHER_FORM]


@pytest.mark.parametrize(
    ("grad", "room", "why"), ((False, 1 << 20, edge_tap.NO_EDGE), (True, 8, edge_tap.NO_ROOM))
)
def test_an_input_without_a_gradient_or_room_is_told(grad: bool, room: int, why: str) -> None:
    module, x, host = nn.RMSNorm(16), torch.randn(8, 16, requires_grad=grad), Host()
    assert measured(module, lambda: module(x).sum().backward(), host, room) == (None, {})
    assert host.left_out == [why]


def test_no_bit_changes_and_every_norm_has_its_turn(tmp_path: Path) -> None:
    def train(path: Optional[Path]) -> tuple[list[Tensor], Any, set[str]]:
        torch.manual_seed(3)
        shape = Shape(fused=False)
        model = Model(shape).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle, seen, status = None, set(), None
        if path is not None:
            handle = bellwether.attach(
                model, record=str(path), run="norms", every=1, overhead_budget=1e9
            )
        for step in range(8):
            loss = model(batch(shape, step).bfloat16()).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if handle is not None:
                handle.step(loss=loss.detach())
                seen |= {name for name in handle.metrics() if name.endswith("dx_scale")}
        if handle is not None:
            assert handle.why_off == "", handle.why_off
            status = handle.status()["linear"]
            handle.detach()
        return [p.detach() for p in model.parameters()], status, seen

    (plain, _, _), (watched, status, seen) = train(None), train(tmp_path / "a.bwrun")
    assert all(torch.equal(a, b) for a, b in zip(plain, watched))
    assert len(seen) == status["norms"] > 1 and not status["faults"]
