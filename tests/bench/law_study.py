#!/usr/bin/env python3
"""What the laws find on real activations: faults of kernels that nothing outside of them sees.

A small GPT (examples/divergence_gpt.py) reads this project's sources for 500 steps on the CPU.
Then faults are planted below PyTorch's dispatcher into the backward of its flash attention, one at
a time, in each layer and head, at falling strengths (planted_below.py).  Each is a recording of one
healthy sample and some with the fault, which `bellwetherd replay` judges as a server would.

With --whole each sample is a training pass of its own under attach().  Otherwise the calls of some
healthy samples are kept.  Those of the layer with the fault are damaged and measured again; what
the layers below would make of its wrong gradient is not computed anew.

    python3 tests/bench/law_study.py --out study                   # all; goes on where it stopped
    python3 tests/bench/law_study.py --out study --whole --stated --heads 1  # a few, end to end
    python3 tests/bench/law_study.py --out study --only none --samples 200   # healthy ones
    python3 tests/bench/law_study.py --out study --report            # the table of what is there

Results are lines of study/results.jsonl.  Ten minutes of one core for a type.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("client_lib/python", "examples", "tests/bench", "tests/python")
sys.path[:0] = [str(ROOT / part) for part in PARTS]
import divergence_gpt as example  # noqa: E402
from planted_below import FAULTS, OPERATOR, Fault, Planted  # noqa: E402

import bellwether  # noqa: E402
from bellwether._hook.law_turns import law_turn  # noqa: E402
from bellwether._hook.layer.law_calls import KEYS  # noqa: E402
from bellwether._kernels import laws  # noqa: E402
from bellwether._kernels.memory import Memories  # noqa: E402
from bellwether._kernels.probe import Sums  # noqa: E402
from bellwether._native import c_api  # noqa: E402
from bellwether._step.sample import _laws_in  # noqa: E402
from bellwether.client import Block, RunClient, RunOptions  # noqa: E402

import protos  # noqa: E402
from recording import replayed_alerts  # noqa: E402

# What an alert says of a tensor, and of a set by laws: SuspectsOf() in law_watch.cc.
SETS = {
    "delta, or keys whose dK was not written": ("delta", "dK"),
    "dK, or keys whose dK was not written": ("dK",),
    "dQ or dK, by a factor or of exchanged heads": ("dQ", "dK"),
    "dV, or P of the backward pass (its logsumexp)": ("dV", "P"),
    "O or dV": ("O", "dV"),
    "O": ("O",),
}
TENSOR = re.compile(r"\b(O|dQ|dK|dV)(?: is wrong:|, as the kernel returned it)")
PLACE = re.compile(r"in layer (\d+) (?:\(all (\d+) heads\)|heads? ([\d, ]+))")


@dataclasses.dataclass(frozen=True)
class Size:
    layers: int = 4
    width: int = 256
    head_dim: int = 64
    vocab: int = 4096
    context: int = 200
    batch: int = 3
    steps: int = 500
    rate: float = 1e-3

    @property
    def heads(self) -> int:
        return self.width // self.head_dim


class Study:
    def __init__(self, folder: Path, size: Size, dtype: str, text: Sequence[Path]) -> None:
        self.folder, self.size, self.dtype = folder, size, dtype
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(1)
        given = argparse.Namespace(**dataclasses.asdict(size), compile_loss=False)
        self.model = example.GPT(given, example.How("sdpa-flash", False))
        self.tokens = self._tokens(text)
        self.batches = torch.Generator().manual_seed(2)

    def _tokens(self, text: Sequence[Path]) -> Tensor:
        path = self.folder / "tokens.pt"
        if not path.exists():
            texts = example.read_texts(text, 8)
            tokens = example.tokenize(texts, self.size.vocab).astype("int32")
            torch.save(torch.from_numpy(tokens), path)
        return torch.load(path, weights_only=True)

    def loss(self) -> Tensor:
        last = len(self.tokens) - self.size.context - 1
        start = torch.randint(0, last, (self.size.batch, 1), generator=self.batches)
        window = self.tokens[start + torch.arange(self.size.context + 1)].long()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bf16"):
            return self.model(window[:, :-1], window[:, 1:])

    def train(self) -> None:
        path = self.folder / f"trained-{self.dtype}.pt"
        if path.exists():
            self.model.load_state_dict(torch.load(path, weights_only=True))
            return
        optimizer = torch.optim.AdamW(self.model.parameters(), self.size.rate, weight_decay=0.0)
        for step in range(self.size.steps):
            optimizer.param_groups[0]["lr"] = self.size.rate * min(1, (step + 1) / 100)
            loss = self.loss()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 50 == 49 or step == self.size.steps - 1:
                done = f"step {step + 1} of {self.size.steps}"
                say(f"{self.dtype}: {done}, loss {float(loss.detach()):.3f}")
        partial = path.with_suffix(".partial")
        torch.save(self.model.state_dict(), partial)
        os.replace(partial, path)

    def questions(self, samples: int) -> int:
        """Of a run of so many: A1 to A4 of each layer.  From the second sample on some layers' o,
        dq, dk and dv are beside a reference; of each its distance and, but for fp32, its factor."""
        half, layers = self.dtype == "bf16", range(self.size.layers)
        laws = 18 * self.size.layers if half else 0
        compared = sum(
            asked("shadow_", at, len(layers), step) for step in range(samples) for at in layers
        )
        return (samples * laws + compared * (8 if half else 4)) * self.size.heads

    def record(
        self, path: Path, planted: Planted, fault: Optional[Fault], layer: int, head: int,
        strength: float, before: int, samples: int,
    ) -> None:  # fmt: skip
        """A run of `before` healthy samples and then `samples` with the fault."""
        monitor = bellwether.attach(
            self.model, record=str(path), run="study", every=1, overhead_budget=1e9,
            byte_budget=0, stats="laws",
        )  # fmt: skip
        planted.plant(None, 0, 0, 0)
        for step in range(before + samples):
            if step == before:
                planted.plant(fault, layer, head, strength)
            loss = self.loss()
            planted.begin()
            loss.backward()
            monitor.step(loss=float(loss.detach()))
            self.model.zero_grad(set_to_none=True)
        status = monitor.status()
        lacks = [of["without_laws"] for of in status["layers"] if of["without_laws"]]
        monitor.flush(60)
        monitor.detach()
        if status["errors"] or lacks:
            raise SystemExit(f"not all was measured: {status['last_error']} {lacks}")


def heads_of(summary: str) -> tuple[int, Optional[frozenset[int]]]:
    """The first layer that a summary names, and its heads; None: all."""
    place = PLACE.search(summary)
    if place is None:
        return -1, frozenset()
    layer, _, heads = place.groups()
    if heads is None:
        return int(layer), None
    return int(layer), frozenset(int(head) for head in heads.split(","))


def named_in(summary: str) -> tuple[set[str], set[str]]:
    """The tensors that are said to be wrong, and those of the set that laws leave."""
    left = [suspects for text, suspects in SETS.items() if f"which leaves {text}" in summary]
    return set(TENSOR.findall(summary)), set(left[0] if left else ())


def graded(
    fault: Fault, layer: int, head: int, heads: int, before: int, said: list[dict[str, Any]]
) -> dict[str, Any]:
    """What the alerts of a recording say of the fault in it.

    first   the sample with the fault that raised the first alert, from 1 on; 0: none did
    place   layer and head are those
    in_set  the tensor is among those that the first alert names or leaves
    tensor  all that the alerts name at last are wrong; None: none was named
    other   alerts before the fault, or of another layer
    """
    about = [t for t in said if t["rule"] in ("kernel", "nonfinite")]
    found: dict[str, Any] = dict(first=0, place=False, in_set=False, tensor=None, other=0)
    found["other"] = len(said) - len(about) + sum(int(t["step"]) < before for t in about)
    if not about or int(about[0]["step"]) < before:
        return found
    found["first"] = int(about[0]["step"]) - before + 1
    at, of = heads_of(about[0]["summary"])
    of = frozenset(range(heads)) if of is None else of
    wrong = frozenset(range(heads)) if fault.of_all_heads else frozenset({head})
    if "exchanged" in fault.plant.__name__:
        wrong |= {(head + 1) % heads}
    found["place"] = at == layer and bool(of) and of <= wrong
    named, left = named_in(about[0]["summary"])
    found["in_set"] = bool((named | left) & fault.wrong)
    for transition in about:
        named, _ = named_in(transition["summary"])
        if named:
            found["tensor"] = named <= fault.wrong
            found["named"] = int(transition["step"]) - before + 1
    found["said"] = about[0]["summary"]
    return found


@dataclasses.dataclass
class KeptCall:
    """A layer's call in a healthy sample, and what was measured of it."""

    of: laws.Graded
    rows: int
    seed: int
    signals: dict[str, list[float]]  # By signal a value for each head; with the shadow check.


