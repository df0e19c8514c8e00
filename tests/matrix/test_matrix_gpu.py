"""Goal: attention of transformers is watched whole on a GPU, by PyTorch's own kernels of each kind.
Method: cells of the matrix (matrix.py) there, with PyTorch's deterministic algorithms.  Inductor's
kernels are tested in test_compiled_gpu.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

import less_than_full
import matrix
from cell import Cell, prepare, run_cell
from gpu import LACKS, SKIPPED

pytestmark = pytest.mark.skipif(SKIPPED, reason=LACKS)

CELLS = """
llama sdpa plain train float32
llama sdpa padded_left train bfloat16
llama sdpa packed train bfloat16
llama eager padded_right train bfloat16
llama eager packed checkpoint float32
llama flex_attention padded_left train float32
llama flex_attention packed train bfloat16
llama bellwether padded_left train bfloat16
llama bellwether plain reentrant autocast
gpt2 sdpa mixed train autocast
gpt2 eager padded_right train autocast
mistral sdpa window checkpoint bfloat16
mistral flex_attention window train bfloat16
mistral bellwether window train autocast
qwen3 sdpa padded_right reentrant autocast
qwen3 flex_attention mixed checkpoint bfloat16
gemma2 eager window train bfloat16
gemma3 sdpa window train float32
gemma3 flex_attention window reentrant bfloat16
phi3 sdpa padded_left train bfloat16
gpt_neox sdpa mixed train bfloat16
olmo3 eager window train float32
mixtral sdpa padded_left checkpoint bfloat16
gpt_oss eager window train bfloat16
llama4 sdpa window train bfloat16
deepseek_v3 sdpa padded_right train bfloat16
deepseek_v2 eager plain train float32
qwen3_next sdpa padded_left train bfloat16
bert sdpa padded_right train autocast
bert flex_attention padded_right train float32
modernbert sdpa window train bfloat16
t5 sdpa padded_left train float32
bart eager padded_right train bfloat16
vit sdpa plain train autocast
whisper sdpa plain checkpoint bfloat16
clip sdpa padded_right train float32
llama sdpa padded_left compile bfloat16
gpt2 sdpa plain compile autocast
mistral sdpa window compile bfloat16
llama bellwether plain compile bfloat16
llama eager padded_left compile bfloat16
llama flex_attention packed compile bfloat16
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        prepare(tmp_path_factory.mktemp("matrix"), patch.setenv, "cuda")
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("words", CELLS.strip().splitlines())
def test_a_cell_has_every_signal_on_a_gpu(words: str, prepared: None) -> None:
    cell = Cell(*words.split())
    assert cell in matrix.every_cell()
    if less_than_full.is_open(cell):
        pytest.skip("not watched yet: see less_than_full.OPEN")
    result = dataclasses.asdict(run_cell(cell, "cuda"))
    assert matrix.passed(result), matrix.describe(result)
