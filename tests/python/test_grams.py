"""Goal: the Gram matrices that a trainer ships are those of its weights, come before their step's
frame, stay within their budget, and are of the heads that the server asks for first.
Method: recordings of small models on every device; the scheduler alone with layers made by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bellwether
from bellwether._hook.model.parallel import Parallel
from bellwether._native.run_client import _deeper_heads
from bellwether._step.grams import Grams, triangle
from bellwether.settings import Settings

from gpu import DEVICES
from models import Model, Shape, batch
from recording import Recording

KINDS = {1: "query", 2: "a", 3: "b"}


def whole(spectrum: Any) -> np.ndarray:
    matrix = np.zeros((spectrum.n, spectrum.n))
    matrix[np.triu_indices(spectrum.n)] = spectrum.upper
    return matrix + np.triu(matrix, 1).T


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_are_those_of_the_weights(device: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Model(Shape(fused=False, heads=4, kv_heads=2)).to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    path = tmp_path / "run.bwrun"
    monitor = bellwether.attach(
        model,
        record=str(path),
        every=1,
        run="g",
        overhead_budget=1e9,
        gram_bytes=1 << 19,
    )
    weights = []
    for step in range(4):
        x = batch(model.shape, step, device=device).to(dtype)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step()
        weights.append([
            [p.weight.detach().cpu().double().unflatten(0, (-1, 16)) for p in (a.q_proj, a.k_proj)]
            for a in model.attentions()
        ])  # fmt: skip
    assert monitor.flush(20) and monitor.status()["errors"] == 0, monitor.status()["last_error"]
    monitor.detach()
    recording = Recording(path)
    bodies = [m.WhichOneof("body") for m in recording.messages]
    closed = -1
    kinds: dict[int, list[str]] = {}
    for message, body in zip(recording.messages, bodies):
        if body == "frame":
            closed = message.frame.step
        if body != "spectrum":
            continue
        s = message.spectrum
        assert s.step == closed + 1, "it comes before the frame of its step, behind the one before"
        kinds.setdefault(s.step, []).append(KINDS[s.kind])
        q, k = (w.numpy() for w in weights[s.step][s.layer])
        if s.kind == 1:
            want = q[s.head] @ q[s.head].T
        else:
            q0, k0 = (w.numpy() for w in weights[s.step - 1][s.layer])
            q0, k0, k = q0[s.head], k0[s.head // 2], k[s.head // 2]
            dq, dk = q[s.head] - q0, k - k0
            c = np.linalg.norm(q0) / np.linalg.norm(dq)
            assert s.scale == pytest.approx(c, rel=1e-6)
            rows = np.concatenate([c * dq, q0] if s.kind == 2 else [k0 / c, dk])
            want = rows @ rows.T
        assert np.allclose(whole(s), want, rtol=1e-6, atol=1e-6 * np.abs(want).max())
    heads = 2 * 4
    pairs = ["a", "b"] * heads if dtype == torch.float32 else []
    # The layers have their numbers from the end of the first step on.
    assert kinds == {
        1: ["query"] * heads, 2: ["query"] * heads + pairs, 3: ["query"] * heads + pairs
    }  # fmt: skip


class FakeLayer:
    """What Grams asks of a Layer."""

    def __init__(self, index: int, heads: int, kv_heads: int, dim: int) -> None:
        self.index, self.heads, self.kv_heads, self.head_dim = (
            index,
            heads,
            kv_heads,
            dim,
        )
        self.q, self.k = torch.randn(heads, dim, 32), torch.randn(kv_heads, dim, 32)
        self.weights = self.location = self
        self.dim = dim

    def of_head(self, head: int) -> Any:
        self.q += 0.01 * torch.randn_like(self.q)
        return self.q[head], self.k[head * self.kv_heads // self.heads]


def shipped(grams: Grams, layers: list[Any], samples: int) -> list[list[tuple[int, int, int, int]]]:
    """(layer, head, kind, bytes) of each sample."""
    found = []
    for _ in range(samples):
        made = grams.measure(layers)
        found.append(
            []
            if made is None
            else [(g.layer, g.head, g.kind, 4 * triangle(g.n)) for g in made.grams]
        )
    return found


def test_the_budget_holds_and_every_head_has_its_turn() -> None:
    layers = [FakeLayer(i, heads=6, kv_heads=3, dim=64) for i in range(2)]
    budget = 2 * 4 * triangle(64)  # One matrix of a head a sample, and a pair each 8.
    samples = shipped(Grams(budget, Parallel()), layers, 96)
    query = [(x, y) for sample in samples for x, y, kind, _ in sample if kind == 1]
    assert all(sum(kind == 1 for *_, kind, _ in sample) == 1 for sample in samples)
    assert sorted(set(query)) == [(x, y) for x in range(2) for y in range(6)]
    assert max(query.count(head) for head in query) == min(query.count(head) for head in query)
    pairs = sum(kind == 2 for sample in samples for *_, kind, _ in sample)
    assert pairs == sum(kind == 3 for sample in samples for *_, kind, _ in sample)
    assert 9 <= pairs <= 12
    changed = [(x, y) for sample in samples for x, y, kind, _ in sample if kind == 2]
    assert len(set(changed)) == pairs, "of each head before any head's second"
    spent = sum(size for sample in samples for *_, size in sample)
    assert spent <= budget * (96 + 8)


def test_the_default_ships_as_much_as_the_documents_say() -> None:
    for dim, heads, pairs in ((64, 4, 1 / 2), (128, 1, 1 / 8)):
        samples = shipped(Grams(Settings().gram_bytes, Parallel()), [FakeLayer(0, 8, 8, dim)], 64)
        kinds = [kind for sample in samples for *_, kind, _ in sample]
        assert kinds.count(1) == 64 * heads
        assert kinds.count(2) == pytest.approx(64 * pairs, abs=2)


def test_no_grams_without_a_budget_or_beyond_the_size() -> None:
    layers = [FakeLayer(0, heads=2, kv_heads=2, dim=600)]
    assert shipped(Grams(0, Parallel()), layers, 3) == [[], [], []]
    assert shipped(Grams(1 << 30, Parallel()), layers, 3) == [[], [], []], (
        "more rows than there may be"
    )


def test_asked_heads_come_first_by_their_global_place() -> None:
    layers = [FakeLayer(i, heads=4, kv_heads=4, dim=16) for i in range(3)]
    grams = Grams(
        4 * 2 * 4 * triangle(16),
        Parallel(tensor=(1, 2), pipeline=(1, 2), first_layer=3, layers=6),
    )
    # Of another stage, of another rank, and two that are here.
    grams.ask([(0, 5), (4, 1), (4, 5), (5, 7)], heads_here=4)
    for sample in shipped(grams, layers, 5):
        query = [(x, y) for x, y, kind, _ in sample if kind == 1]
        assert len(query) == 4 and set(query[:2]) == {(4, 5), (5, 7)}, query
        assert all(3 <= x < 6 and 4 <= y < 8 for x, y, *_ in sample)
    grams.ask([], heads_here=4)
    assert (4, 5) not in [(x, y) for x, y, *_ in shipped(grams, layers, 1)[0]][:1]


def test_the_servers_wish_is_read_without_protobuf() -> None:
    from bellwether.v1 import ingest_pb2

    wish = ingest_pb2.Sampling(period_steps=300)
    assert _deeper_heads(wish.SerializeToString()) == ()
    for layer, head in ((0, 0), (1, 200), (511, 1023)):
        wish.deeper.add(layer=layer, head=head)
    assert _deeper_heads(wish.SerializeToString()) == ((0, 0), (1, 200), (511, 1023))
    for cut in range(len(wish.SerializeToString())):
        _deeper_heads(wish.SerializeToString()[:cut])  # Raises nothing.
    assert _deeper_heads(b"\x0d\0\0\0\0") == ()
