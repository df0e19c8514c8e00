"""Goal: a loss that loses a part of lm_head's gradient is named, also where no tap sees into it.
Sound losses are not.  What is no softmax's cross entropy is left out and said.  No bit changes.
Method: small trainings with losses of all kinds, and gradients that are damaged.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules

import bellwether
from bellwether._hook.layer import head_tap
from bellwether._hook.layer.row_sums import of_logits, over_columns, over_rows, significand_bits
from bellwether._kernels.memory import HostMemory
from bellwether._laws import balance
from bellwether._laws.linear import Z_MIN
from bellwether._laws.rounding import BF16, F16, Grid
from bellwether._step import balances, linears
from bellwether._step.balances import BalanceSample, ModuleLaws

from fused_loss import FusedCrossEntropy
from recording import Recording

MEMORY = HostMemory()
WORDS, WIDTH, TOKENS, CHUNKS = 512, 32, 1024, 64
Loss = Callable[[Tensor, Tensor], Tensor]


class Words(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            nn.init.normal_(self.words.weight, std=0.1)
            self.lm_head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.words(tokens)
        x = x + self.down(torch.relu(self.up(x)))
        return self.norm(x)  # type: ignore[no-any-return]


def data(step: int) -> tuple[Tensor, Tensor]:
    """Tokens, often the common ones, and what follows them."""
    generator = torch.Generator().manual_seed(step)
    frequency = 1 / torch.arange(1, WORDS + 1.0)
    tokens = torch.multinomial(frequency, 2 * TOKENS, replacement=True, generator=generator)
    follow = (7 * tokens[:TOKENS] + 3) % WORDS
    known = torch.rand(TOKENS, generator=generator) < 0.5
    return tokens[:TOKENS], torch.where(known, follow, tokens[TOKENS:])


def fused(accumulate: torch.dtype, z_loss: float = 0.0) -> Any:
    def loss(model: Words, x: Tensor, words: Tensor) -> Tensor:
        dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else x.dtype
        weight = model.lm_head.weight
        return FusedCrossEntropy.apply(  # type: ignore[no-any-return]
            x.to(dtype), weight, words, CHUNKS, accumulate, z_loss
        )

    return loss


def apart(of_logits: Loss) -> Any:
    return lambda model, x, words: of_logits(model.lm_head(x), words)


class Seen:
    """The laws of all samples."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.weights: list[Tensor] = []
        self.laws: list[ModuleLaws] = []
        self.status: Any = None
        self.recording: Optional[Path] = None

    def largest(self, tensor: str) -> float:
        return max(h.laws[tensor].z() for h in self.laws if tensor not in h.not_judged)

    def why_not(self) -> set[str]:
        return {why for head in self.laws for why in head.not_judged.values()}


def train(
    loss: Any, path: Optional[Path], monkeypatch: pytest.MonkeyPatch, *,
    dtype: torch.dtype = torch.bfloat16, cast: bool = False, tied: bool = False, steps: int = 16,
    prepare: Optional[Callable[[Words], None]] = None,
) -> Seen:  # fmt: skip
    """path  None: without a monitor"""
    seen, faults = Seen(), BalanceSample.faults

    def noted(sample: BalanceSample, number: int) -> dict[str, str]:
        seen.laws += [laws for name, laws in sample.laws().items() if name == "lm_head"]
        return faults(sample, number)

    torch.manual_seed(0)
    model = Words(tied).to(dtype)
    if prepare is not None:
        prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    handle = None
    if path is not None:
        handle = bellwether.attach(
            model, record=str(path), run="heads", every=1, overhead_budget=1e9
        )
    with monkeypatch.context() as patch:
        patch.setattr(BalanceSample, "faults", noted)
        for step in range(steps):
            tokens, words = data(step)
            with torch.autocast("cpu", torch.bfloat16) if cast else contextlib.nullcontext():
                got = loss(model, model(tokens), words)
            got.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.losses.append(float(got.detach()))
            if handle is not None:
                handle.step(loss=got.detach())
        if handle is not None:
            assert handle.why_off == "", handle.why_off
            seen.status, seen.recording = handle.status()["linear"], path
            handle.detach()
    assert not modules._global_forward_hooks and not modules._global_forward_pre_hooks
    seen.weights = [p.detach().clone() for p in model.parameters()]
    return seen


