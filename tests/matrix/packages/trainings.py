"""Trainings by the loops of real packages, each a few steps of a tiny model, twice: captured
without Bellwether, then watched.  `trainings.py NAME` runs one in an environment that has the
package, and answers with a line of JSON as cell.py does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import cell  # noqa: E402
import definitions  # noqa: E402
import megatron_training  # noqa: E402
import projections  # noqa: E402
import torchtitan_training  # noqa: E402
from comparison import Result, in_words, judge, recorded  # noqa: E402
from training import (  # noqa: E402
    STEPS,
    VOCABULARY,
    WATCH,
    Training,
    deepspeed_engine,
    job_of_one,
    llama,
    padded,
    tokens,
)

# ---- peft ----


def _adapted(linear: Any) -> Tensor:
    """The weight that an adapter of peft makes of a projection."""
    weight = linear.base_layer.weight.detach().double()
    down, up = linear.lora_A["default"].weight, linear.lora_B["default"].weight
    whole = weight + linear.scaling["default"] * up.detach().double() @ down.detach().double()
    magnitude = getattr(linear, "lora_magnitude_vector", {})
    if "default" in magnitude:  # DoRA
        size = magnitude["default"].weight.detach().double()[:, None]
        whole = size * whole / whole.norm(dim=1, keepdim=True)
    return whole


def _with_adapters(module: Any, heads: int, kv_heads: int, dim: int) -> Optional[projections.Pair]:
    wq, wk = _adapted(module.q_proj), _adapted(module.k_proj)
    return wq.reshape(heads, dim, -1), wk.reshape(kv_heads, dim, -1)


def _peft(training: Training, **options: Any) -> None:
    import peft

    config = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM",
        **options,
    )  # fmt: skip
    torch.manual_seed(1)
    model = peft.get_peft_model(llama(), config).train()
    training.reader = _with_adapters
    training.begins(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(STEPS):
        loss = model(**padded(step, left=bool(step % 2))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        training.step(loss.item())
    training.ends()


def peft_lora(training: Training) -> None:
    _peft(training)


def peft_dora(training: Training) -> None:
    _peft(training, use_dora=True)


# ---- trl ----


def _tokenizer() -> Any:
    import tokenizers
    import transformers

    words = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, VOCABULARY))]
    plain = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
    )
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def _text(seed: int, length: int) -> str:
    return " ".join(f"w{int(i)}" for i in tokens(seed, 1, length)[0])


def _trained(
    training: Training, make: Callable[[list[Any], Path], Any], reader: projections.Reader
) -> None:
    """By a Trainer of transformers, with the callback that users have."""
    import transformers

    import bellwether.hf

    class Tells(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
            training.begins(model, attach=False)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            training.step()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            training.ends()
            if training.watched:
                monitor = watcher.monitor
                training.flushed = monitor.flush(20)
                training.status = monitor.status()

    watcher = bellwether.hf.Callback(record=str(training.path), **WATCH)
    training.reader = reader
    with tempfile.TemporaryDirectory() as folder:
        trainer = make([Tells(), *([watcher] if training.watched else [])], Path(folder))
        trainer.train()
        training.run.losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]


_TRAINER = dict(
    max_steps=STEPS, per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True,
    disable_tqdm=True, seed=3, learning_rate=1e-2, save_strategy="no", bf16=False,
    gradient_checkpointing=False,
)  # fmt: skip


def trl_sft(training: Training) -> None:
    import datasets
    import trl

    data = datasets.Dataset.from_list([{"text": _text(i, 8 + 3 * (i % 4))} for i in range(12)])

    def make(callbacks: list[Any], folder: Path) -> Any:
        arguments = trl.SFTConfig(output_dir=str(folder), max_length=32, **_TRAINER)
        return trl.SFTTrainer(
            llama(), arguments, train_dataset=data, processing_class=_tokenizer(),
            callbacks=callbacks,
        )  # fmt: skip

    _trained(training, make, projections.separate)


def trl_sft_packed(training: Training) -> None:
    import datasets
    import trl

    data = datasets.Dataset.from_list([{"text": _text(i, 8 + 3 * (i % 4))} for i in range(24)])

    def make(callbacks: list[Any], folder: Path) -> Any:
        arguments = trl.SFTConfig(
            output_dir=str(folder), max_length=32, packing=True, padding_free=True, **_TRAINER
        )
        return trl.SFTTrainer(
            llama(), arguments, train_dataset=data, processing_class=_tokenizer(),
            callbacks=callbacks,
        )  # fmt: skip

    _trained(training, make, projections.separate)


def trl_dpo(training: Training) -> None:
    import datasets
    import peft
    import trl

    data = datasets.Dataset.from_list(
        [{"prompt": _text(i, 5 + i % 3), "chosen": _text(100 + i, 6), "rejected": _text(200 + i, 4)}
         for i in range(12)]
    )  # fmt: skip
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM")

    def make(callbacks: list[Any], folder: Path) -> Any:
        arguments = trl.DPOConfig(output_dir=str(folder), max_length=32, **_TRAINER)
        return trl.DPOTrainer(
            llama(), args=arguments, train_dataset=data, processing_class=_tokenizer(),
            callbacks=callbacks, peft_config=adapter,
        )  # fmt: skip

    _trained(training, make, _with_adapters)


def trl_grpo(training: Training) -> None:
    import datasets
    import trl

    data = datasets.Dataset.from_list([{"prompt": _text(i, 4 + i % 4)} for i in range(12)])

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]

    def make(callbacks: list[Any], folder: Path) -> Any:
        arguments = trl.GRPOConfig(
            output_dir=str(folder), max_completion_length=8, num_generations=2, **_TRAINER
        )
        return trl.GRPOTrainer(
            llama(), reward_funcs=reward, args=arguments, train_dataset=data,
            processing_class=_tokenizer(), callbacks=callbacks,
        )  # fmt: skip

    _trained(training, make, projections.separate)


# ---- accelerate, Lightning ----


def accelerate_loop(training: Training) -> None:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = llama()
    training.begins(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.utils.data.DataLoader(
        [{n: x[i % 2] for n, x in padded(i).items()} for i in range(4 * STEPS)], batch_size=2
    )
    wrapped, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses: list[float] = []
    for batch in data:
        with accelerator.accumulate(wrapped):
            loss = wrapped(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if accelerator.sync_gradients:
            training.step(*losses)
            losses.clear()
    training.ends()


def lightning_trainer(training: Training) -> None:
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def training_step(self, number: Tensor, index: int) -> Tensor:
            loss: Tensor = self.model(**padded(int(number[0]))).loss
            losses.append(loss.item())
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            training.step(losses[-1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    losses: list[float] = []
    module = Module()
    training.begins(module)
    lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, torch.utils.data.DataLoader(range(STEPS)))  # fmt: skip
    training.ends()


# ---- DeepSpeed ----


def _deepspeed(training: Training, stage: int) -> None:
    job_of_one()
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = llama()
    training.begins(model)
    engine = deepspeed_engine(model, stage)

    def whole() -> Any:
        if stage < 3:
            return contextlib.nullcontext()
        return deepspeed.zero.GatheredParameters(list(model.parameters()))

    for step in range(STEPS):
        loss = engine(**padded(step)).loss
        engine.backward(loss)
        if stage == 3:  # Weights that are whole in a forward only are told as they are there.
            training.step(loss.item(), whole=whole)
        engine.step()
        if stage < 3:
            training.step(loss.item())
    training.ends(whole)


def deepspeed_1(training: Training) -> None:
    _deepspeed(training, 1)


def deepspeed_2(training: Training) -> None:
    _deepspeed(training, 2)


def deepspeed_3(training: Training) -> None:
    _deepspeed(training, 3)


# ---- models of other packages ----


def _plain_loop(training: Training, model: nn.Module, loss_of: Callable[[int], Tensor]) -> None:
    training.begins(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        training.step(loss.item())
    training.ends()


def litgpt_model(training: Training) -> None:
    import litgpt

    torch.manual_seed(0)
    config = litgpt.Config(
        n_layer=2, n_head=4, n_query_groups=2, n_embd=64, block_size=64, vocab_size=VOCABULARY,
        padded_vocab_size=VOCABULARY, intermediate_size=96, rotary_percentage=1.0,
    )  # fmt: skip
    model = litgpt.GPT(config)
    training.reader, training.kv_heads = projections.fused, 2

    def loss_of(step: int) -> Tensor:
        x = tokens(step)
        return nn.functional.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())

    _plain_loop(training, model, loss_of)


def timm_vit(training: Training) -> None:
    # PyPI's torchvision is built for CUDA: of its operators only the declarations are wanted here.
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.path.append(str(Path(sys.prefix) / "torchvision"))
    import timm

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, patch_size=8).train()
    training.reader = projections.fused

    def loss_of(step: int) -> Tensor:
        return model(torch.randn(2, 3, 32, 32)).square().mean()

    _plain_loop(training, model, loss_of)
    library._destroy()


def x_transformers_decoder(training: Training) -> None:
    import x_transformers

    torch.manual_seed(0)
    model = x_transformers.TransformerWrapper(
        num_tokens=VOCABULARY, max_seq_len=64,
        attn_layers=x_transformers.Decoder(
            dim=64, depth=2, heads=4, attn_dim_head=16, attn_flash=True, rotary_pos_emb=True
        ),
    )  # fmt: skip

    def loss_of(step: int) -> Tensor:
        x = tokens(step)
        mask = padded(step)["attention_mask"].bool()
        logits = model(x, mask=mask)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())

    _plain_loop(training, model, loss_of)


ALL: dict[str, tuple[str, Callable[[Training], None]]] = {  # The package that has to be there.
    "peft_lora": ("peft", peft_lora),
    "peft_dora": ("peft", peft_dora),
    "trl_sft": ("trl", trl_sft),
    "trl_sft_packed": ("trl", trl_sft_packed),
    "trl_dpo": ("trl", trl_dpo),
    "trl_grpo": ("trl", trl_grpo),
    "accelerate": ("accelerate", accelerate_loop),
    "lightning": ("lightning", lightning_trainer),
    "deepspeed_1": ("deepspeed", deepspeed_1),
    "deepspeed_2": ("deepspeed", deepspeed_2),
    "deepspeed_3": ("deepspeed", deepspeed_3),
    "megatron_causal": ("megatron-core", megatron_training.causal),
    "megatron_window": ("megatron-core", megatron_training.window),
    "megatron_documents": ("megatron-core", megatron_training.documents),
    "megatron_scaled": ("megatron-core", megatron_training.scaled),
    "megatron_sinks": ("megatron-core", megatron_training.sinks),
    "torchtitan_flex": ("torchtitan", torchtitan_training.flex_fused),
    "torchtitan_separate": ("torchtitan", torchtitan_training.flex_separate),
    "torchtitan_sdpa": ("torchtitan", torchtitan_training.sdpa),
    "torchtitan_qwen3_flex": ("torchtitan", torchtitan_training.qwen3_flex),
    "torchtitan_qwen3_sdpa": ("torchtitan", torchtitan_training.qwen3_sdpa),
    "litgpt": ("litgpt", litgpt_model),
    "timm": ("timm", timm_vit),
    "x_transformers": ("x-transformers", x_transformers_decoder),
}


def run(name: str, folder: Path) -> Result:
    train = ALL[name][1]
    result, began = Result(name), time.monotonic()
    try:
        known = Training(False, folder / "unused.bwrun")
        train(known)
        calls = [call for step in known.run.calls for part in step for call in part]
        if not calls:
            raise AssertionError("the test sees no call of attention")
        for call in calls:
            off = definitions.mistaken(call)
            if not off <= (1e-3 if call.o.dtype == torch.float32 else 0.05):
                raise AssertionError(f"the test misreads the call of {call.module}: {off:.2g}")
    except Exception as e:
        result.outcome = "invalid"
        result.wrong.append(in_words(e))
        return result
    try:
        watched = Training(True, folder / "watched.bwrun")
        train(watched)
    except Exception as e:
        result.outcome = "crashed"
        result.wrong.append(in_words(e))
        return result
    if not watched.run.same(known.run):
        result.wrong.append("training is not bitwise what it is without us")
    judge(known.run, True, watched.status, watched.flushed, recorded(watched.path), result)
    result.seconds = round(time.monotonic() - began, 2)
    return result


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in ALL:
        print(f"trainings.py: one of {', '.join(ALL)} is legal", file=sys.stderr)
        return 2
    answer = cell.answering()
    with tempfile.TemporaryDirectory() as folder:
        cell.prepare(Path(folder))
        result = run(arguments[0], Path(folder))
        version = importlib.metadata.version(ALL[arguments[0]][0])
        found = {**dataclasses.asdict(result), "version": version}
        print(json.dumps(found), file=answer, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