Signals = dict[str, list[float]]


def measured(of: laws.Graded, rows: int, seed: int, shadow: bool = True) -> Signals:
    """The laws and the shadow check of a call, as a sample of a job would have them."""
    memory = Memories().of(of.q.device)
    sums = Sums(memory, of.q.shape[1], of.k.shape[1])
    memory.begin_step(True, 0)
    laws.add_laws(sums, of, rows=rows, seed=seed)
    if shadow:
        laws.add_shadow(sums, of, rows=rows, keys=KEYS, seed=seed)
    copy = memory.collect(False)
    return {signal: sums.row(copy, signal).tolist() for signal in _laws_in(sums)}


def damaged(kept: KeptCall, fault: Fault, head: int, strength: float) -> laws.Graded:
    """The call as a kernel with this fault would have returned it."""
    of, (q, k, v) = kept.of, (t.contiguous() for t in (kept.of.q, kept.of.k, kept.of.v))
    o, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, True, scale=of.scale
    )
    with Planted(1) as planted:
        planted.plant(fault, 0, head, strength)
        gradients = getattr(torch.ops.aten, OPERATOR)(
            of.d_o, q, k, v, o, logsumexp, 0.0, True, scale=of.scale
        )
    dq, dk, dv = gradients
    return dataclasses.replace(of, dq=dq, dk=dk, dv=dv)