@pytest.mark.parametrize("size", (1e-27, 1e-31, 1e-33, 1e-35, 1e-37, 1e-39))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("tied", (False, True))
def test_gradients_that_underflow_are_not_judged(
    size: float, dtype: torch.dtype, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = apart(lambda z, words: size * F.cross_entropy(z.float(), words))
    seen = train(loss, tmp_path / "a.bwrun", monkeypatch, dtype=dtype, tied=tied, steps=10)
    assert not seen.status["faults"]


# ---- a fused loss ----

KINDS: dict[str, dict[str, Any]] = {
    "bf16": {}, "autocast": {"dtype": torch.float32, "cast": True},
    "fp32": {"dtype": torch.float32}, "tied": {"tied": True},
    "tied autocast": {"dtype": torch.float32, "cast": True, "tied": True},
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_fused_loss_that_accumulates_in_fp32_is_sound(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = train(fused(torch.float32), tmp_path / "a.bwrun", monkeypatch, **KINDS[kind])
    assert len(seen.laws) == 15 and all(head.fused for head in seen.laws)
    assert seen.largest(balances.DW) < 0 and not seen.status["faults"] and not seen.why_not()
    assert seen.status["heads"] == ["lm_head"] and not seen.status["left_out"]


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"tied", "tied autocast"}))
def test_a_fused_loss_in_bf16_is_named_before_it_differs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    twin = train(fused(torch.float32), None, monkeypatch, **KINDS[kind])
    with caplog.at_level("WARNING", "bellwether"):
        seen = train(fused(torch.bfloat16), tmp_path / "a.bwrun", monkeypatch, **KINDS[kind])
    plain = train(fused(torch.bfloat16), None, monkeypatch, **KINDS[kind])
    assert all(torch.equal(a, b) for a, b in zip(seen.weights, plain.weights))
    assert list(seen.status["faults"]) == ["lm_head"]
    told = [r.getMessage() for r in caplog.records if "lm_head" in r.getMessage()]
    messages = Recording(tmp_path / "a.bwrun", ended=True).messages
    events = [m.event for m in messages
              if m.WhichOneof("body") == "event" and "lm_head" in m.event.text]  # fmt: skip
    # The first step is not sampled.
    assert len(told) == len(events) == 1 and events[0].step <= 3
    apart = [abs(a / b - 1) for a, b in zip(seen.losses, twin.losses)]
    assert max(apart) < 0.01


def test_a_tied_head_that_accumulates_in_bf16_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = train(fused(torch.bfloat16), tmp_path / "a.bwrun", monkeypatch, tied=True, steps=40)
    assert list(seen.status["faults"]) == ["lm_head"]


