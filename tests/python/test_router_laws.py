"""Goal: the gradients of a router's logits add up to zero in healthy trainings, which stay the same
bit for bit, and wrong ones are named.  Losses on the logits themselves are no fault.
Method: routers as models have them, healthy and damaged where no tap sees it.
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
from bellwether._hook.layer import edge_tap, router_law
from bellwether._hook.layer.linear_tap import Taps
from bellwether._hook.layer.router_law import LAW, RouterTap, is_router
from bellwether._step.balances import BalanceSample, ModuleLaws

from tap_host import Host

TYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTH, EXPERTS, SELECTED, ROWS = 32, 16, 4, 256
FORMS = ("all", "all, renormalised", "selected", "selected, of a copy")


class Router(nn.Module):
    """As those of Qwen, Mixtral, gpt-oss and Granite.  damage: of what its softmax gives back."""

    damage: Optional[Callable[[Tensor], Any]] = None

    def __init__(self, form: str = "all") -> None:
        super().__init__()
        self.form = form
        self.weight = nn.Parameter(0.3 * torch.randn(EXPERTS, WIDTH))

    def softmax(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        p = logits.softmax(-1, dtype=dtype)
        if self.damage is not None:
            damage = self.damage

            def hook(inputs: Any, outputs: Any) -> Any:
                changed = inputs[0].clone()
                damage(changed)
                return (changed, *inputs[1:])

            assert p.grad_fn is not None
            p.grad_fn.register_hook(hook)
        return p

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(x, self.weight)
        if self.form.startswith("selected"):
            if self.form == "selected, of a copy":
                logits = logits.float()
            best, which = logits.topk(SELECTED, dim=-1)
            return logits, self.softmax(best, best.dtype), which
        weights, which = self.softmax(logits, torch.float32).topk(SELECTED, dim=-1)
        if self.form == "all, renormalised":
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), which


def measured(
    module: nn.Module, run: Callable[[], Any], host: Optional[Host] = None
) -> tuple[Optional[ModuleLaws], dict[str, str]]:
    """The laws of the module's first call in run(), and what is told of them."""
    host, found = host or Host(), []
    taps, left_out = Taps(host), host.left_out
    taps.add(module, RouterTap(host, 0, found.append, lambda _, why: left_out.append(why)))
    run()
    taps.close()
    assert not host.errors
    sample = BalanceSample(["it"], found, lambda _, why: left_out.append(why))
    return sample.laws().get("it"), sample.faults(1)


def case(
    module: nn.Module, dtype: torch.dtype, size: float = 1.0, z_loss: float = 0.0, hot: float = 1.0
) -> Callable[[], Any]:
    module.to(dtype)
    x = (hot * torch.randn(ROWS, WIDTH)).to(dtype).requires_grad_()
    u = torch.randn(ROWS, SELECTED)

    def run() -> None:
        logits, weights, _ = module(x)
        loss = (weights.float() * u).sum() + z_loss * logits.float().logsumexp(-1).square().sum()
        (size * loss).backward()

    return run


@pytest.mark.parametrize("hot", (0.01, 1.0, 10.0))
@pytest.mark.parametrize("size", (1.0, 1e-6, 1e-36))
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("form", FORMS)
def test_rounding_alone_breaks_no_law(
    form: str, dtype: torch.dtype, size: float, hot: float
) -> None:
    torch.manual_seed(0)
    module = Router(form)
    laws, faults = measured(module, case(module, dtype, size, hot=hot))
    assert laws is not None and set(laws.laws) == {LAW} and not faults
    assert laws.laws[LAW].z() < 0 and laws.laws[LAW].largest < 4


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_loss_on_the_logits_is_no_fault(form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = Router(form)
    laws, faults = measured(module, case(module, dtype, z_loss=0.1))
    assert laws is not None and not faults and laws.laws[LAW].z() < 0


def one_element(d_z: Tensor) -> None:
    d_z[5, 2] = 10 * d_z.abs().max()


def an_expert_too_large(d_z: Tensor) -> None:
    d_z[:, 1] *= 1.1


def a_tile_not_written(d_z: Tensor) -> None:
    d_z[16:48, :2] = 0


@pytest.mark.parametrize("damage", (one_element, an_expert_too_large, a_tile_not_written))
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_gradient_is_named(form: str, dtype: torch.dtype, damage: Any) -> None:
    torch.manual_seed(1)
    module = Router(form)
    module.damage = damage
    _, faults = measured(module, case(module, dtype))
    assert faults["it"].startswith("dlogits is wrong")


@pytest.mark.parametrize("dtype", TYPES)
def test_elements_that_are_not_finite_are_named_but_for_fp16(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    module = Router()
    module.damage = lambda d_z: d_z[3, :2].fill_(float("nan"))
    laws, faults = measured(module, case(module, dtype))
    assert laws is not None and laws.given_nonfinite == 0
    assert laws.made_nonfinite == (None if dtype == torch.float16 else 2)
    assert bool(faults) == (dtype != torch.float16)


class Other(Router):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(x, self.weight)
        if self.form == "sigmoid":
            p = logits.sigmoid()
        elif self.form == "capped":
            p = logits.tanh().softmax(-1)
        elif self.form == "of the rows":
            p = logits.softmax(0)
        else:
            p = logits.softmax(-1) + logits
        weights, which = p.topk(SELECTED, dim=-1)
        return logits, weights, which


@pytest.mark.parametrize("form", ("sigmoid", "capped", "of the rows", "added"))
def test_other_routers_are_left_out_and_told(form: str) -> None:
    module, host = Other(form), Host()
    assert measured(module, case(module, torch.float32), host) == (None, {})
    assert host.left_out == [router_law.OTHER_ROUTER]


def test_a_checkpointed_router_is_told() -> None:
    module, host, x = Router(), Host(), torch.randn(ROWS, WIDTH, requires_grad=True)

    def inside() -> None:
        checkpoint(module, x, use_reentrant=False)[1].sum().backward()

    assert measured(module, inside, host) == (None, {})
    assert host.left_out == [edge_tap.CHECKPOINTED]


def test_no_bit_changes_and_every_router_has_its_turn(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        output_router_logits=True,
    )  # fmt: skip

    def train(path: Optional[Path]) -> tuple[list[Tensor], Any, set[str]]:
        torch.manual_seed(3)
        model = MixtralForCausalLM(config).bfloat16().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle, status, seen = None, None, set()
        if path is not None:
            handle = bellwether.attach(
                model, record=str(path), run="routers", every=1, overhead_budget=1e9
            )
        for _ in range(12):
            words = torch.randint(3, 64, (2, 24))
            loss = model(input_ids=words, labels=words, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if handle is not None:
                handle.step(loss=loss.detach())
                seen |= {name for name in handle.metrics() if name.endswith("dlogits_experts")}
        if handle is not None:
            assert handle.why_off == "", handle.why_off
            assert all(is_router(m.mlp.gate) for m in model.model.layers)
            status = handle.status()["linear"]
            handle.detach()
        return [p.detach() for p in model.parameters()], status, seen

    (plain, _, _), (watched, status, seen) = train(None), train(tmp_path / "a.bwrun")
    assert all(torch.equal(a, b) for a, b in zip(plain, watched))
    assert len(seen) == status["routers"] == 2 and not status["faults"]
