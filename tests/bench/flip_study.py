#!/usr/bin/env python3
"""Which flipped bits the laws find, in the model of law_study.py (bf16).

One bit of one element flips in a sampled step.  It is in a result of a linear layer (y, dx, dW) or
of attention (o, dq, dk, dv).  Or it is in an activation or a weight between forward and backward,
or in a gradient between the two products that use it.  Every bit is flipped at each of --places
random places.  What the step would have measured is computed anew, and judged as it is in a run's
20th sample, without the comparison with a reference.

    python3 tests/bench/flip_study.py --out study             # after law_study.py --out study
    python3 tests/bench/flip_study.py --out study --places 20 --report

The table says how many flips move a sum by more than ten of its standard deviations, how many of
those are found, and of all flips of a bit the share that is.  Weights at rest: whether the element
and the bit are named before the next forward, in the samples in which the parameter has its turn.
Results are lines of study/flips.jsonl; what is there is not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

import torch
from law_study import ROOT, Kept, Results, Signals, Size, Study, measured, say, share
from torch import Tensor, nn

from bellwether._hook.layer.linear_tap import Call, LinearTap, Measured
from bellwether._kernels.memory import Memories
from bellwether._kernels.modules import equal_rows
from bellwether._kernels.products import add_products, new_sums
from bellwether._laws.linear import PAIRS, differences, fault, limit
from bellwether._step.at_rest import AtRest
from bellwether._step.linears import sides_of

SAMPLE = 20  # Of the run.
SIGMAS = 10
SIZE = Size()
LAWS = ("law_a1", "law_a2", "law_a3", "law_a4")
INTEGERS = {2: torch.int16, 4: torch.int32}


def with_bit(tensor: Tensor, at: int, bit: int) -> Tensor:
    """A copy with one bit flipped; `at` counts the elements in order."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    bits = copy.view(-1).view(INTEGERS[copy.element_size()])
    top = 8 * copy.element_size() - 1
    bits[at] ^= (1 << bit) if bit < top else -(1 << top)
    return copy


# ---- linear layers ----


@dataclasses.dataclass
class Products:
    """A call of nn.Linear, [tokens, width]: what it was given and what it returned."""

    x: Tensor
    weight: Tensor
    d_y: Tensor
    y: Tensor
    d_x: Tensor
    d_w: Tensor

    def laws(self) -> tuple[dict[str, Any], dict[tuple[str, str], Any]]:
        call = Call(False, self.weight, None)
        products = LinearTap._products(
            None, call, True, self.x, self.y, self.d_y, self.d_x, self.d_w.t()
        )  # type: ignore[arg-type]
        sums = new_sums(len(products), self.x.device)
        memory = Memories().of(self.x.device)
        add_products(memory, list(products.values()), sums)
        equals = torch.stack([equal_rows(memory, t) for t in (self.y, self.d_x)])
        shape = self.x.shape[0], self.x.shape[1], self.y.shape[1]
        found = Measured(0, tuple(products), sums, equals, self.y.dtype, shape)
        sides = sides_of(found, sums.tolist(), equals.tolist())
        return sides, differences(sides, False)

    def flipped(self, what: str, at: int, bit: int) -> Products:
        """Consistent with the moment at which the bit flips."""
        new = dataclasses.replace
        if what in ("y", "d_x", "d_w"):
            return new(self, **{what: with_bit(getattr(self, what), at, bit)})
        if what == "x":  # Between forward and backward.
            x = with_bit(self.x, at, bit)
            return new(self, x=x, d_w=self.d_y.t() @ x)
        if what == "weight":
            weight = with_bit(self.weight, at, bit)
            return new(self, weight=weight, d_x=self.d_y @ weight)
        # Between the product that makes dx and the one that makes dW.
        d_y = with_bit(self.d_y, at, bit)
        return new(self, d_w=d_y.t() @ self.x)


