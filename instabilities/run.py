"""One run: its recording, its series and its truth, all of them from its family and seed.

NAME.bwrun  what bellwether.attach() saw
NAME.csv    loss and gradient norm of each step, for monitors that need no more
NAME.json   the truth (truth.py)
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import random
from pathlib import Path
from typing import Any, Optional

import torch

from . import ranks, truth
from .causes import HEALTHY, family
from .faults import FAULTS, fault_of
from .faults.base import Fault
from .settings import HEALTHY_EXTRAS, Setting, drawn
from .training import Curves, Training, Watch


@dataclasses.dataclass(frozen=True)
class Request:
    """A run that a plan names."""

    family: str
    split: str
    seed: int
    # Fields of its setting that are not drawn, as JSON of an object.
    changes: str = "{}"

    @property
    def name(self) -> str:
        return f"{self.family}-{self.split}-{self.seed}"

    def made(self) -> tuple[Setting, Optional[Fault]]:
        """What run and twin share, and the fault.  Raises ValueError."""
        named = family(self.family)
        # A seed of text is the same in each process; the hash of one is not.
        draw = random.Random(self.name)
        usual = FAULTS[named.name].usual if named.name in FAULTS else {}
        setting = drawn(self.split, draw, {**usual, **json.loads(self.changes)})
        if named.cause == HEALTHY:
            return setting.changed(**draw.choice(HEALTHY_EXTRAS[self.split])), None
        fault = fault_of(named.name, draw, self.split, setting)
        return fault.setting, fault


def _train(request: Request, watched: Watch, device: str) -> tuple[Curves, Curves]:
    """(the run, its twin), in the process of one rank."""
    setting, fault = request.made()
    curves = Training(setting, request.seed, fault, watched, device).run()
    return curves, Training(setting, request.seed, device=device).run() if fault else curves


def _trained(request: Request, watched: Watch, device: str) -> tuple[Curves, Curves]:
    world = request.made()[0].ranks
    if world == 1:
        return _train(request, watched, device)
    both: tuple[Curves, Curves] = ranks.run_ranks(world, _train, request, watched, device)
    record = watched.record
    others = [record.with_name(f"{record.stem}-rank{r}.bwrun") for r in range(1, world)]
    ranks.merge([record, *others], record)
    return both


def versions() -> dict[str, str]:
    import bellwether

    return {
        "bellwether": bellwether.__version__, "torch": torch.__version__,
        "python": platform.python_version(), "machine": platform.machine(),
    }  # fmt: skip


def run(
    request: Request, out: Path, default_stats: bool = False, device: str = "cpu"
) -> dict[str, Any]:
    """Makes the run's files, the truth last; returns it.  Raises ValueError, RuntimeError."""
    # A tiny model gains nothing from a second thread, and is no more the same with one.
    torch.set_num_threads(1)
    setting, fault = request.made()
    out.mkdir(parents=True, exist_ok=True)
    # Whatever monitor is set up around this process, the run is recorded and sent nowhere.
    for name in [name for name in os.environ if name.startswith("BELLWETHER_")]:
        if name not in ("BELLWETHER_LIB_DIR", "BELLWETHER_LOG_LEVEL"):
            del os.environ[name]
    for path in out.glob(f"{request.name}[.-]*"):
        if path.name.startswith((f"{request.name}.", f"{request.name}-rank")):
            path.unlink()  # Of a run that did not come to its end: no file is written over.
    watched = Watch(out / f"{request.name}.bwrun", request.name, default_stats)
    curves, twin = _trained(request, watched, device)
    if not watched.record.exists():
        raise RuntimeError(f"{watched.record} was not recorded")
    place = dataclasses.asdict(fault.place) if fault else dict.fromkeys(truth.PLACES)
    up, noise = truth.limits(setting.task)
    onset = fault.onset if fault else 0
    found = {
        "cause": family(request.family).cause, "family": request.family, "split": request.split,
        "variant": fault.variant if fault else "", "kind": fault.kind if fault else HEALTHY,
        "onset": fault.onset if fault else None, "until": fault.until if fault else None,
        "strength": fault.strength if fault else None, **place,
        "harmless": truth.is_harmless(curves.measure, twin.measure, onset, up, noise),
        "loss_up": truth.loss_up(curves.measure, twin.measure, onset, up) if fault else None,
        "steps": setting.steps, "every": setting.every, "seed": request.seed,
        "architecture": setting.architecture, "optimizer": setting.optimizer,
        "setting": dataclasses.asdict(setting), "stats": "default" if default_stats else "all",
        "versions": versions(),
    }  # fmt: skip
    truth.check(found)
    rows = zip(range(len(curves.loss)), curves.loss, curves.grad_norm)
    text = "step,loss,grad_norm\n" + "".join(f"{s},{a!r},{b!r}\n" for s, a, b in rows)
    (out / f"{request.name}.csv").write_text(text)
    partial = out / f"{request.name}.json.partial"
    partial.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(partial, out / f"{request.name}.json")
    return found
