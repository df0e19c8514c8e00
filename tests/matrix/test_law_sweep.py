"""Goal: sound trainings break no law, whatever the kernel, the type and the mask; and one with a
fault is called broken.
Method: some set-ups of law_sweep.py, whose recordings the server's judge reads; of --long all that
a CPU can train, in test_whole_law_sweep.py; on a GPU test_law_sweep_gpu.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sound_trainings
from torch import Tensor, nn

import bellwether

import law_sweep
from law_sweep import Setup
from planted_kernels import planted

# Of each kind of rounding one; the fp16raw ones underflow.
SLICE = (
    "llama sdpa bf16 plain MATH", "gpt2 eager fp16 plain", "llama eager fp16raw padded",
    "gemma2 eager fp32 padded", "mha fast fp16raw plain", "qwen3 sdpa fp16raw padded MATH",
    "gemma3 bellwether fp16raw padded",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        law_sweep.prepare("cpu", folder, patch.setenv)
        yield folder


@pytest.mark.parametrize("words", SLICE)
def test_a_sound_training_breaks_no_law(words: str, folder: Path) -> None:
    number = [str(setup) for setup in law_sweep.setups("cpu")].index(words)
    one = law_sweep.run(law_sweep.setups("cpu")[number], number, 0, "cpu", folder)
    assert one["outcome"] == "right", law_sweep.describe(one)
    # The margins are the judge's.
    assert one["margins"] and max(one["margins"].values()) < 1


class Core(nn.Module):
    """A kernel with a fault that nothing outside of it sees."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return planted("dk_of_heads_exchanged")(q, k, v)  # type: ignore[no-any-return]


class Faulty(law_sweep.MultiHead):
    def __init__(self, width: int, heads: int, with_weights: bool) -> None:
        super().__init__(width, heads, with_weights)
        self.heads, self.mix = heads, nn.Linear(width, 3 * width)
        self.core = bellwether.wrap_attention(Core(), layout="bhtd")

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        q, k, v = self.mix(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        x = x + self.core(q, k, v).transpose(1, 2).flatten(2)
        logits = self.head(x).flatten(0, 1).float()
        return {"loss": nn.functional.cross_entropy(logits, labels.flatten())}


@pytest.mark.parametrize("precision", ["bf16", "fp16raw"])
def test_a_training_with_a_fault_is_called_broken(
    precision: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(law_sweep, "MultiHead", Faulty)
    one = law_sweep.run(Setup("mha", "fast", precision, "plain"), 1, 0, "cpu", folder)
    assert one["outcome"] == "BROKEN", law_sweep.describe(one)
    assert one["margins"]["a3"] > 1


# Those that were once called wrong though they were right, and of each kind of law one.
OF_MODULES = (
    "gpt fp32 gain-large", "gpt bf16 sure-16-bits", "gpt autocast offset", "gpt medium tied",
    "gpt autocast16 scale-grows", "cohere2 autocast16 train", "clip fp32 train",
)  # fmt: skip


@pytest.mark.parametrize("words", OF_MODULES)
def test_a_sound_training_breaks_no_law_of_modules(words: str, folder: Path) -> None:
    setup = sound_trainings.Whole(*words.split())
    number = law_sweep.setups("cpu").index(setup)
    one = law_sweep.run(setup, number, 0, "cpu", folder)
    assert one["outcome"] == "right" and not one["errors"], law_sweep.describe(one)
    assert one["questions"]["dx=dW"] > 20 and one["questions"]["dx:scale"] > 5
    assert max(one["margins"].values()) < 1 and one["compared"] > 10_000


def test_a_training_whose_weights_flip_is_called_broken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flip(model: Any, step: int) -> None:
        # By numpy: torch sees no change.
        model.head.weight.detach().numpy().view(np.int32)[2, 3] ^= 1 << 22

    way = sound_trainings.Way(between=flip)
    monkeypatch.setitem(sound_trainings.WAYS, "flips", way)
    one = law_sweep.run(sound_trainings.Whole("gpt", "fp32", "flips"), 1, 0, "cpu", folder)
    assert one["outcome"] == "BROKEN", law_sweep.describe(one)
    assert one["margins"]["W:at-rest"] > 1 and "head.weight" in one["flips"]


def test_known_faults_are_told_apart() -> None:
    broken = {"alerts": ['{"rule": "kernel"}'], "known": [], "samples": 4, "questions": {}}
    assert law_sweep.outcome(broken) == "BROKEN"
    assert law_sweep.outcome({**broken, "known": ["cudnn-rows-without-keys"]}) == "known"
    of_norms = {**broken, "alerts": ['{"rule": "arithmetic"}'], "known": ["x"]}
    assert law_sweep.outcome(of_norms) == "BROKEN"
    assert law_sweep.outcome({"alerts": [], "known": ["x"], "samples": 4}) == "right"
    assert law_sweep.outcome({**broken, "alerts": [], "samples": 0}) == "unasked"
    of_modules = {**broken, "alerts": [], "samples": 0, "questions": {"dx=dW": 3}}
    assert law_sweep.outcome(of_modules) == "right"


def test_the_list_has_each_kind_once() -> None:
    for device, at_least in (("cpu", 150), ("cuda", 200)):
        everything = law_sweep.setups(device)
        found = [setup for setup in everything if isinstance(setup, Setup)]
        assert len(set(everything)) == len(everything) > len(found) + 1000
        assert len(found) > at_least
        assert {s.precision for s in found} == set(law_sweep.PRECISIONS)
        assert {s.model for s in found} == {*law_sweep.FAMILIES, "mha"}


@pytest.mark.parametrize("wrong", (["--only", "lama"], ["--device", "tpu"]))
def test_wrong_arguments_are_said(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        law_sweep.main([*wrong, "--list"])
    assert wrong[1] in capsys.readouterr().err