def linear_calls(study: Study) -> dict[str, Products]:
    """Of one pass, by the layer's name."""
    found: dict[str, dict[str, Tensor]] = {}
    hooks = []
    for name, module in study.model.named_modules():
        if not isinstance(module, nn.Linear):
            continue

        def after(m: nn.Linear, args: Any, y: Tensor, name: str = name) -> None:
            of = found.setdefault(name, {})
            of["x"] = args[0].detach().bfloat16().flatten(0, -2)
            of["y"], of["weight"] = y.detach().flatten(0, -2), m.weight.detach().bfloat16()
            y.register_hook(lambda g: of.__setitem__("d_y", g.detach().flatten(0, -2)))

        hooks.append(module.register_forward_hook(after))
    study.loss().backward()
    for hook in hooks:
        hook.remove()
    study.model.zero_grad(set_to_none=True)
    return {
        name: Products(d_x=of["d_y"] @ of["weight"], d_w=of["d_y"].t() @ of["x"], **of)
        for name, of in found.items()
    }


def of_linear(study: Study, what: str, places: int, seed: int) -> Iterator[dict[str, Any]]:
    calls = list(linear_calls(study).items())
    random = torch.Generator().manual_seed(seed)
    z_max = limit(SAMPLE, len(PAIRS))
    for place in range(places):
        name, call = calls[place % len(calls)]
        _, before = call.laws()
        at = int(torch.randint(getattr(call, what).numel(), (1,), generator=random))
        for bit in range(16):
            sides, after = call.flipped(what, at, bit).laws()
            moved = max(
                abs(after[p].value - before[p].value) / math.sqrt(after[p].variance)
                if math.isfinite(after[p].value) else math.inf
                for p in PAIRS
            )  # fmt: skip
            said = fault(sides, after, z_max, False)
            yield dict(place=f"{name}[{at}]", bit=bit, moved=moved, found=bool(said), said=said)


# ---- attention ----


def broken(signals: Signals, questions: int) -> set[str]:
    """As law_watch.cc has it, in the SAMPLE-th sample; without the shadow check."""
    chance = 1e-3 * 6 / (math.pi * SAMPLE) ** 2 / questions
    z = math.sqrt(2 * math.log(2 / chance))
    found = set()
    for head in range(len(signals["law_a3"])):
        over = {}
        for law in LAWS:
            of = max(abs(x) for x in differences_of(signals, law, head))
            alike, variance = signals[f"{law}_alike"][head], signals[f"{law}_variance"][head]
            if not all(math.isfinite(v) for v in (of, alike, variance)):
                continue
            if of - alike > z * math.sqrt(max(variance, 5e-35)):
                over[law] = of > 2 * alike
        if set(over) == {"law_a1"} and not over["law_a1"]:
            continue
        found |= set(over)
    for tensor in ("dq", "dk", "dv"):
        if sum(signals[f"{tensor}_nonfinite"]) and not sum(signals["do_nonfinite"]):
            found.add(f"{tensor} is not finite")
    return found


def differences_of(signals: Signals, law: str, head: int) -> list[float]:
    names = [law] if law in signals else [f"{law}_{i}" for i in range(8)]
    return [signals[name][head] for name in names]


