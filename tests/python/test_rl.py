"""Goal: what TRL's trainers and verl log of reinforcement learning becomes signals of the run, of
the step that it was logged for; other things that they log do not, and nothing raises.
Method: the names of both as they log them; a transformers.Trainer that logs as TRL's do; TRL's own
GRPOTrainer where it is installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
import torch

import bellwether
from bellwether import rl

from models import Model, Shape, batch
from recording import Recording

WATCH: dict[str, Any] = dict(every=1, rows=0, sequences=0, overhead_budget=1e9)
STEPS = 3

# What GRPOTrainer, DPOTrainer, PPOTrainer and verl log in a step, shortened.
OF_RL = {
    "reward": 0.5, "reward_std": 0.1, "frac_reward_zero_std": 0.0, "rewards/length/mean": 0.5,
    "kl": 0.01, "entropy": 2.0, "clip_ratio/low_mean": 0.0, "clip_ratio/region_mean": 0.1,
    "completions/mean_length": 7.5, "sampling/sampling_logp_difference/mean": 0.02,
    "rewards/margins": 0.3, "logps/chosen": -12.0, "logits/rejected": 1.5,
    "objective/kl": 0.1, "policy/clipfrac_avg": 0.2, "val/ratio": 1.0, "loss/policy_avg": 0.3,
    "actor/kl_loss": 0.003, "actor/pg_clipfrac": 0.2, "critic/rewards/mean": 0.4,
    "critic/vf_explained_var": 0.7, "response_length/clip_ratio": 0.1,
    "training/rollout_probs_diff_max": 0.05,
}  # fmt: skip
OTHERS = {
    "loss": 1.0, "grad_norm": 2.0, "learning_rate": 1e-3, "epoch": 0.1, "eval_reward": 3.0,
    "train_runtime": 3.5, "timing_s/gen": 2.0, "perf/throughput": 9.0, "kl_coef_name": "fixed",
}  # fmt: skip


class Takes:
    """What mon.log() was given."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}
        self.step: Optional[int] = None

    def log(self, numbers: Mapping[str, Any], *, step: Optional[int] = None) -> None:
        self.told.update(numbers)
        self.step = step


def test_names_of_trl_and_verl_are_taken() -> None:
    monitor = Takes()
    rl.log_metrics(monitor, {**OTHERS, **OF_RL}, step=7)
    assert monitor.told == OF_RL
    assert monitor.step == 7


def test_a_number_may_be_an_array_or_tensor_of_one() -> None:
    monitor = Takes()
    given = {"kl": torch.tensor(0.5), "reward": np.float32(1.0), "entropy": np.array(2.0)}
    rl.log_metrics(monitor, {**given, "rewards/a": torch.ones(3), "rewards/b": "x"})
    assert monitor.told == given


def test_one_call_takes_so_many_names() -> None:
    monitor = Takes()
    rl.log_metrics(monitor, {f"rewards/{i}/mean": 1.0 for i in range(300)})
    assert list(monitor.told) == [f"rewards/{i}/mean" for i in range(rl.METRICS_MAX)]


def test_metrics_that_cannot_be_read_raise_nothing() -> None:
    class Broken(Mapping[str, Any]):
        def __getitem__(self, name: str) -> Any:
            raise RuntimeError("no such metric")

        def __iter__(self) -> Iterator[str]:
            return iter(["kl"])

        def __len__(self) -> int:
            return 1

    monitor = Takes()
    rl.log_metrics(monitor, Broken())
    assert monitor.told == {}


def own_of(path: Path) -> dict[int, dict[str, float]]:
    """Step -> name -> value."""
    found: dict[int, dict[str, float]] = {}
    for frame in Recording(path, ended=True).frames:
        found[frame.step] = {own.name: own.values[0] for own in frame.own}
    return found


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "a.bwrun"
    model = Model(Shape(layers=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = bellwether.attach(model, record=str(path), run="rl", **WATCH)
    for step in range(STEPS):
        model(batch(Shape(layers=1), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rl.log_metrics(monitor, {**OTHERS, **OF_RL, "actor/kl_loss": float(step)})
    assert monitor.flush(20)
    assert monitor.status()["numbers_left_out"] == {}
    monitor.detach()
    told = own_of(path)
    assert sorted(told) == list(range(STEPS))
    for step, own in told.items():
        assert sorted(own) == sorted(OF_RL)
        assert own["actor/kl_loss"] == step


def logged_by(trainer: Any, name: str) -> dict[int, float]:
    """By step, from 0 on, what the trainer has logged."""
    return {log["step"] - 1: log[name] for log in trainer.state.log_history if name in log}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_trainer_that_logs_as_trl_does(accumulate: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from bellwether import hf

    class Logs(transformers.Trainer):  # type: ignore[misc,name-defined]
        def log(self, logs: dict[str, float], *rest: Any) -> None:
            mode = "" if "loss" in logs else "eval_"
            also = {"kl": 0.5 + self.state.global_step, "rewards/len/mean": 1.0}
            super().log({**logs, **{mode + name: value for name, value in also.items()}}, *rest)

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=50, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 50, (16, 8))]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=STEPS, per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulate, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    callback = hf.Callback(record=str(tmp_path / "a.bwrun"), run="hf", **WATCH)
    trainer = Logs(
        transformers.LlamaForCausalLM(config), arguments, train_dataset=data,
        eval_dataset=data[:2], callbacks=[callback],
    )  # fmt: skip
    trainer.train()
    assert callback.monitor is not None
    assert callback.monitor.status()["numbers_left_out"] == {}
    told = own_of(tmp_path / "a.bwrun")
    assert {step: own["kl"] for step, own in told.items()} == logged_by(trainer, "kl")
    assert all(sorted(own) == ["kl", "rewards/len/mean"] for own in told.values())


def test_trls_grpo_trainer(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    from bellwether import hf

    words = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, 50))]
    plain = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
    )
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=50, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    # With beta above 0 the trainer loads the reference model from where the model came from.
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    callback = hf.Callback(record=str(tmp_path / "a.bwrun"), run="grpo", **WATCH)

    def length(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]

    trainer = trl.GRPOTrainer(
        model, reward_funcs=length,
        args=trl.GRPOConfig(
            output_dir=str(tmp_path / "out"), max_completion_length=8, num_generations=2,
            beta=0.1, max_steps=STEPS, per_device_train_batch_size=2, logging_steps=1,
            report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": f"w{3 + i} w9"} for i in range(12)]),
        processing_class=tokenizer, callbacks=[callback],
    )  # fmt: skip
    trainer.train()
    assert callback.monitor is not None
    assert callback.monitor.status()["numbers_left_out"] == {}
    told = own_of(tmp_path / "a.bwrun")
    assert sorted(told) == list(range(STEPS))
    for name in ("reward", "reward_std", "kl", "entropy", "rewards/length/mean",
                 "clip_ratio/region_mean", "completions/mean_length"):  # fmt: skip
        logged = logged_by(trainer, name)
        assert {step: own[name] for step, own in told.items()} == pytest.approx(logged, rel=1e-6)
