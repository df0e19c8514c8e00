"""Goal: models of transformers are switched in flight, however their sequences are laid out and
whichever function computes the attention.  They stay watched, with the numbers of our attention.
Method: a model that is switched beside its twin, which computes ours from the first step on: with
stabilize() where PyTorch's function is called, else made with attn_implementation="bellwether".
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comparing import assert_same_calls
from torch import Tensor, nn

import bellwether
import bellwether.hf
from bellwether._hook.compiled import recipes

from asking import ALL, action
from conftest import ROOT
from recording import Recording

sys.path.insert(0, str(ROOT / "tests" / "support"))
from bellwether_process import Server, wait_for

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(2, 42).view(2, 20) % 31 + 1
SIZES = dict(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False,
)  # fmt: skip


def padded(left: bool) -> dict[str, Tensor]:
    mask = torch.ones_like(TOKENS)
    mask[0, :7] = 0
    mask = mask if left else mask.flip(1)
    return {
        "input_ids": TOKENS * mask, "attention_mask": mask,
        "labels": TOKENS.masked_fill(mask == 0, -100),
    }  # fmt: skip


def packed() -> dict[str, Tensor]:
    positions = torch.cat([torch.arange(7), torch.arange(13)]).expand(2, -1)
    return {"input_ids": TOKENS, "labels": TOKENS, "position_ids": positions}


def model_of(name: str, implementation: str, spread: float = 0.19, **more: Any) -> nn.Module:
    bellwether.hf.register()
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")._from_config(
        config, attn_implementation=implementation, dtype=torch.bfloat16
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, spread)
    return model.train()


class Run:
    """One training; it goes on by steps."""

    def __init__(self, model: nn.Module, given: dict[str, Tensor], path: Path, **more: Any) -> None:
        self.model, self.given, self.path = model, given, path
        self.run: Any = model
        where = more or {"record": str(path)}
        self.monitor = bellwether.attach(
            model,
            every=1,
            rows=0,
            run=path.stem,
            overhead_budget=1e9,
            allow=ALL,
            **where,
        )
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(self, count: int = 1, **more: Any) -> list[float]:
        losses = []
        for _ in range(count):
            loss = self.run(**self.given, **more).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.monitor.step(loss=loss)
            losses.append(loss.item())
        return losses

    def ask(self, kind: str, **fields: Any) -> Any:
        """The answer, after a step."""
        before = set(self.monitor.status()["actions"]["answers"])
        self.monitor.actions.take(action(kind, **fields).encode())
        self.step()
        answers = self.monitor.status()["actions"]["answers"]
        (id,) = set(answers) - before
        return {"id": id, **answers[id]}

    def ends(self) -> tuple[dict[int, dict[str, Any]], list[Any]]:
        """(what is recorded, what the layers say is not measured)"""
        assert self.monitor.flush(20)
        status = self.monitor.status()
        assert status["errors"] == 0, status["last_error"]
        self.monitor.detach()
        notes = [sorted(layer["notes"]) for layer in status["layers"]]
        return Recording(self.path, ended=True).steps(), notes


WINDOW = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 0}
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("Llama", "sdpa", "left", {}),
    ("Llama", "sdpa", "packed", {}),
    ("Qwen2", "sdpa", "right", WINDOW),
    ("Llama", "eager", "left", {}),
    ("Llama", "eager", "packed", {}),
    ("Qwen2", "eager", "right", WINDOW),
    ("Gemma2", "eager", "left", {"sliding_window": 6}),  # With a softcap.
    (
        "GptOss",
        "eager",
        "right",
        {"num_local_experts": 2, "num_experts_per_tok": 1},
    ),  # Sinks.
]


@pytest.mark.parametrize("name, implementation, layout, more", CASES)
def test_switched_in_flight_its_numbers_are_those_of_ours(
    name: str, implementation: str, layout: str, more: dict[str, Any], tmp_path: Path
) -> None:
    given = packed() if layout == "packed" else padded(layout == "left")
    run = Run(model_of(name, implementation, **more), given, tmp_path / "switched.bwrun")
    run.step(2)
    answer = run.ask("attention.mode", mode="hp")
    assert answer["applied"] and not answer["reason"], answer
    twin = model_of(name, "sdpa" if implementation == "sdpa" else "bellwether", **more)
    twin.load_state_dict(run.model.state_dict())
    losses = run.step(2)
    steps, notes = run.ends()
    ours = Run(twin, given, tmp_path / "ours.bwrun")
    handle = bellwether.stabilize(twin) if implementation == "sdpa" else None
    assert ours.step(2) == losses
    want, want_notes = ours.ends()
    if handle is not None:
        handle.close()
    assert notes == want_notes
    for step, signals in want.items():
        assert_same_calls(steps[step + 3], signals)
    assert (want[0]["delta_error_abs_sum"] > 0).all() and (want[0]["wq_sigma"] > 0).all()


def test_our_implementation_changes_its_mode_and_back(tmp_path: Path) -> None:
    run = Run(model_of("Llama", "bellwether"), padded(True), tmp_path / "run.bwrun")
    run.step(2)
    assert run.ask("attention.mode", mode="sdpa")["reason"].startswith("layer 0: mode is sdpa")
    biased = run.ask("attention.mode", mode="fa")
    assert biased["applied"]
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    fa = run.step()
    assert run.ask("attention.mode", undoes=biased["id"])["applied"]
    after = run.step()
    run.ends()
    twin = model_of("Llama", "sdpa")
    twin.load_state_dict(weights)
    with bellwether.stabilize(twin, mode="fa"):
        assert twin(**run.given).loss.item() == fa[0]
    assert after != fa


def test_eager_that_returns_its_weights_stays_as_it_is(tmp_path: Path) -> None:
    """Our attention has no probabilities to return."""
    run = Run(model_of("Llama", "eager"), padded(False), tmp_path / "run.bwrun")
    run.step(2, output_attentions=True)
    answer = run.ask("attention.mode", mode="hp")
    assert not answer["applied"]
    assert answer["reason"] == (
        "layer 0: output_attentions is asked for, and the output alone is served"
    )
    run.ends()


def test_padded_llama_is_switched_by_an_action_of_the_server(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        model = model_of("Llama", "sdpa", spread=0.5)
        run = Run(model, padded(True), tmp_path / "llama", server=server.grpc)
        run.step(8)
        assert run.monitor.flush(20)
        wait_for("the run is known", lambda: server.call("ListRuns").get("runs"))
        server.run("action", "propose", "llama", "attention.mode", "--mode", "hp", "--approve")

        def applied() -> Any:
            run.step()
            return run.monitor.status()["actions"]["answers"]

        (answer,) = wait_for("it is applied", applied).values()
        assert answer["applied"], answer
        run.step(8)
        assert run.monitor.flush(20)
        status = run.monitor.status()
        last = answer["step"] + 7

        def leaks() -> dict[int, float]:
            return server.series("llama", "key_leak")

        told = wait_for("its numbers are told", lambda: leaks() if last in leaks() else None)
        run.monitor.detach()
        before = [leak for step, leak in told.items() if step < answer["step"]]
        after = [leak for step, leak in told.items() if step >= answer["step"]]
        assert np.mean(after) < np.mean(before) / 2, told
        (action_of_it,) = server.call("ListActions", run="llama")["actions"]
        assert action_of_it["state"] == "ACTION_STATE_APPLIED", action_of_it
        for layer in status["layers"]:
            assert not layer["notes"] and layer["fired"] == layer["calls"] == last + 1, layer


def in_force(run: Run) -> list[str]:
    found: list[str] = run.monitor.status()["actions"]["in_force"]
    return found


def test_a_mode_that_a_compiled_call_leaves_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(model_of("Llama", "eager"), padded(left=True), tmp_path / "late.bwrun")
    run.step(2)
    answer = run.ask("attention.mode", mode="hp")
    run.step()
    assert answer["applied"] and in_force(run) == [answer["id"]]
    run.run = torch.compile(run.model, backend="aot_eager")
    run.step(2)
    assert in_force(run) == []
    _, notes = run.ends()
    torch._dynamo.reset()
    said = f"attention.mode hp does not hold: {recipes.FIXED}"
    assert notes == [[said]] * 2 and caplog.text.count(said) == 1
