"""Goal: what is read of a call of a model's eager_attention_forward is what it computes, and one
that computes something unknown is named.
Method: the installed transformers' own functions with a module that has what they ask for, against
fp64 from what was read (read_calls.py).
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from read_calls import check
from torch import Tensor, nn

from bellwether._adapters import transformers_eager
from bellwether._hook.calls.call import AttentionCall

# One of each way in which they compute.
MODELS = ("llama", "bert", "gpt_neox", "clip", "gemma2", "t5", "vit", "gpt_oss", "gpt2",
          "granite_swa", "internvl", "mimo_v2_flash", "llama4", "modernbert_decoder")  # fmt: skip
MIN = torch.finfo(torch.float32).min


class Module(nn.Module):
    def __init__(self, groups: int = 2) -> None:
        super().__init__()
        self.num_key_value_groups, self.head_dim = groups, 8
        self.sinks = nn.Parameter(torch.tensor([0.3, -0.5, 1.0, 0.0]))


def function_of(model: str, name: str = "eager_attention_forward") -> Any:
    place = f"transformers.models.{model}.modeling_{model}"
    return getattr(importlib.import_module(place), name)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def tensors(function: Any, keys: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    heads = 2 if "repeat_kv" in function.__code__.co_names else 4
    return random(3, 4, 7, 8), random(3, heads, keys, 8), random(3, heads, keys, 8) + 1


def padded(keys: int = 9) -> Tensor:
    """As transformers makes it: causal, and each sequence with padding of another length."""
    hidden = torch.ones(7, keys, dtype=torch.bool).triu(keys - 6).expand(3, 1, 7, keys).clone()
    for sequence in range(3):
        hidden[sequence, :, :, :sequence] = True
    return torch.zeros(3, 1, 7, keys).masked_fill(hidden, MIN)


def read(function: Any, *args: Any, **kwargs: Any) -> Any:
    return transformers_eager.read(function, args, kwargs)


@pytest.mark.parametrize("model", MODELS)
def test_each_way_of_computing(model: str) -> None:
    function = function_of(model)
    q, k, v = tensors(function)
    module = Module()
    for mask in (padded(), random(1, 1, 7, 9)):
        check(read(function, module, q, k, v, mask, scaling=0.3))
    check(read(function, module, q, k, v, attention_mask=padded(), dropout=0.0, scaling=0.3,
               use_cache=False, position_ids=torch.arange(7)))  # fmt: skip
    if model not in ("modernbert_decoder",):
        call = check(read(function, module, q, k, v, None, scaling=0.3))
        assert call.module is module and not call.mask.tensors()


def test_a_softcap_and_a_bias_of_positions() -> None:
    gemma, t5 = function_of("gemma2"), function_of("t5")
    call = check(read(gemma, Module(), *tensors(gemma), padded(), softcap=1.5))
    assert call.softcap == 1.5 and call.scale == 8**-0.5
    bias = random(1, 4, 7, 9)
    for mask in (None, padded()):
        check(read(t5, Module(), *tensors(t5), mask, scaling=1.0, position_bias=bias))


def test_a_scale_that_the_module_sets() -> None:
    vision = function_of("llama4", "vision_eager_attention_forward")
    module = Module()
    module.head_dim = 4
    call = check(read(vision, module, *tensors(vision), None, scaling=0.9))
    assert call.scale == 0.5


def test_sinks_are_the_modules() -> None:
    function, module = function_of("gpt_oss"), Module()
    call = check(read(function, module, *tensors(function), padded(), scaling=0.3))
    assert call.sinks is not None and torch.equal(call.sinks, module.sinks)
    function = function_of("mimo_v2_flash")
    module.sinks = None  # type: ignore[assignment]
    assert check(read(function, module, *tensors(function), None, scaling=0.3)).sinks is None


def test_dropout_counts_in_training_only() -> None:
    function, module = function_of("llama"), Module()
    call = read(function, module, *tensors(function), None, scaling=1.0, dropout=0.1)
    assert call.dropout == 0.1
    module.eval()
    call = read(function, module, *tensors(function), None, scaling=1.0, dropout=0.1)
    assert call.dropout == 0.0


def test_the_first_sequences_of_several_biases() -> None:
    function = function_of("t5")
    call = read(function, Module(), *tensors(function), padded(), scaling=1.0,
                position_bias=random(1, 4, 7, 9))  # fmt: skip
    rows = torch.arange(7).expand(3, 4, -1)
    whole = call.mask.function(rows, torch.zeros(3, 4, 7, 9))
    assert torch.equal(call.mask.function(rows[:2], torch.zeros(2, 4, 7, 9)), whole[:2])


def eager_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    scaling: float = 1.0, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    weights = torch.special.entr(query @ key.mT * scaling)
    return (weights @ value).transpose(1, 2), None


def test_a_function_of_another_kind_is_named() -> None:
    found = dict(transformers_eager.functions())
    assert eager_attention_forward in found  # Of whichever module: this one has its name.
    call = read(eager_attention_forward, Module(1), *tensors(eager_attention_forward), None)
    assert isinstance(call, AttentionCall) and call.unread is not None
    assert call.unread == f"{__name__} computes its attention with special"


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(3, 1, 7, 9, dtype=torch.bool), "attention_mask is no tensor that is added"),
        ("flex", "attention_mask is no tensor that is added"),
    ],
)
def test_unknown_masks_are_named(mask: Any, words: str) -> None:
    function = function_of("llama")
    call = read(function, Module(), *tensors(function), mask, scaling=1.0)
    assert words in call.unread


def test_every_function_of_the_package_is_known() -> None:
    start = re.compile(r"^def (\w*eager_attention_forward)\(", re.MULTILINE)
    strange, count = {}, 0
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = path.read_text()
        for found in start.finditer(text):
            source = text[found.start() : text.index("\n\n\n", found.start())]
            names: dict[str, Any] = {}
            exec(f"from __future__ import annotations\n{source}", names)
            function = names[found.group(1)]
            part = transformers_eager._unknown_part(function)
            count += 1
            if part is not None or not transformers_eager._is_one(function.__code__):
                strange[path.stem] = part
    assert strange == {} and count > 300
