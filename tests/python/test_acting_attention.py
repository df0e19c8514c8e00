"""Goal: attention.mode and attention.center_k switch some or all layers in flight and back.  They
compute to the bit what stabilize() and center_keys() do, also in what torch.compile has made, with
one compilation a switch.  The taps see what the kernel is fed.
Method: the same model with the same calls written by hand; dynamo's own counters.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch._dynamo
from torch import Tensor

import bellwether
from bellwether._hook import attention_switch
from bellwether._hook.patches import intercept

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
    assert [layer.centred for layer in training.monitor.layers] == [False, True]
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
        (6, "attention_mode", training.monitor.layers[0].kernel),
    ]  # fmt: skip
    # Centred keys have no common mode left, and the taps say so from the very step on.
    coherence = {
        step: signals["key_coherence_sum"][1].max() / signals["key_coherence_sum"][0].max()
        for step, signals in recorded.steps().items()
    }
    assert all(coherence[step] > 0.1 for step in (0, 1, 2))
    assert all(coherence[step] < 0.01 for step in (3, 4, 5))


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


def test_refused_switches_say_why(tmp_path: Path) -> None:
    class Masked(models.Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, enable_gqa=gqa
            )

    torch.manual_seed(7)
    training = Training(tmp_path / "a.bwrun", shape=SHAPE, model=Model(SHAPE, kind=Masked))
    training.step(2)
    training.monitor.layers[0].graphed = True  # As if a CUDA graph held it.
    hp = training.ask("attention.mode", mode="sdpa")
    centre = training.ask("attention.center_k", value=1)
    training.step()
    answer = training.answer(hp)
    assert answer and "captured in a CUDA graph" in answer["reason"]
    answer = training.answer(centre)
    assert answer and "captured in a CUDA graph" in answer["reason"]
    training.monitor.layers[0].graphed = False
    hp, centre = (
        training.ask("attention.mode", mode="hp"),
        training.ask("attention.center_k", value=1),
    )
    training.step()
    answer = training.answer(hp)
    assert answer and "layer 0 has an attention mask" in answer["reason"]
    answer = training.answer(centre)
    assert answer and answer["applied"]  # Right with any mask.
    training.ends()

    weights = Training(tmp_path / "b.bwrun", shape=SHAPE, weights_only=True)
    weights.step(2)
    answer = weights.answer(weights.ask("attention.mode", mode="hp"))
    assert answer and "only the weights are watched" in answer["reason"]
    weights.ends()


def test_attention_of_another_function_is_not_switched(tmp_path: Path) -> None:
    """Nothing would change where scaled_dot_product_attention is not called."""
    model = Model(SHAPE, kind=ByHand)
    for attention in model.attentions():
        attention.mode = "hp"  # type: ignore[attr-defined]
    training = Training(tmp_path / "a.bwrun", shape=SHAPE, model=model)
    training.step(2)
    asked = (
        training.ask("attention.mode", mode="hpm"),
        training.ask("attention.center_k", value=1),
    )
    training.step()
    for action in asked:
        answer = training.answer(action)
        assert answer and "has bellwether hp, which is no scaled_dot" in answer["reason"]
    training.ends()


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
    assert intercept._running.stack == [] and attention_switch.users == 0


def compilations() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("how", ["blocks", "whole"])
def test_compiled_with_one_compilation_a_switch(how: str, tmp_path: Path) -> None:
    shape = Shape(layers=9, heads=4, kv_heads=2, dtype=torch.bfloat16, spread=1.5, width=16, dim=8)
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
        some = {"layers": [2, 5, 7]}
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
    training = Training(tmp_path / "a.bwrun", shape=SHAPE)
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