def of_attention(study: Study, what: str, places: int, seed: int) -> Iterator[dict[str, Any]]:
    kept = Kept(study, 3).calls[1:]
    random = torch.Generator().manual_seed(seed)
    questions = study.size.layers * study.size.heads * 18
    for place in range(places):
        layer = place % study.size.layers
        call = kept[place // study.size.layers % len(kept)][layer]
        whole = getattr(call.of, what)
        at = int(torch.randint(whole.numel(), (1,), generator=random))
        for bit in range(16):
            of = dataclasses.replace(call.of, **{what: with_bit(whole, at, bit)})
            signals = measured(of, call.rows, call.seed, shadow=False)
            moved = 0.0
            for head in range(study.size.heads):
                for law in LAWS:
                    sigma = math.sqrt(signals[f"{law}_variance"][head] or 1e-30)
                    pairs = zip(
                        differences_of(signals, law, head), differences_of(call.signals, law, head)
                    )
                    for after, before in pairs:
                        by = abs(after - before) / sigma
                        moved = max(moved, by if math.isfinite(by) else math.inf)
            said = sorted(broken(signals, questions))
            yield dict(place=f"{layer}[{at}]", bit=bit, moved=moved, found=bool(said), said=said)


# ---- weights at rest ----


def at_rest(study: Study, what: str, places: int, seed: int) -> Iterator[dict[str, Any]]:
    """Of the sample in which the element has its turn; in the others it is not looked at."""
    random = torch.Generator().manual_seed(seed)
    parameters = [(n, p) for n, p in study.model.named_parameters() if p.numel() >= 64]
    for place in range(places):
        name, p = parameters[place % len(parameters)]
        at = int(torch.randint(p.numel(), (1,), generator=random))
        for bit in range(32):
            rest = AtRest(lambda p=p: nn.ParameterList([p]))  # type: ignore[misc]
            found = []
            for _ in range(16):
                rest.optimizer_stepped()
                bits = p.data.view(-1).view(torch.int32)
                bits[at] ^= (1 << bit) if bit < 31 else -(1 << 31)
                found += rest.forward_begins()
                bits[at] ^= (1 << bit) if bit < 31 else -(1 << 31)
                if found:
                    break
            right = [f for f in found if f.bit == bit and place_of(f.element, p) == at]
            yield dict(place=f"{name}[{at}]", bit=bit, moved=math.inf, found=bool(right), said="")


def place_of(element: Sequence[int], p: Tensor) -> int:
    at = 0
    for index, size in zip(element, p.shape):
        at = at * size + index
    return at


Run = Callable[[Study, str, int, int], Iterator[dict[str, Any]]]
KINDS: dict[str, tuple[Run, str]] = {
    "linear y": (of_linear, "y"), "linear dx": (of_linear, "d_x"), "linear dW": (of_linear, "d_w"),
    "activation x, forward to backward": (of_linear, "x"),
    "weight, forward to backward": (of_linear, "weight"),
    "gradient dy, from dx to dW": (of_linear, "d_y"),
    "attention o": (of_attention, "o"), "attention dq": (of_attention, "dq"),
    "attention dk": (of_attention, "dk"), "attention dv": (of_attention, "dv"),
    "weight at rest": (at_rest, ""),
}  # fmt: skip


def table(results: Results) -> str:
    rows = ["| flipped in | flips | beyond 10 sigmas | of those found | found of all | by bit |",
            "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for kind in KINDS:
        of = [r for r in results.of.values() if r["kind"] == kind]
        if not of:
            continue
        far = [r for r in of if r["moved"] > SIGMAS]
        bits = sorted({r["bit"] for r in of})
        by_bit = []
        for bit in bits:
            mine = [r for r in of if r["bit"] == bit]
            by_bit.append(f"{100 * sum(r['found'] for r in mine) / len(mine):.0f}")
        cells = [
            kind, str(len(of)), str(len(far)), share(sum(r["found"] for r in far), len(far)),
            share(sum(r["found"] for r in of), len(of)), " ".join(by_bit),
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main(argv: Optional[Sequence[str]] = None, size: Size = SIZE) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the folder of law_study.py")
    add("--text", type=Path, nargs="+", help="what the model reads [this project's sources]",
        default=[ROOT / part for part in ("client_lib", "server", "kernels", "docs")])  # fmt: skip
    add("--places", type=int, default=100, help="of each kind [%(default)s]")
    add("--only", choices=tuple(KINDS), action="append", help="[all]")
    add("--report", action="store_true", help="only the table of what is there")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    results = Results(args.out / "flips.jsonl")
    study: Optional[Study] = None
    for number, kind in enumerate(() if args.report else args.only or KINDS):
        run, what = KINDS[kind]
        if sum(r["kind"] == kind for r in results.of.values()) >= args.places * 16:
            continue
        if study is None:
            study = Study(args.out, size, "bf16", args.text)
            study.train()
        study.batches.manual_seed(5)
        for done, found in enumerate(run(study, what, args.places, number)):
            key = f"{kind}/{found['place']}/{found['bit']}"
            if key not in results.of:
                results.add(key, {"kind": kind, **found})
            if done % 400 == 399:
                say(f"{kind}: {done + 1} flips")
    print(f"torch {torch.__version__}\n\n{table(results)}")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
