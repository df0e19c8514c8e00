"""Goal: attention.mode and attention.center_k switch some or all layers in flight and back.  They
compute to the bit what stabilize() and center_keys() do, also in what torch.compile has made, with
one compilation a switch.  The taps see what the kernel is fed.
Method: the same model with the same calls written by hand; dynamo's own counters.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from pathlib import Path
from typing import Any, Optional

import flash_stand_in
import pytest
import torch
import torch._dynamo
from comparing import assert_same_calls
from torch import Tensor

import bellwether
from bellwether._hook import attention_switch
from bellwether._hook.running import running

import models
from asking import Training
from models import Model, Shape, batch
from recording import Recording

SHAPE = Shape(heads=4, kv_heads=2, dtype=torch.bfloat16, spread=3.0)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class ByHand(models.Attention):
    mode: Optional[str] = None
    center = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        if self.center:
            k = bellwether.center_keys(k)
        if self.mode is None:
            return super().attend(q, k, v, gqa)
        return bellwether.attention(
            q, k, v, causal=self.shape.causal, mode=self.mode, enable_gqa=gqa
        )


def gradients(run: Any) -> list[Tensor]:
    parameters = list(run.parameters())
    loss = run(batch(SHAPE, 1)).square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, parameters, allow_unused=True)]


def by_hand(model: Any, *ways: tuple[Optional[str], bool]) -> list[Tensor]:
    """What a copy of the model computes whose layers attend in these ways."""
    twin = Model(SHAPE, kind=ByHand)
    twin.load_state_dict(model.state_dict())
    for attention, (mode, center) in zip(twin.attentions(), ways):
        attention.mode, attention.center = mode, center  # type: ignore[attr-defined]
    return gradients(twin)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b))


PLAIN = (None, False)


def test_switched_in_flight_layer_by_layer_and_back(tmp_path: Path) -> None:
    training = Training(tmp_path / "a.bwrun", shape=SHAPE)
    training.step(2)
    model = training.model
    assert same(gradients(model), by_hand(model, PLAIN, PLAIN))
    centred = training.ask("attention.center_k", value=1, scope={"layers": [1]})
    training.step()
    assert same(gradients(model), by_hand(model, PLAIN, (None, True)))
    assert [layer.seen.centred for layer in training.monitor.layers] == [False, True]
    hp = training.ask("attention.mode", mode="hp")
    training.step()
    assert same(gradients(model), by_hand(model, ("hp", False), ("hp", True)))
    heads = {"heads": [{"layer": 0, "head": 3}]}
    training.ask("attention.mode", mode="sdpa", scope=heads)
    training.step()
    assert same(gradients(model), by_hand(model, PLAIN, ("hp", True)))
    training.ask("attention.center_k", value=0)
    training.ask("attention.mode", undoes=hp)
    training.step()
    assert same(gradients(model), by_hand(model, PLAIN, PLAIN))
    again = training.ask("attention.center_k", undoes=centred)
    training.step()
    answer = training.answer(again)
    assert answer and answer["applied"]
    training.ends()
    assert same(gradients(model), by_hand(model, PLAIN, PLAIN))
    recorded = Recording(tmp_path / "a.bwrun", ended=True)
    names = {7: "centring_on", 8: "centring_off", 9: "attention_mode"}
    events = [(e.step, names[e.kind], e.text) for e in recorded.events if e.kind in names]
    assert events == [
        (3, "centring_on", ""), (4, "attention_mode", "bellwether-hp"),
        (5, "attention_mode", "bellwether-hp"), (6, "centring_off", ""),
        (6, "attention_mode", training.monitor.layers[0].seen.kernel),
    ]  # fmt: skip
    # Centred keys have no common mode left, and the taps say so from the very step on.
    coherence = {
        step: signals["key_coherence_sum"][1].max() / signals["key_coherence_sum"][0].max()
        for step, signals in recorded.steps().items()
    }
    assert all(coherence[step] > 0.1 for step in (0, 1, 2))
    assert all(coherence[step] < 0.01 for step in (3, 4, 5))


def test_a_mode_beneath_a_later_one_is_not_in_force(tmp_path: Path) -> None:
    training = Training(tmp_path / "a.bwrun", shape=SHAPE)
    training.step(2)

    def in_force(kind: str, **fields: Any) -> tuple[str, list[str]]:
        id = training.ask(kind, **fields)
        training.step()
        answer = training.answer(id)
        assert answer and answer["applied"]
        return id, training.monitor.status()["actions"]["in_force"]

    centred, ids = in_force("attention.center_k", value=1)
    assert ids == [centred]
    hp, ids = in_force("attention.mode", mode="hp")
    assert ids == [centred, hp]
    first, ids = in_force("attention.mode", mode="sdpa", scope={"layers": [0]})
    assert ids == [centred, hp, first]  # Layer 1 has it still.
    sdpa, ids = in_force("attention.mode", mode="sdpa")
    assert ids == [centred, sdpa]
    _, ids = in_force("attention.mode", undoes=sdpa)
    assert ids == [centred, hp, first]
    training.ends()


KINDS = [
    models.PaddedRight, models.PaddedLeft, models.KeysAlone, models.Window, models.Packed,
    models.NarrowValues,
]  # fmt: skip


@pytest.mark.parametrize(
    "kind, compiled", [*((kind, False) for kind in KINDS), (models.PaddedLeft, True)]
)
def test_all_that_stabilize_serves_is_switched_and_stays_watched(
    kind: type, compiled: bool, tmp_path: Path
) -> None:
    """As if it were stabilized from that step on, in each number."""

    def trained(asked: bool) -> tuple[list[Tensor], dict[int, Any]]:
        torch.manual_seed(7)
        path = tmp_path / f"{asked}.bwrun"
        training = Training(path, shape=SHAPE, model=Model(SHAPE, kind=kind))
        if compiled:
            training.run = torch.compile(training.model, backend="aot_eager", fullgraph=True)
        training.step(2)
        if asked:
            id = training.ask("attention.mode", mode="hp")
        training.step()
        handle = None if asked else bellwether.stabilize(training.model)
        training.step(2)
        if asked:
            assert training.answer(id) == {"applied": True, "step": 3, "reason": ""}
        assert not any(layer["notes"] for layer in training.monitor.status()["layers"])
        training.ends()
        if handle is not None:
            handle.close()
        return training.losses, Recording(path, ended=True).steps()

    losses, steps = trained(True)
    want_losses, want_steps = trained(False)
    assert same(losses, want_losses)
    for step, signals in want_steps.items():
        assert set(steps[step]) == set(signals)
        assert_same_calls(steps[step], signals)
    assert not (steps[3]["delta_error_abs_sum"] == 0).any()


def test_beside_stabilize_and_keys_that_are_centred_already(tmp_path: Path) -> None:
    training = Training(tmp_path / "a.bwrun", shape=SHAPE)
    model = training.model
    with bellwether.stabilize(model, mode="fa"):
        training.step(2)
        training.ask("attention.center_k", value=1)
        training.step()
        assert same(gradients(model), by_hand(model, ("fa", True), ("fa", True)))
        training.ask("attention.mode", mode="sdpa")
        training.step()
        assert same(gradients(model), by_hand(model, (None, True), (None, True)))
    training.ends()

    torch.manual_seed(7)
    own = Model(SHAPE, kind=ByHand)
    own.attentions()[0].center = own.attentions()[1].center = True  # type: ignore[attr-defined]
    training = Training(tmp_path / "b.bwrun", shape=SHAPE, model=own)
    training.step(2)
    on = training.ask("attention.center_k", value=1)
    off = training.ask("attention.center_k", value=0)
    training.step()
    answers = [training.answer(id) for id in (on, off)]
    assert answers[0] and answers[0]["reason"] == "the model centres these keys itself"
    assert answers[1] and "centres the keys of layer 0 itself" in answers[1]["reason"]
    training.ends()


class Dropped(models.Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=0.1, enable_gqa=gqa
        )


DROPS = "dropout_p is above 0, and 0 is served"
LEARNS = "the mask requires a gradient, and one that does not is served"


@pytest.mark.parametrize(
    "kind, reason, compiled",
    [
        (Dropped, DROPS, False),
        (models.Biased, LEARNS, False),
        (models.Biased, LEARNS, True),
    ],
)
def test_layers_that_no_kernel_serves_stay_and_say_why(
    kind: type, reason: str, compiled: bool, tmp_path: Path
) -> None:
    torch.manual_seed(7)
    model = Model(SHAPE)
    model.blocks[0].attention = kind(SHAPE)
    training = Training(tmp_path / "a.bwrun", shape=SHAPE, model=model)
    if compiled:
        training.run = torch.compile(model, backend="aot_eager")
    training.step(2)
    named = training.ask("attention.mode", mode="hp", scope={"layers": [0, 1]})
    every = training.ask("attention.mode", mode="hp")
    training.step()
    answer = training.answer(named)
    assert answer == {"applied": False, "step": 3, "reason": f"layer 0: {reason}"}
    answer = training.answer(every)
    assert answer and answer["applied"]
    assert answer["reason"] == f"1 of 2 layers; layer 0: {reason}"
    assert [attention_switch.of(m) for m in model.attentions()] == ["", "hp"]
    back = training.ask("attention.mode", undoes=every)
    training.step()
    answer = training.answer(back)
    assert answer and answer["applied"]
    assert [attention_switch.of(m) for m in model.attentions()] == ["", ""]
    training.ends()


def test_refused_switches_say_why(tmp_path: Path) -> None:
    training = Training(tmp_path / "a.bwrun", shape=SHAPE)
    training.step(2)
    training.monitor.layers[0].seen.graphed = True  # As if a CUDA graph held it.
    asked = (
        training.ask("attention.mode", mode="sdpa", scope={"layers": [0]}),
        training.ask("attention.center_k", value=1),
    )
    training.step()
    for id in asked:
        answer = training.answer(id)
        assert answer and not answer["applied"]
        assert "layer 0: it was captured in a CUDA graph" in answer["reason"]
    training.ends()

    weights = Training(tmp_path / "b.bwrun", shape=SHAPE, weights_only=True)
    weights.step(2)
    answer = weights.answer(weights.ask("attention.mode", mode="hp"))
    assert answer and "only the weights are watched" in answer["reason"]
    weights.ends()


def test_bellwether_attention_of_the_model_changes_its_mode(tmp_path: Path) -> None:
    model = Model(SHAPE, kind=ByHand)
    for attention in model.attentions():
        attention.mode = "fa"  # type: ignore[attr-defined]
    training = Training(tmp_path / "a.bwrun", shape=SHAPE, model=model)
    training.step(2)
    ours = training.ask("attention.mode", mode="hp", scope={"layers": [1]})
    refused = {
        "mode is sdpa, and the model calls bellwether.attention": training.ask(
            "attention.mode", mode="sdpa"
        ),
        "its attention is bellwether fa, and scaled_dot_product_attention": training.ask(
            "attention.center_k", value=1
        ),
    }
    training.step()
    answer = training.answer(ours)
    assert answer and answer["applied"]
    for reason, id in refused.items():
        answer = training.answer(id)
        assert answer and not answer["applied"] and reason in answer["reason"]
    assert same(gradients(model), by_hand(model, ("fa", False), ("hp", False)))
    training.ask("attention.mode", undoes=ours)
    training.step()
    assert same(gradients(model), by_hand(model, ("fa", False), ("fa", False)))
    assert not any(layer["notes"] for layer in training.monitor.status()["layers"])
    training.ends()


def test_a_compiled_call_of_another_function_is_not_switched(tmp_path: Path) -> None:
    model = Model(SHAPE, kind=ByHand)
    for attention in model.attentions():
        attention.mode = "fa"  # type: ignore[attr-defined]
    training = Training(tmp_path / "a.bwrun", shape=SHAPE, model=model)
    training.run = torch.compile(model, backend="aot_eager")
    training.step(2)
    id = training.ask("attention.mode", mode="hp")
    training.step()
    answer = training.answer(id)
    assert answer and answer["reason"].startswith("layer 0: its call is compiled, and")
    training.ends()


def test_attention_of_another_function_is_not_switched(tmp_path: Path) -> None:
    """Nothing would change where none of the functions that are served is called."""

    class Flash(models.Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            o: Tensor = flash_stand_in.two.flash_attn_func(q, k, v, causal=True)
            return o.transpose(1, 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", flash_stand_in.two)
        training = Training(tmp_path / "a.bwrun", shape=SHAPE, model=Model(SHAPE, kind=Flash))
        training.step(2)
        id = training.ask("attention.mode", mode="hp")
        training.step()
        answer = training.answer(id)
        training.ends()
    assert answer and "layer 0: its attention is flash" in answer["reason"]
    assert "scaled_dot_product_attention, transformers' eager attention and" in answer["reason"]


def test_copies_train_on_their_own(tmp_path: Path) -> None:
    training = Training(tmp_path / "a.bwrun", shape=SHAPE)
    training.step(2)
    twins = [copy.deepcopy(training.model), pickle.loads(pickle.dumps(training.model))]
    training.ask("attention.mode", mode="hp")
    training.step()
    for twin in twins:
        assert same(gradients(twin), by_hand(twin, PLAIN, PLAIN))
    training.ends()
    for twin in twins:
        assert same(gradients(twin), by_hand(twin, PLAIN, PLAIN))
    assert running.stack == [] and attention_switch.users == 0


def compilations() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("how", ["blocks", "whole"])
def test_compiled_with_one_compilation_a_switch(how: str, tmp_path: Path) -> None:
    # Blocks are more than the variants of one code that torch keeps.
    layers, switched = (9, [2, 5, 7]) if how == "blocks" else (3, [1])
    shape = Shape(layers, heads=4, kv_heads=2, dtype=torch.bfloat16, spread=1.5, width=16, dim=8)
    torch._dynamo.utils.counters.clear()

    def trained(compiled: bool, path: Path) -> tuple[list[Tensor], list[int]]:
        training = Training(path, shape=shape)
        if compiled and how == "whole":
            training.run = torch.compile(training.model, backend="aot_eager", fullgraph=True)
        elif compiled:
            for block in training.model.blocks:
                block.compile(backend="aot_eager", fullgraph=True)
        made = []
        training.step(3)
        made.append(compilations())
        some = {"layers": switched}
        ids = [training.ask("attention.center_k", value=1, scope=some)]
        training.step(3)
        made.append(compilations())
        ids.append(training.ask("attention.mode", mode="hp"))
        training.step(3)
        made.append(compilations())
        for id in reversed(ids):
            training.ask("attention.mode" if id == ids[1] else "attention.center_k", undoes=id)
            training.step(3)
            made.append(compilations())
        for id, answer in training.monitor.status()["actions"]["answers"].items():
            assert answer["applied"], (id, answer)
        training.ends()
        return training.losses, made

    eager, _ = trained(False, tmp_path / "e.bwrun")
    compiled, made = trained(True, tmp_path / "c.bwrun")
    for step, (a, b) in enumerate(zip(eager, compiled)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=0, msg=f"step {step}")
    # All blocks are one graph.  Flagged layers with a word of their own need one more, and with
    # "hp" for all both anew; what was there before is found again.
    want = [1, 2, 4, 4, 4] if how == "blocks" else [1, 2, 3, 3, 3]
    assert made == want, made


def test_variants_of_compiled_code_end_before_torchs_limit(tmp_path: Path) -> None:
    training = Training(tmp_path / "a.bwrun", shape=dataclasses.replace(SHAPE, layers=1))
    training.run = torch.compile(training.model, backend="aot_eager")
    training.step(2)
    modes = ["hp", "fa", "hpm", "paper", "sr"]
    ids = []
    for mode in modes:
        ids.append(training.ask("attention.mode", mode=mode))
        training.step()
    ids.append(training.ask("attention.center_k", value=1))
    ids.append(training.ask("attention.mode", mode="hp"))  # Known.
    training.step()
    answers = [training.answer(id) for id in ids]
    assert all(answer and answer["applied"] for answer in (*answers[:5], answers[6]))
    assert answers[5] and "6 variants were compiled" in answers[5]["reason"]
    training.ends()
