"""Goal: each framework's own way in works: its loop's steps, its attention's shapes, its layer
numbers; and training is bit by bit what it is without.
Method: the real transformers, Lightning and Fabric on small models; torchtitan, Megatron-Core,
TransformerEngine and DeepSpeed as stand-ins that keep to their documented interfaces.
docs/frameworks.md says which is which.
"""

from __future__ import annotations

import copy
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from comparing import OF_LINEAR
from torch import Tensor, nn

import bellwether
from bellwether._hook.calls.kernel_choice import SDPA
from bellwether._step import grad_scale
from bellwether.settings import STATS

from models import Model, Shape, batch
from recording import Recording

WATCH = dict(every=1, rows=0, sequences=0, overhead_budget=1e9)


def read(path: Path) -> tuple[Recording, dict[int, dict[str, np.ndarray]]]:
    recorded = Recording(path, ended=True)
    return recorded, recorded.steps()


# ---- transformers ----


def llama_trainer(folder: Path, callbacks: list[Any], accumulate: int) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=50, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(0, 50, (32, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"), max_steps=4, per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulate, logging_steps=1, save_steps=3, report_to=[],
        use_cpu=True, disable_tqdm=True, eval_strategy="steps", eval_steps=2, seed=3,
    )  # fmt: skip
    return transformers.Trainer(
        model, arguments, train_dataset=data, eval_dataset=data[:2], callbacks=callbacks
    )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_transformers_trainer(accumulate: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from bellwether import hf

    plain = llama_trainer(tmp_path, [], accumulate)
    plain.train()
    callback = hf.Callback(record=str(tmp_path / "a.bwrun"), run="hf", **WATCH)
    watched = llama_trainer(tmp_path, [callback], accumulate)
    watched.train()
    for a, b in zip(plain.model.parameters(), watched.model.parameters()):
        assert torch.equal(a, b)
    recorded, steps = read(tmp_path / "a.bwrun")
    layout = recorded.hello.run.layout
    assert (layout.layers, layout.heads, layout.kv_heads) == (2, 4, 2)
    assert recorded.hello.run.model == "LlamaForCausalLM"
    assert sorted(steps) == [0, 1, 2, 3]
    logged = {log["step"] - 1: log["loss"] for log in watched.state.log_history if "loss" in log}
    assert sorted(logged) == sorted(steps)
    for step, signals in steps.items():
        assert signals["rows"].tolist() == [[2 * 16.0] * 4] * 2  # Of the first micro-batch.
        assert signals["loss"][0, 0] == pytest.approx(logged[step], rel=1e-6)
    assert all("grad_norm" in signals for signals in steps.values())
    assert [e.step for e in recorded.events if e.kind == 3] == [2, 3]  # Saved behind these.


# ---- Lightning ----


def module_of(lightning: Any, late: bool) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model: Optional[Model] = None if late else self._build()

        def _build(self) -> Model:
            torch.manual_seed(0)
            return Model(Shape())

        def configure_model(self) -> None:
            if self.model is None:
                self.model = self._build()

        def training_step(self, x: Tensor, index: int) -> Tensor:
            assert self.model is not None
            return self.model(x).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


@pytest.mark.parametrize("late", [False, True])
def test_lightning(late: bool, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from bellwether.lightning import Callback

    def fit(callbacks: list[Any]) -> Any:
        module = module_of(lightning, late)
        trainer = lightning.Trainer(
            max_steps=3, accumulate_grad_batches=2, callbacks=callbacks, accelerator="cpu",
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        data = [batch(Shape(), i) for i in range(6)]
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
        return module

    plain = fit([])
    watched = fit([Callback(record=str(tmp_path / "a.bwrun"), run="l", **WATCH)])
    for a, b in zip(plain.parameters(), watched.parameters()):
        assert torch.equal(a, b)
    _, steps = read(tmp_path / "a.bwrun")
    assert sorted(steps) == [0, 1, 2]
    for signals in steps.values():
        assert (signals["rows"] == 120).all() and np.isfinite(signals["loss"][0, 0])
    assert F.scaled_dot_product_attention is SDPA


def test_fabric(tmp_path: Path) -> None:
    fabric_module = pytest.importorskip("lightning.fabric")
    from bellwether.lightning import Callback

    def fit(callbacks: list[Any]) -> list[Tensor]:
        fabric = fabric_module.Fabric(accelerator="cpu", devices=1, callbacks=callbacks)
        torch.manual_seed(0)
        model = Model(Shape())
        run, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            fabric.backward(run(batch(Shape(), step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        for each in callbacks:
            assert each.monitor.flush(20)
            each.monitor.detach()
        return [p.detach() for p in model.parameters()]

    plain = fit([])
    callback = Callback(record=str(tmp_path / "a.bwrun"), run="f", **WATCH)
    watched = fit([callback])
    assert all(torch.equal(a, b) for a, b in zip(plain, watched))
    _, steps = read(tmp_path / "a.bwrun")
    assert sorted(steps) == [0, 1, 2] and all((s["rows"] == 120).all() for s in steps.values())


# ---- torchtitan ----


class Inner(nn.Module):
    """As torchtitan's ScaledDotProductAttention: q, k, v [batch, tokens, heads, dim]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: Any = None) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scale)
        return o.transpose(1, 2)


class ByHand(Inner):
    """Attention that cannot be recognised."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: Any = None) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(1, 2)


class TitanAttention(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(32, rows, bias=False) for rows in (32, 16, 16))
        self.wo = nn.Linear(32, 32, bias=False)
        self.inner_attention = inner

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 8)) for w in (self.wq, self.wk, self.wv))
        return self.wo(self.inner_attention(q, k, v).flatten(2))


class Titan(nn.Module):
    def __init__(self, inner: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): TitanAttention(inner()) for i in range(3)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = x + layer(x)
        return x


def titan_steps(
    path: Optional[Path], inner: Callable[[], nn.Module], wrap: bool, compiled: bool = False
) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model = Titan(inner)
    monitor = None
    if wrap:
        for layer in model.layers.values():
            bellwether.wrap_attention(layer.inner_attention, layout="bthd", causal=True)
    if path is not None:
        monitor = bellwether.attach(model, record=str(path), run="titan", **WATCH)
    if compiled:
        for layer in model.layers.values():
            layer.compile(fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(2):
        x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.step(loss=loss)
        found.append(loss.detach())
    found += [p.detach() for p in model.parameters()]
    if wrap:
        for layer in model.layers.values():
            bellwether.unwrap_attention(layer.inner_attention)
    if monitor is None:
        return found, None
    assert monitor.flush(20) and monitor.status()["errors"] == 0, monitor.status()["last_error"]
    monitor.detach()
    assert path is not None
    return found, read(path)


@pytest.mark.parametrize(
    ("inner", "wrap", "compiled"),
    [(Inner, False, True), (Inner, True, False), (ByHand, True, False), (ByHand, True, True)],
)
def test_torchtitan_inner_attention(
    inner: Callable[[], nn.Module], wrap: bool, compiled: bool, tmp_path: Path
) -> None:
    """Whatever computes it and however it is reached, the same statistics."""
    torch._dynamo.reset()
    plain, _ = titan_steps(None, inner, False, compiled)
    forward = TitanAttention.forward, Inner.forward, ByHand.forward
    watched, (recorded, got) = titan_steps(tmp_path / "a.bwrun", inner, wrap, compiled)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched))
    assert forward == (TitanAttention.forward, Inner.forward, ByHand.forward)
    assert recorded.hello.run.attention.kernel == "custom" or not wrap
    layout = recorded.hello.run.layout
    assert (layout.layers, layout.heads, layout.kv_heads) == (3, 4, 2)
    _, (_, want) = titan_steps(tmp_path / "w.bwrun", Inner, False)
    for step, signals in want.items():
        # A kernel that is not known has no shadow check; compiled linear layers are not asked.
        left_out = {n for n in STATS["laws"] if wrap and n.startswith("shadow_")}
        left_out |= OF_LINEAR if compiled else set()
        assert got[step].keys() == signals.keys() - left_out
        for signal in ("rows", "common_mode_sum", "spread_sum", "key_gradient_sum", "entropy_sum",
                       "delta_abs_sum", "wq_sigma"):  # fmt: skip
            assert np.allclose(got[step][signal], signals[signal], rtol=1e-3), signal


class Plain(nn.Module):
    """Names for q, k and v, a tuple as the output, and no weights."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, str]:
        return F.scaled_dot_product_attention(query, key, value), "more"


def test_a_wrapped_module_by_itself(tmp_path: Path) -> None:
    core = bellwether.wrap_attention(Plain(), layout="bhtd", kernel="mine")
    x = torch.randn(2, 4, 10, 8, requires_grad=True)
    assert core(query=x, key=x, value=x)[1] == "more"  # Before anybody attached.
    with bellwether.attach(core, record=str(tmp_path / "a.bwrun"), run="one", **WATCH) as monitor:
        output, more = core(query=x, key=x, value=x)
        output.square().sum().backward()
        assert more == "more" and torch.equal(output, F.scaled_dot_product_attention(x, x, x))
        assert core(x[0], x[0], x[0])[0].shape == (4, 10, 8)  # Not what it was said to be.
        monitor.step()
        assert monitor.flush(20) and monitor.status()["errors"] == 0
        assert "not three tensors of 4 dimensions" in " ".join(monitor.layers[0].notes)
        copies = copy.deepcopy(core), pickle.loads(pickle.dumps(core))
        for other in copies:
            assert other(x, x, x)[1] == "more"
    bellwether.unwrap_attention(core)
    recorded, steps = read(tmp_path / "a.bwrun")
    assert recorded.hello.run.attention.kernel == "mine"
    assert steps[0]["rows"].tolist() == [[20.0] * 4]
    with pytest.raises(ValueError, match="layout: 'thb' is not one of bhtd, bthd, sbhd, thd"):
        bellwether.wrap_attention(core, layout="thb")
    with pytest.raises(ValueError, match="arithmetic: 'fp32' is not one of fused, composed"):
        bellwether.wrap_attention(core, arithmetic="fp32")


class Named(NamedTuple):
    output: Tensor
    more: str


class NamedCore(Plain):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Named:
        return Named(*super().forward(query, key, value))


def test_a_wrapped_module_keeps_its_named_tuple(tmp_path: Path) -> None:
    core = bellwether.wrap_attention(NamedCore(), layout="bhtd")
    x = torch.randn(1, 2, 6, 8, requires_grad=True)
    with bellwether.attach(core, record=str(tmp_path / "a.bwrun"), run="n", **WATCH) as monitor:
        result = core(x, x, x)
        result[0].sum().backward()
        assert type(result) is Named and monitor.layers[0].fired == 1
    bellwether.unwrap_attention(core)


class NormingCore(nn.Module):
    """Computes in float32 what autocast would compute in float32, and casts where it does."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (F.layer_norm(t, t.shape[-1:]) for t in (q, k))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, nn.Linear(48, 64))
        self.core, self.out = NormingCore(), nn.Linear(64, 48)

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (p.unflatten(-1, (4, 16)).transpose(1, 2).float() * 1.01 for p in parts)
        return self.out(self.core(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_wrapped_module_under_autocast_is_not_cast(compiled: bool, tmp_path: Path) -> None:
    def losses(path: Optional[Path]) -> list[float]:
        torch.manual_seed(0)
        model, monitor = Normed(), None
        if path is not None:
            bellwether.wrap_attention(model.core, layout="bhtd", causal=True)
            monitor = bellwether.attach(model, record=str(path), run="cast", **WATCH)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        optimizer, told = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(4):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = run(batch(Shape(), step)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append(loss.item())
            if monitor is not None:
                monitor.step(loss=loss)
        if monitor is not None:
            assert monitor.flush(20) and monitor.status()["errors"] == 0, monitor.status()
            monitor.detach()
            bellwether.unwrap_attention(model.core)
        return told

    path = tmp_path / "a.bwrun"
    assert losses(path) == losses(None)
    steps = Recording(path, ended=True).steps()
    for step in range(4):
        assert (steps[step]["rows"] == 3 * 40).all()
        for signal in ("logit_max", "delta_abs_sum", "key_leak_sum", "spread_sum"):
            assert np.isfinite(steps[step][signal]).all() and (steps[step][signal] > 0).all()
    if compiled:
        sys.modules["torch._dynamo"].reset()


# ---- Megatron-Core and TransformerEngine ----


class DotProductAttention(nn.Module):
    """By their documents: q [s, b, np, d], k and v by group, output [s, b, np * d]."""

    def __init__(self, number: int, **more: Any) -> None:
        super().__init__()
        self.layer_number = number
        self.attention_dropout = nn.Dropout(0.0)
        for name, value in more.items():
            setattr(self, name, value)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None
    ) -> Tensor:
        if getattr(self, "qkv_format", "sbhd") == "bshd":
            return self._core(query, key, value).flatten(2)
        q, k, v = (t.transpose(0, 1) for t in (query, key, value))
        return self._core(q, k, v).transpose(0, 1).flatten(2)

    def _core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ByHand.forward(self, q, k, v)  # type: ignore[arg-type]


class MegatronAttention(nn.Module):
    GROUPS, HEADS, DIM = 2, 4, 8

    def __init__(self, number: int, **more: Any) -> None:
        super().__init__()
        self.linear_qkv = nn.Linear(32, (self.HEADS + 2 * self.GROUPS) * self.DIM, bias=False)
        self.core_attention = DotProductAttention(number, **more)

    def forward(self, x: Tensor) -> Tensor:
        per = self.HEADS // self.GROUPS
        mixed = self.linear_qkv(x).unflatten(-1, (self.GROUPS, per + 2, self.DIM))
        q = mixed[..., :per, :].flatten(2, 3)
        return x + self.core_attention(q, mixed[..., per, :], mixed[..., per + 1, :], None)


class Gpt(nn.Module):
    def __init__(self, first: int, **more: Any) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(num_layers=6)
        self.layers = nn.ModuleList(MegatronAttention(first + i, **more) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def parallel_state(monkeypatch: pytest.MonkeyPatch, **sizes: tuple[int, int]) -> None:
    """megatron.core.parallel_state, as far as it is documented."""
    state = types.ModuleType("megatron.core.parallel_state")
    for name in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel",
                 "data_parallel"):  # fmt: skip
        rank, size = sizes.get(name, (0, 1))
        setattr(state, f"get_{name}_rank", lambda rank=rank: rank)
        setattr(state, f"get_{name}_world_size", lambda size=size: size)
    core = types.ModuleType("megatron.core")
    core.parallel_state = state  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron", types.ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)


@pytest.mark.parametrize(("qkv_format", "tokens_first"), [("sbhd", True), ("bshd", False)])
def test_megatron_and_transformer_engine(
    qkv_format: str, tokens_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bellwether import megatron

    monkeypatch.setenv("WORLD_SIZE", "4")
    parallel_state(monkeypatch, tensor_model_parallel=(1, 2), pipeline_model_parallel=(1, 2))
    torch.manual_seed(0)
    model = Gpt(4, qkv_format=qkv_format)  # The second stage of six layers.
    shape = (12, 2, 32) if tokens_first else (2, 12, 32)
    x = torch.randn(*shape)
    want = model(x)
    assert megatron.wrap(model) == [f"layers.{i}.core_attention" for i in range(3)]
    place = megatron.parallel(model)
    with bellwether.attach(
        model, record=str(tmp_path / "a.bwrun"), run="m", parallel=place, **WATCH
    ) as monitor:
        got = model(x)
        assert torch.equal(got, want)
        got.square().sum().backward()
        monitor.step()
        assert monitor.flush(20) and monitor.status()["errors"] == 0, monitor.status()
    recorded = Recording(tmp_path / "a.bwrun", ended=True)
    run = recorded.hello.run
    assert (run.layout.layers, run.layout.heads, run.layout.kv_heads) == (6, 8, 4)
    assert (run.world, run.reporters, run.attention.kernel) == (4, 4, "DotProductAttention")
    blocks = {recorded.names[b.signal]: b for b in recorded.frames[0].blocks}
    sigma = blocks["wq_sigma"]
    assert (sigma.layer_begin, sigma.layer_count, sigma.head_begin, sigma.head_count) == (
        3,
        3,
        4,
        4,
    )
    leak = blocks["key_leak_sum"]
    assert (leak.head_begin, leak.head_count) == (2, 2)
    assert list(blocks["rows"].values) == [24.0] * 12
    weight = model.layers[0].linear_qkv.weight.detach().view(2, 4, 8, 32)[:, :2].reshape(4, 8, 32)
    norms = torch.linalg.matrix_norm(weight, ord=2).numpy()
    assert np.allclose(np.array(sigma.values)[:4], norms, rtol=1e-5)
    for layer in model.layers:
        bellwether.unwrap_attention(layer.core_attention)


def test_packed_and_masked_megatron_attention() -> None:
    from bellwether import megatron
    from bellwether._hook.calls import contract as contracts

    assert megatron.wrap(Gpt(1, qkv_format="thd")) == []
    model = Gpt(1, attn_mask_type=types.SimpleNamespace(name="padding"))
    assert len(megatron.wrap(model)) == 3
    contract = contracts.contract_of(model.layers[0].core_attention)
    assert contract is not None and contract.masked and not contract.causal
    for layer in model.layers:
        bellwether.unwrap_attention(layer.core_attention)


# ---- DeepSpeed ----


def test_zero_3_weights_are_measured_while_they_are_whole(tmp_path: Path) -> None:
    """By its contract: parameters carry ds_id and are empty but in the forward and backward."""
    torch.manual_seed(0)
    model = Model(Shape(layers=1))
    attention = model.blocks[0].attention
    weight, whole = attention.qkv.weight, attention.qkv.weight.data
    weight.ds_id = 0  # type: ignore[attr-defined]
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="z", **WATCH) as monitor:
        for step in range(2):
            weight.data = whole
            model(batch(Shape(), step)).square().mean().backward()
            weight.data = torch.empty(0)
            monitor.step()
        assert monitor.flush(20) and monitor.status()["errors"] == 0
    _, steps = read(tmp_path / "a.bwrun")
    norms = torch.linalg.matrix_norm(whole[: 4 * 16].unflatten(0, (4, 16)), ord=2).numpy()
    for step in range(2):
        assert np.allclose(steps[step]["wq_sigma"][0], norms, rtol=1e-5)


# ---- GradScaler ----


def test_gradients_are_told_unscaled(tmp_path: Path) -> None:
    def run(path: Path, scaler: Optional[torch.amp.GradScaler]) -> dict[str, np.ndarray]:
        torch.manual_seed(0)
        model = Model(Shape(layers=1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with bellwether.attach(model, record=str(path), run="s", **WATCH) as monitor:
            for step in range(2):
                loss = model(batch(Shape(), step)).square().mean()
                if scaler is None:
                    loss.backward()
                    optimizer.step()
                else:
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()  # Doubles it, before the step is told.
                optimizer.zero_grad()
                monitor.step()
            assert monitor.flush(20) and monitor.status()["errors"] == 0
            assert "bellwether/grad_scale" not in monitor.metrics()
        return Recording(path, ended=True).steps()[1]

    before = torch.amp.GradScaler.scale
    plain = run(tmp_path / "p.bwrun", None)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    scaled = run(tmp_path / "s.bwrun", scaler)
    assert torch.amp.GradScaler.scale is before and scaler.get_scale() == 4096
    told = [signal for signal, power in grad_scale.POWERS.items() if power and signal in plain]
    assert "delta_bias_sumsq" in told
    for signal in told:
        assert np.allclose(scaled[signal], plain[signal], rtol=1e-4, atol=1e-9), signal
    off = run(tmp_path / "o.bwrun", torch.amp.GradScaler("cpu", enabled=False))
    assert np.array_equal(off["key_gradient_sum"], plain["key_gradient_sum"])


# ---- selective checkpointing ----


def test_selective_checkpointing(tmp_path: Path) -> None:
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = "scaled_dot_product" in str(op) or op == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    class Selective(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inlet(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            return x

    def run(kind: type[Model], path: Optional[Path]) -> list[Tensor]:
        torch.manual_seed(0)
        model = kind(Shape(dtype=torch.bfloat16))
        monitor = None
        if path is not None:
            monitor = bellwether.attach(model, record=str(path), run="s", **WATCH)
        model(batch(Shape(), 1)).square().mean().backward()
        if monitor is not None:
            monitor.step()
            assert monitor.flush(20) and monitor.status()["errors"] == 0
            assert [layer.fired for layer in monitor.layers] == [1, 1]
            monitor.detach()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain = run(Selective, None)
    watched = run(Selective, tmp_path / "s.bwrun")
    assert all(torch.equal(a, b) for a, b in zip(plain, watched))
    run(Model, tmp_path / "w.bwrun")
    got, want = (Recording(tmp_path / n, ended=True).steps()[0] for n in ("s.bwrun", "w.bwrun"))
    for signal in ("rows", "common_mode_sum", "key_gradient_sum", "delta_abs_sum"):
        assert np.allclose(got[signal], want[signal], rtol=1e-6), signal
