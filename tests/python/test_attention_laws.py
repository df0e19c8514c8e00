"""Goal: the kernels library finds in a call of attention the differences that its laws have in
     fp64, calls sound kernels sound from some rows, and finds the faults that are planted.
Method: doctor's laws in fp64 torch beside them; PyTorch's kernels, ours and one with faults.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bellwether._kernels.laws import laws_of
from bellwether._kernels.probe import KernelError, ProbeMask
from bellwether._laws.attention import laws, tensor_sums
from bellwether._laws.call import GradedCall
from bellwether._laws.judge import Limits
from bellwether._laws.reference import reference
from bellwether.tools.kernel_cases import Case, Shape, make
from bellwether.tools.kernel_check import graded

from graded_calls import (
    ARITHMETICS,
    beyond,
    difference,
    given,
    laws_rows,
    planted_kernel,
    sound_kernels,
    with_scores,
    written_out,
)
from planted_kernels import SCALED_FIRST

CPU = torch.device("cpu")
LIMIT = Limits(10**7).z
LAWS = ("a1", "a2", "a3", "a4")
HALVES = (torch.bfloat16, torch.float16)
SOUND = sound_kernels()


def size_of(call: GradedCall, law: str) -> float:
    """The sum of the absolute terms of both sides."""
    each = {
        "a1": (call.dk,), "a2": (call.dv, call.d_o), "a3": (call.q * call.dq, call.k * call.dk),
        "a4": (call.o * call.d_o, call.v * call.dv),
    }  # fmt: skip
    return sum(float(t.double().abs().sum()) for t in each[law])


def sound(case: Case) -> GradedCall:
    return graded(planted_kernel(""), make(case, CPU))


@pytest.mark.parametrize("arithmetic", ["fused", "composed"])
@pytest.mark.parametrize("mask", [None, "rows", "minimum"])
@pytest.mark.parametrize("dtype", HALVES)
def test_every_row_gives_what_fp64_does(dtype: torch.dtype, mask: str, arithmetic: str) -> None:
    for values, dim, kv_heads in (
        ("normal", 40, 2),
        ("broad", 64, 4),
        ("peaked", 33, 1),
    ):
        shape = Shape(4, kv_heads, dim, dtype, 75, mask is None)
        call = sound(Case(values, shape, batch=2, values=values, mask=mask))
        true = laws(call, reference(call, arithmetic=arithmetic))
        got = laws_rows(given(call, arithmetic), kv_heads, rows=0)
        for law in LAWS:
            want = true[law.upper()].difference.sum(0).reshape(kv_heads, -1)
            wrong = (difference(got, law) - want).abs().max()
            assert wrong < 1e-5 * size_of(call, law), (law, values)
            variance = true[law.upper()].variance.sum(0).reshape(kv_heads, -1).amax(-1)
            assert bool((got[f"law_{law}_variance"] > 0.9 * variance).all()), (
                law,
                values,
            )


@pytest.mark.parametrize("causal, window", [(True, None), (False, 9), (True, 9)])
def test_windows_and_additive_masks_hold_the_laws(causal: bool, window: int) -> None:
    call = sound(Case("normal", Shape(4, 2, 32, torch.bfloat16, 60, False)))
    mask = ProbeMask(causal, True, window, tensor=torch.randn(1, 4, 60, 60))
    call = dataclasses.replace(call, mask=mask)
    known = reference(call)
    as_type = {
        name: getattr(known, name).exact.reshape(getattr(call, name).shape).to(torch.bfloat16)
        for name in ("o", "dq", "dk", "dv")
    }
    assert known.dk is not None
    call = dataclasses.replace(call, **as_type)
    for rows in (0, 16):
        got = laws_rows(given(call), 2, rows)
        assert max(beyond(got, law) for law in LAWS) < LIMIT
        for law, law_true in laws(call, reference(call)).items():
            want = law_true.difference.sum(0).reshape(2, -1)
            wrong = (difference(got, law.lower()) - want).abs().max()
            assert wrong < 1e-5 * size_of(call, law.lower())


def test_sums_of_the_gradients_are_those_of_all_elements() -> None:
    for dtype in (*HALVES, torch.float32):
        call = sound(Case("normal", Shape(4, 2, 24, dtype, 50), batch=3))
        got = laws_rows(given(call), 2, rows=8)
        for name in ("d_o", "dq", "dk", "dv"):
            of = tensor_sums(getattr(call, name))
            row = name.replace("_", "")
            for what, values in (("sum", of.total), ("abs_sum", of.absolute),
                                 ("sumsq", of.squares), ("nonfinite", of.nonfinite)):  # fmt: skip
                scale = of.absolute if what == "sum" else values
                wrong = (got[f"{row}_{what}"] - values.sum(0)).abs()
                assert bool((wrong <= 1e-6 * scale.sum(0)).all()), (name, what)
        assert (dtype == torch.float32) == all(
            float(difference(got, x).abs().max()) == 0 for x in LAWS
        )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("values", ["normal", "broad", "peaked", "common-mode"])
def test_sound_kernels_are_sound_from_some_rows(dtype: torch.dtype, values: str) -> None:
    for heads, kv_heads, dim, tokens, causal, mask in (
        (4, 4, 32, 129, True, None), (4, 1, 64, 300, True, None), (2, 2, 256, 160, False, None),
        (4, 2, 64, 200, True, "rows"),
    ):  # fmt: skip
        case = Case(
            values,
            Shape(heads, kv_heads, dim, dtype, tokens, causal),
            2,
            0,
            values,
            mask,
        )
        for kernel in SOUND:
            call = graded(kernel, make(case, CPU))
            of = given(call, ARITHMETICS.get(kernel.name, "fused"))
            got = laws_rows(of, kv_heads, rows=32)
            worst = {law: beyond(got, law) for law in LAWS}
            assert max(worst.values()) < LIMIT, (kernel.name, case, worst)


@pytest.mark.parametrize("values", ["normal", "broad", "common-mode"])
@pytest.mark.parametrize("size", [1e-3, 1e-5, 1e-7])
def test_gradients_that_underflow_break_no_law(size: float, values: str) -> None:
    for dim in (64, 128):
        inputs = make(Case("tiny", Shape(2, 2, dim, torch.float16, 300), values=values), CPU)
        inputs = dataclasses.replace(inputs, d_o=(inputs.d_o.double() * size).half())
        for kernel in (planted_kernel(""), planted_kernel(SCALED_FIRST), written_out()):
            call = graded(kernel, inputs)
            arithmetic = ARITHMETICS.get(kernel.name, "fused")
            for rows in (0, 32):
                got = laws_rows(given(call, arithmetic), 2, rows)
                assert max(beyond(got, law) for law in LAWS) < LIMIT, (kernel.name, dim, rows)


@pytest.mark.parametrize("largest", [1e2, 1e4, 3e5])
def test_scores_as_large_as_fp32_rounds_break_no_law(largest: float) -> None:
    for kv_heads, dim, tokens in ((2, 32, 48), (1, 80, 200), (2, 128, 65)):
        for dtype in HALVES:
            case = Case("large", Shape(2, kv_heads, dim, dtype, tokens, True), batch=2)
            inputs = with_scores(make(case, CPU), largest)
            for kernel in SOUND:
                of = given(graded(kernel, inputs), ARITHMETICS.get(kernel.name, "fused"))
                for rows in (0, 32):
                    got = laws_rows(of, kv_heads, rows)
                    worst = {law: beyond(got, law) for law in LAWS}
                    assert max(worst.values()) < LIMIT, (kernel.name, case, rows, worst)


def test_one_key_that_takes_all_breaks_no_law() -> None:
    """It takes all, so rows of dq are multiples of it: z of A3 was 8.2 in a training."""
    n, dim = 256, 256
    torch.manual_seed(0)
    q, ds = torch.rand(1, 1, 1, dim) + 1, 2.0 ** -torch.randint(30, 32, (1, 1, n, 1))
    q = q.bfloat16().expand(1, 1, n, dim).contiguous()
    k = torch.cat([q[:, :, :1], (-0.0015 * q[:, :, 1:]).bfloat16()], 2)
    of_first = ds.sum(2, keepdim=True) * q[:, :, :1]
    weights = torch.rand(n - 1, 1)
    dk = torch.cat([of_first, -of_first * weights / weights.sum()], 2)
    dq = (ds * k[:, :, :1] - ds * k[:, :, 1:2].float()).bfloat16()
    assert torch.equal(dq, (ds * k[:, :, :1].float()).bfloat16())
    v = torch.zeros_like(q)
    for factor, alarms in ((1.0, False), (1.02, True)):
        call = GradedCall(q, k, v, v, v, factor * dq, dk.bfloat16(), v, 0.125, ProbeMask())
        got = laws_rows(given(call), 1, 0)
        assert float(difference(got, "a3").abs() / got["law_a3_variance"].sqrt()) > LIMIT
        assert (beyond(got, "a3") > LIMIT) == alarms
        law = laws(call, reference(call))["A3"]
        assert (float(law.beyond().abs()) > LIMIT) == alarms


def test_keys_of_padding_may_round_alike() -> None:
    """A third of all keys is seen by rows of padding alone: what those pass back is one number."""
    tokens, padding = 512, 170
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    hidden[:, :padding] = True
    bias = torch.zeros(1, 1, tokens, tokens, dtype=torch.float16).masked_fill_(hidden, -65504.0)
    inputs = make(Case("tiny", Shape(2, 2, 64, torch.float16, tokens, False), batch=2), CPU)
    q, k, v = (t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    d_o = (inputs.d_o.double() * 3e-5).half()
    o = torch.softmax(q @ k.mT * 0.125 + bias, -1) @ v
    gradients = torch.autograd.grad(o, (q, k, v), d_o)
    call = GradedCall(
        q.detach(), k.detach(), v.detach(), o.detach(), d_o, *gradients, 0.125,
        ProbeMask(tensor=bias),
    )  # fmt: skip
    for rows in (0, 32):
        got = laws_rows(given(call, "composed"), 2, rows)
        assert max(beyond(got, law) for law in LAWS) < 3, rows


@pytest.mark.parametrize("fault, law, head", [
    ("dq_times_five_in_a_sequence", "a3", None),
    ("dq_negated_in_a_head", "a3", 2),
    ("dk_of_heads_exchanged", "a3", None),
    ("dq_key_tile_skipped", "a3", None),
    ("dv_one_percent_large", "a2", 3),
    ("p_does_not_add_up", "a2", None),
    ("dv_last_row_of_queries_left_out", "a2", None),
])  # fmt: skip
def test_planted_faults_break_their_law(fault: str, law: str, head: int) -> None:
    case = Case("normal", Shape(4, 4, 64, torch.bfloat16, 512, True), batch=2)
    got = laws_rows(given(graded(planted_kernel(fault), make(case, CPU))), 4, rows=64)
    assert beyond(got, law) > LIMIT
    for other in {"a1", "a2", "a3", "a4"} - {law, "a4"}:
        assert beyond(got, other) < LIMIT, other
    if head is not None:
        z = difference(got, law).abs().amax(-1) / got[f"law_{law}_variance"].sqrt()
        assert int(z.argmax()) == head


def test_an_element_not_finite_shows_in_its_head_alone() -> None:
    case = Case("normal", Shape(4, 4, 64, torch.bfloat16, 70, True))
    call = graded(planted_kernel("nan_in_a_head_of_dq"), make(case, CPU))
    got = laws_rows(given(call), 4, rows=16)
    assert got["dq_nonfinite"].tolist() == [0, 0, 1, 0]
    assert torch.isnan(got["dq_sum"]).tolist() == [False, False, True, False]
    assert torch.isnan(got["law_a3"]).tolist() == [False, False, True, False]
    assert bool(torch.isfinite(got["law_a1_0"]).all() and torch.isfinite(got["law_a4"]).all())


def test_unseeing_rows_of_nan_are_counted_and_left_out() -> None:
    call = sound(Case("masked", Shape(4, 4, 32, torch.bfloat16, 70), batch=2, mask="rows"))
    blank = (call.o == 0).all(-1)
    assert bool(blank.any())
    o = call.o.masked_fill(blank[..., None], torch.nan)
    got = laws_rows(given(dataclasses.replace(call, o=o)), 4, rows=0)
    assert got["law_rows_left_out"].tolist() == blank.sum((0, 2)).tolist()
    assert max(beyond(got, law) for law in LAWS) < LIMIT
    assert all(bool(torch.isfinite(difference(got, law)).all()) for law in LAWS)


def test_softcaps_and_sinks_leave_out_what_they_end() -> None:
    case = Case("normal", Shape(4, 2, 32, torch.bfloat16, 64))
    capped = dataclasses.replace(sound(case), softcap=5.0)
    assert laws_of(given(capped), 0) == ("a2", "a3", "a4")
    got = laws_rows(given(capped), 2, rows=0)
    assert float(difference(got, "a1").abs().max()) == 0 == float(got["law_a1_variance"].max())
    hp = next(kernel for kernel in SOUND if kernel.name == "bellwether hp")
    call = graded(hp, make(dataclasses.replace(case, sinks=True), CPU))
    assert laws_of(given(call), 16) == ("a3", "a4") and laws_of(given(call), 64) == LAWS
    some, every = (laws_rows(given(call), 2, rows) for rows in (16, 0))
    assert float(some["law_a1_variance"].max()) == 0 < float(every["law_a1_variance"].max())
    assert max(beyond(every, law) for law in LAWS) < LIMIT
    want = laws(call, reference(call))["A1"].difference.sum(0)
    assert float((difference(every, "a1") - want).abs().max()) < 1e-5 * size_of(call, "a1")


def test_repeated_key_heads_are_added_first() -> None:
    call = sound(Case("normal", Shape(4, 2, 32, torch.float16, 64)))
    apart = torch.zeros_like(call.dk)
    of = dataclasses.replace(
        given(call), k=call.k.repeat_interleave(2, 1), v=call.v.repeat_interleave(2, 1), group=2,
        **{n: torch.stack((getattr(call, n), apart), 2).flatten(1, 2) for n in ("dk", "dv")},
    )  # fmt: skip
    once, repeated = laws_rows(given(call), 2, rows=8), laws_rows(of, 2, rows=8)
    for name, row in once.items():
        assert torch.equal(row, repeated[name]), name


def test_a_row_alone_says_nothing_of_the_others() -> None:
    call = graded(planted_kernel("dv_one_percent_large"),
                  make(Case("normal", Shape(4, 4, 32, torch.bfloat16, 200)), CPU))  # fmt: skip
    got = laws_rows(given(call), 4, rows=1)
    assert beyond(got, "a2") == beyond(got, "a4") == 0


def test_calls_that_do_not_fit_are_refused() -> None:
    call = sound(Case("normal", Shape(4, 4, 32, torch.bfloat16, 20)))
    with pytest.raises(ValueError, match=r"dk is torch\.float32, must be torch\.bfloat16 as q is"):
        laws_rows(dataclasses.replace(given(call), dk=call.dk.float()), 4, rows=4)
    with pytest.raises(KernelError, match="bw_attention_laws: scale is 0, but must be"):
        laws_rows(dataclasses.replace(given(call), scale=0.0), 4, rows=4)


def test_variances_are_unknown_beside_a_nan_in_do() -> None:
    call = sound(Case("normal", Shape(4, 4, 64, torch.bfloat16, 70, True)))
    d_o = call.d_o.clone()
    d_o[0, 1, 5, 3] = torch.nan
    got = laws_rows(given(dataclasses.replace(call, d_o=d_o)), 4, rows=16)
    for law in ("a1", "a2", "a4"):
        unknown = torch.isnan(got[f"law_{law}_variance"]).tolist()
        assert unknown == [False, True, False, False], law