class Kept:
    """Healthy samples of a study's model: [sample][layer]."""

    def __init__(self, study: Study, samples: int) -> None:
        self.study, self.calls = study, []
        path, add = study.folder / "kept.bwrun", laws.add_laws
        found: list[tuple[laws.Graded, int, int]] = []

        def keep(sums: Any, of: laws.Graded, *, rows: int, seed: int) -> None:
            names = ("q", "k", "v", "o", "d_o", "dq", "dk", "dv")
            of = dataclasses.replace(of, **{name: getattr(of, name).clone() for name in names})
            found.append((of, rows, seed))
            add(sums, of, rows=rows, seed=seed)

        laws.add_laws = keep
        try:
            with Planted(study.size.layers) as planted:
                study.record(path, planted, None, 0, 0, 0, samples, 0)
        finally:
            laws.add_laws = add
        layers = study.size.layers
        for at in range(0, len(found), layers):  # The last layer's came first.
            calls = [KeptCall(*of, measured(*of)) for of in found[at : at + layers]]
            self.calls.append(calls[::-1])

    def record(
        self, path: Path, fault: Optional[Fault], layer: int, head: int, strength: float,
        before: int, samples: int, first: int,
    ) -> None:  # fmt: skip
        """As Study.record(), from the kept samples that begin with `first`."""
        size, dtype = self.study.size, self.study.dtype
        client = RunClient(
            RunOptions(run="study", layers=size.layers, heads=size.heads, record_path=str(path),
                       attention_kernel="flash", score_dtype=dtype)
        )  # fmt: skip
        for step in range(before + samples):
            calls = self.calls[(first + step) % len(self.calls)]
            found = [call.signals for call in calls]
            if fault is not None and step >= before:
                call = calls[layer]
                of = damaged(call, fault, head, strength)
                found[layer] = measured(of, call.rows, call.seed)
            blocks = [Block("loss", [4.0])]
            for signal in found[0]:
                values = [
                    value
                    for at, signals in enumerate(found)
                    for value in (
                        signals[signal] if asked(signal, at, size.layers, step)
                        else [c_api.NOT_MEASURED] * size.heads
                    )
                ]  # fmt: skip
                blocks.append(Block(signal, values, layer_count=size.layers, head_count=size.heads))
            client.push(step, blocks)
        client.flush(60)
        client.close()


