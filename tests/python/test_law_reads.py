"""Goal: no law reads values while a step runs: on a GPU the host would wait for it.
Method: all operations that torch is asked for in a sampled step of small models, on the CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Union

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from bellwether._kernels import bits
from bellwether._step import balances
from bellwether._step.balances import Balances
from bellwether._step.linears import Linears

from tap_host import Host

Laws = Union[Linears, Balances]
# They give the host a number, or a size that values decide.
READING = (
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "unique", "bincount",
    "masked_select", "histc", "allclose",
)  # fmt: skip
WORDS, WIDTH, TOKENS = 96, 48, 64


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        self.calls[name] += 1
        by_mask = name.startswith("index") and any(
            isinstance(at, Tensor) and at.dtype in (torch.bool, torch.uint8)
            for given in args[1:] if isinstance(given, (list, tuple)) for at in given
        )  # fmt: skip
        if by_mask or any(name.strip("_").startswith(of.strip("_")) for of in READING):
            self.reads[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watching]:
    with monkeypatch.context() as patched:
        # Where a mode counts what is called, no region's inputs are summed.
        patched.setattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
        for name in ("tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "item"):
            patched.setattr(Tensor, name, refused(name))
        with Watching() as mode:
            yield mode


def refused(name: str) -> Callable[..., Any]:
    def called(*_: Any) -> Any:
        raise AssertionError(f"Tensor.{name}() was called")

    return called


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64)
        self.down_proj = nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner)  # type: ignore[no-any-return]


class Small(nn.Module):
    """All kinds of modules that laws ask, one in a checkpointed region."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=3)
        self.first, self.last = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.mlp, self.again = Gate(), nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.lm_head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        x = x + self.mlp(self.first(x))
        x = x + checkpoint(self.again, x, use_reentrant=False)
        logits = self.lm_head(self.last(x)).flatten(0, 1)
        return nn.functional.cross_entropy(logits.float(), words.flatten())


def router() -> nn.Module:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = pytest.importorskip("transformers").MixtralConfig(
        hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, vocab_size=WORDS,
    )  # fmt: skip
    return mixtral.MixtralTopKRouter(config)  # type: ignore[no-any-return]


def job(laws: type[Laws], model: nn.Module) -> tuple[Host, Any]:
    host = Host()
    host.cannot_measure_on = lambda device: None  # type: ignore[attr-defined]
    of = laws(host, lambda: model)  # type: ignore[arg-type]
    of.watch()
    return host, of


def samples(
    laws: type[Laws], model: nn.Module, run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Rows of the laws of a whole turn; nothing may read a value before the steps are over."""
    host, of = job(laws, model)
    found: list[str] = []
    for _ in range(60):
        of.begin_step(False)
        with watching(monkeypatch) as plain:
            run()
        of.begin_step(True)
        with watching(monkeypatch) as watched:
            run()
            sample = of.sample()
        of.stop()
        assert not host.errors, host.errors
        assert watched.reads == plain.reads
        if sample is not None:
            found += [f"{row.place} {row.law}" for row in sample.law_rows()]
    return found


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_no_law_reads_values_in_a_step(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, words = Small().to(dtype), torch.randint(0, WORDS, (2, TOKENS))
    run = lambda: model(words).backward()  # noqa: E731
    linear = samples(Linears, model, run, monkeypatch)
    assert {"mlp.up_proj dx=dW", "again x:recomputed"} <= set(linear)
    others = samples(Balances, model, run, monkeypatch)
    assert {
        "words dW:few", "first dx:mean", "last dx:scale", "mlp y=du", "lm_head dz:classes",
        "lm_head dW:classes",
    } <= set(others)  # fmt: skip


@pytest.mark.parametrize("laws, most", ((Linears, 50), (Balances, 220)))
def test_a_sample_asks_torch_for_few_operations(
    laws: type[Laws], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each costs the host some microseconds.  Of `Balances` lm_head and another module."""
    torch.manual_seed(0)
    model, words = Small().bfloat16(), torch.randint(0, WORDS, (2, TOKENS))
    _, of = job(laws, model)
    counts = []
    for sampled in (False, *[True] * 12):
        of.begin_step(sampled)
        with watching(monkeypatch) as mode:
            model(words).backward()
            of.sample()
        of.stop()
        counts.append(sum(mode.calls.values()))
    assert 0 < max(counts) - counts[0] <= most


def test_a_routers_law_reads_nothing_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = router(), torch.randn(TOKENS, WIDTH)
    with torch.no_grad():
        next(model.parameters()).normal_()

    def run() -> None:
        results = [t for t in model(x) if isinstance(t, Tensor) and t.requires_grad]
        (results[-1] * torch.rand_like(results[-1])).sum().backward()

    assert any("dlogits" in row for row in samples(Balances, model, run, monkeypatch))


def test_reading_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(4)
    with watching(monkeypatch) as mode:
        unique: Any = x.unique
        unique()
        x[x > 1]
    assert sum(mode.reads.values()) >= 2
    with watching(monkeypatch), pytest.raises(AssertionError):
        bool(x.sum() > 0)


def test_heads_take_turns_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Small()
    _, of = job(Balances, model)
    asked: list[bool] = []
    monkeypatch.setattr(balances, "HEADS_EVERY_ON_GPUS", 4)
    monkeypatch.setattr(Balances, "_on_cpu", staticmethod(lambda module: False), raising=True)
    words = torch.randint(0, WORDS, (1, TOKENS))
    for _ in range(9):
        of.begin_step(True)
        model(words).backward()
        sample = of.sample()
        asked.append(sample is not None and "lm_head" in sample.laws())
        of.stop()
    assert asked == [True, False, False, False] * 2 + [True]


def test_chunks_together_give_the_same_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "CHUNK", 32)
    monkeypatch.setattr(bits, "_weights", {})
    values = torch.randint(-(1 << 31), (1 << 31) - 1, (32 * 37 + 5,), dtype=torch.int32)
    for count in (3, 32, 64, 32 * 16, 32 * 20, len(values)):
        some = values[:count]
        assert bits._of_bits(some, 16) == bits._of_bits(some, 1)
