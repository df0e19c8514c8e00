"""Goal: sigma is that of the matrices that the model computes with, whatever holds them.  Where it
cannot be told, it is left out and said.
Method: small models are trained; each sample is compared to the singular values, in double, of the
matrix that the test itself takes from the model.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import bellwether
from bellwether._actions import head_rows
from bellwether._weights import locate, location
from bellwether._weights.adapters import Unreadable
from bellwether._weights.projection import read
from bellwether.tools.doctor import layer_findings

from recording import Recording

HEADS, DIM, WIDTH = 4, 8, 32
Matrices = Callable[[nn.Module], tuple[Tensor, Tensor]]


def turned(x: Tensor) -> Tensor:
    """[batch, heads, tokens, dim] with rotary positions."""
    angle = torch.arange(x.shape[2])[:, None] / 10 ** torch.linspace(0, 2, x.shape[3] // 2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Attention(nn.Module):
    """`split` gives q, k and v of what `projections` return for x, [batch, heads, tokens, dim]."""

    def __init__(self, split: Callable[..., Any], rotary: bool, **projections: nn.Module) -> None:
        super().__init__()
        for name, projection in projections.items():
            self.add_module(name, projection)
        self.split, self.rotary = split, rotary

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self, x)
        if self.rotary:
            q, k = turned(q), turned(k)
        gqa = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        return x + y.transpose(1, 2).flatten(2)


def train(model: nn.Module, steps: int = 3, stepped: Callable[[], None] = lambda: None) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(3, 10, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        stepped()


def sampled(
    model: nn.Module, path: Path, matrices: Matrices, steps: int = 3, **attach: Any
) -> tuple[Any, list[dict[str, Any]]]:
    """(the layer's status, of each step what was measured and what is right)"""
    monitor = bellwether.attach(
        model, record=str(path), run="w", every=1, overhead_budget=1e9, **attach
    )
    want = []

    def stepped() -> None:
        with torch.no_grad():
            want.append([torch.linalg.svdvals(w.detach().double())[:, 0] for w in matrices(model)])

    train(model, steps, stepped)
    assert monitor.flush(20) and monitor.status()["errors"] == 0, monitor.status()
    status = next(layer for layer in monitor.status()["layers"] if layer["calls"])
    monitor.detach()
    found = Recording(path, ended=True).steps()
    return status, [{**found[step], "want": want[step]} for step in range(steps)]


def check(model: nn.Module, path: Path, matrices: Matrices, **attach: Any) -> Any:
    torch.manual_seed(0)
    status, samples = sampled(model, path, matrices, **attach)
    for sample in samples:
        for signal, want in zip(("wq_sigma", "wk_sigma"), sample["want"]):
            have = torch.tensor(sample[signal][0, : len(want)]).double()
            assert torch.allclose(have, want, rtol=1e-5), (signal, have, want, status)
    return status


def by_head(x: Tensor, heads: int = HEADS) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


# ---- the order of rows ----


def fused(order: str, keys: int, width: int = DIM) -> Attention:
    """One projection; `order` names its blocks of rows: q, k and v by head, g a gate."""

    def split(module: Any, x: Tensor) -> list[Tensor]:
        y = module.qkv(x).unflatten(-1, (-1, width)).transpose(1, 2)
        return [y[:, [i for i, c in enumerate(order) if c == name]] for name in "qkv"]

    return Attention(split, True, qkv=nn.Linear(WIDTH, len(order) * width))


def of_fused(order: str) -> Matrices:
    def matrices(model: Any) -> tuple[Tensor, Tensor]:
        blocks = model.qkv.weight.unflatten(0, (-1, DIM))
        q, k = ([i for i, c in enumerate(order) if c == name] for name in "qk")
        return blocks[q], blocks[k]

    return matrices


@pytest.mark.parametrize(
    ("order", "keys", "how"),
    [
        ("qqqqkkkkvvvv", 4, "fused qkv"),
        ("qqqqkkvv", 2, "fused qkv"),
        ("qkvqkvqkvqkv", 4, "grouped qkv"),
        ("qqkvqqkv", 2, "grouped qkv"),
        ("kkkkqqqqvvvv", 4, "by its rows qkv"),
        ("kkvvqqqq", 2, "by its rows qkv"),
    ],
)
def test_rows_of_a_fused_projection_in_any_order(
    order: str, keys: int, how: str, tmp_path: Path
) -> None:
    status = check(fused(order, keys), tmp_path / "a.bwrun", of_fused(order))
    assert status["weights"] == how and not status["notes"]


def test_rows_of_queries_may_lie_between_those_of_keys(tmp_path: Path) -> None:
    def split(module: Any, x: Tensor) -> list[Tensor]:
        parts = module.qkv(x).unflatten(-1, (HEADS, DIM, 3)).transpose(1, 2)
        return list(parts.unbind(-1))

    def matrices(model: Any) -> tuple[Tensor, Tensor]:
        rows = model.qkv.weight.unflatten(0, (HEADS, DIM, 3))
        return rows[:, :, 0], rows[:, :, 1]

    model = Attention(split, True, qkv=nn.Linear(WIDTH, 3 * HEADS * DIM))
    status = check(model, tmp_path / "a.bwrun", matrices)
    assert status["weights"] == "interleaved qkv" and not status["notes"]
    place = location.interleaved("qkv", HEADS, DIM)
    assert head_rows.unchangeable(model, place) == "rows of a head that do not lie side by side"
    assert torch.equal(place.key.matrix(model, 2), matrices(model)[1][2])
    uneven = dataclasses.replace(place.key, begins=tuple(place.key.begins[i] for i in (0, 1, 3)))
    assert torch.equal(uneven.matrices(model), matrices(model)[1][[0, 1, 3]])


@pytest.mark.parametrize(
    ("order", "how"), [("qqqqkkkkvvvv", "fused qkv"), ("qkvqkvqkvqkv", "grouped qkv")]
)
@pytest.mark.parametrize("image", [False, True])
def test_rows_of_a_pointwise_convolution(image: bool, order: str, how: str, tmp_path: Path) -> None:
    def split(module: Any, x: Tensor) -> list[Tensor]:
        places = x.mT.unflatten(-1, (2, -1)) if image else x.mT
        y = module.qkv(places).flatten(2).unflatten(1, (-1, DIM)).mT
        return [y[:, [i for i, c in enumerate(order) if c == name]] for name in "qkv"]

    conv = nn.Conv2d if image else nn.Conv1d
    model = Attention(split, False, qkv=conv(WIDTH, 3 * HEADS * DIM, 1))

    def matrices(model: Any) -> tuple[Tensor, Tensor]:
        blocks = model.qkv.weight.flatten(1).unflatten(0, (-1, DIM))
        q, k = ([i for i, c in enumerate(order) if c == name] for name in "qk")
        return blocks[q], blocks[k]

    status = check(model, tmp_path / "a.bwrun", matrices)
    assert status["weights"] == how and not status["notes"]


@pytest.mark.parametrize("norm", [False, True])
def test_a_gate_in_the_projection_of_queries(norm: bool, tmp_path: Path) -> None:
    def split(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, gate = by_head(module.q_proj(x)).chunk(2, -1)
        k, v = by_head(module.k_proj(x), 2), by_head(module.v_proj(x), 2)
        if norm:
            q, k = (
                module.q_norm(q.transpose(1, 2)).transpose(1, 2),
                module.k_norm(k.transpose(1, 2)).transpose(1, 2),
            )
        return q, k, v * gate.mean().sigmoid()

    rows = {"q_proj": 2 * HEADS, "k_proj": 2, "v_proj": 2}
    parts: dict[str, nn.Module] = {n: nn.Linear(WIDTH, r * DIM) for n, r in rows.items()}
    norms = {"q_norm": nn.RMSNorm(DIM), "k_norm": nn.RMSNorm(DIM)} if norm else {}
    status = check(
        Attention(split, True, **parts, **norms), tmp_path / "a.bwrun",
        lambda m: (
            m.q_proj.weight.unflatten(0, (HEADS, -1))[:, :DIM],
            m.k_proj.weight.unflatten(0, (2, -1)),
        ),
    )  # fmt: skip
    assert status["weights"] == "gated q_proj k_proj"


@pytest.mark.parametrize("heads_first", [False, True])
def test_keys_that_are_repeated_behind_their_norm(heads_first: bool, tmp_path: Path) -> None:
    def split(module: Any, x: Tensor) -> tuple[Tensor, ...]:
        def normed(norm: nn.Module, x: Tensor) -> Tensor:
            found: Tensor = norm(x) if heads_first else norm(x.transpose(1, 2)).transpose(1, 2)
            return found

        q, k = by_head(module.q_proj(x)), by_head(module.k_proj(x), 2)
        q, k = normed(module.q_norm, q), normed(module.k_norm, k)
        copies = (t.repeat_interleave(2, 1) for t in (k, by_head(module.v_proj(x), 2)))
        return q, *copies

    rows = {"q_proj": HEADS, "k_proj": 2, "v_proj": 2}
    parts: dict[str, nn.Module] = {n: nn.Linear(WIDTH, r * DIM) for n, r in rows.items()}
    status = check(
        Attention(split, True, **parts, q_norm=nn.RMSNorm(DIM), k_norm=nn.RMSNorm(DIM)),
        tmp_path / "a.bwrun",
        lambda m: (
            m.q_proj.weight.unflatten(0, (HEADS, -1)), m.k_proj.weight.unflatten(0, (2, -1)),
        ),
    )  # fmt: skip
    assert status["weights"] == "separate q_proj k_proj" and not status["notes"]


def test_rows_are_checked_after_an_evaluation(tmp_path: Path) -> None:
    class Evaluated(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Any:
            with torch.no_grad():
                for _ in range(4):
                    self.inner(x)
            return self.inner(x)

    order = "qkvqkvqkvqkv"
    of = of_fused(order)
    status = check(Evaluated(fused(order, 4)), tmp_path / "a.bwrun", lambda m: of(m.inner))
    assert status["weights"] == "grouped qkv"


def separate(split: Callable[..., Any], rotary: bool = True, **other: nn.Module) -> Attention:
    parts = {n: nn.Linear(WIDTH, HEADS * DIM) for n in ("q_proj", "k_proj", "v_proj")}
    return Attention(split, rotary, **{**parts, **other})


def plain(module: Any, x: Tensor) -> list[Tensor]:
    return [by_head(p(x)) for p in (module.q_proj, module.k_proj, module.v_proj)]


def of_separate(model: Any) -> tuple[Tensor, Tensor]:
    return tuple(p.weight.unflatten(0, (HEADS, -1)) for p in (model.q_proj, model.k_proj))  # type: ignore[return-value]


def test_rows_that_are_no_heads_are_left_out_and_said(tmp_path: Path) -> None:
    def split(module: Any, x: Tensor) -> list[Tensor]:  # Rows by dimension, then by head.
        parts = (module.q_proj, module.k_proj, module.v_proj)
        return [p(x).unflatten(-1, (DIM, HEADS)).permute(0, 3, 1, 2) for p in parts]

    status, samples = sampled(separate(split), tmp_path / "a.bwrun", of_separate)
    assert all("wq_sigma" not in sample and "rows" in sample for sample in samples)
    assert any("are not those of the heads" in note for note in status["notes"])


def test_rows_without_a_check_are_told_as_such(tmp_path: Path) -> None:
    def split(module: Any, x: Tensor) -> list[Tensor]:
        q, k, v = plain(module, x)
        return [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v]

    status = check(separate(split), tmp_path / "a.bwrun", of_separate)
    assert status["weights"] == "separate q_proj k_proj, not checked against q"


def test_keys_whose_queries_come_from_experts_are_named(tmp_path: Path) -> None:
    def split(module: Any, x: Tensor) -> list[Tensor]:
        which = torch.arange(x.shape[1]) % 2
        q = torch.einsum("bti,toi->bto", x, module.experts[which])
        return [by_head(q), *by_head(module.kv_proj(x), 2 * HEADS).chunk(2, 1)]

    model = Attention(split, False, kv_proj=nn.Linear(WIDTH, 2 * HEADS * DIM))
    model.experts = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / WIDTH**0.5)
    status, samples = sampled(model, tmp_path / "a.bwrun", lambda m: ())
    assert any("W_K is kv_proj, and no one projection" in note for note in status["notes"]), status
    assert not any("not found" in note for note in status["notes"])
    assert all("wq_sigma" not in sample for sample in samples)


class ByHead(nn.Module):
    """As XLNet: each projection is a parameter [width, heads, dim]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        for name in "qkv":
            weight = torch.randn(WIDTH, HEADS, dim) / WIDTH**0.5
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bti,ind->bntd", x, w) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + F.pad(y, (0, WIDTH - y.shape[2]))


@pytest.mark.parametrize("dim", [DIM, 3])
def test_parameters_of_width_by_heads_by_dimension(dim: int, tmp_path: Path) -> None:
    status = check(
        ByHead(dim), tmp_path / "a.bwrun",
        lambda m: (m.q.permute(1, 2, 0), m.k.permute(1, 2, 0)),
    )  # fmt: skip
    assert status["weights"].startswith("separate q k")
    place = location.separate(("q", "k"), HEADS, HEADS, dim)
    assert head_rows.unchangeable(ByHead(dim), place) == "a weight of three dimensions"


def test_key_heads_are_known_without_the_names_of_weights(tmp_path: Path) -> None:
    def split(module: Any, x: Tensor) -> list[Tensor]:
        q, k, v = (by_head(p(x), n) for p, n in zip((module.a, module.b, module.c), (HEADS, 2, 2)))
        return [q, *(t.repeat_interleave(HEADS // 2, 1) for t in (k, v))]

    parts = {name: nn.Linear(WIDTH, n * DIM) for name, n in (("a", HEADS), ("b", 2), ("c", 2))}
    model = Attention(split, True, **parts)
    model.num_key_value_heads = 2
    status, _ = sampled(model, tmp_path / "a.bwrun", lambda m: ())
    assert (status["kv_heads"], status["weights"]) == (2, "by its rows a b")


def test_rows_agree_where_a_bias_is_added_to_queries(tmp_path: Path) -> None:
    def split(module: Any, x: Tensor) -> list[Tensor]:
        q, k, v = (by_head(p(x)) for p in (module.q_proj, module.k_proj, module.v_proj))
        return [0.5 * q + torch.linspace(-1, 2, HEADS * DIM).view(HEADS, 1, DIM), k, v]

    model = separate(split)
    model.rotary = False
    status = check(model, tmp_path / "a.bwrun", of_separate)
    assert status["weights"] == "separate q_proj k_proj"


# ---- other places ----


@pytest.mark.parametrize("said", [False, True])
def test_latent_attention_by_its_rows_without_a_position(said: bool, tmp_path: Path) -> None:
    rotated = 4

    def split(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = by_head(module.q_b_proj(module.q_a_proj(x)))
        latent, shared = module.kv_a_proj(x).split([12, rotated], -1)
        k, v = by_head(module.kv_b_proj(latent)).split([DIM, 8], -1)
        position = turned(shared.unsqueeze(1)).expand(-1, HEADS, -1, -1)
        q = torch.cat([q[..., :DIM], turned(q[..., DIM:])], -1)
        return q, torch.cat([k, position], -1), v

    model = Attention(
        split, False, q_a_proj=nn.Linear(WIDTH, 10),
        q_b_proj=nn.Linear(10, HEADS * (DIM + rotated)),
        kv_a_proj=nn.Linear(WIDTH, 12 + rotated), kv_b_proj=nn.Linear(12, HEADS * (DIM + 8)),
    )  # fmt: skip
    if said:
        model.qk_nope_head_dim = DIM
    status = check(
        model, tmp_path / "a.bwrun",
        lambda m: tuple(
            p.weight.unflatten(0, (HEADS, -1))[:, :DIM] for p in (m.q_b_proj, m.kv_b_proj)
        ),
    )  # fmt: skip
    assert status["weights"] == "latent q_b_proj kv_b_proj"


def test_multihead_attention_with_other_widths_of_keys(tmp_path: Path) -> None:
    class Across(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, kdim=20, vdim=24, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            return self.attention(x, x[..., :20], x[..., :24], need_weights=False)[0]

    status = check(
        Across(), tmp_path / "a.bwrun",
        lambda m: (
            m.attention.q_proj_weight.unflatten(0, (HEADS, -1)),
            m.attention.k_proj_weight.unflatten(0, (HEADS, -1)),
        ),
    )  # fmt: skip
    assert status["weights"].startswith("separate q_proj_weight k_proj_weight")


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(WIDTH, 3 * HEADS * DIM, bias=False)

    def forward(self, x: Tensor) -> list[Tensor]:
        y = self.wqkv(x).unflatten(-1, (HEADS, 3, DIM))
        return [part.transpose(1, 2) for part in y.unbind(-2)]


class Beside(nn.Module):
    """The projections lie beside the module that calls attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_linear, self.inner_attention = Projections(), Core()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner_attention(*self.qkv_linear(x)).transpose(1, 2).flatten(2)


class Normalised(Beside):
    """What the projections return is normalised head by head before the attention."""

    def __init__(self, tokens_first: bool, skips: bool = False) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.tokens_first, self.skips = tokens_first, skips

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.qkv_linear(x))
        for i, norm in enumerate((self.q_norm, self.k_norm) if not self.skips else ()):
            given = parts[i].transpose(1, 2) if self.tokens_first else parts[i]
            parts[i] = norm(given).transpose(1, 2) if self.tokens_first else norm(given)
        return x + self.inner_attention(*parts).transpose(1, 2).flatten(2)


def of_beside(model: Any) -> tuple[Tensor, Tensor]:
    rows = model[0].qkv_linear.wqkv.weight.unflatten(0, (HEADS, 3, DIM))
    return rows[:, 0], rows[:, 1]


@pytest.mark.parametrize("path", [None, "0.qkv_linear.wqkv.weight"])
def test_projections_beside_the_attention(path: Any, tmp_path: Path) -> None:
    told = {"weights": {r"0\.inner_attention": (path, path)}} if path is not None else {}
    model = nn.Sequential(Beside())
    status = check(model, tmp_path / "a.bwrun", of_beside, **told)
    assert status["weights"] == f"grouped {path or 'qkv_linear.wqkv'}" and not status["notes"]


@pytest.mark.parametrize("tokens_first", [False, True])
def test_projections_and_norms_beside_the_attention(tokens_first: bool, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(Normalised(tokens_first))
    with torch.no_grad():
        model[0].q_norm.weight.copy_(torch.linspace(0.5, 2.0, DIM))
    status = check(model, tmp_path / "a.bwrun", of_beside)
    assert status["weights"] == "grouped qkv_linear.wqkv" and not status["notes"]
    assert not model[0].q_norm._forward_hooks and not model[0].k_norm._forward_hooks


def test_norms_beside_compiled_attention_are_looked_through(tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch.manual_seed(3)
    model = nn.Sequential(Normalised(True))
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="c", every=1) as monitor:
        run = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            run(torch.randn(2, 6, WIDTH)).sum().backward()
            monitor.step()
        layers = [layer for layer in monitor.status()["layers"] if layer["calls"]]
    assert [layer["weights"] for layer in layers] == ["grouped qkv_linear.wqkv"], layers
    assert not layers[0]["notes"]


def test_norms_that_never_run_keep_no_hook_of_ours(tmp_path: Path) -> None:
    model = nn.Sequential(Normalised(False, skips=True))
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="n", every=1) as monitor:
        for _ in range(4):
            model(torch.randn(2, 6, WIDTH)).sum().backward()
            assert len(model[0].q_norm._forward_hooks) <= 1
            monitor.step()
    assert not model[0].q_norm._forward_hooks and not model[0].k_norm._forward_hooks


def test_a_module_that_lends_its_projections_is_no_attention(tmp_path: Path) -> None:
    model = nn.Sequential(Beside())
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="l") as monitor:
        model(torch.randn(2, 6, WIDTH)).sum().backward()
        monitor.step()
        found = [f.ok for f in layer_findings(monitor.status())]
    assert sorted(found, key=str) == [None, True]


