"""Goal: attention that a module writes out in its own forward is measured whole, and trains the
same bit for bit.  Where something between its products is not known, nothing is told of it.
Method: modules that write it in the ways that models do; each number against fp64 of the tensors
that the module itself had.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch.nn.functional as F
from comparing import compare
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bellwether
from bellwether.tools.doctor import layer_findings

from definitions import Call, mistaken, of_call, of_tensors
from recording import Recording

BATCH, HEADS, TOKENS, DIM = 3, 4, 9, 8
WIDTH = HEADS * DIM
SEES = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
PADDED = (torch.arange(TOKENS) < torch.tensor([9, 6, 7])[:, None])[:, None, None]
ADDED = torch.zeros(BATCH, 1, 1, TOKENS).masked_fill(~PADDED, torch.finfo(torch.float32).min)
SLOPES = (torch.arange(TOKENS) * 0.1 * torch.arange(1, HEADS + 1)[:, None])[:, None]
POSITIONS = torch.randn(HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0))


def merged(x: Tensor) -> Tensor:
    return x.reshape(BATCH * HEADS, *x.shape[2:])


def divided(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = scores / math.sqrt(DIM)
    added = ADDED.type_as(scores).expand_as(scores).reshape_as(scores)
    weights = F.softmax(scores + added, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(m.dropout(weights), v)


def by_where(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2))
    least = torch.tensor(torch.finfo(scores.dtype).min, dtype=scores.dtype).to(scores.device)
    scores = torch.where(SEES, scores, least) / torch.sqrt(torch.tensor(float(DIM)))
    return torch.matmul(torch.softmax(scores, -1).to(v.dtype), v)


def in_place(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores *= DIM**-0.5
    scores.masked_fill_(~SEES, -math.inf).add_(POSITIONS)
    return m.softmax(scores) @ v


def batched(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = merged(q * DIM**-0.5), merged(k), merged(v)
    scores = torch.bmm(q, k.transpose(1, 2)).view(BATCH, HEADS, TOKENS, TOKENS) + ADDED
    scores = torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min))
    weights = F.dropout(scores.view(BATCH * HEADS, TOKENS, TOKENS).softmax(-1), 0.1, False)
    return torch.bmm(weights, v).view(BATCH, HEADS, TOKENS, DIM)


def slopes(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    added = SLOPES.expand(BATCH, HEADS, 1, TOKENS).reshape(BATCH * HEADS, 1, TOKENS).to(q.dtype)
    scores = added.baddbmm(
        batch1=merged(q), batch2=merged(k).transpose(-1, -2), beta=1.0, alpha=DIM**-0.5
    )
    weights = torch.softmax(scores.masked_fill(~SEES, -1e9), -1)
    return torch.bmm(weights, merged(v)).unflatten(0, (BATCH, HEADS))


def shifted(x: Tensor) -> Tensor:
    """As relative positions are brought beside the keys."""
    turned = x.reshape(*x.shape[:2], x.shape[3], x.shape[2])[:, :, 1:]
    return F.pad(turned.reshape(*x.shape[:2], x.shape[2], -1), (0, 1))


def of_relative(q: Tensor) -> Tensor:
    known = POSITIONS[:, :, :DIM].transpose(0, 1)[:, None].expand(TOKENS, BATCH, HEADS, DIM)
    return shifted(torch.einsum("ibnd,jbnd->bnij", q.permute(2, 0, 1, 3), known))


def by_equation(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    tokens_first = [t.permute(2, 0, 1, 3) for t in (q, k, v)]
    scores = torch.einsum("ibnd, jbnd -> bnij", tokens_first[0], tokens_first[1])
    scores = (scores + of_relative(q) + 0) * DIM**-0.5
    scores = scores - 1e30 * (~SEES).float()
    o = torch.einsum("bnij,jbnd->ibnd", F.softmax(scores, dim=3), tokens_first[2])
    return o.permute(1, 2, 0, 3)


def heads_last(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bnjd,bnid->bijn", k, q) * DIM**-0.5 + POSITIONS.permute(1, 2, 0)
    weights = torch.softmax(scores.masked_fill(~SEES[:, :, None], -math.inf), 2)
    return torch.einsum("bnjd,bijn->bnid", [v, weights])


def of_streams(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.view(1, BATCH, HEADS, TOKENS, DIM) for t in (q * DIM**-0.5, k, v))
    scores = torch.einsum("gbhtc,gbhsc->gbhts", (q, k)) + ADDED + POSITIONS
    o = torch.einsum("gbhts,gbhsc->gbhtc", scores.float().softmax(-1).type_as(q), v)
    return o.view(BATCH, HEADS, TOKENS, DIM)


def in_blocks(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2).unsqueeze(1) for t in (q, k, v))  # One block of tokens.
    scores = torch.einsum("...qhd,...khd->...hqk", q, k) * DIM**-0.5 + POSITIONS
    o = torch.einsum("...hqk,...khd->...qhd", torch.softmax(scores, -1), v)
    return o.squeeze(1).transpose(1, 2)


def turned(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT).permute(0, 2, 3, 1) * DIM**-0.5 + POSITIONS.permute(1, 2, 0)
    return torch.softmax(scores, dim=-2).transpose(1, 3).transpose(-1, -2) @ v


def of_positions(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With a second product, of the queries and the positions."""
    scores = q @ k.transpose(-1, -2) + q @ m.position(k).transpose(-1, -2)
    return torch.softmax(scores * DIM**-0.5, -1) @ v


