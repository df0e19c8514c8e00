"""Goal: doctor --kernels tells right kernels from broken ones, names both, and exits accordingly.
Method: planted kernels beside sound ones, in this process and by the command; a script whose model
has heads, sizes and types of its own.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from test_doctor import HEAD, TAIL
from test_doctor import doctor as run_doctor

from bellwether._hook.calls.kernel_choice import kernel_of
from bellwether._laws.judge import BROKEN, NOT_JUDGED, RIGHT
from bellwether.tools import doctor
from bellwether.tools.kernel_backends import Kernel, NotOffered, chosen, kernels, named
from bellwether.tools.kernel_cases import (
    SCORES_MAX,
    Case,
    Inputs,
    Shape,
    cases_of,
    default_cases,
    make,
    shortened,
)  # fmt: skip
from bellwether.tools.kernel_check import Result, as_json, check, table

CPU = torch.device("cpu")
MATH = next(kernel for kernel in kernels(CPU) if kernel.name == "torch math")
PLANTED, WRITTEN_OUT = (
    named("planted_kernels:exchanged"),
    named("planted_kernels:sound"),
)
CASES = [Case("normal", Shape(tokens=40)), Case("grouped", Shape(heads=8, tokens=33))]


def checked(*tried: Kernel) -> list[Result]:
    return check(CASES, tried, CPU, 60.0)


def test_the_command_fails_on_a_planted_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--kernels", "--function", "planted_kernels:exchanged", "--seconds", "2"]
    assert doctor.main([*given, "--json", str(tmp_path / "told.json")]) == 1
    said = capsys.readouterr().out
    assert "planted_kernels:exchanged: normal (bfloat16, 1 x 4 heads of 64" in said
    assert "    dk, sequence 0, head " in said
    told = json.loads((tmp_path / "told.json").read_text())["results"]
    of_it = [r for r in told if r["kernel"] == "planted_kernels:exchanged"]
    assert of_it[0]["verdict"] == BROKEN and of_it[0]["numbers"]["dk"]["cosine_min"] < 0.5


def test_a_script_gives_its_own_shapes(tmp_path: Path) -> None:
    script = (HEAD + "model = A().bfloat16()" + TAIL).replace(
        "torch.randn(2, 6, 16)", "torch.randn(2, 70, 16, dtype=torch.bfloat16)"
    )
    done = run_doctor(tmp_path, script, "--kernels", "--seconds", "0.5", "--json", "told.json")
    assert "layer 0, 2 heads" in done.stdout, done.stderr
    told = json.loads((tmp_path / "told.json").read_text())["results"]
    assert "torch flex is left out: the model does not call flex_attention" in done.stdout
    assert all(result["kernel"] != "torch flex" for result in told)
    of_model = told[0]["input"]
    assert (of_model["heads"], of_model["head_dim"], of_model["tokens"]) == (2, 8, 70)
    assert of_model["dtype"] == "torch.bfloat16" and told[0]["verdict"] == RIGHT, done.stdout


@pytest.mark.parametrize(
    "options, words",
    [(["--kernels", "--function", "planted_kernels"], "must be module:name"),
     (["--kernels", "--function", "planted_kernels:none"], "cannot be imported"),
     (["--kernels", "--device", "meta"], "must be cpu or cuda"),
     (["--kernels", "--seconds", "0"], "must be above 0"),
     (["--json", "told.json"], "go with --kernels")],
)  # fmt: skip
def test_options_that_cannot_be_are_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = doctor.main(options)
    except SystemExit as e:  # Of the parser.
        code = int(str(e.code))
    said = capsys.readouterr()
    assert code == 2 and words in said.out + said.err


def test_the_table_names_a_kernel_that_is_right() -> None:
    results = checked(PLANTED, MATH, WRITTEN_OUT)
    assert [r.verdict.verdict for r in results] == [BROKEN] * 2 + [RIGHT] * 4
    text = table(results)
    assert "torch math is right here: with torch.nn.attention.sdpa_kernel(" in text
    assert text.splitlines()[0].startswith("Each kernel ran forward and backward on 2 inputs.")
    assert text.splitlines()[3].split() == ["torch", "math", "2", "-", "-", "-"]


def test_a_kernel_that_takes_no_sinks_is_said_plainly() -> None:
    cases = [Case("sinks", Shape(tokens=40, causal=False), sinks=True), CASES[0]]
    text = table(check(cases, [MATH], CPU, 60.0))
    assert "  torch math does not take 1 input: has no sinks" in text.splitlines()


def test_very_negative_scores_show_what_unused_keys_do() -> None:
    """A public fault: exp(-logsumexp) is beyond fp32, times keys that are 0."""
    named_so = [case for case in default_cases(CPU) if case.values == "negative"]
    tried = check(named_so, [named("planted_kernels:unused"), MATH, WRITTEN_OUT], CPU, 60.0)
    assert [r.verdict.verdict for r in tried] == [BROKEN, RIGHT, RIGHT]
    assert [(f.what, f.head) for f in tried[0].verdict.findings] == [("dq", 0)]


def test_a_kernel_that_raises_is_not_judged() -> None:
    def fails(*_: object) -> torch.Tensor:
        raise RuntimeError("no such device")

    def narrow(inputs: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q[..., :1]

    results = checked(Kernel("fails", fails, ""), Kernel("narrow", narrow, ""))
    assert {r.verdict.verdict for r in results} == {NOT_JUDGED}
    assert results[0].verdict.why == "RuntimeError: no such device"
    assert "returned [1, 4, 40, 1] instead of [1, 4, 40, 64]" in results[2].verdict.why


def test_a_kernel_that_is_compiled_comes_last() -> None:
    order: list[tuple[str, int]] = []

    def seen(name: str) -> Kernel:
        def run(inputs: Inputs, *_: torch.Tensor) -> torch.Tensor:
            order.append((name, inputs.q.shape[2]))
            raise NotOffered("it only notes its turn")

        return Kernel(name, run, "", slow=name == "slow")

    results = checked(seen("slow"), seen("a"), seen("b"))
    turns = [("a", 40), ("b", 40), ("a", 33), ("b", 33), ("slow", 40), ("slow", 33)]
    assert order == turns
    assert [r.kernel.name for r in results] == ["slow", "slow", "a", "a", "b", "b"]


def test_the_rest_is_not_judged_once_time_is_over() -> None:
    results = check(CASES, [MATH], CPU, 0.0)
    assert results[1].verdict.verdict == NOT_JUDGED and "--seconds" in results[1].verdict.why


def test_the_answer_has_each_kernel_and_input() -> None:
    told = as_json(checked(MATH, PLANTED), CPU)
    assert len(told["results"]) == 4 and json.loads(json.dumps(told)) == told
    assert {"A1", "A2", "A3", "A4", "o", "dq", "dk", "dv"} < set(told["results"][0]["numbers"])


def test_inputs_are_of_all_kinds_and_repeat() -> None:
    cases = default_cases(CPU)
    assert {c.shape.dtype for c in cases} == {
        torch.bfloat16,
        torch.float16,
        torch.float32,
    }
    assert {c.shape.head_dim for c in cases} >= {32, 64, 128, 256}
    assert any(c.strided for c in cases) and any(c.shape.heads > c.shape.kv_heads for c in cases)
    strided = make(next(c for c in cases if c.strided), CPU)
    assert not strided.q.is_contiguous() and not strided.d_o.is_contiguous()
    assert torch.equal(strided.q, make(next(c for c in cases if c.strided), CPU).q)


def test_long_sequences_are_shortened_for_the_reference() -> None:
    long = Shape(32, 8, 128, torch.bfloat16, 100_000)
    short = shortened(long, CPU)
    assert short.heads == 32 and 32 * short.tokens**2 <= SCORES_MAX["cpu"]
    assert len(cases_of([long, long, dataclasses.replace(long, head_dim=64)], CPU)) == 26


def test_the_star_is_what_torch_chooses() -> None:
    inputs = make(CASES[0], CPU)
    assert chosen(inputs) == "torch " + kernel_of(inputs.q, inputs.k, inputs.v, {"is_causal": True})