@pytest.mark.parametrize("copies", [False, True])
def test_projections_without_a_name_that_is_known(copies: bool, tmp_path: Path) -> None:
    def split(module: Any, x: Tensor) -> tuple[Tensor, ...]:
        k, v = by_head(module.second(x), 2), by_head(module.third(x), 2)
        if copies:
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return by_head(module.first(x)), k, v

    rows = {"first": HEADS, "second": 2, "third": 2}
    model = Attention(split, True, **{n: nn.Linear(WIDTH, r * DIM) for n, r in rows.items()})
    each = 2 if copies else 1

    def matrices(model: Any) -> tuple[Tensor, Tensor]:
        keys = model.second.weight.unflatten(0, (2, -1)).repeat_interleave(each, 0)
        return model.first.weight.unflatten(0, (HEADS, -1)), keys

    status = check(model, tmp_path / "a.bwrun", matrices)
    assert status["weights"] == "by its rows first second" and not status["notes"]


class SharesKeys(nn.Module):
    """Of two attentions the second has the keys and values of the first."""

    def __init__(self) -> None:
        super().__init__()
        three = {n: nn.Linear(WIDTH, WIDTH) for n in ("q_proj", "k_proj", "v_proj")}
        first = Attention(lambda m, x: [], True, **three, k_norm=nn.RMSNorm(DIM))
        second = Attention(lambda m, x: [], True, q_proj=nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(nn.ModuleDict({"attn": a}) for a in (first, second))

    def forward(self, x: Tensor) -> Tensor:
        held: list[Tensor] = []

        def split(module: Any, x: Tensor) -> list[Tensor]:
            if hasattr(module, "k_proj"):
                held[:] = [module.k_norm(by_head(module.k_proj(x))), by_head(module.v_proj(x))]
            return [by_head(module.q_proj(x)), *held]

        for block in self.blocks:
            block["attn"].split = split
            x = block["attn"](x)
        return x


def test_keys_of_another_layer_have_its_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = SharesKeys()
    monitor = bellwether.attach(
        model, record=str(tmp_path / "a.bwrun"), run="s", every=1, overhead_budget=1e9
    )
    want = []

    def stepped() -> None:
        first, second = (block["attn"] for block in model.blocks)
        of = (first.q_proj, first.k_proj, second.q_proj)
        with torch.no_grad():
            weights = [p.weight.unflatten(0, (HEADS, -1)).double() for p in of]
            want.append([torch.linalg.svdvals(w)[:, 0] for w in weights])

    train(model, 3, stepped)
    assert monitor.flush(20)
    status = monitor.status()
    monitor.detach()
    assert not status["errors"] and not [n for layer in status["layers"] for n in layer["notes"]]
    assert status["layers"][1]["weights"] == "by its rows q_proj, with the keys of blocks.0.attn"
    found = Recording(tmp_path / "a.bwrun", ended=True).steps()
    for step, (q1, k1, q2) in enumerate(want):
        for row, signal, sigma in ((0, "wq_sigma", q1), (1, "wq_sigma", q2), (1, "wk_sigma", k1)):
            have = torch.tensor(found[step][signal][row]).double()
            assert torch.allclose(have, sigma, rtol=1e-5), (row, signal)


def test_compiled_projections_without_a_name_are_told_apart(tmp_path: Path) -> None:
    def split(module: Any, x: Tensor) -> list[Tensor]:
        return [by_head(p(x)) for p in (module.first, module.second, module.third)]

    torch._dynamo.reset()
    parts = {n: nn.Linear(WIDTH, HEADS * DIM) for n in ("first", "second", "third")}
    model = nn.Sequential(Attention(split, True, **parts))
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="c", every=1) as monitor:
        run = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            run(torch.randn(2, 6, WIDTH)).sum().backward()
            monitor.step()
        (layer,) = (layer for layer in monitor.status()["layers"] if layer["calls"])
    assert layer["weights"] == "by its rows first second" and not layer["notes"]


