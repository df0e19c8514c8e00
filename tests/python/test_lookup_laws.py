"""Goal: the gradient of an embedding agrees with its law in healthy trainings, which stay the same
bit for bit, and one that is wrong is named.
Method: embeddings, healthy and damaged where no tap sees it.
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
from bellwether._hook.layer import edge_tap, lookup_law
from bellwether._hook.layer.linear_tap import Taps
from bellwether._hook.layer.lookup_law import LAWS, LookupTap
from bellwether._step.balances import BalanceSample, ModuleLaws

from tap_host import Host

TYPES = (torch.float32, torch.bfloat16, torch.float16)
WORDS, WIDTH, TOKENS, PADDING = 300, 24, (4, 128), 3
Damage = Callable[[Tensor, Tensor], Any]


class Damaged(nn.Embedding):
    """Returns another gradient for its weight."""

    damage: Optional[Damage] = None

    def forward(self, words: Tensor) -> Tensor:
        found = super().forward(words)
        if self.damage is not None:
            damage = self.damage

            def hook(inputs: Any, outputs: Any) -> Any:
                changed = inputs[0].clone()
                damage(changed, words.flatten())
                return (changed, *inputs[1:])

            assert found.grad_fn is not None
            found.grad_fn.register_hook(hook)
        return found


def measured(
    module: nn.Embedding, run: Callable[[], Any], host: Optional[Host] = None
) -> tuple[Optional[ModuleLaws], dict[str, str]]:
    """The laws of the module's first call in run(), and what is told of them."""
    host, found = host or Host(), []
    taps, left_out = Taps(host), host.left_out
    taps.add(module, LookupTap(host, 0, found.append, lambda _, why: left_out.append(why)))
    run()
    taps.close()
    assert not host.errors
    sample = BalanceSample(["it"], found, lambda _, why: left_out.append(why))
    return sample.laws().get("it"), sample.faults(1)


def tokens() -> Tensor:
    """As text has them: a few words often, many once."""
    frequency = 1 / torch.arange(1, WORDS + 1.0)
    return torch.multinomial(frequency, TOKENS[0] * TOKENS[1], replacement=True).view(TOKENS)


def gradients(values: str) -> Tensor:
    if values == "of one sign":
        return torch.rand(*TOKENS, WIDTH) + 1
    if values == "equal":
        return torch.randn(WIDTH).expand(*TOKENS, WIDTH)
    return torch.randn(*TOKENS, WIDTH) * {"plain": 1, "small": 1e-6, "underflow": 1e-39}[values]


@pytest.mark.parametrize("values", ("plain", "small", "underflow", "of one sign", "equal"))
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("seed", range(4))
def test_rounding_alone_breaks_no_law(dtype: torch.dtype, values: str, seed: int) -> None:
    torch.manual_seed(seed)
    module, words = nn.Embedding(WORDS, WIDTH, padding_idx=PADDING).to(dtype), tokens()
    laws, faults = measured(module, lambda: module(words).backward(gradients(values).to(dtype)))
    assert laws is not None and set(laws.laws) == set(LAWS) and not faults
    assert all(law.z() < 0 and law.largest < 1 for law in laws.laws.values())


def one_element(d_e: Tensor, words: Tensor) -> None:
    d_e[7, 5] += 100 * d_e.abs().max()


def a_little_too_large(d_e: Tensor, words: Tensor) -> None:
    d_e.mul_(1.01)


def rows_exchanged(d_e: Tensor, words: Tensor) -> None:
    once = [w for w in words.tolist() if words.tolist().count(w) == 1][:2]
    d_e[once] = d_e[once[::-1]]


def a_token_not_added(d_e: Tensor, words: Tensor) -> None:
    d_e[next(w for w in words.tolist() if words.tolist().count(w) == 1)] = 0


def padding_written(d_e: Tensor, words: Tensor) -> None:
    d_e[PADDING] = d_e[0]


def another_row_written(d_e: Tensor, words: Tensor) -> None:
    seen = set(words.tolist())
    d_e[next(w for w in range(WORDS) if w not in seen), 2] = d_e.abs().max()