def asked(signal: str, layer: int, layers: int, step: int) -> bool:
    """Some layers of a sample are compared to a reference, from the second sample on."""
    return not signal.startswith("shadow_") or (
        step > 0 and law_turn(layer, layers, step, layers).compared
    )


class Results:
    """Lines of JSON, each with a key that is not measured again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.of: dict[str, dict[str, Any]] = {}
        for line in lines:
            with contextlib.suppress(ValueError):  # Cut off by the end of an earlier run.
                result = json.loads(line)
                self.of[result["key"]] = result

    def add(self, key: str, result: dict[str, Any]) -> None:
        self.of[key] = {"key": key, **result}
        with self.path.open("a") as file:
            file.write(json.dumps(self.of[key]) + "\n")


def faults(
    study: Study, results: Results, places: Sequence[tuple[int, int]], args: argparse.Namespace
) -> None:
    """One healthy sample, and as many with the fault as there are layers."""
    size, path = study.size, study.folder / f"fault-{study.dtype}.bwrun"
    way = "whole" if args.whole else "kept"
    wanted = [
        (f"{way}/{study.dtype}/{name}/{strength:g}/{layer}.{head}", name, strength, layer, head)
        for name, fault in FAULTS.items()
        for strength in ((fault.stated,) if args.stated else fault.strengths)
        for layer, head in places
        if re.search(args.only, name)
    ]
    wanted = [what for what in wanted if what[0] not in results.of]
    if not wanted:
        return
    kept = None if args.whole else Kept(study, 1 + 3 * size.layers)
    began = time.monotonic()
    for done, (key, name, strength, layer, head) in enumerate(wanted, 1):
        fault = FAULTS[name]
        path.unlink(missing_ok=True)
        if kept is not None:
            kept.record(path, fault, layer, head, strength, 1, size.layers, done)
        else:
            with Planted(size.layers) as planted:
                study.record(path, planted, fault, layer, head, strength, 1, size.layers)
        result = graded(fault, layer, head, size.heads, 1, replayed_alerts(path))
        # The first sample with the fault in which the layer is compared to a reference.
        compared = next(n for n in range(1, 99) if asked("shadow_", layer, size.layers, n))
        what = dict(way=way, dtype=study.dtype, fault=name, strength=strength, layer=layer,
                    head=head, compared=compared)  # fmt: skip
        results.add(key, {**what, "asked": study.questions(1 + size.layers), **result})
        if done % 16 == 0 or done == len(wanted):
            left = (time.monotonic() - began) / done * (len(wanted) - done)
            say(f"{study.dtype}: {done} of {len(wanted)}, {left / 60:.1f} minutes left")


def healthy(study: Study, results: Results, samples: int) -> None:
    """Recordings of 20 healthy samples each."""
    path, done, questions = study.folder / f"healthy-{study.dtype}.bwrun", 0, 0
    with Planted(study.size.layers) as planted:
        for at in range(math.ceil(samples / 20)):
            key = f"{study.dtype}/healthy/{at}"
            if key not in results.of:
                path.unlink(missing_ok=True)
                study.batches.manual_seed(1000 + at)
                study.record(path, planted, None, 0, 0, 0, 20, 0)
                said = replayed_alerts(path)
                results.add(key, dict(dtype=study.dtype, fault="healthy", samples=20,
                                      asked=study.questions(20), alerts=len(said),
                                      said=[t["summary"] for t in said]))  # fmt: skip
            done, questions = done + 20, questions + results.of[key]["asked"]
            say(f"{study.dtype}: {done} healthy samples, {questions} questions")


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


COLUMNS = ("way", "type", "fault", "strength", "trials", "first sample", "within 3",
           "when compared", "place", "in set", "tensor")  # fmt: skip


def table(results: Results) -> str:
    """What was found, as Markdown.  Place, set and tensor are shares of the alerts."""
    rows = [f"| {' | '.join(COLUMNS)} |", "| --- " * len(COLUMNS) + "|"]
    groups: dict[tuple[str, str, str, float], list[dict[str, Any]]] = {}
    for result in results.of.values():
        if result["fault"] != "healthy":
            what = result["way"], result["dtype"], result["fault"], result["strength"]
            groups.setdefault(what, []).append(result)
    order = list(FAULTS)

    def rank(key: tuple[str, str, str, float]) -> tuple[Any, ...]:
        return *key[:2], order.index(key[2]), FAULTS[key[2]].strengths.index(key[3])

    for key in sorted(groups, key=rank):
        of, (way, dtype, name, strength) = groups[key], key
        found = [r for r in of if r["first"]]
        bold = "**" if strength == FAULTS[name].stated else ""
        cells = [
            way, dtype, name, f"{bold}{strength:g}{bold}", str(len(of)),
            share(sum(r["first"] == 1 for r in of), len(of)),
            share(sum(0 < r["first"] <= 3 for r in of), len(of)),
            share(sum(0 < r["first"] <= r["compared"] for r in of), len(of)),
            share(sum(r["place"] for r in found), len(found)),
            share(sum(r["in_set"] for r in found), len(found)),
            share(sum(bool(r["tensor"]) for r in found), len(found)),
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    asked = sum(r["asked"] for r in results.of.values())
    other = sum(r["other"] for r in results.of.values() if r["fault"] != "healthy")
    of = [r for r in results.of.values() if r["fault"] == "healthy"]
    alone = f"{sum(r['asked'] for r in of):,} questions, {sum(r['alerts'] for r in of)} alerts"
    rows.append(f"\n{asked:,} questions; {other} alerts before a fault.  Healthy alone: {alone}.")
    return "\n".join(rows)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def parsed(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the folder of model, recordings and results")
    add("--text", type=Path, nargs="+", help="what the model reads [this project's sources]",
        default=[ROOT / part for part in ("client_lib", "server", "kernels", "docs")])  # fmt: skip
    add("--type", choices=("bf16", "fp32"), action="append", help="[both]")
    add("--only", default="", help="faults whose names this pattern finds; 'none': none")
    add("--whole", action="store_true", help="each sample a pass of its own")
    add("--stated", action="store_true", help="at the stated strengths alone")
    add("--seed", type=int, default=2, help="of what the samples read; a folder holds one")
    add("--layers", type=int, nargs="+", help="[all]")
    add("--heads", type=int, nargs="+", help="[all]")
    add("--samples", type=int, default=0, help="healthy ones besides")
    add("--report", action="store_true", help="only the table of what is there")
    return parser.parse_args(argv)


def main(argv: Optional[Sequence[str]] = None, size: Size = Size()) -> int:
    args = parsed(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    results = Results(args.out / "results.jsonl")
    for dtype in () if args.report else args.type or ("bf16", "fp32"):
        study = Study(args.out, size, dtype, args.text)
        study.train()
        study.batches.manual_seed(args.seed)
        places = [
            (layer, head)
            for layer in args.layers or range(size.layers)
            for head in args.heads or range(size.heads)
        ]
        faults(study, results, places, args)
        healthy(study, results, args.samples)
    print(f"torch {torch.__version__}, bellwether {bellwether.__version__}\n\n{table(results)}")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as generated:
        protos.generate(Path(generated))
        sys.exit(main())
