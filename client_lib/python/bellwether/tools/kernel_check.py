"""doctor --kernels: which kernels of attention are right on this machine, on these inputs.

Each kernel runs forward and backward on each input.  What it returns is judged by the laws and the
shadow check (_laws/judge.py), in fp64 on the kernel's own device.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import torch

from .. import __version__
from .._hook.calls import known_kernels
from .._hook.capture import keeper
from .._laws.call import GradedCall
from .._laws.judge import BIASED, BROKEN, NOT_JUDGED, RIGHT, Limits, Verdict, judge, questions
from .._laws.reference import References
from .kernel_backends import FLEX, Kernel, NotOffered, chosen, facts, kernels, named
from .kernel_cases import Case, Inputs, Shape, cases_of, default_cases, make

Keep = Callable[[Kernel, Case, GradedCall, Verdict], None]
VERDICTS = (RIGHT, BIASED, BROKEN, NOT_JUDGED)
CAPTURES_MAX = 4
_SHOWN = 12  # Lines of one verdict on the screen; the JSON has all.


@dataclasses.dataclass
class Result:
    kernel: Kernel
    case: Case
    chosen: bool  # scaled_dot_product_attention picks it for this input.
    verdict: Verdict
    seconds: float
    known: list[known_kernels.Entry]  # Of the table of known kernels, for this input.


def graded(kernel: Kernel, inputs: Inputs) -> GradedCall:
    """One forward and backward pass.  Raises NotOffered."""
    q, k, v = (t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    with torch.enable_grad():
        o = kernel.run(inputs, q, k, v)
        want = (*q.shape[:3], v.shape[3])
        if tuple(o.shape) != want:
            raise NotOffered(f"returned {list(o.shape)} instead of {list(want)}")
        if o.grad_fn is None:
            raise NotOffered("returned an output without a gradient")
        dq, dk, dv = torch.autograd.grad(o, (q, k, v), inputs.d_o.to(o.dtype))
    return GradedCall(
        q.detach(), k.detach(), v.detach(), o.detach(), inputs.d_o, dq, dk, dv,
        inputs.scale, inputs.seen(), sinks=inputs.sinks,
    )  # fmt: skip


def try_kernel(
    kernel: Kernel, inputs: Inputs, limits: Limits, known_of: References,
    keep: Optional[Callable[[GradedCall, Verdict], None]] = None,
) -> Verdict:  # fmt: skip
    """What a kernel does on one input.  An exception of its own is a verdict, too.

    keep: gets what is broken"""
    try:
        call = graded(kernel, inputs)
    except NotOffered as e:
        return Verdict(NOT_JUDGED, f"not offered: {e}")
    except Exception as e:  # A kernel may fail in any way.
        text = str(e).strip().splitlines()
        return Verdict(NOT_JUDGED, f"{type(e).__name__}: {text[0][:160] if text else ''}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # Its operations are small: more threads only wait for each other.
    try:
        verdict = judge(call, limits, known_of)
        if keep is not None and verdict.verdict == BROKEN:
            keep(call, verdict)
        return verdict
    finally:
        torch.set_num_threads(threads)


def check(
    cases: Sequence[Case], tried: Sequence[Kernel], device: torch.device, seconds: float,
    keep: Optional[Keep] = None,
) -> list[Result]:  # fmt: skip
    """All kernels on all cases, by kernel.  What does not fit into `seconds` is not judged."""
    asked = len(tried) * sum(
        questions(c.batch, c.shape.heads, c.shape.kv_heads, c.shape.tokens, c.k_len) for c in cases
    )
    limits, begin = Limits(asked), time.monotonic()
    results: dict[tuple[str, int], Result] = {}
    for slow in (False, True):
        # Input by input: what all kernels are held against is computed once, and let go.
        for number, case in enumerate(cases):
            made: Optional[Inputs] = None
            known_of, picks = References(), ""
            for kernel in tried:
                if kernel.slow != slow:
                    continue
                start = time.monotonic()
                known: list[known_kernels.Entry] = []
                if start - begin > seconds:
                    verdict = Verdict(NOT_JUDGED, f"{seconds:g} s were over: --seconds")
                else:
                    if made is None:
                        made = make(case, device)
                        picks = chosen(made)
                    kept = functools.partial(keep, kernel, case) if keep is not None else None
                    verdict = try_kernel(kernel, made, limits, known_of, kept)
                    known = known_kernels.fitting(facts(kernel, made))
                results[kernel.name, number] = Result(
                    kernel, case, picks == kernel.name, verdict, time.monotonic() - start, known
                )
    return [results[kernel.name, number] for kernel in tried for number in range(len(cases))]


def _keeping(folder: str, say: Callable[[str], None]) -> Keep:
    write = keeper(Path(folder), CAPTURES_MAX, say)

    def keep(kernel: Kernel, case: Case, call: GradedCall, verdict: Verdict) -> None:
        found = verdict.findings[0] if verdict.findings else None
        reason = f"{found.what}: {found.text}" if found is not None else verdict.why
        more = {"kernel": kernel.name, "reason": reason, "input": str(case)}
        write(call, found.batch if found is not None else 0, f"{kernel.name} {case.name}", more)

    return keep


def _advice(result: Result, results: Sequence[Result]) -> str:
    """A kernel that is right where this one is not."""
    for other in results:
        same = other.case == result.case and other.verdict.verdict in (RIGHT, BIASED)
        if same and not other.kernel.for_comparison:
            return f"{other.kernel.name} is right here: {other.kernel.advice}"
    return "no other kernel here is right: use another input, or report it"


def _lines(of: str, results: Sequence[Result]) -> list[str]:
    lines = []
    for r in results:
        v = r.verdict
        if v.verdict != of or (of == NOT_JUDGED and v.why.startswith("not offered")):
            continue
        place = f"  {r.kernel.name}{' *' if r.chosen else ''}: {r.case}"
        lines.append(place + (f": {v.why}" if v.why else ""))
        for f in v.findings[:4]:
            lines.append(f"    {f.what}, sequence {f.batch}, head {f.head}: {f.text}")
        if of == BROKEN:
            lines += [f"    known: {entry.id}, {entry.source}" for entry in r.known]
            lines.append(f"    {_advice(r, results)}")
    return lines


def _not_offered(results: Sequence[Result]) -> list[str]:
    """A line for each kernel."""
    refused = [r for r in results if r.verdict.why.startswith("not offered")]
    lines = []
    for name in dict.fromkeys(r.kernel.name for r in refused):
        why = Counter(r.verdict.why for r in refused if r.kernel.name == name)
        [(most, _)] = why.most_common(1)
        others = len(why) - 1
        rest = f", and {others} other reason{'s' * (others > 1)}" if others else ""
        count, reason = why.total(), most.removeprefix("not offered: ")[:200]
        inputs = f"{count} input{'s' * (count > 1)}"
        lines.append(f"  {name} does not take {inputs}: {reason}{rest}")
    return lines


_EXPLAINED = {
    BROKEN: "broken: no rounding makes such a difference",
    BIASED: "biased: a difference that rounding can make; evidence, no fault",
    NOT_JUDGED: "not judged",
}


def table(results: Sequence[Result]) -> str:
    """Kernels by verdict, then what is behind each that is not right."""
    width = max(len(r.kernel.name) for r in results) + 2
    inputs = len({str(r.case) for r in results})
    lines = [
        f"Each kernel ran forward and backward on {inputs} inputs.  On how many of them it is:",
        "kernel".ljust(width) + "".join(f"{v:>12}" for v in VERDICTS),
    ]
    for name in dict.fromkeys(r.kernel.name for r in results):
        counts = Counter(r.verdict.verdict for r in results if r.kernel.name == name)
        star = " *" if any(r.chosen for r in results if r.kernel.name == name) else ""
        cells = "".join(f"{counts[v] or '-':>12}" for v in VERDICTS)
        lines.append((name + star).ljust(width) + cells)
    lines.append("* is what scaled_dot_product_attention chooses by itself, for some input or all")
    if any(r.kernel.for_comparison for r in results):
        modes = ", ".join(dict.fromkeys(r.kernel.name for r in results if r.kernel.for_comparison))
        lines.append(f"for comparison, and for no job: {modes}")
    for of, text in _EXPLAINED.items():
        found = _lines(of, results)
        more = _not_offered(results) if of == NOT_JUDGED else []
        if found or more:
            lines += ["", text, *found[:_SHOWN]]
            if len(found) > _SHOWN:
                lines.append(f"  ... {len(found) - _SHOWN} lines more: --json has all")
            lines += more
    return "\n".join(lines)


def as_json(results: Sequence[Result], device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "bellwether": __version__, "torch": torch.__version__, "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or "cpu",
        "results": [
            {
                "kernel": r.kernel.name, "chosen_by_torch": r.chosen, "verdict": r.verdict.verdict,
                "why": r.verdict.why, "seconds": round(r.seconds, 3),
                "findings": [dataclasses.asdict(f) for f in r.verdict.findings],
                "numbers": r.verdict.numbers, "rows_left_out": r.verdict.left_out,
                "known": [entry.id for entry in r.known],
                "input": {
                    **{name: value for name, value in dataclasses.asdict(r.case).items()
                       if name != "shape"},
                    **dataclasses.asdict(r.case.shape), "dtype": str(r.case.shape.dtype),
                },
            }
            for r in results
        ],
    }  # fmt: skip


def device_of(name: Optional[str]) -> torch.device:
    """The one to try on: a GPU if there is one.  Raises ValueError."""
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device is {name!r}, but must be cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch sees no GPU")
    return device


def run(
    shapes: Optional[Sequence[Shape]], *, device: Optional[str] = None, seconds: float = 50.0,
    function: Optional[str] = None, json_path: Optional[str] = None,
    calls_flex: bool = True, capture: Optional[str] = None, say: Callable[[str], None] = print,
) -> int:  # fmt: skip
    """The exit code: 0 if no kernel is broken and some were judged, else 1.

    shapes      of a model's layers; None = the default list
    calls_flex  whether that model calls flex_attention, which takes seconds for each input
    capture     a folder for at most CAPTURES_MAX calls that are broken

    Raises ValueError.
    """
    on = device_of(device)
    tried = [kernel for kernel in kernels(on) if calls_flex or kernel.name != FLEX]
    if function is not None:
        tried.insert(0, named(function))
    cases = default_cases(on) if shapes is None else cases_of(shapes, on)
    results = check(cases, tried, on, seconds, _keeping(capture, say) if capture else None)
    say(table(results))
    if not calls_flex:
        say(f"{FLEX} is left out: the model does not call flex_attention")
    if json_path is not None:
        Path(json_path).write_text(json.dumps(as_json(results, on), indent=1) + "\n")
        say(f"all numbers: {json_path}")
    verdicts = {r.verdict.verdict for r in results}
    return 1 if BROKEN in verdicts or verdicts == {NOT_JUDGED} else 0