def test_calls_of_one_forward_with_projections_of_their_own(tmp_path: Path) -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(WIDTH, 3 * HEADS * DIM) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                q, k, v = (by_head(y) for y in part(x).chunk(3, -1))
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                x = x + y.transpose(1, 2).flatten(2)
            return x

    model, path = nn.Sequential(Many()), tmp_path / "a.bwrun"
    _, samples = sampled(
        model, path,
        lambda m: [p.weight[: HEADS * DIM].unflatten(0, (HEADS, -1)) for p in m[0].parts],
    )  # fmt: skip
    for sample in samples:
        assert torch.allclose(
            torch.tensor(sample["wq_sigma"]).double(),
            torch.stack(sample["want"]),
            rtol=1e-5,
        )


# ---- adapters ----


class Low(nn.Module):
    """As a layer of peft is built."""

    def __init__(self, base: nn.Linear, names: tuple[str, ...], dora: bool) -> None:
        super().__init__()
        rows, width = base.weight.shape
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({n: nn.Linear(width, 3, bias=False) for n in names})
        self.lora_B = nn.ModuleDict({n: nn.Linear(3, rows, bias=False) for n in names})
        self.scaling = {n: 1.5 + i for i, n in enumerate(names)}
        self.lora_magnitude_vector = nn.ModuleDict()
        self.active_adapters, self.use_dora = list(names), dict.fromkeys(names, dora)
        self.disable_adapters = self.merged = False
        if dora:
            for name in names:
                self.lora_magnitude_vector[name] = nn.Module()
                length = base.weight.norm(dim=1) * torch.linspace(0.5, 2, rows)
                self.lora_magnitude_vector[name].weight = nn.Parameter(length)

    @property
    def weight(self) -> Any:
        return self.base_layer.weight

    def whole(self) -> Tensor:
        base = self.base_layer.weight
        found = base
        for name in self.active_adapters if not (self.disable_adapters or self.merged) else ():
            product = self.scaling[name] * self.lora_B[name].weight @ self.lora_A[name].weight
            if self.use_dora[name]:
                length = (base + product).norm(dim=1).detach()
                ratio = (self.lora_magnitude_vector[name].weight / length)[:, None]
                product = ratio * (base + product) - base
            found = found + product
        return found

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.whole().T


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        ("lora", "frozen"),
        ("dora", "trained"),
        ("two", "changed"),
        ("two of dora", "frozen"),
        ("one of two", "trained"),
        ("off", "frozen"),
        ("merged", "frozen"),
    ],
)
def test_adapters_of_low_rank(kind: str, base: str, tmp_path: Path) -> None:
    names = ("a", "b") if "two" in kind else ("a",)
    parts = {
        n: Low(nn.Linear(WIDTH, HEADS * DIM), names, "dora" in kind) for n in ("q_proj", "k_proj")
    }
    for part in parts.values():
        part.disable_adapters, part.merged = kind == "off", kind == "merged"
        if kind == "one of two":
            part.active_adapters = ["b"]
        part.base_layer.weight.requires_grad_(base == "trained")
    model = separate(plain, **parts)

    def matrices(model: Any) -> tuple[Tensor, Tensor]:
        found = tuple(p.whole().unflatten(0, (HEADS, -1)) for p in (model.q_proj, model.k_proj))
        return found  # type: ignore[return-value]

    if base == "changed":  # By a checkpoint that is loaded.

        def load(*_: Any) -> None:
            model.q_proj.base_layer.weight.mul_(1.01)

        model.register_forward_pre_hook(lambda *_: torch.no_grad()(load)())
    check(model, tmp_path / "a.bwrun", matrices)


