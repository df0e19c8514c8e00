"""Goal: the products of gated MLPs agree with their law in healthy trainings, which stay the same
bit for bit, and one that is wrong is named.
Method: MLPs of transformers, healthy and damaged where no tap sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bellwether
from bellwether._hook.layer import edge_tap, gate_law
from bellwether._hook.layer.gate_law import LAW, GateTap, gate_children, gate_laws
from bellwether._hook.layer.linear_tap import Held, Taps
from bellwether._step.balances import BalanceSample, ModuleLaws

from tap_host import Host

TYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTH, INNER, ROWS = 32, 80, (4, 64)
NAMES = ("llama", "gemma", "deepseek", "t5", "bilinear")


class Bilinear(nn.Module):
    """As others name them, and without an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.w2 = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.w1(x) * self.w3(x))  # type: ignore[no-any-return]


def make(name: str) -> nn.Module:
    pytest.importorskip("transformers")
    from transformers import GemmaConfig, LlamaConfig, T5Config
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek
    from transformers.models.gemma import modeling_gemma as gemma
    from transformers.models.llama import modeling_llama as llama
    from transformers.models.t5 import modeling_t5 as t5

    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": INNER}
    if name == "llama":
        return llama.LlamaMLP(LlamaConfig(**sizes))
    if name == "gemma":
        return gemma.GemmaMLP(GemmaConfig(**sizes))
    if name == "deepseek":
        return deepseek.DeepseekV2MLP(deepseek.DeepseekV2Config(**sizes))
    if name == "t5":
        config = T5Config(d_model=WIDTH, d_ff=INNER, dropout_rate=0.2, dense_act_fn="gelu")
        return t5.T5DenseGatedActDense(config)
    return Bilinear()


def measured(
    module: nn.Module, run: Callable[[], Any], host: Optional[Host] = None, room: int = 1 << 30
) -> tuple[Optional[ModuleLaws], dict[str, str]]:
    """The laws of the module's first call in run(), and what is told of them."""
    host, found = host or Host(), []
    taps, left_out = Taps(host), host.left_out
    tap = GateTap(
        host, 0, module, Held(room), gate_laws, found.append, lambda _, why: left_out.append(why)
    )
    tap.listen(taps, module)
    run()
    taps.close()
    assert not host.errors
    sample = BalanceSample(["it"], found, lambda _, why: left_out.append(why))
    return sample.laws().get("it"), sample.faults(1)


def case(module: nn.Module, dtype: torch.dtype, size: float = 1.0) -> Callable[[], Any]:
    module.to(dtype)
    x = torch.randn(*ROWS, WIDTH).to(dtype).requires_grad_()
    u = (size * torch.randn(*ROWS, WIDTH)).to(dtype)
    return lambda: module(x).backward(u)


@pytest.mark.parametrize("size", (1.0, 1e-6, 1e-36, 1e-40))
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", NAMES)
def test_rounding_alone_breaks_no_law(name: str, dtype: torch.dtype, size: float) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        module = make(name)
        laws, faults = measured(module, case(module, dtype, size))
        assert laws is not None and set(laws.laws) == {LAW} and not faults
        assert laws.laws[LAW].z() < 0 and laws.laws[LAW].largest < 5


def test_copies_of_autocast_are_asked() -> None:
    torch.manual_seed(0)
    module, run = make("llama"), None
    run = case(module, torch.float32)

    def cast() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            run()

    laws, faults = measured(module, cast)
    assert laws is not None and not faults and laws.laws[LAW].z() < 0