@pytest.mark.parametrize("strength", (1e-4, 1e-3, 1e-1))
def test_a_fused_z_loss_is_no_fault(
    strength: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = train(fused(torch.float32, strength), tmp_path / "a.bwrun", monkeypatch)
    assert not seen.status["faults"]
    if strength > 1e-4:
        assert seen.why_not() <= {balance.Z_LOSS, balance.OTHER} and seen.why_not()
        assert all(why.startswith("lm_head: its loss") for why in seen.status["left_out"])


def test_a_model_that_caps_its_logits_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Config:
        final_logit_softcapping = 30.0

    def prepare(model: Words) -> None:
        model.config = Config()  # type: ignore[assignment]

    seen = train(fused(torch.bfloat16), tmp_path / "a.bwrun", monkeypatch, prepare=prepare, steps=4)
    assert not seen.laws and list(seen.status["left_out"]) == [f"lm_head: {balances.SOFTCAP}"]


def test_a_weight_with_its_own_hook_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(model: Words) -> None:
        model.lm_head.weight.register_hook(lambda gradient: 2 * gradient)

    seen = train(fused(torch.bfloat16), tmp_path / "a.bwrun", monkeypatch, prepare=prepare, steps=4)
    assert not seen.laws and list(seen.status["left_out"]) == [f"lm_head: {head_tap.HOOKED}"]


# ---- logits that are seen ----

_some = torch.rand(WORDS, generator=torch.Generator().manual_seed(5)) + 0.1


def ignoring(z: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(z.float(), words.masked_fill(words % 3 == 0, -100))


SOFT: dict[str, Loss] = {
    "plain": lambda z, words: F.cross_entropy(z.float(), words),
    "in the type": lambda z, words: F.cross_entropy(z, words),
    "smooth": lambda z, words: F.cross_entropy(z.float(), words, label_smoothing=0.1),
    "weighed": lambda z, words: F.cross_entropy(z.float(), words, weight=_some),
    "ignoring": ignoring,
    "hot": lambda z, words: F.cross_entropy(8 * z.float(), words),
    "little z-loss": lambda z, words: F.cross_entropy(z.float(), words)
    + 1e-5 * z.float().logsumexp(-1).square().mean(),
}  # fmt: skip


@pytest.mark.parametrize("kind", ("bf16", "autocast", "fp32"))
@pytest.mark.parametrize("name", sorted(SOFT))
def test_a_softmax_and_its_cross_entropy_are_sound(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "little z-loss" and kind == "fp32":
        pytest.skip("fp32 tells it")
    if name == "in the type" and kind != "bf16":
        pytest.skip("as the plain one")
    seen = train(apart(SOFT[name]), tmp_path / "a.bwrun", monkeypatch, steps=8, **KINDS[kind])
    assert len(seen.laws) == 7 and not any(head.fused for head in seen.laws)
    assert seen.largest(balances.DW) < 0 and seen.largest(balances.DZ) < 0
    assert not seen.status["faults"] and not seen.status["left_out"]


@pytest.mark.parametrize("kind", ("bf16", "autocast", "fp32", "in the type"))
@pytest.mark.parametrize("size", (10.0, 100.0, 3000.0))
def test_rows_that_are_sure_of_a_word_are_sound(
    size: float, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """p of the label is rounded before the 1 is taken off, which leaves next to nothing of it."""

    def sure(z: Tensor, words: Tensor) -> Tensor:
        # Half of the rows are right.
        likeliest = z.detach().argmax(1)
        right = torch.arange(len(words)) % 2 == 0
        z = z if kind == "in the type" else z.float()
        return F.cross_entropy(z, torch.where(right, likeliest, words))

    def prepare(model: Words) -> None:
        nn.init.normal_(model.lm_head.weight, std=size / WIDTH**0.5)

    seen = train(apart(sure), tmp_path / "a.bwrun", monkeypatch, steps=5, prepare=prepare,
                 **KINDS.get(kind, {}))  # fmt: skip
    assert seen.laws and seen.largest(balances.DZ) < 0 and not seen.status["faults"]
    assert not seen.why_not()


class Places(nn.Module):
    """As wide as it has positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(300, 128), nn.Embedding(128, 128)
        self.mix = nn.MultiheadAttention(128, 2, batch_first=True)
        self.norm, self.lm_head = nn.LayerNorm(128), nn.Linear(128, 300)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        x = x + self.mix(x, x, x, need_weights=False)[0]
        return self.lm_head(self.norm(x))  # type: ignore[no-any-return]


def test_a_projection_as_wide_as_positions_is_no_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function takes its weight, so its gradient would be taken for that of a fused loss."""
    torch.manual_seed(0)
    model = Places()
    handle = bellwether.attach(
        model, record=str(tmp_path / "a.bwrun"), run="places", every=1, overhead_budget=1e9
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        tokens = torch.randint(0, 300, (2, 64))
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    status = handle.status()["linear"]
    handle.detach()
    assert status["heads"] == ["lm_head"] and not status["faults"]
    assert f"mix.out_proj: {linears.LENT}" in status["left_out"]


@pytest.mark.parametrize("std", (0.0, 1e-3, 0.02))
def test_a_loss_in_bf16_is_sound_where_words_are_alike(
    std: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All log p are nearly the same number then, and so is their rounding."""

    def prepare(model: Words) -> None:
        nn.init.normal_(model.lm_head.weight, std=std)

    loss = apart(SOFT["in the type"])
    seen = train(loss, tmp_path / "a.bwrun", monkeypatch, steps=6, prepare=prepare)
    assert len(seen.laws) == 5 and not seen.status["faults"]
    assert seen.largest(balances.DZ) < 0


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("smoothing", (0.0, 0.1))
@pytest.mark.parametrize("sure", (0.0, 0.5, 2.0, 8.0))
def test_sure_rows_are_sound_in_a_loss_of_16_bits(
    sure: float, smoothing: float, dtype: torch.dtype
) -> None:
    """Few rows have an entropy, and few of those are among the ones that are looked at."""
    torch.manual_seed(0)
    words = torch.randint(0, WORDS, (TOKENS,))
    z = torch.randn(TOKENS, WORDS).exp() * sure
    z[torch.arange(TOKENS), words] += torch.randn(TOKENS).exp() * 4 * sure
    z = z.to(dtype).requires_grad_()
    (1024 * F.cross_entropy(z, words, label_smoothing=smoothing)).backward()
    assert z.grad is not None
    sums = over_columns(MEMORY, z.grad)
    unsure, off = of_logits(MEMORY, z.detach(), significand_bits(z))
    weights = balance.loss_weights(sums[1], unsure)
    assert balance.of_classes(sums[0], sums[3], sums[1], sums[2], weights, off).z() < 0


def test_how_sure_rows_are_is_what_float64_says() -> None:
    torch.manual_seed(0)
    z = 10 * torch.randn(50, 3000)
    z[:, 7], z[3, :2000] = 60, -math.inf
    exact = z.double().log_softmax(1)
    others = exact.exp().scatter(1, z.argmax(1, keepdim=True), 0.0).sum(1)
    entropy = -torch.where(exact.exp() > 0, exact.exp() * exact, 0.0).sum(1)
    logarithm = -exact.max(1).values
    for bits in (None, 7):
        unsure, off = of_logits(MEMORY, z, bits)
        assert torch.allclose(unsure.double(), others, rtol=1e-4, atol=0)
        if bits is not None:
            expected = (1 + entropy + logarithm) * 2.0**-8
            assert torch.allclose(off.double(), expected, rtol=1e-4, atol=0)


OTHERS: dict[str, tuple[Loss, str]] = {
    "squares": (lambda z, words: z.float().square().mean() + z.float().mean(), balance.OTHER),
    "capped": (
        lambda z, words: F.cross_entropy(2 * torch.tanh(z.float() / 2), words), balance.OTHER,
    ),
    "hardly capped": (
        lambda z, words: F.cross_entropy(30 * torch.tanh(z.float() / 30), words),
        balance.OTHER,
    ),
    "sigmoids": (
        lambda z, words: F.binary_cross_entropy_with_logits(
            z.float(), F.one_hot(words, WORDS).float()
        ),
        balance.OTHER,
    ),
    "z-loss": (
        lambda z, words: F.cross_entropy(z.float(), words)
        + 1e-2 * z.float().logsumexp(-1).square().mean(),
        balance.Z_LOSS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ("bf16", "fp32"))
@pytest.mark.parametrize("name", sorted(OTHERS))
def test_other_losses_are_left_out(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, why = OTHERS[name]
    seen = train(apart(loss), tmp_path / "a.bwrun", monkeypatch, steps=8, **KINDS[kind])
    assert not seen.status["faults"] and seen.largest(balances.DW) < 0
    # In bf16 a cap that hardly shows is less than rounding.
    assert why in seen.why_not() or (name, kind) == ("hardly capped", "bf16")


class Faulty(torch.autograd.Function):
    """A cross entropy whose gradient is damaged."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, words: Tensor, damage: Any) -> Tensor:
        logs = z.float().log_softmax(-1)
        ctx.save_for_backward(logs.exp(), words)
        ctx.dtype, ctx.damage = z.dtype, damage
        return -logs.gather(1, words[:, None]).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        d_z, words = ctx.saved_tensors
        d_z = d_z.scatter_add(1, words[:, None], torch.full((len(words), 1), -1.0)) / len(words)
        ctx.damage(d_z, words)
        return (gradients[0] * d_z).to(ctx.dtype), None, None


def target_not_written(d_z: Tensor, words: Tensor) -> None:
    d_z[17].scatter_(0, words[17:18], 0.0)


def tile_not_written(d_z: Tensor, words: Tensor) -> None:
    d_z[64:128, 32:64] = 0.0


@pytest.mark.parametrize("kind", ("bf16", "autocast", "fp32"))
@pytest.mark.parametrize("damage", (target_not_written, tile_not_written))
def test_a_damaged_gradient_of_logits_is_named(
    damage: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = apart(lambda z, words: Faulty.apply(z, words, damage))  # type: ignore[no-any-return]
    seen = train(loss, tmp_path / "a.bwrun", monkeypatch, steps=4, **KINDS[kind])
    assert list(seen.status["faults"]) == ["lm_head"]
    assert seen.status["faults"]["lm_head"].startswith(balances.WORDS[balances.DZ])
    assert seen.largest(balances.DW) < 0


# ---- sums ----


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_sums_and_variances_equal_those_in_fp64(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    t = (torch.randn(300, 17) * torch.logspace(-6, 0, 17)).to(dtype)
    grid: Grid = BF16 if dtype == torch.bfloat16 else F16
    variance, exact = grid.variance(t), t.double()
    rows, columns = over_rows(MEMORY, t, 10), over_columns(MEMORY, t)
    assert torch.allclose(rows[0], exact.sum(0), rtol=0, atol=1e-6 * float(exact.abs().sum()))
    assert torch.allclose(rows[1], exact.abs().sum(0), rtol=1e-5)
    assert torch.allclose(rows[2], variance.sum(0), rtol=1e-5)
    assert torch.allclose(columns[1], exact.abs().sum(1), rtol=1e-5)
    assert torch.allclose(columns[2], grid.ulp(t).sum(1), rtol=1e-5)
    assert torch.allclose(columns[3], variance.sum(1), rtol=1e-5)


def test_a_float32_that_holds_bf16_is_taken_for_it() -> None:
    torch.manual_seed(1)
    t = torch.randn(64, 8)
    coarse, fine = over_rows(MEMORY, t.bfloat16().float(), 10), over_rows(MEMORY, t, 10)
    assert torch.allclose(coarse[2] / fine[2], torch.full((8,), 64.0).double(), rtol=0.5)


def test_the_norm_of_independent_roundings_is_far_below_its_limit() -> None:
    torch.manual_seed(2)
    for _ in range(20):
        sums, rows = torch.randn(4096), torch.randn(64, 4096)
        law = balance.of_rows(sums, torch.full((4096,), 0.5), torch.ones(4096), rows, 1.0)
        assert abs(law.norm**2 / law.degrees - 1) < 0.2 and law.z() < 0 < Z_MIN
