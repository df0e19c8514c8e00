"""The loggers that a run's signals are forwarded to; each of their packages is imported only when
it is asked for."""

from __future__ import annotations

import importlib
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from .reader import Entry, Told

_METRICS_MAX, _TAGS_MAX = 1000, 100  # MLflow's own limits for a batch.
_TAG_MAX = 5000  # MLflow's own limit for the value of a tag.
STEP = "bellwether_step"  # W&B's own step may not go back, and counts calls.


class Missing(RuntimeError):
    """A package is not installed; the text says which, and how to install it."""


class Logger(Protocol):
    resume: str  # By what it is found again; it has begun.

    def write(self, entries: list[Entry]) -> None:
        """Returns when all of them are out of this process, as far as the package tells."""

    def close(self, ended: bool) -> None:
        """`ended`: the run has, nothing more will come."""


@dataclass(frozen=True)
class Start:
    """What a logger is opened with."""

    run: str  # The run's name.
    uuid: str
    facts: dict[str, Any]  # Of the run, plain values.
    resume: str  # What `resume` was the last time; empty: never.
    alerts: bool = False  # A change of an alert is one there, too, where the logger has alerts.


_NEEDS = {  # By logger: what is imported, and what pip calls it.
    "tensorboard": ("torch.utils.tensorboard", "torch tensorboard"),
    "wandb": ("wandb", "wandb"),
    "trackio": ("trackio", "trackio"),
    "mlflow": ("mlflow", "mlflow-skinny"),
}


def package(logger: str) -> Any:
    """What a logger needs.  Raises Missing."""
    module, packages = _NEEDS[logger]
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise Missing(f"{logger}: {e}: python -m pip install {packages}") from None


def _tell(package: Any, run: Any, told: Told, **more: Any) -> None:
    """As an alert of the tracker's own, where it is one of a warning or more that fires."""
    level = {"warning": "WARN", "critical": "ERROR"}.get(told.severity)
    title, _, text = told.text.partition(": ")
    if level is not None and "firing" in title:
        run.alert(
            title=f"bellwether: {told.severity}", text=text,
            level=getattr(package.AlertLevel, level), **more,
        )  # fmt: skip


class TensorBoard:
    """Event files in a folder; changes of alerts are texts."""

    def __init__(self, folder: str, start: Start) -> None:
        tensorboard = package("tensorboard")
        self.resume = ""  # Another file beside the others is all it takes.
        self._writer = tensorboard.SummaryWriter(folder, filename_suffix=".bellwether")

    def write(self, entries: list[Entry]) -> None:
        for entry in entries:
            for name, value in entry.values.items():
                self._writer.add_scalar(name, value, entry.step)
            if entry.told:
                # One text a step is all that it shows.
                text = "\n\n".join(told.text for told in entry.told)
                self._writer.add_text("bellwether_run/alerts", text, entry.step)
        self._writer.flush()

    def close(self, ended: bool) -> None:
        self._writer.close()


class Wandb:
    """A W&B run of its own, or the one that was forwarded to before; changes of alerts are logged
    as text."""

    def __init__(self, project: str, start: Start) -> None:
        wandb = package("wandb")
        entity, _, name = project.rpartition("/")
        self.resume = start.resume or secrets.token_hex(8)
        self._run = wandb.init(
            project=name, entity=entity or None, id=self.resume, resume="allow", name=start.run,
            config={"bellwether_run_uuid": start.uuid, **start.facts},
        )  # fmt: skip
        self._wandb, self._alerts = wandb, start.alerts
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def write(self, entries: list[Entry]) -> None:
        for entry in entries:
            row: dict[str, Any] = {**entry.values, STEP: entry.step}
            if entry.told:
                row["bellwether_alert"] = "\n".join(told.text for told in entry.told)
            self._run.log(row)
            for told in entry.told if self._alerts else ():
                _tell(self._wandb, self._run, told)

    def close(self, ended: bool) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio's of its own, found again by its name."""

    def __init__(self, project: str, start: Start) -> None:
        self._trackio, self._alerts = package("trackio"), start.alerts
        self.resume = start.resume or f"{start.run}-{secrets.token_hex(4)}"
        self._run = self._trackio.init(
            project=project, name=self.resume, resume="allow", embed=False,
            config={"bellwether_run_uuid": start.uuid, **start.facts},
        )  # fmt: skip

    def write(self, entries: list[Entry]) -> None:
        for entry in entries:
            row: dict[str, Any] = dict(entry.values)
            if entry.told:
                row["bellwether_alert"] = "\n".join(told.text for told in entry.told)
            self._run.log(row, step=entry.step)
            for told in entry.told if self._alerts else ():
                _tell(self._trackio, self._run, told, step=entry.step)

    def close(self, ended: bool) -> None:
        self._run.finish()


class Mlflow:
    """An MLflow run of its own, or the one that was forwarded to before; each alert is a tag that
    tells its newest change."""

    def __init__(self, where: str, start: Start) -> None:
        self._mlflow = package("mlflow")
        uri, _, experiment = where.partition("#")
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        if start.resume:
            self.resume = start.resume
            self._client.update_run(self.resume, status="RUNNING")
            return
        name = experiment or "bellwether"
        known = self._client.get_experiment_by_name(name)
        id = known.experiment_id if known else self._client.create_experiment(name)
        run = self._client.create_run(
            id, run_name=start.run, tags={"bellwether.run_uuid": start.uuid}
        )
        self.resume = run.info.run_id
        for fact, value in start.facts.items():
            self._client.log_param(self.resume, fact, value)

    def write(self, entries: list[Entry]) -> None:
        metric, tag = self._mlflow.entities.Metric, self._mlflow.entities.RunTag
        now = int(time.time() * 1000)
        metrics = [metric(n, v, now, e.step) for e in entries for n, v in e.values.items()]
        for first in range(0, len(metrics), _METRICS_MAX):
            self._client.log_batch(self.resume, metrics=metrics[first : first + _METRICS_MAX])
        newest = {told.key: told for entry in entries for told in entry.told}
        tags = [
            tag(
                "bellwether.alert." + re.sub(r"[^\w. -]", "_", key),
                f"step {told.step}: {told.text}"[:_TAG_MAX],
            )
            for key, told in newest.items()
        ]
        for first in range(0, len(tags), _TAGS_MAX):
            self._client.log_batch(self.resume, tags=tags[first : first + _TAGS_MAX])

    def close(self, ended: bool) -> None:
        if ended:
            self._client.set_terminated(self.resume)


LOGGERS: dict[str, Callable[[str, Start], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": Mlflow,
}
