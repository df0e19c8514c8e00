#!/usr/bin/env python3
"""Every attention of transformers, in every way it is trained, under watch.

    matrix.py                              the cover: each pair of two choices in some cell
    matrix.py --random 60 --seed 5         cells by chance; the seed is printed
    matrix.py --only "llama sdpa padded_left"   all cells that have these words
    matrix.py --without compile            the cover, less the cells that have this word
    matrix.py --jobs 16 --seconds 400      as many processes; after 400 s no cell is begun
    matrix.py --device cuda                on a GPU
    matrix.py --list                       says which cells it would run

A cell trains a tiny model of random weights a few steps without and with Bellwether.  Losses and
weights must be the same bits.  Each number must be that of an fp64 computation from the captured
call, and all twelve groups of signals must be there, or less_than_full.py says which tensor does
not exist.  Results are kept, so a second start goes on where the first one ended.

Exit code: 0 all as it should be, 1 some cell is not or was not begun, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import collections
import functools
import hashlib
import heapq
import itertools
import json
import os
import platform
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Optional

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "client_lib" / "python"), str(ROOT / "tests" / "python"), str(HERE)]

import architectures  # noqa: E402
import less_than_full  # noqa: E402
from cell import Cell  # noqa: E402
from comparison import GROUPS  # noqa: E402

COVER_MAX = 400  # Cells.
SECONDS = 300  # Of one cell; a longer one is called crashed.
OUTCOMES = ("full", "less, as listed", "partly", "wrong", "crashed", "invalid")
_FACTORS = (
    [architecture.name for architecture in architectures.ALL],
    list(architectures.IMPLEMENTATIONS),
    list(architectures.BATCHES),
    list(architectures.MODES),
    list(architectures.PRECISIONS),
)


@functools.cache
def here() -> list[architectures.Architecture]:
    """Those that this transformers has."""
    import transformers

    return [
        a for a in architectures.ALL
        if hasattr(transformers, a.config) and hasattr(transformers, a.model)
    ]  # fmt: skip


def every_cell() -> list[Cell]:
    found: list[Cell] = []
    for a in here():
        for implementation in a.implementations:
            for batch in a.batches:
                for mode in a.modes:
                    found += [Cell(a.name, implementation, batch, mode, p) for p in a.precisions]
    return found


def pairs(cell: Cell) -> set[tuple[str, str]]:
    return set(itertools.combinations((f"{at} {word}" for at, word in enumerate(cell)), 2))


def cover() -> list[Cell]:
    """Few cells in which each pair of two choices occurs that occurs in any: always the one next
    that has most of what is left.  (allpairspy leaves pairs out where not all go together.)"""
    cells = every_cell()
    random.Random(0).shuffle(cells)  # Else those that come first are alike.
    left = set[tuple[str, str]]().union(*map(pairs, cells))
    waiting = [(-len(pairs(cell)), at) for at, cell in enumerate(cells)]
    heapq.heapify(waiting)
    found: list[Cell] = []
    while left:
        promised, at = heapq.heappop(waiting)
        new = pairs(cells[at]) & left
        if len(new) == -promised:
            found.append(cells[at])
            left -= new
        elif new:  # It has less than when it was looked at.
            heapq.heappush(waiting, (-len(new), at))
    assert len(found) <= COVER_MAX, f"{len(found)} cells"
    return found


def by_chance(count: int, seed: int, without: str = "") -> list[Cell]:
    return random.Random(seed).sample(less(every_cell(), without), count)


def less(cells: list[Cell], words: str) -> list[Cell]:
    return [cell for cell in cells if not set(words.split()) & set(cell)]


def with_words(words: str) -> list[Cell]:
    return [cell for cell in every_cell() if set(words.split()) <= set(cell)]


def versions() -> dict[str, str]:
    import torch
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def libraries() -> Path:
    return Path(os.environ.get("BELLWETHER_LIB_DIR") or ROOT / "build" / "cpu" / "bin")


def content() -> str:
    """A word for what a result depends on: the package, its libraries and the matrix itself."""
    state = hashlib.sha256()
    mine = (
        "architectures", "capture", "capture_in_graph", "cell", "comparison", "projections",
    )  # fmt: skip
    paths = [*(ROOT / "client_lib" / "python" / "bellwether").rglob("*.py")]
    paths += [HERE / f"{name}.py" for name in mine]
    paths += [ROOT / "tests" / "python" / "definitions.py"]
    paths += libraries().glob("libbellwether_*.so")
    for path in sorted(paths):
        state.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return state.hexdigest()[:16]


class Results:
    """Lines of JSON: what was found, under the cell, the versions and the content."""

    def __init__(self, path: Path, device: str = "cpu") -> None:
        self._path, self.device = path, device
        self.key = "/".join([*versions().values(), device, content()])
        self.found: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                result = json.loads(line)
            except ValueError:  # Cut off in the middle.
                continue
            if result["key"] == self.key:
                self.found[result["cell"]] = result

    def add(self, result: dict[str, Any]) -> None:
        self.found[result["cell"]] = result
        with self._path.open("a") as file:
            file.write(json.dumps({"key": self.key, **result}) + "\n")


class Worker:
    """A process that runs cells one after the other, and is started again when it has died."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._environment = {
            **os.environ, "BELLWETHER_LIB_DIR": str(libraries()), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        if device == "cpu":  # A checkpoint may not be the first to touch a GPU that is there.
            self._environment["CUDA_VISIBLE_DEVICES"] = ""
        self._process: Optional[subprocess.Popen[str]] = None

    def run(self, cell: Cell) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "cell.py"), self._device], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                env=self._environment,
            )  # fmt: skip
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        ended = threading.Timer(SECONDS, process.kill)
        ended.start()
        began = time.monotonic()
        try:
            process.stdin.write(f"{cell}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        finally:
            ended.cancel()
        if answer:
            found: dict[str, Any] = json.loads(answer)
            return found
        self.end()
        seconds = round(time.monotonic() - began, 2)
        why = f"the process ended by {process.returncode} after {seconds} s"
        return {"cell": str(cell), "outcome": "crashed", "missing": {}, "wrong": [why], "said": [],
                "seconds": seconds}  # fmt: skip

    def end(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.close()
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._process = None


def run(
    cells: Iterable[Cell], results: Results, jobs: int = 1, seconds: float = float("inf")
) -> None:
    """Runs those that have no result yet; none is begun when so many seconds are over."""
    from tqdm import tqdm

    waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
    cells = list(dict.fromkeys(cells))
    left = [cell for cell in cells if str(cell) not in results.found]
    for cell in left:
        waiting.put(cell)
    lock = threading.Lock()
    until = time.monotonic() + seconds
    bar = tqdm(total=len(cells), initial=len(cells) - len(left), unit="cell")

    def work() -> None:
        worker = Worker(results.device)
        try:
            while time.monotonic() < until:
                try:
                    cell = waiting.get_nowait()
                except queue.Empty:
                    return
                result = worker.run(cell)
                with lock:
                    results.add(result)
                    bar.set_postfix_str(f"{cell}: {verdict(result)}")
                    bar.update()
        finally:
            worker.end()

    threads = [threading.Thread(target=work) for _ in range(min(jobs, len(left)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bar.close()


def verdict(result: dict[str, Any]) -> str:
    """One of OUTCOMES."""
    outcome: str = result["outcome"]
    if outcome == "partly" and less_than_full.allows(
        Cell(*result["cell"].split()), result["missing"]
    ):
        return "less, as listed"
    return outcome


def passed(result: dict[str, Any]) -> bool:
    return verdict(result) in ("full", "less, as listed")


def describe(result: dict[str, Any]) -> str:
    lines = [f"{verdict(result)}: {result['cell']}"]
    lines += [f"    {text}" for text in result["wrong"]]
    where: dict[str, list[str]] = {}
    for group, place in result["missing"].items():
        where.setdefault(place, []).append(group)
    for place, groups in where.items():
        missing = "everything" if len(groups) == len(GROUPS) else ", ".join(groups)
        lines.append(f"    without {missing}: {place}")
    lines += [f"    note: {text}" for text in result["said"] if not passed(result)]
    return "\n".join(lines)


def table(found: Sequence[dict[str, Any]]) -> str:
    """Counts of outcomes, by each factor."""
    names = ("architecture", "implementation", "batch", "mode", "precision")
    lines = [f"{'':24}" + "".join(f"{outcome:>17}" for outcome in OUTCOMES)]
    for at, (name, words) in enumerate(zip(names, _FACTORS)):
        lines.append(name)
        for word in words:
            of_word = [result for result in found if result["cell"].split()[at] == word]
            counts = collections.Counter(map(verdict, of_word))
            if of_word:
                numbers = "".join(f"{counts[outcome] or '':>17}" for outcome in OUTCOMES)
                lines.append(f"  {word:22}{numbers}")
    counts = collections.Counter(map(verdict, found))
    lines.append(f"{'all':24}" + "".join(f"{counts[outcome]:>17}" for outcome in OUTCOMES))
    return "\n".join(lines)


def summary(found: Sequence[dict[str, Any]], asked: int, seconds: float, jobs: int) -> str:
    """One line."""
    counts = collections.Counter(map(verdict, found))
    full, listed = counts["full"], counts["less, as listed"]
    return (
        f"{asked} cells: {full} full, {listed} less as listed, {len(found) - full - listed} failed,"
        f" {asked - len(found)} not begun; {seconds / 60:.1f} minutes, {jobs} processes"
    )


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, help="only so many cells of the cover, by chance")
    parser.add_argument("--random", type=int, default=0, help="so many cells by chance, of all")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", metavar="WORDS", help="all cells that have all these words")
    parser.add_argument(
        "--without", metavar="WORDS", default="", help="no cells that have one of these words"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then no cell is begun")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (1)")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "matrix.jsonl")
    parser.add_argument("--anew", action="store_true", help="as if there were no results yet")
    parser.add_argument("--list", action="store_true", help="only says which cells it would run")
    given = parser.parse_args(arguments)
    words = [word for words in _FACTORS for word in words]
    unknown = [w for w in f"{given.only or ''} {given.without}".split() if w not in words]
    if unknown:
        parser.error(f"--only, --without: unknown {unknown}; words are {', '.join(words)}")
    if given.jobs < 1 or given.seconds < 0:
        parser.error("--jobs from 1 and --seconds from 0 are legal")
    if given.only is not None:
        cells = with_words(given.only)
        if not cells:
            parser.error(f"--only: no cell has all of {given.only!r}")
    elif given.random:
        cells = by_chance(given.random, given.seed, given.without)
    else:
        cells = cover()
    cells = less(cells, given.without)
    print(f"seed {given.seed}")
    missing = [a.name for a in architectures.ALL if a not in here()]
    if missing:
        print(f"left out, transformers {versions()['transformers']} has none: {', '.join(missing)}")
    if given.cells is not None and given.cells < len(cells):
        cells = random.Random(given.seed).sample(cells, given.cells)
    if given.list:
        print(*cells, f"{len(cells)} cells", sep="\n")
        return 0
    results = Results(given.results, given.device)
    if given.anew:
        results.found.clear()
    began = time.monotonic()
    run(cells, results, given.jobs, given.seconds)
    found = [results.found[str(cell)] for cell in cells if str(cell) in results.found]
    for result in found:
        if not passed(result):
            print(describe(result))
    print(table(found))
    print(summary(found, len(cells), time.monotonic() - began, given.jobs))
    return 0 if len(found) == len(cells) and all(map(passed, found)) else 1


if __name__ == "__main__":
    sys.exit(main())