@pytest.fixture
def damaged(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool, Any], None]:
    """The product of a gate, or the gradient of u, is another: before any tap sees it."""
    product = Tensor.__mul__

    def damaged(of_y: bool, damage: Callable[[Tensor], Any]) -> None:
        def changed(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            damage(gradient.view(-1, INNER))
            return gradient

        def multiplied(a: Tensor, b: Any) -> Tensor:
            y = product(a, b)
            if isinstance(b, Tensor) and y.shape[-1] == INNER and y.grad_fn is not None:
                if of_y:
                    damage(y.detach().view(-1, INNER))
                else:
                    # The second factor is u.
                    y.grad_fn.register_hook(lambda inputs, _: (inputs[0], changed(inputs[1])))
            return y

        monkeypatch.setattr(Tensor, "__mul__", multiplied)

    return damaged


def one_element(t: Tensor) -> None:
    t[5, 7] = 50 * t.abs().max()


def all_too_large(t: Tensor) -> None:
    t.mul_(1.0 + 2.0**-4)


def a_tile_not_written(t: Tensor) -> None:
    t[16:32, :16] = 0


@pytest.mark.parametrize("of_y", (False, True))
@pytest.mark.parametrize("damage", (one_element, all_too_large, a_tile_not_written))
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ("llama", "gemma", "t5"))
def test_a_wrong_product_is_named(
    name: str, dtype: torch.dtype, damage: Any, of_y: bool, damaged: Any
) -> None:
    torch.manual_seed(2)
    module = make(name)
    run = case(module, dtype)
    damaged(of_y, damage)
    _, faults = measured(module, run)
    assert faults["it"].startswith("y or du is wrong")


@pytest.mark.parametrize("dtype", TYPES)
def test_elements_that_are_not_finite_are_named_but_for_fp16(
    dtype: torch.dtype, damaged: Any
) -> None:
    torch.manual_seed(2)
    module = make("llama")
    run = case(module, dtype)
    damaged(False, lambda t: t[3, :2].fill_(float("nan")))
    laws, faults = measured(module, run)
    assert laws is not None and laws.given_nonfinite == 0
    assert laws.made_nonfinite == (None if dtype == torch.float16 else 1)
    assert bool(faults) == (dtype != torch.float16)


class Other(Bilinear):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        gate, u = self.w1(x).sigmoid(), self.w3(x)
        if self.form == "clamped":
            y = gate * u.clamp(-1, 1)
        elif self.form == "added":
            y = gate * u + u
        elif self.form == "squared":
            y = gate * u * u
        else:
            y = u.mul_(gate)
        return self.w2(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", ("clamped", "added", "squared", "in place"))
def test_other_products_are_left_out_and_told(form: str) -> None:
    module, host = Other(form), Host()
    assert measured(module, case(module, torch.float32), host) == (None, {})
    assert host.left_out == [gate_law.OTHER_GATE]


def test_a_checkpoint_or_want_of_room_is_told() -> None:
    module, host, x = make("llama"), Host(), torch.randn(*ROWS, WIDTH, requires_grad=True)
    assert measured(module, case(module, torch.float32), host, room=8) == (None, {})

    def inside() -> None:
        checkpoint(module, x, use_reentrant=False).sum().backward()

    assert measured(module, inside, host) == (None, {})
    assert host.left_out == [edge_tap.NO_ROOM, edge_tap.CHECKPOINTED]
    assert gate_children(nn.Sequential(nn.Linear(4, 4))) is None


@pytest.mark.parametrize("checkpointed", (False, True))
def test_no_bit_changes_and_every_gate_has_its_turn(tmp_path: Path, checkpointed: bool) -> None:
    def train(path: Optional[Path]) -> tuple[list[Tensor], Any, set[str]]:
        torch.manual_seed(3)
        model = nn.Sequential(*(make(name) for name in ("llama", "gemma", "t5"))).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle, status, seen = None, None, set()
        if path is not None:
            handle = bellwether.attach(
                model, record=str(path), run="gates", every=1, overhead_budget=1e9
            )
        for _ in range(8):
            x = torch.randn(*ROWS, WIDTH).bfloat16().requires_grad_()
            y = checkpoint(model, x, use_reentrant=True) if checkpointed else model(x)
            loss = y.float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if handle is not None:
                handle.step(loss=loss.detach())
                seen |= {name for name in handle.metrics() if name.endswith("y_du")}
        if handle is not None:
            assert handle.why_off == "", handle.why_off
            status = handle.status()["linear"]
            handle.detach()
        return [p.detach() for p in model.parameters()], status, seen

    (plain, _, _), (watched, status, seen) = train(None), train(tmp_path / "a.bwrun")
    assert all(torch.equal(a, b) for a, b in zip(plain, watched))
    assert len(seen) == status["gates"] == 3 and not status["faults"]