def hides(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, -math.inf)


Spelling = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
SPELLINGS: dict[Spelling, tuple[float, Callable[[Any], Optional[Tensor]]]] = {
    divided: (DIM**-0.5, lambda m: ADDED),
    by_where: (DIM**-0.5, lambda m: SEES),
    in_place: (DIM**-0.5, lambda m: hides(SEES) + POSITIONS),
    batched: (1.0, lambda m: ADDED),
    slopes: (DIM**-0.5, lambda m: hides(SEES) + SLOPES),
    by_equation: (DIM**-0.5, lambda m: hides(SEES) + DIM**-0.5 * of_relative(m.had[0])),
    heads_last: (DIM**-0.5, lambda m: hides(SEES) + POSITIONS),
    of_streams: (1.0, lambda m: ADDED + POSITIONS),
    in_blocks: (DIM**-0.5, lambda m: POSITIONS),
    turned: (DIM**-0.5, lambda m: POSITIONS),
    of_positions: (
        DIM**-0.5, lambda m: DIM**-0.5 * m.had[0] @ m.position(m.had[1]).transpose(-1, -2)
    ),
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self, spelling: Spelling, dropout: float = 0.0, named: bool = True) -> None:
        super().__init__()
        if named:
            self.num_heads = HEADS
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v_proj = nn.Linear(WIDTH, WIDTH)
        self.position = nn.Linear(DIM, DIM)
        self.dropout = nn.Dropout(dropout)
        self.spelling = spelling
        self.had: list[Tensor] = []  # q, k, v, o of the last forward, ...
        self.came: dict[str, Tensor] = {}  # ... and gradients of the last backward.

    def softmax(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        o = self.spelling(self, q, k, v)
        self.had = [q, k, v, o]
        for name, t in (("k", k), ("o", o)):
            if t.requires_grad and self.spelling is not of_positions:
                t.register_hook(lambda gradient, name=name: self.came.update({name: gradient}))
        if o.requires_grad and self.spelling is of_positions:
            o.register_hook(lambda gradient: self.came.update(o=gradient))
        return x + o.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, spelling: Spelling, how: str, dropout: float) -> None:
        super().__init__()
        self.inlet, self.how = nn.Linear(WIDTH, WIDTH), how
        self.attention = Attention(spelling, dropout, how != "unnamed")

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        if self.how in ("checkpoint", "reentrant"):
            y: Tensor = checkpoint(self.attention, x, use_reentrant=self.how == "reentrant")
            return y
        return self.attention(x)  # type: ignore[no-any-return]