class OfOne(nn.Linear):
    """As loralib has it; as LitGPT and torchtune do where it `holds` its projection."""

    def __init__(self, holds: bool, modules: bool) -> None:
        super().__init__(WIDTH, HEADS * DIM)
        if holds:
            self.linear, self.weight = nn.Linear(WIDTH, HEADS * DIM), None  # type: ignore[assignment]
        down, up = torch.randn(3, WIDTH), torch.randn(HEADS * DIM, 3)
        if modules:
            self.lora_a, self.lora_b = nn.Linear(WIDTH, 3, False), nn.Linear(3, HEADS * DIM, False)
            self.alpha, self.rank = 1.5, 3
        else:
            self.lora_A, self.lora_B = nn.Parameter(down), nn.Parameter(up)
            self.scaling, self.merged = 0.5, False

    def whole(self) -> Tensor:
        base = self.weight if self.weight is not None else self.linear.weight
        if hasattr(self, "lora_a"):
            return base + 0.5 * self.lora_b.weight @ self.lora_a.weight
        return base + self.scaling * self.lora_B @ self.lora_A

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.whole().T


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("modules", [False, True])
def test_a_projection_with_one_adapter(holds: bool, modules: bool, tmp_path: Path) -> None:
    parts = {name: OfOne(holds, modules) for name in ("q_proj", "k_proj")}

    def matrices(model: Any) -> tuple[Tensor, Tensor]:
        q, k = (p.whole().unflatten(0, (HEADS, -1)) for p in (model.q_proj, model.k_proj))
        return q, k

    status = check(separate(plain, **parts), tmp_path / "a.bwrun", matrices)
    assert not status["notes"]


