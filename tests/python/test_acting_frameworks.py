"""Goal: transformers' Trainer and Lightning save and stop when they are asked to; lr.scale acts
under the Trainer's own schedule.  Method: the real ones on small models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_frameworks import WATCH, llama_trainer, module_of

from asking import action
from models import Shape, batch

ALLOW = "checkpoint.now,stop,lr.scale"


def answers(monitor: Any) -> list[tuple[bool, int]]:
    found = monitor.actions.status()["answers"].values()
    return [(answer["applied"], answer["step"]) for answer in found]


def test_a_transformers_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from bellwether import hf

    rates: list[float] = []

    class Asks(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                actions = watch.monitor.actions
                actions.take(action("checkpoint.now"))
                actions.take(action("lr.scale", value=0.5))
                actions.take(action("stop", apply_at_step=3))

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            rates.append(watch.monitor.actions.rate_factor())

    watch = hf.Callback(record=str(tmp_path / "a.bwrun"), run="hf", allow=ALLOW, **WATCH)
    trainer = llama_trainer(tmp_path, [watch, Asks()], 1)
    trainer.args.max_steps, trainer.args.save_strategy = 9, "no"
    trainer.train()
    assert trainer.state.global_step == 4  # Asked to stop before step 3, which was the last.
    assert answers(watch.monitor) == [(True, 2), (True, 2), (True, 3)]
    assert rates == [1.0, 1.0, 0.5, 0.5]
    saved = sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*"))
    assert saved == ["checkpoint-3"]
    state = torch.load(tmp_path / "out/checkpoint-3/optimizer.pt", weights_only=True)
    assert state["param_groups"][0]["lr"] == pytest.approx(5e-5 * 6 / 9)  # Without the factor.


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from bellwether.lightning import Callback

    class Asks(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            self.monitor = watch.monitor  # Gone at the end.
            if trainer.global_step == 2:
                for kind in ("checkpoint.now", "stop"):
                    watch.monitor.actions.take(action(kind))

    watch = Callback(record=str(tmp_path / "a.bwrun"), run="l", allow=ALLOW, **WATCH)
    asks = Asks()
    trainer = lightning.Trainer(
        max_steps=9, callbacks=[watch, asks], accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    data = [batch(Shape(), i) for i in range(9)]
    trainer.fit(module_of(lightning, False), torch.utils.data.DataLoader(data, batch_size=None))
    assert trainer.global_step == 3
    assert answers(asks.monitor) == [(True, 3), (True, 3)]
    assert (tmp_path / "bellwether-step=3.ckpt").exists()