def trained(
    spelling: Spelling, path: Optional[Path], how: str = "plain", dropout: float = 0.0
) -> tuple[list[Tensor], Any, Model]:
    """(losses and weights, the monitor, the model)"""
    torch.manual_seed(1)
    model, monitor = Model(spelling, how, dropout), None
    if path is not None:
        monitor = bellwether.attach(
            model, record=str(path), run="written", every=1, rows=0, overhead_budget=1e9
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        torch.manual_seed(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            loss = model(3 * torch.randn(BATCH, TOKENS, WIDTH)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found + [p.detach() for p in model.parameters()], monitor, model


def watched(
    spelling: Spelling, path: Path, how: str = "plain", dropout: float = 0.0
) -> tuple[Any, Any, Attention]:
    """(the status, what was recorded of the last step, the attention)"""
    plain, _, _ = trained(spelling, None, how, dropout)
    again, monitor, model = trained(spelling, path, how, dropout)
    assert all(torch.equal(a, b) for a, b in zip(plain, again))
    assert monitor.flush(20)
    status = dict(monitor.status())
    status["findings"] = layer_findings(status)
    monitor.detach()
    assert status["errors"] == 0, status["last_error"]
    return status, Recording(path, ended=True).steps()[2], model.attention


@pytest.mark.parametrize(
    ("spelling", "how"),
    [(s, "plain") for s in SPELLINGS]
    + [(s, how) for s in (divided, batched, by_equation) for how in ("checkpoint", "reentrant")]
    + [(s, "unnamed") for s in (divided, batched, heads_last)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_all_signals_are_measured(spelling: Spelling, how: str, tmp_path: Path) -> None:
    status, recorded, attention = watched(spelling, tmp_path / "a.bwrun", how)
    layer = status["layers"][0]
    assert not layer["notes"] and not layer["not_judged_by"], layer
    q, k, v, o = (t.detach() for t in attention.had)
    scale, mask = SPELLINGS[spelling]
    with torch.no_grad():
        want = of_tensors(
            q * DIM**-0.5 if spelling in (batched, of_streams) else q,
            k, v, o, attention.came["o"], scale, False, mask(attention), attention.came.get("k"),
        )  # fmt: skip
    if spelling is of_positions:  # Its positions were of the weights before the step.
        want.values = {n: want.values[n] for n in ("rows", "common_mode_sum", "spread_sum")}
    for signal in want.values:
        compare(signal, recorded[signal][0], want, float(want.values["rows"][0]))
    assert (recorded["key_leak_sum"] <= 1e-5 * recorded["key_gradient_sum"]).all()
    assert (recorded["wq_sigma"] > 0).all() and (recorded["key_gradient_sum"] > 0).all()


@pytest.mark.parametrize(
    "spelling", [divided, slopes, heads_last], ids=lambda spelling: spelling.__name__
)
def test_under_autocast_each_is_measured(spelling: Spelling, tmp_path: Path) -> None:
    status, recorded, _ = watched(spelling, tmp_path / "a.bwrun", "autocast")
    layer = status["layers"][0]
    assert not layer["notes"] and not layer["not_judged_by"], layer
    assert (recorded["entropy_sum"] > 0).all() and (recorded["delta_abs_sum"] > 0).all()


def test_dropout_leaves_out_delta(tmp_path: Path) -> None:
    status, recorded, _ = watched(divided, tmp_path / "a.bwrun", dropout=0.3)
    assert any("dropout" in note for note in status["layers"][0]["notes"])
    assert (recorded["entropy_sum"] > 0).all() and "delta_abs_sum" not in recorded


def capped(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.tanh(q @ k.mT / math.sqrt(DIM) / 2.0) * 2.0 + POSITIONS
    return torch.softmax(scores.masked_fill(~SEES, -math.inf), -1) @ v


def with_sinks(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT * DIM**-0.5).masked_fill(~SEES, -math.inf)
    sinks = torch.arange(4.0).view(1, HEADS, 1, 1).expand(BATCH, HEADS, TOKENS, 1)
    return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1] @ v


def with_zeros(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A softmax whose weights may all be near 0."""
    scores = (q @ k.mT * DIM**-0.5).masked_fill(~SEES, -math.inf)
    scores = torch.cat((scores, torch.zeros(BATCH, HEADS, TOKENS, 1)), 3)
    return m.dropout(scores.softmax(-1))[:, :, :, :-1] @ v  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("spelling", "has"),
    [(capped, {"softcap": 2.0, "bias": POSITIONS}), (with_sinks, {"sinks": torch.arange(4.0)}),
     (with_zeros, {"sinks": torch.zeros(HEADS)})],
    ids=lambda x: getattr(x, "__name__", ""),
)  # fmt: skip
def test_caps_and_sinks_are_read(spelling: Spelling, has: Any, tmp_path: Path) -> None:
    status, recorded, attention = watched(spelling, tmp_path / "a.bwrun")
    q, k, v, o = (t.detach() for t in attention.had)
    call = Call("", q, k, v, o, DIM**-0.5, SEES, d_o=attention.came["o"], kv_heads=HEADS, **has)
    assert mistaken(call) < 1e-5
    want = of_call(call)
    for signal in want.values:
        compare(signal, recorded[signal][0], want, float(want.values["rows"][0]))
    assert "key_leak_sum" not in recorded
    assert all("need not add up to 0" in note for note in status["layers"][0]["notes"])


class Head(nn.Module):
    """One head, as lessons write it."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, DIM, bias=False) for _ in range(3))
        self.had: list[Tensor] = []
        self.came: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        k, q, v = self.key(x), self.query(x), self.value(x)
        scores = q @ k.transpose(-2, -1) * DIM**-0.5
        scores = scores.masked_fill(PADDED[:, 0] == 0, -math.inf)
        o = F.softmax(scores.masked_fill(~SEES, -math.inf), -1) @ v
        self.had = [t.unsqueeze(1) for t in (q, k, v, o)]
        for name, t in (("k", k), ("o", o)):
            t.register_hook(
                lambda gradient, name=name: self.came.update({name: gradient.unsqueeze(1)})
            )
        return o


def test_modules_of_one_head_are_measured(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "a.bwrun"
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Head())
    with bellwether.attach(
        model, record=str(path), run="one", every=1, rows=0, overhead_budget=1e9
    ) as monitor:
        model(torch.randn(BATCH, TOKENS, WIDTH)).square().mean().backward()
        monitor.step()
        assert monitor.flush(20)
        (layer,) = monitor.status()["layers"]
    assert not layer["notes"] and not layer["not_judged_by"], layer
    head = model[1]
    assert isinstance(head, Head)
    q, k, v, o = (t.detach() for t in head.had)
    want = of_tensors(
        q, k, v, o, head.came["o"], DIM**-0.5, True, PADDED, head.came["k"]
    )  # fmt: skip
    recorded = Recording(path, ended=True).steps()[0]
    for signal in want.values:
        compare(signal, recorded[signal][0], want, float(want.values["rows"][0]))


def multiplied(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    return torch.softmax(scores * SEES.float() - 1e4 * (~SEES).float(), -1) @ v


def of_itself(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    return torch.softmax(scores - scores.amax(-1, keepdim=True), -1) @ v


def written_to(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    scores[..., 0] = 1.0
    return torch.softmax(scores, -1) @ v


def over_queries(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2), -2) @ v


def of_other_heads(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # Each token attends over its heads.
    return (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).transpose(1, 2)


def of_grouped_queries(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.unflatten(1, (HEADS, 1))
    weights = torch.einsum("bkgid,bkjd->bkgij", q, k).softmax(-1)
    return torch.einsum("bkgij,bkjd->bkgid", weights, v).flatten(1, 2)


def inverted(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Its values are made of other scores, as an approximation by landmarks has them."""
    others = torch.softmax(k @ q.mT, -1)
    return torch.softmax(q @ k.mT, -1) @ (others.mT @ others) @ v


@pytest.mark.parametrize(
    ("spelling", "said"),
    [
        (of_grouped_queries, "of no product that is known"),
        (inverted, "of values that are made of scores"),
        (multiplied, "mul between its products"), (of_itself, "amax between its products"),
        (written_to, "setitem between its products"),
        (over_queries, "softmax between its products"), (of_other_heads, "for 9 heads"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)  # fmt: skip
def test_an_unknown_operation_is_named(spelling: Spelling, said: str, tmp_path: Path) -> None:
    status, recorded, _ = watched(spelling, tmp_path / "a.bwrun")
    assert "rows" not in recorded and "key_gradient_sum" not in recorded
    notes = status["layers"][0]["notes"]
    assert any(said in note for note in notes), notes
    findings = status["findings"]
    assert any(found.ok is False and said in str(found) for found in findings), findings


def of_one(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Its queries are its keys, with gradients from elsewhere besides."""
    return torch.einsum("bhqd,bhkd->bhqk", q, q).softmax(-1) @ q.sin() + q + k + v


def test_queries_that_are_the_keys_have_no_tap(tmp_path: Path) -> None:
    _, recorded, _ = watched(of_one, tmp_path / "a.bwrun")  # Bitwise, too.
    assert "rows" in recorded and "key_gradient_sum" not in recorded


class Unnamed(nn.Module):
    """Its projections are called like none."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = HEADS
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, DIM)) for p in (self.one, self.two, self.three))
        weights = torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k), -1)
        return x + torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = torch.softmax(self.weight(x), -1)
        return x * chosen.amax(-1, keepdim=True)


def test_a_module_with_heads_and_a_softmax_is_attention(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Unnamed(), Router())
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="w") as monitor:
        model(torch.randn(BATCH, TOKENS, WIDTH)).square().mean().backward()
        monitor.step()
        (layer,) = monitor.status()["layers"]
    assert layer["name"] == "0" and layer["weights"] == "by its rows one two"


def test_an_error_of_ours_leaves_the_product_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _, _ = trained(heads_last, None)
    monkeypatch.setattr("bellwether._hook.layer.layer.apply_tap", lambda *_: 1 / 0)
    again, monitor, _ = trained(heads_last, tmp_path / "a.bwrun")
    assert all(torch.equal(a, b) for a, b in zip(plain, again))
    assert monitor.status()["errors"] == 1 and "ZeroDivisionError" in monitor.why_off
    monitor.detach()