def test_an_adapter_of_another_kind_is_left_out(tmp_path: Path) -> None:
    class Other(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, HEADS * DIM)
            self.lora_a, self.lora_b = nn.Linear(WIDTH, 2), nn.Linear(2, HEADS * DIM)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.lora_b(self.lora_a(x))

    status, samples = sampled(separate(plain, q_proj=Other()), tmp_path / "a.bwrun", of_separate)
    assert all("wq_sigma" not in sample and "rows" in sample for sample in samples)
    assert any("Other as an adapter is not known" in note for note in status["notes"])


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_of_peft(dora: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "k_proj"]
    config = peft.LoraConfig(
        r=3,
        lora_alpha=12,
        target_modules=targets,
        init_lora_weights=False,
        use_dora=dora,
    )
    model = peft.get_peft_model(nn.Sequential(separate(plain)), config)

    def matrices(model: Any) -> tuple[Tensor, Tensor]:
        attention = model.base_model.model[0]
        eye, found = torch.eye(WIDTH), []
        for name in targets:
            layer = getattr(attention, name)
            found.append((layer(eye) - layer(torch.zeros(1, WIDTH))).T.unflatten(0, (HEADS, -1)))
        return found[0], found[1]

    status = check(model, tmp_path / "a.bwrun", matrices)
    assert status["weights"] == "separate q_proj k_proj"


