"""Goal: the shadow check of the kernels library compares as doctor's in fp64 does, finds nothing in
     sound kernels, and names the tensor that a planted fault is in.
Method: doctor's shadow check in fp64 torch beside it, on all rows and keys; faults on some.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from bellwether._kernels.probe import ProbeMask, Unsupported, sampled_rows
from bellwether._laws.call import GradedCall
from bellwether._laws.judge import NOT_JUDGED, Limits, judge
from bellwether._laws.reference import reference
from bellwether._laws.shadow import Shadow, shadow
from bellwether.tools.kernel_backends import Kernel
from bellwether.tools.kernel_cases import Case, Inputs, Shape, make
from bellwether.tools.kernel_check import graded

from graded_calls import (
    ARITHMETICS,
    beyond,
    given,
    laws_rows,
    planted_kernel,
    shadow_rows,
    sound_kernels,
    with_scores,
    written_out,
)
from planted_kernels import FAULTS, SCALED_FIRST

CPU = torch.device("cpu")
LIMITS = Limits(10**7)
TENSORS = ("o", "dq", "dk", "dv")
EVERY = 1 << 20
SOUND = sound_kernels()


def excess(of: dict[str, Tensor], tensor: str) -> Tensor:
    return of[f"shadow_{tensor}_rest"] / of[f"shadow_{tensor}_variance"]


def over(of: dict[str, Tensor], tensor: str) -> bool:
    """Whether some head is beyond chance."""
    degrees = of[f"shadow_{tensor}_variance"].square() / of[f"shadow_{tensor}_variance_sq"]
    return bool((excess(of, tensor) > LIMITS.excess(degrees)).any())


def factor_z(of: dict[str, Tensor], tensor: str) -> Tensor:
    """Of the tensor as a multiple of its reference, beyond what alike roundings explain."""
    beyond = (of[f"shadow_{tensor}_factor"].abs() - of[f"shadow_{tensor}_factor_alike"]).clamp(0)
    variance = of[f"shadow_{tensor}_factor_variance"]
    return (beyond / variance.sqrt()).where(variance > 0, 0.0)  # 0: it is not judged.


def same_factor(got: dict[str, Tensor], tensor: str, true: Shadow) -> None:
    """Within parts of its standard deviation."""
    sigma = true.factor_variance[0].sqrt()
    for part, want in (("", true.factor[0]), ("_alike", true.factor_alike[0])):
        rest = (got[f"shadow_{tensor}_factor{part}"] - want).abs()
        assert bool((rest <= 0.02 * want.abs() + 0.02 * sigma).all()), (tensor, part, rest / sigma)
    information = got[f"shadow_{tensor}_factor_variance"]
    assert torch.allclose(information, true.factor_variance[0], rtol=1e-2), tensor


def shadow_of(call: GradedCall, arithmetic: str, rows: int, keys: int) -> dict[str, Tensor]:
    return shadow_rows(given(call, arithmetic), call.k.shape[1], rows, keys)


@pytest.mark.parametrize("values", ["normal", "broad"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_row_and_key_gives_what_fp64_does(dtype: torch.dtype, values: str) -> None:
    for kv_heads, dim, mask in ((4, 32, None), (2, 40, "rows")):
        shape = Shape(4, kv_heads, dim, dtype, 67, True)
        for kernel in SOUND:
            call = graded(kernel, make(Case(values, shape, values=values, mask=mask), CPU))
            arithmetic = ARITHMETICS.get(kernel.name, "fused")
            true = shadow(call, reference(call, arithmetic=arithmetic))
            got = shadow_of(call, arithmetic, 0, EVERY)
            for name in TENSORS:
                norms = got[f"shadow_{name}_got_sumsq"] * got[f"shadow_{name}_ref_sumsq"]
                cosine = got[f"shadow_{name}_dot"] / norms.sqrt()
                assert torch.allclose(cosine, true[name].cosine[0], atol=1e-6), name
                want = true[name].excess[0]
                assert torch.allclose(excess(got, name), want, rtol=3e-2, atol=5e-3), name
                same_factor(got, name, true[name])


def test_sampled_rows_and_keys_are_compared_alone() -> None:
    call = graded(planted_kernel(""), make(Case("normal", Shape(4, 4, 32, torch.float16, 90)), CPU))
    got = shadow_of(call, "fused", 8, 5)
    rows = sampled_rows(1, 4, 90, 8, 3)
    picked = call.o.gather(2, rows[..., None].expand(-1, -1, -1, 32)).double()
    want = picked.square().sum((0, 2, 3))
    assert torch.allclose(got["shadow_o_got_sumsq"], want, rtol=1e-6)
    some, every = got["shadow_dk_got_sumsq"], call.dk.double().square().sum((0, 2, 3))
    assert bool((some > 0).all() and (some < every).all())
    without = shadow_of(call, "fused", 8, 0)
    assert all(float(without[f"shadow_dk_{what}"].sum()) == 0 for what in ("dot", "variance"))
    assert torch.equal(without["shadow_dq_rest"], got["shadow_dq_rest"])


@pytest.mark.parametrize("values", ["normal", "broad", "peaked", "common-mode"])
def test_sound_kernels_are_within_chance(values: str) -> None:
    for heads, kv_heads, dim, tokens, causal, mask in (
        (4, 4, 32, 129, True, None), (2, 1, 256, 80, False, None), (4, 2, 64, 96, True, "rows"),
    ):  # fmt: skip
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            shape = Shape(heads, kv_heads, dim, dtype, tokens, causal)
            for kernel in SOUND:
                call = graded(kernel, make(Case(values, shape, values=values, mask=mask), CPU))
                got = shadow_of(call, ARITHMETICS.get(kernel.name, "fused"), 16, 8)
                wrong = [name for name in TENSORS if over(got, name)]
                assert not wrong, (kernel.name, dtype, {n: excess(got, n) for n in wrong})
                z = {name: float(factor_z(got, name).max()) for name in TENSORS}
                assert max(z.values()) < LIMITS.z / 2, (kernel.name, dtype, shape, z)


@pytest.mark.parametrize("values", ["normal", "broad", "common-mode"])
@pytest.mark.parametrize("size", [1e-3, 1e-5, 1e-7])
def test_gradients_that_underflow_are_within_chance(size: float, values: str) -> None:
    kernels = (planted_kernel(""), planted_kernel(SCALED_FIRST), written_out())
    for dim in (64, 128):
        inputs = make(Case("tiny", Shape(2, 2, dim, torch.float16, 300), values=values), CPU)
        inputs = dataclasses.replace(inputs, d_o=(inputs.d_o.double() * size).half())
        for kernel in kernels:
            call = graded(kernel, inputs)
            got = shadow_of(call, ARITHMETICS.get(kernel.name, "fused"), 32, 16)
            wrong = [name for name in TENSORS if over(got, name)]
            assert not wrong, (kernel.name, dim, {n: excess(got, n) for n in wrong})
            z = {name: float(factor_z(got, name).max()) for name in TENSORS}
            assert max(z.values()) < LIMITS.z, (kernel.name, dim, z)


@pytest.mark.parametrize("largest", [1e2, 1e4, 3e5])
def test_scores_as_large_as_fp32_rounds_are_within_chance(largest: float) -> None:
    for kv_heads, dim, tokens in ((2, 32, 48), (1, 80, 200), (2, 128, 65)):
        for dtype in (torch.bfloat16, torch.float16):
            case = Case("large", Shape(2, kv_heads, dim, dtype, tokens, True), batch=2)
            inputs = with_scores(make(case, CPU), largest)
            for kernel in SOUND:
                call = graded(kernel, inputs)
                got = shadow_of(call, ARITHMETICS.get(kernel.name, "fused"), 32, EVERY)
                wrong = [name for name in TENSORS if over(got, name)]
                assert not wrong, (kernel.name, case, {n: excess(got, n) for n in wrong})
                z = {name: float(factor_z(got, name).max()) for name in TENSORS}
                assert max(z.values()) < LIMITS.z, (kernel.name, case, z)


def test_keys_that_fp32_loses_tell_no_factor() -> None:
    inputs = make(Case("far", Shape(2, 2, 32, torch.bfloat16, 48, True), batch=2), CPU)
    inputs = with_scores(inputs, 125)
    inputs = dataclasses.replace(inputs, d_o=(inputs.d_o.double() * 1e-3).bfloat16())
    for kernel in SOUND:
        call = graded(kernel, inputs)
        got = shadow_of(call, ARITHMETICS.get(kernel.name, "fused"), 32, EVERY)
        assert max(float(factor_z(got, name).max()) for name in TENSORS) < LIMITS.z / 2, kernel.name


def test_a_fault_shows_where_gradients_underflow() -> None:
    inputs = make(Case("tiny", Shape(4, 4, 64, torch.float16, 141), batch=2), CPU)
    inputs = dataclasses.replace(inputs, d_o=(inputs.d_o.double() * 1e-3).half())
    got = shadow_of(graded(planted_kernel("dq_negated_in_a_head"), inputs), "fused", 32, 16)
    assert {name for name in TENSORS if over(got, name)} == {"dq"}


@pytest.mark.parametrize("fault", [f for f in FAULTS if not f.startswith(("nan", "dv_one"))])
def test_planted_faults_show_in_their_tensor(fault: str) -> None:
    case = Case("normal", Shape(4, 4, 64, torch.bfloat16, 320, True), batch=2)
    got = shadow_of(graded(planted_kernel(fault), make(case, CPU)), "fused", 32, 32)
    wrong = {name for name in TENSORS if over(got, name)}
    assert FAULTS[fault][0] in wrong
    if fault != "p_does_not_add_up":
        assert wrong == {FAULTS[fault][0]}


@pytest.mark.parametrize("tensor", ["dq", "dk", "dv"])
@pytest.mark.parametrize("by", [1.02, 0.985])
def test_a_factor_near_one_names_its_tensor_and_head(tensor: str, by: float) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        case = Case("normal", Shape(4, 4, 64, dtype, 320, True), batch=2)
        call = graded(planted_kernel(""), make(case, CPU))
        of_head = getattr(call, tensor)[:, 2]
        of_head.copy_((of_head.double() * by).to(dtype))
        got = shadow_of(call, "fused", 32, 16)
        named = {(name, at) for name in TENSORS for at in range(4)
                 if factor_z(got, name)[at] > LIMITS.z}  # fmt: skip
        assert named == {(tensor, 2)}
        of = got[f"shadow_{tensor}_factor"] / got[f"shadow_{tensor}_factor_variance"]
        assert abs(1 + float(of[2]) - by) < 2e-3


def test_no_factor_is_told_in_float32() -> None:
    case = Case("normal", Shape(4, 4, 64, torch.float32, 70, True))
    got = shadow_of(graded(planted_kernel(""), make(case, CPU)), "fused", 0, EVERY)
    factors = [row for name, row in got.items() if "factor" in name]
    assert len(factors) == 12 and not any(bool(row.any()) for row in factors)


def test_elements_that_are_not_finite_are_left_out() -> None:
    case = Case("normal", Shape(4, 4, 64, torch.bfloat16, 70, True))
    call = graded(planted_kernel("nan_in_a_head_of_dq"), make(case, CPU))
    got = shadow_of(call, "fused", 0, EVERY)
    sound = shadow_of(graded(planted_kernel(""), make(case, CPU)), "fused", 0, EVERY)
    assert all(bool(torch.isfinite(row).all()) for row in got.values())
    changed = got["shadow_dq_got_sumsq"] != sound["shadow_dq_got_sumsq"]
    assert changed.tolist() == [False, False, True, False]


def test_keys_want_a_mask_of_all_rows() -> None:
    call = graded(
        planted_kernel(""), make(Case("normal", Shape(4, 4, 32, torch.bfloat16, 40)), CPU)
    )
    tensor = torch.ones(1, 1, 8, 40, dtype=torch.bool)
    visible = torch.ones(1, 1, 40, dtype=torch.bool)
    mask = ProbeMask(causal=True, tensor=tensor, by_sample=True, visible=visible)
    call = dataclasses.replace(call, mask=mask)
    with pytest.raises(Unsupported, match="keys_per_head is 4, but must be 0 with mask_by_sample"):
        shadow_of(call, "fused", 8, 4)
    plain = dataclasses.replace(call, mask=ProbeMask(causal=True))
    got, want = shadow_of(call, "fused", 8, 0), shadow_of(plain, "fused", 8, 0)
    assert all(
        math.isclose(a, b, rel_tol=1e-6)
        for a, b in zip(got["shadow_dq_rest"], want["shadow_dq_rest"])
    )


def at_the_minimum(size: float, graded_rows: bool) -> GradedCall:
    """Written out in fp16: rows see no key, and scores are up to `size` or so.  graded_rows: such
    rows have gradients."""
    inputs = make(Case("masked", Shape(4, 4, 64, torch.float16, 70, False), mask="minimum"), CPU)
    assert inputs.mask is not None
    unseen = (inputs.mask < 0).all(-1, keepdim=True)
    d_o = inputs.d_o if graded_rows else inputs.d_o.masked_fill(unseen, 0.0)
    q = (inputs.q.double() * size / 4).half()

    def run(of: Inputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * of.scale + of.mask).softmax(-1) @ v

    return graded(Kernel("written out", run, ""), dataclasses.replace(inputs, q=q, d_o=d_o))


@pytest.mark.parametrize("size", [4.0, 60.0])
def test_rows_whose_scores_outlast_the_mask_are_left_out(size: float) -> None:
    got = shadow_of(at_the_minimum(size, graded_rows=False), "composed", 0, EVERY)
    assert all(math.isfinite(float(excess(got, name).sum())) for name in TENSORS)
    assert not [name for name in TENSORS if over(got, name)]
    got = shadow_of(at_the_minimum(size, graded_rows=True), "composed", 0, EVERY)
    assert not [name for name in TENSORS if over(got, name)]
    assert not any(bool(got[f"shadow_{name}_variance"].any()) for name in ("dk", "dv"))


def test_such_rows_are_not_called_broken() -> None:
    call = at_the_minimum(60.0, graded_rows=True)
    of = laws_rows(given(call, "composed"), 4, 0)
    assert all(beyond(of, law) < LIMITS.z for law in ("a1", "a2", "a3", "a4"))
    verdict = judge(call, LIMITS)
    assert verdict.verdict == NOT_JUDGED and "outlast" in verdict.why


@pytest.mark.parametrize("graded_rows", [False, True])
def test_wrong_padding_counts_where_a_gradient_comes(graded_rows: bool) -> None:
    case = Case("masked", Shape(4, 4, 64, torch.bfloat16, 70, False), mask="minimum")
    inputs = make(case, CPU)
    assert inputs.mask is not None
    unseen = (inputs.mask < 0).all(-1, keepdim=True)
    d_o = inputs.d_o if graded_rows else inputs.d_o.masked_fill(unseen, 0.0)
    call = graded(planted_kernel(""), dataclasses.replace(inputs, d_o=d_o))
    call = dataclasses.replace(call, o=torch.where(unseen, 1.5 * call.o, call.o))
    assert over(shadow_of(call, "fused", 0, EVERY), "o") == graded_rows
