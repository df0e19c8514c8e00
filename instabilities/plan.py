"""Plans: the families, splits and seeds of runs, named before the first of them is made.

    {"runs": [{"family": "bad-data", "split": "train", "seeds": [1, 4]}]}

`seeds` are the first and the last.  `family` may be a list, or "faults": all that a CPU makes.
`set` has fields of the runs' settings that are not drawn from the seed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from .causes import family
from .faults import FAULTS
from .run import Request, run
from .settings import SPLITS

PLANS = Path(__file__).resolve().parent / "plans"


def read(plan: str) -> list[Request]:
    """Raises ValueError that names the file and the row, OSError."""
    path = Path(plan)
    if not path.suffix:
        path = PLANS / f"{plan}.json"
    try:
        rows = json.loads(path.read_text())["runs"]
        found = [request for row in rows for request in _requests(row)]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    names = [request.name for request in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path}: {twice[0]} is named twice")
    # By seed: a plan that is not made to its end has runs of all families.
    return sorted(found, key=lambda request: request.seed)


def _requests(row: dict[str, Any]) -> list[Request]:
    unknown = sorted(row.keys() - {"family", "split", "seeds", "set"})
    if unknown:
        raise ValueError(f"{unknown[0]} is no field of a row")
    split, (first, last) = row["split"], row["seeds"]
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    named = row["family"]
    if named == "faults":
        named = list(FAULTS)
    families = [named] if isinstance(named, str) else named
    return [
        Request(family(name).name, split, seed, json.dumps(row.get("set", {})))
        for seed in range(first, last + 1)
        for name in families
    ]


def _worker() -> None:
    os.environ.setdefault(
        "BELLWETHER_LOG_LEVEL", "error"
    )  # Lines of a run would break the progress.


def _say(text: str, ended: bool = False) -> None:
    if sys.stderr.isatty():
        print(f"\r{text}\x1b[K", end="\n" if ended else "", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def make(plan: str, out: Path, jobs: int, default_stats: bool = False, device: str = "cpu") -> int:
    """Makes the runs that have no truth yet; returns 1 if one failed, else 0."""
    requests = read(plan)
    waiting = [request for request in requests if not (out / f"{request.name}.json").exists()]
    failed: list[str] = []
    began, before = time.monotonic(), len(requests) - len(waiting)
    # A process makes many runs: importing torch takes longer than a short one.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_worker) as pool:
        runs = {
            pool.submit(run, request, out, default_stats, device): request for request in waiting
        }
        for made, ended in enumerate(as_completed(runs), 1):
            name, error = runs[ended].name, ended.exception()
            if error is not None:
                failed.append(name)
                _say(f"{name} failed: {type(error).__name__}: {error}", ended=True)
            left = (time.monotonic() - began) / made * (len(waiting) - made)
            _say(f"{before + made}/{len(requests)}  {left / 60:.0f} min left  {name}")
    done = f"{len(requests) - len(failed)} of {len(requests)} runs are in {out}"
    _say(done + (f"; failed: {', '.join(failed)}" if failed else ""), ended=True)
    return 1 if failed else 0