# ---- other ways to keep a weight ----


class Eight(nn.Module):
    """Eight bits and a scale for each row."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.randint(-127, 128, (HEADS * DIM, WIDTH), dtype=torch.int8)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.weight.SCB = torch.rand(HEADS * DIM) + 0.1

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.weight.SCB[:, None] / 127).T


def test_weights_of_eight_bits(tmp_path: Path) -> None:
    model = separate(plain, q_proj=Eight(), k_proj=Eight())
    check(
        model, tmp_path / "a.bwrun",
        lambda m: tuple(
            p(torch.eye(WIDTH)).T.unflatten(0, (HEADS, -1)) for p in (m.q_proj, m.k_proj)
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options", "error"),
    [("Linear4bit", {}, 1e-5), ("Linear8bitLt", {"has_fp16_weights": False}, 0.02)],
)
def test_weights_of_bitsandbytes(kind: str, options: dict[str, Any], error: float) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = getattr(bitsandbytes.nn, kind)(WIDTH, 2 * WIDTH, bias=False, **options).to("cpu")
    want = layer(torch.eye(WIDTH)).T.float()
    assert (read(layer).base().float() - want).abs().max() <= error * want.abs().max()


def test_adapters_beside_a_quantised_weight(tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")

    class Quantised(Low):
        def forward(self, x: Tensor) -> Tensor:
            product = self.lora_B["a"](self.lora_A["a"](x)) * self.scaling["a"]
            return self.base_layer(x) + product

    parts: dict[str, nn.Module] = {}
    for name in ("q_proj", "k_proj"):
        low = Quantised(nn.Linear(WIDTH, HEADS * DIM), ("a",), False)
        low.base_layer = bitsandbytes.nn.Linear4bit(WIDTH, HEADS * DIM, bias=False).to("cpu")
        parts[name] = low

    def matrices(model: Any) -> Any:
        eye = torch.eye(WIDTH)
        return [p(eye).T.unflatten(0, (HEADS, -1)) for p in (model.q_proj, model.k_proj)]

    check(separate(plain, **parts), tmp_path / "a.bwrun", matrices)


def test_a_quantised_weight_too_large_to_unpack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bellwether._weights.projection.UNPACKED_BYTES_MAX", 1 << 10)
    with pytest.raises(Unreadable, match="unpacked up to"):
        read(Eight()).base()


def test_a_weight_that_is_elsewhere_has_its_whole_shape() -> None:
    model = separate(plain)
    for part in (model.q_proj, model.k_proj):
        part.weight.ds_shape = part.weight.shape
        part.weight.data = torch.empty(0)
    (place,) = locate.candidates(model, "", HEADS, HEADS, DIM)
    assert place.how == "separate q_proj k_proj" and place.views(model) is None
    with pytest.raises(Unreadable, match="not whole"):
        place.query.matrices(model)


class Pooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.kv = nn.Parameter(torch.randn(HEADS, 1, DIM)), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        k, v = map(by_head, self.kv(x).chunk(2, -1))
        q = (self.query * 0.5).expand(len(x), -1, -1, -1)
        return F.scaled_dot_product_attention(q, k, v)


def test_queries_that_are_parameters_have_no_projection(tmp_path: Path) -> None:
    model = nn.Sequential(Pooling())
    monitor = bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="w", every=1)
    train(model)
    monitor.flush(20)
    (finding,) = layer_findings(monitor.status())
    monitor.detach()
    assert finding.ok and "the queries or the keys are parameters" in finding.text


class Noisy(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return F.dropout(weight, 0.1, self.training)


class Delta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (
            nn.Parameter(torch.randn(2, WIDTH)),
            nn.Parameter(torch.randn(32, 2)),
        )

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def by_spectral_norm(linear: nn.Module) -> None:
    nn.utils.parametrizations.spectral_norm(linear)


def by_noise(linear: nn.Module) -> None:
    parametrize.register_parametrization(linear, "weight", Noisy())


def by_delta(linear: nn.Module) -> None:
    parametrize.register_parametrization(linear, "weight", Delta())


@pytest.mark.parametrize("change", [by_spectral_norm, by_noise, by_delta])
def test_weights_that_are_computed_when_asked_for(
    change: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        model = separate(plain)
        for part in (model.q_proj, model.k_proj):
            change(part)
        return model

    def matrices(model: Any) -> tuple[Tensor, Tensor]:
        as_told = copy.deepcopy(model).eval()
        q, k = as_told.q_proj.weight, as_told.k_proj.weight
        return q.unflatten(0, (HEADS, -1)), k.unflatten(0, (HEADS, -1))

    watched, alone = made(), made()
    check(watched, tmp_path / "a.bwrun", matrices)
    drawn = torch.get_rng_state()
    torch.manual_seed(0)
    train(alone)
    assert torch.equal(torch.get_rng_state(), drawn)
    for name, tensor in alone.state_dict().items():
        assert torch.equal(watched.state_dict()[name], tensor), name


@pytest.mark.parametrize("backward", [False, True])
def test_weights_that_are_whole_for_their_own_module_only(backward: bool, tmp_path: Path) -> None:
    model = separate(plain)
    whole = {}
    for part in (model.q_proj, model.k_proj):
        whole[part] = part.weight.data
        part.weight.ds_id, part.weight.ds_shape = 0, part.weight.shape
        part.weight.requires_grad_(False)

        def gather(module: Any, *_: Any) -> None:
            module.weight.data = whole[module]

        def release(module: Any, *_: Any) -> None:
            module.weight.data = torch.empty(0)

        part.register_forward_pre_hook(gather)
        part.register_forward_hook(release)
        part.register_full_backward_pre_hook(gather)
        if backward:
            part.register_full_backward_hook(release)
        release(part)

    def matrices(_: Any) -> Any:
        return [w.unflatten(0, (HEADS, -1)) for w in whole.values()]

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), model)
    status, samples = sampled(model, tmp_path / "a.bwrun", matrices)
    for sample in samples[1:]:
        for signal, want in zip(("wq_sigma", "wk_sigma"), sample["want"]):
            assert torch.allclose(torch.tensor(sample[signal][0]).double(), want, rtol=1e-5)
    assert list(status["notes"]) == ["sharded weights: sigma is that of before the step"]
