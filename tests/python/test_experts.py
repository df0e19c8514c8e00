"""Goal: what is told of routers and their experts equals a recomputation in float64, for routers of
transformers, Megatron-Core and one's own.  A dead expert and a collapsed router are seen within
two samples.  Training stays the same bit for bit, and no GPU is waited for.
Method: trainings whose routers are overheard beside us, compared with their recordings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bellwether
from bellwether._hook.layer import routing_tap
from bellwether._hook.layer.linear_tap import Taps
from bellwether._hook.layer.routers import Routed, Router, plain, routers, wrap_router
from bellwether._hook.layer.routing_tap import Routing, RoutingTap, measure, row_cosine
from bellwether._hook.model.parallel import Parallel
from bellwether._step import experts as experts_module
from bellwether._step.expert_sample import OF_EXPERTS, OF_LAYERS, ExpertSample
from bellwether._step.experts import Experts
from bellwether.settings import STATS

from models import Model, Shape, batch
from no_waiting import DEVICE, NoWaiting
from recording import Recording, replayed_alerts
from tap_host import Host as TapHost

ALL: dict[str, Any] = {"stats": frozenset(STATS)}
WORDS, WIDTH, EXPERTS, TOP_K, ROWS = 128, 32, 8, 2, 96


class Host(TapHost):
    microbatches = "first"

    def samples_call(self, calls: int) -> bool:
        return calls == 0 or self.microbatches == "all"


# ---- one router ----


def told(
    module: nn.Module,
    run: Callable[[], Any],
    host: Host | None = None,
    cosine: bool = True,
) -> tuple[dict[str, Any], Routing]:
    """By signal, of the calls in run()."""
    host = host or Host()
    found = [router for _, _, router in routers(nn.ModuleList([module])) if router is not None]
    routing = Routing(0, found[0])
    taps, left_out = Taps(host), host.left_out  # type: ignore[arg-type]
    tap = RoutingTap(
        host, routing, cosine, host.samples_call,  # type: ignore[arg-type]
        lambda _, why: left_out.append(why),
    )  # fmt: skip
    taps.add(module, tap)
    run()
    taps.close()
    assert not host.errors, host.errors
    return as_signals(routing), routing


def as_signals(routing: Routing) -> dict[str, Any]:
    sample = ExpertSample([(0, routing)], routing.router.experts)
    assert sample.ready()
    return {block.signal: torch.tensor(list(block.values)).double() for block in sample.blocks()}


def wanted(logits: Tensor | None, chosen: list[int], experts: int) -> dict[str, Tensor]:
    """In float64, one token after the other."""
    load = torch.tensor([float(chosen.count(e)) for e in range(experts)]).double()
    found = {
        "expert_load": load, "expert_dead": (load == 0).double(), "expert_ideal_load": load.mean(),
        "expert_largest_load": load.max(),
    }  # fmt: skip
    if logits is not None:
        p = logits.detach().double().reshape(-1, experts).softmax(-1)
        found["router_entropy_sum"] = torch.special.entr(p).sum()
        found["router_logit_max"] = logits.detach().double().max()
        found["router_tokens"] = torch.tensor(float(len(p)))
        found["router_entropy_largest_sum"] = len(p) * torch.tensor(float(experts)).double().log()
    return found


def cosine_of(weight: Tensor) -> float:
    rows = nn.functional.normalize(weight.detach().double(), dim=1)
    pairs = [float(rows[i] @ rows[j]) for i in range(len(rows)) for j in range(i)]
    return max(pairs)


def same(told: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert set(told) == set(wanted)
    for signal, value in wanted.items():
        got, value = told[signal].flatten(), torch.as_tensor(value).double().flatten()
        torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-5, msg=f"{signal}: {got} {value}")


SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "num_experts_per_tok": TOP_K, "num_local_experts": EXPERTS,
    "num_experts": EXPERTS,
}  # fmt: skip
GROUPS = {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1}
# By the class: its module, its configuration and how its result is read: logits, chosen experts.
OF_TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "MixtralTopKRouter": ("mixtral", "MixtralConfig", {}),
    "Qwen3MoeTopKRouter": ("qwen3_moe", "Qwen3MoeConfig", {}),
    "OlmoeTopKRouter": ("olmoe", "OlmoeConfig", {}),
    "GptOssTopKRouter": ("gpt_oss", "GptOssConfig", {}),
    "DeepseekV2TopkRouter": ("deepseek_v2", "DeepseekV2Config", GROUPS),
    "DeepseekV3TopkRouter": ("deepseek_v3", "DeepseekV3Config", GROUPS),
    "PhimoeTopKRouter": ("phimoe", "PhimoeConfig", {}),
}


def of_transformers(name: str) -> Any:
    folder, config_name, more = OF_TRANSFORMERS[name]
    transformers = pytest.importorskip("transformers")
    home = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    if not hasattr(home, name):
        pytest.skip(f"this transformers has no {name}")
    router = getattr(home, name)(getattr(transformers, config_name)(**SIZES, **more))
    with torch.no_grad():
        for p in router.parameters():
            p.normal_()
    return router.train()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_values_of_a_known_router_are_those_of_float64(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    router = of_transformers(name).to(dtype)
    results: list[Any] = []
    x = torch.randn(1, ROWS, WIDTH).to(dtype)
    x = x if name != "PhimoeTopKRouter" else x[0]
    found, _ = told(router, lambda: results.append(router(x)))
    logits, _, chosen = results[0]
    expected = wanted(logits, chosen.flatten().tolist(), EXPERTS)
    same(found, expected | {"router_row_cosine_max": cosine_of(router.weight)})
    assert float(found["expert_load"].sum()) == ROWS * TOP_K


def switch(capacity: int) -> Any:
    home = pytest.importorskip(
        "transformers.models.switch_transformers.modeling_switch_transformers"
    )
    config = home.SwitchTransformersConfig(
        d_model=WIDTH,
        num_experts=EXPERTS,
        expert_capacity=capacity,
        router_jitter_noise=0.0,
    )
    return home.SwitchTransformersTop1Router(config)


def test_dropped_tokens_are_told_where_the_router_shows_them() -> None:
    torch.manual_seed(0)
    router, results = switch(capacity=4), []
    found, _ = told(router, lambda: results.append(router(torch.randn(2, ROWS, WIDTH))))
    mask, _, logits = results[0]
    expected = wanted(logits, logits.argmax(-1).flatten().tolist(), EXPERTS)
    expected["expert_dropped"] = expected["expert_load"] - mask.sum((0, 1)).double()
    expected["router_row_cosine_max"] = torch.tensor(cosine_of(router.classifier.weight))
    same(found, expected)
    assert float(found["expert_dropped"].sum()) > 0


def test_a_router_that_gives_sizes_alone_is_read() -> None:
    torch.manual_seed(0)
    home = pytest.importorskip("transformers.models.jetmoe.modeling_jetmoe")
    router, results = home.JetMoeTopKGating(WIDTH, EXPERTS, TOP_K), []
    found, _ = told(router, lambda: results.append(router(torch.randn(ROWS, WIDTH))))
    *_, sizes, logits = results[0]
    expected = wanted(logits, [e for e, n in enumerate(sizes) for _ in range(n)], EXPERTS)
    same(found, expected | {"router_row_cosine_max": cosine_of(router.layer.weight)})


def test_a_map_of_megatron_is_read() -> None:
    class TopKRouter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            p = (x @ self.weight.T).softmax(-1)
            mask = torch.zeros_like(p, dtype=torch.bool)
            return p * 1.0, mask.scatter_(-1, p.topk(TOP_K, -1).indices, True)

    TopKRouter.__module__ = "megatron.core.transformer.moe.router"
    router, results = TopKRouter(), []
    found, _ = told(router, lambda: results.append(router(torch.randn(ROWS, WIDTH))))
    chosen = results[0][1].nonzero()[:, 1].tolist()
    same(
        found,
        wanted(None, chosen, EXPERTS) | {"router_row_cosine_max": cosine_of(router.weight)},
    )


def test_all_micro_batches_are_added_up() -> None:
    torch.manual_seed(0)
    router, host = of_transformers("MixtralTopKRouter"), Host()
    host.microbatches = "all"
    xs = [torch.randn(ROWS, WIDTH) for _ in range(3)]
    results: list[Any] = []
    found, _ = told(router, lambda: results.extend(router(x) for x in xs), host)
    logits = torch.cat([r[0] for r in results])
    chosen = torch.cat([r[2] for r in results]).flatten().tolist()
    expected = wanted(logits, chosen, EXPERTS)
    same(found, expected | {"router_row_cosine_max": cosine_of(router.weight)})


def test_only_the_first_micro_batch_is_read_if_not_said() -> None:
    router = of_transformers("MixtralTopKRouter")

    def run() -> None:
        for _ in range(3):
            router(torch.randn(ROWS, WIDTH))

    assert float(told(router, run)[0]["router_tokens"]) == ROWS


def test_passes_without_gradients_are_not_counted() -> None:
    router = of_transformers("MixtralTopKRouter")

    def run() -> None:
        with torch.no_grad():
            router(torch.randn(ROWS, WIDTH))

    assert told(router, run)[1].sums is None


@pytest.mark.parametrize("reentrant", (False, True))
def test_a_checkpointed_router_is_counted_once(reentrant: bool) -> None:
    router, host = of_transformers("MixtralTopKRouter"), Host()
    host.microbatches = "all"
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def run() -> None:
        checkpoint(router, x, use_reentrant=reentrant)[1].sum().backward()

    assert float(told(router, run, host)[0]["router_tokens"]) == ROWS


def test_a_checkpoint_that_keeps_results_is_left_out() -> None:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    router, host = of_transformers("MixtralTopKRouter"), Host()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    contexts = functools.partial(
        create_selective_checkpoint_contexts,
        [torch.ops.aten.mm.default],
    )

    def run() -> None:
        checkpoint(router, x, use_reentrant=False, context_fn=contexts)[1].sum().backward()

    assert told(router, run, host)[1].sums is None and host.left_out == [routing_tap.CACHED]


def test_numbers_beyond_the_experts_are_none() -> None:
    chosen = torch.tensor([[0, -1], [EXPERTS, 2], [2, 7]])
    sums = measure(Routed(chosen=chosen), EXPERTS, torch.device("cpu"))
    assert sums[:EXPERTS].tolist() == [1, 0, 2, 0, 0, 0, 0, 1]


def test_chunks_of_logits_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(ROWS, EXPERTS)
    whole = measure(Routed(logits), EXPERTS, torch.device("cpu"))
    monkeypatch.setattr(routing_tap, "CHUNK", 3 * EXPERTS)
    torch.testing.assert_close(measure(Routed(logits), EXPERTS, torch.device("cpu")), whole)


def test_logits_that_are_not_finite_stay_so() -> None:
    logits = torch.randn(ROWS, EXPERTS)
    logits[3, 2] = float("nan")
    sums = measure(Routed(logits), EXPERTS, torch.device("cpu"))
    assert sums[-3].isnan() and sums[-2].isnan()


def test_no_gpu_is_waited_for() -> None:
    logits, weight = (
        torch.empty(ROWS, EXPERTS, device=DEVICE),
        torch.empty(EXPERTS, WIDTH, device=DEVICE),
    )
    chosen = torch.empty(ROWS, TOP_K, dtype=torch.int64, device=DEVICE)
    kept = torch.empty(ROWS, TOP_K, dtype=torch.bool, device=DEVICE)
    with NoWaiting() as seen:
        for routed in (
            Routed(logits, chosen, kept),
            Routed(logits, loads=chosen.sum(0)[:1]),
        ):
            sums = measure(routed, EXPERTS, torch.device(DEVICE))
            sums[-1] = row_cosine(weight)
            routing = Routing(0, Router("it", None, EXPERTS, TOP_K, plain, None))
            routing.add(ROWS, routed, sums)
            routing.add(ROWS, routed, sums.clone())
    assert seen.operations


# ---- one's own ----


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.scores(x)}


def test_a_router_of_ones_own_is_read_as_declared() -> None:
    torch.manual_seed(0)
    router, results = Own(), []
    kept = torch.rand(ROWS, TOP_K) < 0.7

    def read(output: dict[str, Tensor]) -> Any:
        return output["logits"], output["logits"].topk(TOP_K).indices, kept

    assert wrap_router(router, read=read) is router
    found, _ = told(router, lambda: results.append(router(torch.randn(ROWS, WIDTH))))
    chosen = results[0]["logits"].topk(TOP_K).indices
    expected = wanted(results[0]["logits"], chosen.flatten().tolist(), EXPERTS)
    expected["expert_dropped"] = torch.tensor(
        [float(((chosen == e) & ~kept).sum()) for e in range(EXPERTS)]
    )
    expected["router_row_cosine_max"] = torch.tensor(cosine_of(router.scores.weight))
    same(found, expected)


def test_a_router_of_logits_alone_is_read_with_top_k() -> None:
    torch.manual_seed(0)
    router, results = bellwether.wrap_router(Own(), top_k=TOP_K), []
    found, _ = told(router, lambda: results.append(router(torch.randn(ROWS, WIDTH))))
    chosen = results[0]["logits"].topk(TOP_K).indices.flatten().tolist()
    expected = wanted(results[0]["logits"], chosen, EXPERTS)
    same(found, expected | {"router_row_cosine_max": cosine_of(router.scores.weight)})


@pytest.mark.parametrize(
    "read",
    (
        lambda output: output["nothing"],
        lambda output: (output["logits"], [0, 1]),
        lambda output: (output["logits"], torch.tensor(1)),
        lambda output: (output["logits"], output["logits"].argmax(1), torch.ones(3)),
    ),
)
def test_a_reading_that_raises_costs_the_router_alone(read: Any) -> None:
    router, host = Own(), Host()
    wrap_router(router, read=read)
    _, routing = told(router, lambda: router(torch.randn(ROWS, WIDTH)), host)
    assert routing.sums is None and len(host.left_out) == 1 and not host.errors


@pytest.mark.parametrize(
    "wrong",
    ({"experts": 0}, {"experts": 5000}, {"top_k": 0}, {"layer": 512}, {"read": 3}),
)
def test_bad_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        wrap_router(Own(), **wrong)


def test_a_function_is_no_module_to_declare() -> None:
    with pytest.raises(TypeError):
        wrap_router(lambda x: x)  # type: ignore[arg-type]


# ---- which layer ----


def placed(
    model: nn.Module, attention: list[tuple[str, int]], at: Parallel | None = None
) -> Experts:
    found = Experts(Host(), lambda: model, at or Parallel())  # type: ignore[arg-type]
    found.watch()
    found.place(attention)
    return found


def tree(*names: str) -> nn.Module:
    """A model with a router at each of these paths."""
    root = nn.Module()
    for name in names:
        at = root
        *path, last = name.split(".")
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = getattr(at, part)
        at.add_module(last, wrap_router(nn.Linear(WIDTH, EXPERTS), top_k=TOP_K))
    return root


def test_a_router_is_of_the_layer_of_its_block() -> None:
    model = tree("layers.1.mlp.gate", "layers.2.mlp.gate", "layers.12.mlp.gate")
    attention = [(f"layers.{i}.attn", i) for i in range(13)]
    assert list(placed(model, attention).layers.values()) == [1, 2, 12]
    late = Parallel(pipeline=(1, 2), first_layer=13, layers=26)
    found = placed(model, attention, late)
    assert list(found.layers.values()) == [14, 15, 25] and found.layers_needed() == 26


def test_routers_between_other_layers_are_counted_in_order() -> None:
    model = tree("layers.1.gate", "layers.3.gate", "layers.5.gate")
    found = placed(model, [("layers.3.attn", 0)])
    assert list(found.layers.values()) == [0, 1, 2] and found.layers_needed() == 3
    stages = placed(model, [("layers.3.attn", 0)], Parallel(pipeline=(0, 2), layers=4))
    assert not stages.layers and {why for _, why in stages.left_out} == {experts_module.STAGES}


def test_a_router_inside_attention_leaves_the_layer_to_another() -> None:
    model = tree("layers.0.self_attention.experts.router", "layers.0.mlp.router")
    found = placed(model, [("layers.0.self_attention", 0)])
    assert found.layers == {"layers.0.mlp.router": 0}
    assert set(found.left_out.values()) == {1}


def test_a_second_router_of_a_layer_is_left_out() -> None:
    model = tree("a.gate", "b.gate")
    for name in ("a", "b"):
        wrap_router(model.get_submodule(f"{name}.gate"), layer=3)
    found = placed(model, [])
    assert found.layers == {"a.gate": 3} and found.left_out["b.gate", experts_module.TAKEN] == 1


def test_a_router_of_unknown_size_is_told() -> None:
    class MyRouter(nn.Module):
        pass

    MyRouter.__module__ = "transformers.models.mine"
    found = placed(nn.ModuleList([MyRouter()]), [])
    assert found.left_out["0", experts_module.HOW_MANY] == 1


def test_one_tensor_parallel_rank_tells_and_all_have_its_layout() -> None:
    model = tree("layers.0.gate", "layers.3.gate")
    first, second = (placed(model, [], Parallel(tensor=(rank, 2))) for rank in range(2))
    assert second.not_measured == experts_module.COPY
    assert first.layers_needed() == second.layers_needed() == 2 and first.most == second.most
    second.begin_step(True)
    model.get_submodule("layers.0.gate")(torch.randn(ROWS, WIDTH))
    assert second.sample() is None


def test_rows_of_large_routers_are_compared_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tree(*(f"layers.{i}.gate" for i in range(5)))
    found = placed(model, [])
    monkeypatch.setattr(experts_module, "COSINE_PRODUCTS", 2 * EXPERTS**2 * WIDTH)
    seen: list[set[int]] = []
    for _ in range(3):
        found.begin_step(True)
        for i in range(5):
            model.get_submodule(f"layers.{i}.gate")(torch.randn(ROWS, WIDTH))
        sample = found.sample()
        assert sample is not None
        block = next(b for b in sample.blocks() if b.signal == "router_row_cosine_max")
        seen.append({i for i, v in enumerate(block.values) if abs(v) <= 1})
        found.stop()
    assert seen == [{0, 1}, {2, 3}, {4, 0}]


# ---- a training ----


def gpt_oss() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, head_dim=16,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K, attn_implementation="eager",
    )  # fmt: skip
    return transformers.GptOssForCausalLM(config)


def mixtral(layers: int = 2) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K, output_router_logits=True,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


@contextmanager
def overheard(model: nn.Module) -> Iterator[dict[int, Any]]:
    """What the routers return last, by layer."""
    found: dict[int, Any] = {}
    hooks = [
        (getattr(layer.mlp, "gate", None) or layer.mlp.router).register_forward_hook(
            lambda module, args, output, i=i: found.__setitem__(
                i, (module.weight.detach().clone(), output)
            )
        )
        for i, layer in enumerate(model.model.layers)  # type: ignore[union-attr, arg-type]
    ]
    yield found
    for hook in hooks:
        hook.remove()


def trained(
    path: Path | None, steps: int = 6, change: Callable[[Any, int], None] = lambda m, s: None,
    dtype: torch.dtype = torch.float32, make: Callable[[], Any] = mixtral, rate: float = 0.1,
    **settings: Any,
) -> tuple[list[Tensor], list[dict[int, Any]], Any]:  # fmt: skip
    torch.manual_seed(3)
    model = make().to(dtype).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    handle, status, kept = None, None, []
    if path is not None:
        given = {"every": 1, "overhead_budget": 1e9, **ALL, **settings}
        handle = bellwether.attach(model, record=str(path), run="experts", **given)
    for step in range(steps):
        change(model, step)
        words = torch.randint(3, WORDS, (2, 24))
        with overheard(model) as found:
            loss = model(input_ids=words, labels=words, use_cache=False).loss
        kept.append(found)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if handle is not None:
            handle.step(loss=loss.detach())
    if handle is not None:
        assert handle.why_off == "", handle.why_off
        status = handle.status()
        handle.detach()
    return [p.detach() for p in model.parameters()], kept, status


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_no_bit_of_a_training_changes(dtype: torch.dtype, tmp_path: Path) -> None:
    plain_, _, _ = trained(None, dtype=dtype)
    watched, _, status = trained(tmp_path / "a.bwrun", dtype=dtype)
    assert all(torch.equal(a, b) for a, b in zip(plain_, watched))
    assert status["errors"] == 0 and not status["experts"]["left_out"]
    assert status["experts"]["experts"] == EXPERTS
    assert list(status["experts"]["routers"].values()) == [0, 1]


def test_a_recording_has_what_the_routers_did(tmp_path: Path) -> None:
    path = tmp_path / "a.bwrun"
    _, kept, _ = trained(path)
    recording = Recording(path, ended=True)
    assert recording.hello.run.layout.experts == EXPERTS
    steps = recording.steps()
    for step in range(1, 6):  # The layout is told behind the first.
        for layer, (weight, (logits, _, chosen)) in kept[step].items():
            expected = wanted(logits, chosen.flatten().tolist(), EXPERTS)
            expected["router_row_cosine_max"] = torch.tensor(cosine_of(weight))
            found = {
                signal: torch.tensor(of[layer][: expected[signal].numel()])
                for signal, of in steps[step].items()
                if signal in (*OF_EXPERTS, *OF_LAYERS)
            }  # fmt: skip
            same({signal: v.double() for signal, v in found.items()}, expected)


def test_nothing_is_told_where_it_was_not_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.bwrun"
    trained(path, steps=3, stats=frozenset(STATS) - {"experts"})
    recording = Recording(path, ended=True)
    assert recording.hello.run.layout.experts == 0
    assert not any("expert_load" in found for found in recording.steps().values())


def test_declared_routers_that_stats_leave_out_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "bellwether")
    shape, said = Shape(fused=False), experts_module.NOT_ASKED
    model = Model(shape)
    model.gate = bellwether.wrap_router(Own(), experts=EXPERTS, top_k=TOP_K)
    monitor = bellwether.attach(model, run="e", record=str(tmp_path / "a.bwrun"), stats="drift")
    monitor.wrap_router(lambda x: x, name="route", experts=EXPERTS)
    for step in range(3):
        model(batch(shape, step)).square().mean().backward()
        monitor.step()
    status = monitor.status()
    monitor.detach()
    assert status["errors"] == 0 and status["experts"]["not_measured"] == said
    assert status["experts"]["left_out"] == {f"gate: {said}": 1, f"route: {said}": 1}
    assert caplog.text.count(f"wrap_router(): {said}, so 2 routers are not measured (gate)") == 1


def test_without_declared_routers_nothing_is_said(tmp_path: Path) -> None:
    _, _, status = trained(tmp_path / "a.bwrun", steps=3, stats=frozenset({"drift"}))
    assert status["experts"]["not_measured"] is None and not status["experts"]["left_out"]


RULES = "thresholds: {context: {warmup_steps: 0}}"


def alerts_of(path: Path) -> list[Any]:
    rules = path.with_suffix(".yml")
    rules.write_text(RULES)
    return replayed_alerts(path, "--rules", str(rules))


def told_of(path: Path, step: int, layer: int, signal: str) -> Any:
    return Recording(path, ended=True).steps()[step][signal][layer]


BROKEN = 3  # The step before which it breaks.


def test_a_dead_expert_is_told_in_the_next_sample(tmp_path: Path) -> None:
    def dies(model: Any, step: int) -> None:
        if step == BROKEN:
            with torch.no_grad():
                model.model.layers[1].mlp.router.bias[5] = -1e4

    path = tmp_path / "a.bwrun"
    trained(path, change=dies, make=gpt_oss)
    for step in (BROKEN, BROKEN + 1):
        assert told_of(path, step, 1, "expert_dead")[5] == 1
        assert told_of(path, step, 1, "expert_load")[5] == 0
    for step in range(1, BROKEN):
        assert told_of(path, step, 1, "expert_load")[5] > 0


def test_the_server_names_a_dead_expert_and_a_collapsed_router(tmp_path: Path) -> None:
    def breaks(model: Any, step: int) -> None:
        if step == 70:
            with torch.no_grad():
                model.model.layers[0].mlp.router.bias[2] = 1e3
                model.model.layers[1].mlp.router.bias[5] = -1e4

    path = tmp_path / "a.bwrun"
    trained(path, steps=100, make=gpt_oss, rate=1e-3)
    assert alerts_of(path) == []
    trained(path, steps=90, change=breaks, make=gpt_oss, rate=1e-3)
    said = str([alert["summary"] for alert in alerts_of(path)])
    assert "the router of layer 0 sends its tokens to the same few experts: expert 2" in said, said
    assert "of layer 1 has had no token in 3 samples, after having some: expert 5" in said, said


def test_a_router_whose_rows_become_one_is_told(tmp_path: Path) -> None:
    def collapses(model: Any, step: int) -> None:
        if step == BROKEN:
            weight = model.model.layers[0].mlp.gate.weight
            with torch.no_grad():
                weight.copy_(weight[:1].expand_as(weight))

    path = tmp_path / "a.bwrun"
    trained(path, change=collapses)
    assert told_of(path, BROKEN, 0, "router_row_cosine_max")[0] == pytest.approx(1)
    assert told_of(path, BROKEN - 1, 0, "router_row_cosine_max")[0] < 0.9
    entropy = told_of(path, BROKEN, 0, "router_entropy_sum")[0]
    assert entropy == pytest.approx(told_of(path, BROKEN, 0, "router_entropy_largest_sum")[0])


def test_a_router_that_sends_all_to_the_same_is_told(tmp_path: Path) -> None:
    def collapses(model: Any, step: int) -> None:
        if step == BROKEN:
            with torch.no_grad():
                model.model.layers[0].mlp.router.bias[2] = 1e3

    path = tmp_path / "a.bwrun"
    trained(path, change=collapses, make=gpt_oss)
    steps = Recording(path, ended=True).steps()[BROKEN]
    assert steps["router_entropy_sum"][0, 0] / steps["router_tokens"][0, 0] < 1e-3
    assert steps["router_logit_max"][0, 0] > 900
    largest = steps["expert_largest_load"][0, 0] / steps["expert_ideal_load"][0, 0]
    assert largest == EXPERTS / TOP_K


def test_functions_that_route_are_told(tmp_path: Path) -> None:
    shape, path = Shape(fused=False), tmp_path / "a.bwrun"
    torch.manual_seed(0)
    model = Model(shape)
    monitor = bellwether.attach(
        model, run="f", record=str(path), every=1, overhead_budget=1e9, **ALL
    )
    weight = torch.randn(EXPERTS, WIDTH)
    route = monitor.wrap_router(lambda x: x @ weight.T, experts=EXPERTS, top_k=TOP_K, layer=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = []
    for step in range(4):
        given.append(route(torch.randn(ROWS, WIDTH)))
        model(batch(shape, step)).square().mean().backward()
        optimizer.step()
        monitor.step()
    assert monitor.status()["experts"]["routers"] == {"<lambda>": 1}
    assert monitor.wrap_router(plain, experts=4) is plain  # Too late.
    assert monitor.status()["experts"]["left_out"] == {f"plain: {experts_module.BEGUN}": 1}
    monitor.detach()
    route(torch.randn(ROWS, WIDTH))
    for step in (1, 2, 3):
        chosen = given[step].topk(TOP_K).indices.flatten().tolist()
        load = wanted(given[step], chosen, EXPERTS)["expert_load"]
        assert told_of(path, step, 1, "expert_load").tolist() == load.tolist()


def test_a_function_without_a_number_of_experts_is_refused() -> None:
    found = Experts(SimpleNamespace(), lambda: None, Parallel())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        found.wrap(lambda x: x, "", None, None, None, None)