DAMAGES = (
    one_element, a_little_too_large, rows_exchanged, a_token_not_added, padding_written,
    another_row_written,
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_wrong_gradient_is_named(dtype: torch.dtype, damage: Damage) -> None:
    torch.manual_seed(1)
    module, words = Damaged(WORDS, WIDTH, padding_idx=PADDING).to(dtype), tokens()
    module.damage = damage
    _, faults = measured(module, lambda: module(words).backward(gradients("plain").to(dtype)))
    assert faults["it"].startswith("dW is wrong: it is not that of the tokens")


@pytest.mark.parametrize("dtype", TYPES)
def test_elements_that_are_not_finite_are_named_but_for_fp16(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    module, words = Damaged(WORDS, WIDTH).to(dtype), tokens()
    module.damage = lambda d_e, _: d_e[9].fill_(float("nan"))
    laws, faults = measured(module, lambda: module(words).backward(gradients("plain").to(dtype)))
    assert laws is not None and laws.given_nonfinite == 0
    assert laws.made_nonfinite == (None if dtype == torch.float16 else WIDTH)
    assert bool(faults) == (dtype != torch.float16)


def test_a_gradient_that_came_not_finite_is_no_fault() -> None:
    module, words, u = nn.Embedding(WORDS, WIDTH), tokens(), gradients("plain")
    u[1, 2, 3] = float("inf")
    laws, faults = measured(module, lambda: module(words).backward(u))
    assert laws is not None and laws.given_nonfinite == 1 and not faults


def test_a_multiplier_behind_it_is_none_of_its_own() -> None:
    class Scaled(nn.Embedding):
        def forward(self, words: Tensor) -> Tensor:
            return super().forward(words) * torch.tensor(7.0)

    module, words = Scaled(WORDS, WIDTH), tokens()
    laws, faults = measured(module, lambda: module(words).backward(gradients("plain")))
    assert laws is not None and not faults


def test_lookups_that_are_left_out_are_told() -> None:
    words, u = tokens(), gradients("plain")

    def why(module: nn.Embedding, run: Optional[Callable[[], Any]] = None) -> str:
        host = Host()
        run = run or (lambda: module(words).backward(u))
        assert measured(module, run, host) == (None, {})
        return host.left_out[0]

    assert why(nn.Embedding(WORDS, WIDTH, sparse=True)) == lookup_law.SPARSE
    assert why(nn.Embedding(WORDS, WIDTH, scale_grad_by_freq=True)) == lookup_law.BY_FREQUENCY

    class Other(nn.Embedding):
        def forward(self, words: Tensor) -> Tensor:
            return self.weight[words]

    assert why(Other(WORDS, WIDTH)) == lookup_law.OTHER_LOOKUP
    module = nn.Embedding(WORDS, WIDTH)

    def inside() -> None:
        checkpoint(module, words, use_reentrant=False).backward(u)

    assert why(module, inside) == edge_tap.CHECKPOINTED


class Shifted(nn.Embedding):
    """As OPT's positions, and Gemma's words: other rows than were asked for, times a number."""

    def forward(self, words: Tensor) -> Tensor:
        return 8 * super().forward(words + 2)


def test_rows_that_a_module_chooses_itself_are_sound() -> None:
    torch.manual_seed(0)
    module, host = Shifted(WORDS + 2, WIDTH), Host()
    words = torch.arange(WORDS).repeat(3, 1)
    u = torch.randn(3, WORDS, WIDTH)
    laws, faults = measured(module, lambda: module(words).backward(u), host)
    assert laws is not None and set(laws.laws) and not faults and not host.left_out


@pytest.mark.parametrize("tied", (False, True))
def test_no_bit_changes_with_a_head_that_may_be_tied(tmp_path: Path, tied: bool) -> None:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, WIDTH)
            self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
            if tied:
                self.lm_head.weight = self.words.weight

        def forward(self, words: Tensor) -> Tensor:
            return self.lm_head(self.words(words).tanh())  # type: ignore[no-any-return]

    def train(path: Optional[Path]) -> tuple[list[Tensor], Any, dict[str, float]]:
        torch.manual_seed(3)
        model = Text().bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle, status, metrics = None, None, {}
        if path is not None:
            handle = bellwether.attach(
                model, record=str(path), run="words", every=1, overhead_budget=1e9
            )
        for _ in range(6):
            words = tokens()
            logits = model(words)[:, :-1].flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, words[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if handle is not None:
                handle.step(loss=loss.detach())
                metrics.update(handle.metrics())
        if handle is not None:
            assert handle.why_off == "", handle.why_off
            status = handle.status()["linear"]
            handle.detach()
        return [p.detach() for p in model.parameters()], status, metrics

    (plain, _, _), (watched, status, metrics) = train(None), train(tmp_path / "a.bwrun")
    assert all(torch.equal(a, b) for a, b in zip(plain, watched))
    assert status["embeddings"] == 1 and not status["faults"]
    assert {f"bellwether/words/{law.replace(':', '_')}" for law in LAWS} <= metrics.keys()
