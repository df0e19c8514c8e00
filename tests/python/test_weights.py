"""Goal: W_Q and W_K are found under the names people use, believed only if the shape fits.
Method: modules with planted weights whose rows carry their own number.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bellwether._weights import locate, names
from bellwether._weights.location import Location

HEADS, DIM, WIDTH = 4, 8, 20


def numbered(rows: int) -> nn.Linear:
    linear = nn.Linear(WIDTH, rows, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.arange(float(rows))[:, None].expand(rows, WIDTH))
    return linear


class Conv1D(nn.Module):
    """As transformers' GPT-2 has it: the weight is [in, out]."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbered(rows).weight.detach().t().contiguous())


def first_columns(pair: tuple[Tensor, Tensor]) -> list[list[float]]:
    return [w[..., 0].flatten().tolist() for w in pair]


def located(module: nn.Module, kv_heads: int = HEADS, paths: Any = None) -> Location:
    return locate.candidates(module, "", HEADS, kv_heads, DIM, paths)[0]


def found(module: nn.Module, kv_heads: int = HEADS) -> list[list[float]]:
    views = located(module, kv_heads).views(module)
    assert views is not None
    assert views[0].shape == (HEADS, DIM, WIDTH) and views[1].shape == (
        kv_heads,
        DIM,
        WIDTH,
    )
    return first_columns(views)


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ("q_proj", "k_proj"),
        ("wq", "wk"),
        ("query", "key"),
        ("to_q", "to_k"),
        ("W_Q", "W_K"),
    ],
)
def test_separate_projections(query: str, key: str) -> None:
    module = nn.Module()
    module.add_module(query, numbered(HEADS * DIM))
    module.add_module(key, numbered(2 * DIM))
    assert names.named(module)
    assert locate.kv_heads_of(module, HEADS, DIM) == 2
    assert found(module, 2) == [list(range(32)), list(range(16))]


@pytest.mark.parametrize("name", ["c_attn", "qkv", "Wqkv", "qkv_proj", "in_proj"])
@pytest.mark.parametrize("kind", [numbered, Conv1D])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_fused_projections(name: str, kind: type, kv_heads: int) -> None:
    module = nn.Module()
    module.add_module(name, kind((HEADS + 2 * kv_heads) * DIM))
    assert locate.kv_heads_of(module, HEADS, DIM) == kv_heads
    want_k = list(range(HEADS * DIM, (HEADS + kv_heads) * DIM))
    assert found(module, kv_heads) == [list(range(HEADS * DIM)), want_k]


def test_grouped_rows() -> None:
    module = nn.Module()
    module.query_key_value = numbered(3 * HEADS * DIM)
    q, k = found(module)
    assert q[:DIM] == list(range(DIM)) and q[DIM : 2 * DIM] == list(range(24, 32))
    assert k[:DIM] == list(range(DIM, 2 * DIM))


def test_multihead_attention() -> None:
    module = nn.MultiheadAttention(HEADS * DIM, HEADS)
    assert names.named(module)
    assert located(module).how == "fused in_proj_weight"


def test_views_read_the_live_weight() -> None:
    module = nn.Module()
    module.qkv = numbered(3 * HEADS * DIM)
    views = located(module).views(module)
    assert views is not None
    assert views[0].data_ptr() == module.qkv.weight.data_ptr()


def test_a_name_without_the_shape_is_not_believed() -> None:
    module = nn.Module()
    module.q_proj, module.k_proj = numbered(HEADS * DIM), numbered(HEADS * DIM + 1)
    assert not locate.candidates(module, "", HEADS, HEADS, DIM)


def test_paths_given_by_the_user() -> None:
    module = nn.Module()
    module.inner = nn.Module()
    module.inner.a, module.inner.b = numbered(HEADS * DIM), numbered(HEADS * DIM)
    assert not locate.candidates(module, "", HEADS, HEADS, DIM)
    paths = ("inner.a.weight", "inner.b.weight")
    assert located(module, paths=paths).views(module) is not None
    assert names.override_for({r"layers\.\d+\.x": paths}, "layers.3.x") == paths
    assert names.override_for({r"layers\.\d+\.x": paths}, "layers.3.xy") is None
