"""Goal: the laws of attention and the shadow check on a GPU are those of the CPU, find planted
faults, and give the same bits each time.  Sums agree to 1e-5, differences to 0.02 of their
standard deviation, variances to 0.5 %.

Method: gradients come from fp64, rounded to the type, so that a right call is known to be right.
Every call is made twice, on copies of the same tensors, by the CPU's kernels, which have tests of
their own, and by the GPU's.  The differences are also computed here, in fp64 by PyTorch.  Without
a GPU of compute capability 8.0 it is skipped (exit status 77), or fails if
BELLWETHER_REQUIRE_GPU is 1.

    laws_gpu_test.py LIBRARY [SUBSTRING ...]
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import sys
from collections.abc import Callable

import torch

import statistics_gpu_test as base  # It says where kernels/bench is.
import attention_calls
import statistics_calls as calls
from statistics_calls import Gradients, ProbeOptions
from statistics_gpu_test import BF16, F16, F32, Lib, Problem, Shape, assert_close

Z = 6.5  # Beyond it a law is broken, in doctor too.
Stats = dict[str, torch.Tensor]


@dataclasses.dataclass
class Graded:
    problem: Problem
    gradients: Gradients  # dq, dk, dv
    exact: Gradients  # the same, and o, before they were rounded
    weight: torch.Tensor  # [batch][heads][q_len] sum of a row's P


def graded(shape: Shape, options: ProbeOptions, seed: int = 0,
           by_token: torch.Tensor | None = None, scale: float = 1.0) -> Graded:
    """scale: of dO."""
    problem = base.make(shape, options, seed=seed, by_token=by_token)
    assert problem.outputs is not None
    v, o, d_o = problem.outputs
    d_o = (d_o.double() * scale).to(shape.dtype)
    problem.outputs = v, o, d_o
    group = shape.heads // shape.kv_heads
    logits = base.scores(problem)
    if options.sinks is not None:
        sink = options.sinks.double()[:, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, sink), -1)
    p = torch.softmax(logits, -1).nan_to_num()[..., :shape.k_len]
    keys, values = (t.double().repeat_interleave(group, 1) for t in (problem.k, v))
    d_p = d_o.double() @ values.mT
    d_s = p * (d_p - (p * d_p).sum(-1, keepdim=True))
    if options.softcap:
        d_s = d_s * (1 - torch.tanh(base.raw_scores(problem) / options.softcap).square())
    factor = 1 / math.sqrt(shape.head_dim)

    def of_keys(t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(1, (-1, group)).sum(2)

    exact = (factor * d_s @ keys, of_keys(factor * d_s.mT @ problem.q.double()),
             of_keys(p.mT @ d_o.double()))
    dq, dk, dv = (t.to(shape.dtype) for t in exact)
    return Graded(problem, (dq, dk, dv), exact, p.sum(-1))


def moved(t: torch.Tensor, device: str) -> torch.Tensor:
    """A copy with the strides of t, which `to` keeps for dense tensors alone."""
    if device == "cpu":
        return t
    whole = t if t._base is None else t._base
    assert whole.is_contiguous()
    return whole.to(device).as_strided(t.shape, t.stride(), t.storage_offset())


def run(lib: Lib, call: Graded, device: str, keys: int | None = None, arithmetic: int = 0,
        times: int = 1) -> Stats:
    """By name, float64 on the CPU; of the laws, or with `keys` of the shadow check."""
    problem = call.problem
    assert problem.outputs is not None
    heads, kv_heads = problem.q.shape[1], problem.k.shape[1]
    if keys is None:
        names, kv_names = calls.LAW_HEAD_STATS, calls.LAW_KV_STATS
    else:
        names, kv_names = (tuple(f"{t}_{of}" for t in pair for of in calls.SHADOW_STATS)
                           for pair in (("o", "dq"), ("dk", "dv")))
    into = (torch.zeros(len(names), heads, device=device),
            torch.zeros(len(kv_names), kv_heads, device=device))
    factors = (torch.zeros(6, heads, device=device), torch.zeros(6, kv_heads, device=device))
    v, o, d_o = (moved(t, device) for t in problem.outputs)
    dq, dk, dv = (moved(t, device) for t in call.gradients)
    q, k = moved(problem.q, device), moved(problem.k, device)
    parts = {f.name: getattr(problem.options, f.name) for f in dataclasses.fields(ProbeOptions)}
    options = ProbeOptions(**{name: part.to(device) if isinstance(part, torch.Tensor) else part
                              for name, part in parts.items()})
    for _ in range(times):
        if keys is None:
            calls.laws(lib, q, k, (v, o, d_o), (dq, dk, dv), options, into, arithmetic)
        else:
            calls.shadow(lib, q, k, (v, o, d_o), (dq, dk, dv), options, into, keys, arithmetic,
                         factors)
    of = dict(zip(names, into[0].double().cpu())) | dict(zip(kv_names, into[1].double().cpu()))
    for pair, rows in zip((("o", "dq"), ("dk", "dv")), factors if keys is not None else ()):
        names = tuple(f"{t}_{stat}" for t in pair for stat in calls.FACTOR_STATS)
        of |= dict(zip(names, rows.double().cpu()))
    return {name: row for name, row in of.items()}


def projections(vectors: torch.Tensor) -> torch.Tensor:
    """[heads][dim] to [8][heads], with the signs that attention_laws.h says."""
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
        return x ^ x >> 31

    dim = vectors.shape[-1]
    signs = torch.tensor([[2.0 * (mix(i * dim + c) & 1) - 1 for c in range(dim)] for i in range(8)])
    return signs.double() @ vectors.mT


def expected_differences(call: Graded) -> Stats:
    """In fp64 from the tensors; A1 and A2 without what sinks do."""
    problem = call.problem
    assert problem.outputs is not None
    v, o, d_o = (t.double() for t in problem.outputs)
    q, k, (dq, dk, dv) = problem.q.double(), problem.k.double(), (t.double() for t in call.gradients)
    kv_heads = k.shape[1]

    def of_group(t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(1, (kv_heads, -1)).sum(2)

    weighted = of_group((call.weight[..., None] * d_o).sum(2))
    a1, a2 = projections(dk.sum((0, 2))), projections((dv.sum(2) - weighted).sum(0))
    found = {f"a1_{i}": a1[i] for i in range(8)} | {f"a2_{i}": a2[i] for i in range(8)}
    found["a3"] = (of_group((q * dq).sum((2, 3))) - (k * dk).sum((2, 3))).sum(0)
    found["a4"] = (of_group((o * d_o).sum((2, 3))) - (v * dv).sum((2, 3))).sum(0)
    return found


def near(name: str, got: torch.Tensor, want: torch.Tensor, relative: float,
         absolute: torch.Tensor | float = 0.) -> None:
    assert_close(name, got, want, relative * want.abs() + absolute + 1e-30)


def bar_of(of: Stats, name: str) -> torch.Tensor:
    """Standard deviations of a law's row."""
    return of[f"{name[:2]}_variance"].sqrt().nan_to_num()


def assert_equal_laws(lib: Lib, call: Graded, what: str, arithmetic: int = 0) -> Stats:
    cpu, gpu = (run(lib, call, device, arithmetic=arithmetic) for device in ("cpu", "cuda"))
    by_sample = call.problem.options.mask_by_sample
    for name, want in cpu.items():
        of, label = name.rpartition("_")[2], f"{name} of {what}"
        if of in ("nonfinite", "left_out", "out"):
            near(label, gpu[name], want, 0)
        elif name in ("a3", "a4") or name[:3] in ("a1_", "a2_") and of.isdigit():
            near(label, gpu[name], want, 1e-5, 0.02 * bar_of(cpu, name))
        elif of == "variance":
            near(label, gpu[name], want, 5e-3)
        elif of == "alike":
            if by_sample and name == "a2_alike":  # Rows with output 0 count more there.
                continue
            near(label, gpu[name], want, 0.02, 0.05 * bar_of(cpu, name))
        elif of == "sum":
            near(label, gpu[name], want, 0, 1e-5 * cpu[f"{name[:2]}_abs"].nan_to_num())
        else:
            near(label, gpu[name], want, 1e-5)
    return gpu


def assert_equal_shadows(lib: Lib, call: Graded, keys: int, what: str, arithmetic: int = 0) -> Stats:
    cpu, gpu = (run(lib, call, device, keys, arithmetic) for device in ("cpu", "cuda"))
    for tensor in ("o", "dq", "dk", "dv"):
        of = {name: cpu[f"{tensor}_{name}"] for name in calls.SHADOW_STATS}
        # fp32 sums stand beside double ones.  Where dS is 0, what is left of them is far below rounding.
        # Where scores are rounded, one near a tie may go up here and down there.
        precision = 2e-5 if call.problem.q.dtype == F32 or arithmetic == 1 else 5e-6
        size = precision * (of["got"] * of["ref"]).sqrt() + 1e-4 * of["variance"]
        for name in ("dot", "got", "ref"):
            near(f"{tensor} {name} of {what}", gpu[f"{tensor}_{name}"], of[name], precision, size)
        near(f"{tensor} variance of {what}", gpu[f"{tensor}_variance"], of["variance"], 5e-3)
        near(f"{tensor} variance_sq of {what}", gpu[f"{tensor}_variance_sq"], of["variance_sq"], 1e-2)
        near(f"{tensor} rest of {what}", gpu[f"{tensor}_rest"], of["rest"], 0.05, 0.05 * of["variance"])
        # In standard deviations: fp32 sums move it by parts of one.
        information = cpu[f"{tensor}_factor_variance"]
        near(f"{tensor} information of {what}", gpu[f"{tensor}_factor_variance"], information, 1e-2, 1e-3)
        for name in ("factor", "factor_alike"):
            near(f"{tensor} {name} of {what}", gpu[f"{tensor}_{name}"], cpu[f"{tensor}_{name}"], 0.05,
                 0.1 * information.sqrt() + 2e-5 * information + 1e-6)
    return gpu


# ---- the laws

SHAPES = [
    *(Shape(head_dim=d, v_dim=d) for d in (32, 64, 80, 96, 128, 192, 256)),
    *(Shape(dtype=F16, head_dim=d, v_dim=d) for d in (64, 128)),
    Shape(heads=8, kv_heads=2, q_len=77, k_len=201), Shape(heads=3, kv_heads=1, q_len=1, k_len=1),
    Shape(q_len=700, k_len=700), Shape(q_len=200, k_len=65, head_dim=128, v_dim=64),
    Shape(head_dim=40, v_dim=72), Shape(head_dim=33, v_dim=5),
    Shape(head_dim=576, v_dim=512, heads=4, kv_heads=1), Shape(head_dim=192, v_dim=128, heads=4),
    Shape(dtype=F32, head_dim=40, v_dim=24), Shape(dtype=F32, q_len=300, k_len=300),
    Shape(batch=5, heads=6, kv_heads=3, q_len=300, k_len=257), Shape(batch=1, q_len=3000, k_len=3000),
]
OPTIONS = [ProbeOptions(), ProbeOptions(causal=True, rows=32), ProbeOptions(causal=True, window=33),
           ProbeOptions(softcap=2.0, rows=20, seed=5, head_offset=3)]


def test_laws_equal_the_cpu(lib: Lib) -> None:
    for shape in SHAPES:
        for options in OPTIONS:
            assert_equal_laws(lib, graded(shape, options), f"{shape} {options}")


def test_differences_are_those_of_fp64(lib: Lib) -> None:
    for shape in (Shape(), Shape(dtype=F16, heads=8, kv_heads=2, q_len=77, k_len=201),
                  Shape(batch=3, q_len=300, k_len=300, head_dim=128, v_dim=96)):
        for options in (ProbeOptions(), ProbeOptions(causal=True, rows=32)):
            call = graded(shape, options)
            gpu = run(lib, call, "cuda")
            for name, want in expected_differences(call).items():
                near(f"{name} of {shape}", gpu[name], want, 1e-5, 0.02 * bar_of(gpu, name))


def test_masks_equal_the_cpu(lib: Lib) -> None:
    for shape in (Shape(), Shape(dtype=F16, heads=4), Shape(heads=8, kv_heads=2, q_len=77, k_len=201),
                  Shape(heads=6, kv_heads=2, q_len=201, k_len=77), Shape(dtype=F32, head_dim=40, v_dim=24),
                  Shape(head_dim=576, v_dim=512, heads=4, kv_heads=1),
                  Shape(batch=3, heads=2, kv_heads=1, q_len=1, k_len=40)):
        for what, options, by_token in base.masks(lib, shape):
            for rows in {options.rows, 32 if not options.mask_by_sample else options.rows}:
                some = dataclasses.replace(options, rows=rows)
                call = graded(shape, some, by_token=by_token)
                assert_equal_laws(lib, call, f"{what}, {rows} rows, {shape}")


def test_composed_equals_the_cpu(lib: Lib) -> None:
    for shape in (Shape(), Shape(dtype=F16, heads=4, q_len=300, k_len=300)):
        call = graded(shape, ProbeOptions(causal=True, rows=32))
        assert_equal_laws(lib, call, f"composed, {shape}", arithmetic=1)


def test_rows_that_see_nothing(lib: Lib) -> None:
    """Blank, NaN and a mean: padding on the right, and more queries than keys."""
    for shape in (Shape(q_len=200, k_len=120), Shape(heads=4, q_len=96, k_len=96)):
        for value in (0.0, math.nan, 0.5):
            for masked in (False, True):
                options = ProbeOptions(causal=not masked)
                if masked:
                    shown = torch.ones(shape.batch, 1, shape.q_len, shape.k_len, dtype=torch.bool)
                    shown[0, :, 30:50] = False
                    options = ProbeOptions(mask=shown, visible=shown.any(2))
                call = graded(shape, options)
                assert call.problem.outputs is not None
                unseen = call.weight == 0
                call.problem.outputs[1][unseen] = value
                if math.isnan(value):
                    call.gradients[0][unseen] = value
                gpu = assert_equal_laws(lib, call, f"unseen rows of {value}, {shape}")
                want = unseen.sum((0, 2)).double() if math.isnan(value) else 0 * gpu["left_out"]
                assert torch.equal(gpu["left_out"], want), (gpu["left_out"], want)


def test_equal_elements_are_rounded_alike(lib: Lib) -> None:
    """Columns that repeat: variances grow with the square of their length."""
    call = graded(Shape(q_len=500, k_len=500), ProbeOptions(rows=32))
    before = run(lib, call, "cuda")
    for t in call.gradients:
        t[:, :, 1:] = t[:, :, :1]
    after = assert_equal_laws(lib, call, "columns that repeat")
    assert bool((after["a1_variance"] > 10 * before["a1_variance"]).all())


def test_nonfinite_elements_are_counted_exactly(lib: Lib) -> None:
    for dtype in (BF16, F16, F32):
        for value in (math.nan, math.inf):
            for place, name in enumerate(("dq", "dk", "dv", "do")):
                call = graded(Shape(dtype=dtype, heads=4), ProbeOptions(causal=True, rows=32))
                assert call.problem.outputs is not None
                of = call.gradients[place] if place < 3 else call.problem.outputs[2]
                of[1, 1, 5:9, 3] = value
                gpu = run(lib, call, "cuda")
                assert gpu[f"{name}_nonfinite"].tolist()[:2] == [0, 4], (name, gpu[f"{name}_nonfinite"])
                assert gpu[f"{name}_sum"][1].isnan() and not gpu[f"{name}_sum"][0].isnan()
                cpu = run(lib, call, "cpu")
                for stat in cpu:
                    assert torch.equal(cpu[stat].isfinite(), gpu[stat].isfinite()), (stat, name)


def test_tiny_gradients_keep_their_variance(lib: Lib) -> None:
    for scale in (1e-6, 1e-12):
        gpu = assert_equal_laws(lib, graded(Shape(), ProbeOptions(rows=32), scale=scale), f"dO of {scale}")
        assert bool((gpu["a3_variance"] > 0).all())


# ---- the shadow check

SHADOW_SHAPES = [
    *(Shape(head_dim=d, v_dim=d) for d in (32, 64, 128, 192, 256)),
    Shape(dtype=F16, heads=4), Shape(dtype=F32, q_len=200, k_len=200),
    Shape(heads=8, kv_heads=2, q_len=77, k_len=201), Shape(heads=3, kv_heads=1, q_len=1, k_len=1),
    Shape(q_len=200, k_len=65, head_dim=128, v_dim=64), Shape(head_dim=40, v_dim=72),
    Shape(head_dim=33, v_dim=5), Shape(head_dim=576, v_dim=512, heads=4, kv_heads=1),
    Shape(batch=1, q_len=1500, k_len=1500),
]


def test_shadows_equal_the_cpu(lib: Lib) -> None:
    for shape in SHADOW_SHAPES:
        for options in (*OPTIONS, ProbeOptions(causal=True, rows=9, seed=77)):
            for keys in (0, 5, 1 << 20):
                call = graded(shape, options)
                assert_equal_shadows(lib, call, keys, f"{keys} keys, {shape} {options}")


def test_masked_shadows_equal_the_cpu(lib: Lib) -> None:
    for shape in (Shape(), Shape(heads=8, kv_heads=2, q_len=77, k_len=201),
                  Shape(heads=6, kv_heads=2, q_len=201, k_len=77)):
        for what, options, by_token in base.masks(lib, shape):
            keys = 0 if options.mask_by_sample else 7
            call = graded(shape, options, by_token=by_token)
            assert_equal_shadows(lib, call, keys, f"{what}, {shape}")


def test_composed_shadows_equal_the_cpu(lib: Lib) -> None:
    call = graded(Shape(heads=4), ProbeOptions(causal=True, rows=20))
    assert_equal_shadows(lib, call, 7, "composed", 1)


def test_rows_that_see_nothing_pass_the_softcap(lib: Lib) -> None:
    """Of keys that are all hidden comes a mean; what it passes back bends as scores do."""
    hidden = torch.zeros(2, 1, 128, 128)
    hidden[0, :, 40:60] = torch.finfo(torch.float32).min
    for dtype in (BF16, F32):
        call = graded(Shape(dtype=dtype, heads=4), ProbeOptions(mask=hidden, visible=(hidden == 0).any(2), softcap=2.0))
        assert_equal_shadows(lib, call, 1 << 20, f"unseen rows under a softcap, {dtype}")


def test_rows_whose_scores_outlast_the_mask_are_left_out(lib: Lib) -> None:
    hidden = torch.zeros(2, 1, 128, 128)
    hidden[0, :, 40:60] = torch.finfo(torch.float32).min
    options = ProbeOptions(mask=hidden, visible=(hidden == 0).any(2))
    variance = {}
    for with_gradients in (False, True):
        call = graded(Shape(dtype=F16, heads=4), options)
        assert call.problem.outputs is not None
        if not with_gradients:
            call.problem.outputs[2][0, :, 40:60] = 0
            assert_equal_laws(lib, call, "rows without a gradient", arithmetic=1)
        gpu = assert_equal_shadows(lib, call, 1 << 20, f"gradients: {with_gradients}", arithmetic=1)
        variance[with_gradients] = gpu["dv_variance"]
        assert bool((gpu["o_variance"] > 0).all())
    # Of the sequence with such rows no key is compared, where a gradient comes to them.
    assert bool((variance[True] < 0.7 * variance[False]).all()), variance


def test_gradients_that_underflow_equal_the_cpu(lib: Lib) -> None:
    for scale in (1e-3, 1e-5, 1e-7):
        for head_dim in (64, 128):
            for arithmetic in (0, 1):
                shape = Shape(dtype=F16, heads=4, q_len=300, k_len=300, head_dim=head_dim, v_dim=head_dim)
                call = graded(shape, ProbeOptions(rows=32), scale=scale)
                what = f"dO of {scale}, {head_dim}, {arithmetic}"
                assert_equal_laws(lib, call, what, arithmetic)
                assert_equal_shadows(lib, call, 7, what, arithmetic)


def test_right_results_differ_by_rounding_alone(lib: Lib) -> None:
    """Gradients of fp64 have half of the variance of two roundings, and none of those inside."""
    for dtype in (BF16, F16):
        call = graded(Shape(dtype=dtype, heads=4, q_len=300, k_len=300), ProbeOptions(rows=64))
        gpu = run(lib, call, "cuda", keys=64)
        for tensor in ("o", "dq", "dk", "dv"):
            excess = gpu[f"{tensor}_rest"] / gpu[f"{tensor}_variance"]
            assert bool((excess < 1).all()), (tensor, excess)
            cosine = gpu[f"{tensor}_dot"] / (gpu[f"{tensor}_got"] * gpu[f"{tensor}_ref"]).sqrt()
            assert bool((cosine > 0.9999).all()), (tensor, cosine)


def test_rows_that_are_not_finite_are_left_to_the_counts(lib: Lib) -> None:
    call = graded(Shape(heads=4), ProbeOptions())
    for place in range(3):
        call.gradients[place][1, 1, 5:9, 3] = math.nan
    assert_equal_shadows(lib, call, 1 << 20, "with NaN")


# ---- planted faults


def over(of: Stats, law: str) -> torch.Tensor:
    """[kv_heads]: standard deviations beyond what roundings that are all alike can do."""
    rows = torch.stack([of[f"{law}_{i}"] for i in range(8)]) if law in ("a1", "a2") else of[law][None]
    beyond = (rows.abs() - of[f"{law}_alike"]).clamp(min=0).amax(0)
    return beyond / of[f"{law}_variance"].sqrt()


def slack(of: Stats, name: str) -> torch.Tensor:
    """A factor is what differences leave that nearly cancel: parts of its standard deviation."""
    if "_factor" not in name or name.endswith("_variance"):
        return torch.zeros_like(of[name])
    return 0.05 * of[f"{name.split('_')[0]}_factor_variance"].sqrt()


def plant(call: Graded, fault: str) -> None:
    dq, dk, dv = call.gradients
    if fault == "dq_times_five_in_a_sequence":
        dq[-1] *= 5
    elif fault == "dq_negated_in_a_head":
        dq[:, 2] *= -1
    elif fault == "dk_of_heads_exchanged":
        dk[:, [0, 1]] = dk[:, [1, 0]]
    elif fault == "dk_tail_not_written":
        dk[:, 1, -37:] = 0
    elif fault == "dv_two_percent_large":
        dv[:, 3] *= 1.02
    elif fault == "dq_four_percent_large":
        dq[:, 3] *= 1.04


FAULTS = {  # -> laws that break, key heads
    "": ((), ()),
    "dq_times_five_in_a_sequence": (("a3",), (0, 1, 2, 3)),
    "dq_negated_in_a_head": (("a3",), (2,)),
    "dk_of_heads_exchanged": (("a3",), (0, 1)),
    "dk_tail_not_written": (("a1",), (1,)),
    "dv_two_percent_large": (("a2",), (3,)),
}


def test_planted_faults_break_their_laws(lib: Lib) -> None:
    """Every row is sampled; and healthy calls never break one, with few rows either."""
    for dtype in (BF16, F16):
        for fault, (broken, heads) in FAULTS.items():
            call = graded(Shape(dtype=dtype, heads=4, kv_heads=4, q_len=512, k_len=512), ProbeOptions())
            plant(call, fault)
            of = run(lib, call, "cuda")
            z = {law: over(of, law) for law in ("a1", "a2", "a3", "a4")}
            print(f"     {fault or 'right'} {dtype}: "
                  + " ".join(f"{law} {x.max():.1f}" for law, x in z.items()), flush=True)
            for law in broken:
                assert bool((z[law][list(heads)] > Z).all()), (fault, law, z[law])
            rest = [head for head in range(4) if head not in heads]
            assert all(bool((x[rest] < Z).all()) for x in z.values()), (fault, z)
    for rows in (16, 32, 64):
        for seed in range(5):
            options = ProbeOptions(causal=seed % 2 == 0, rows=rows)
            of = run(lib, graded(Shape(heads=4, q_len=400, k_len=400), options, seed=seed), "cuda")
            for law in ("a1", "a2", "a3", "a4"):
                assert bool((over(of, law) < Z).all()), (rows, seed, law, over(of, law))


def test_the_shadow_check_names_the_tensor(lib: Lib) -> None:
    for fault, tensor, head in (("dq_four_percent_large", "dq", 3), ("dv_two_percent_large", "dv", 3),
                                ("dk_tail_not_written", "dk", 1), ("dq_negated_in_a_head", "dq", 2)):
        call = graded(Shape(heads=4, kv_heads=4, q_len=512, k_len=512), ProbeOptions(rows=32))
        plant(call, fault)
        of = run(lib, call, "cuda", keys=32)
        for name in ("o", "dq", "dk", "dv"):
            excess = of[f"{name}_rest"] / of[f"{name}_variance"]
            print(f"     {fault}: excess of {name} " + " ".join(f"{x:.2f}" for x in excess.tolist()), flush=True)
            for at, x in enumerate(excess.tolist()):
                assert (x > 2) == (name == tensor and at == head), (fault, name, excess)


def test_a_factor_near_one_names_the_tensor(lib: Lib) -> None:
    for dtype in (BF16, F16):
        for place, by, tensor in ((0, 1.02, "dq"), (1, 0.98, "dk"), (2, 1.01, "dv")):
            call = graded(Shape(heads=4, kv_heads=4, q_len=512, k_len=512, dtype=dtype), ProbeOptions(rows=32))
            of_head = call.gradients[place][:, 3]
            of_head.copy_((of_head.double() * by).to(dtype))
            of = run(lib, call, "cuda", keys=16)
            for name in ("o", "dq", "dk", "dv"):
                rest = (of[f"{name}_factor"].abs() - of[f"{name}_factor_alike"]).clamp(min=0)
                z = (rest / of[f"{name}_factor_variance"].sqrt()).tolist()
                print(f"     {tensor} times {by}: z of {name} " + " ".join(f"{x:.2f}" for x in z), flush=True)
                for at, x in enumerate(z):
                    assert x > Z if name == tensor and at == 3 else x < Z, (tensor, name, z)


# ---- the rest


def test_a_call_gives_the_same_bits_each_time(lib: Lib) -> None:
    for shape in (Shape(batch=5, heads=6, kv_heads=3, q_len=300, k_len=257), Shape(q_len=3000, k_len=3000)):
        call = graded(shape, ProbeOptions(causal=True, rows=32))
        for keys in (None, 5):
            first = run(lib, call, "cuda", keys=keys)
            for _ in range(5):
                again = run(lib, call, "cuda", keys=keys)
                for name, row in first.items():
                    assert torch.equal(row, again[name]), (name, row, again[name])


def test_outputs_are_added_to(lib: Lib) -> None:
    call = graded(Shape(), ProbeOptions(causal=True, rows=32))
    for keys in (None, 5):
        once, twice = run(lib, call, "cuda", keys=keys), run(lib, call, "cuda", keys=keys, times=2)
        for name, row in once.items():
            near(name, twice[name], 2 * row, 1e-6)


def test_rows_and_heads_may_lie_anywhere(lib: Lib) -> None:
    """[batch][token][head][channel], and rows that no 16-byte load can take."""
    for pad in (0, 1):
        call = graded(Shape(heads=4, kv_heads=2), ProbeOptions(causal=True, rows=32))
        want, shadows = run(lib, call, "cuda"), run(lib, call, "cuda", keys=5)

        def turned(t: torch.Tensor, pad: int = pad) -> torch.Tensor:
            b, h, n, d = t.shape
            wide = d + pad
            whole = torch.zeros(b, n, h, wide, dtype=t.dtype)
            whole[..., pad:] = t.transpose(1, 2)
            return whole.as_strided((b, h, n, d), (n * h * wide, wide, h * wide, 1), pad)

        problem = call.problem
        assert problem.outputs is not None
        problem.q, problem.k = turned(problem.q), turned(problem.k)
        v, o, d_o = problem.outputs
        problem.outputs = turned(v), turned(o), turned(d_o)
        dq, dk, dv = call.gradients
        call.gradients = turned(dq), turned(dk), turned(dv)
        got = assert_equal_laws(lib, call, f"turned, pad {pad}")
        for name, row in want.items():
            near(name, got[name], row, 1e-5, 1e-3 * (bar_of(want, name) if name[0] == "a" else row.abs()))
        got = assert_equal_shadows(lib, call, 5, f"turned, pad {pad}")
        for name, row in shadows.items():
            near(name, got[name], row, 1e-3, slack(shadows, name))


def test_all_ranks_sample_the_same_rows_and_keys(lib: Lib) -> None:
    """Two ranks with half of the heads each add what one with all of them does."""
    o = ProbeOptions(causal=True, rows=9, seed=77)
    whole = graded(Shape(heads=4, kv_heads=4), o)
    for keys in (None, 5):
        want = run(lib, whole, "cuda", keys=keys)
        for rank in range(2):
            mine = slice(2 * rank, 2 * rank + 2)
            part = copy.copy(whole)
            part.problem = copy.copy(whole.problem)
            assert whole.problem.outputs is not None
            part.problem.q, part.problem.k = (t[:, mine].clone() for t in (whole.problem.q, whole.problem.k))
            v, out, d_o = (t[:, mine].clone() for t in whole.problem.outputs)
            part.problem.outputs = v, out, d_o
            dq, dk, dv = (t[:, mine].clone() for t in whole.gradients)
            part.gradients = dq, dk, dv
            part.problem.options = dataclasses.replace(o, head_offset=2 * rank)
            for name, row in run(lib, part, "cuda", keys=keys).items():
                few = 1e-3 * want[name].abs() + 1e-12 + slack(want, name)
                near(name, row, want[name][mine], 1e-4, few[mine])


def test_a_gate_decides_when_the_graph_runs(lib: Lib) -> None:
    """Shut, nothing is written; open, the rows are those of the seed that it gives."""
    call = graded(Shape(q_len=500, k_len=500), ProbeOptions(causal=True, rows=9, seed=3))
    problem = call.problem
    assert problem.outputs is not None
    q, k, v, o, d_o, dq, dk, dv = (t.cuda() for t in (problem.q, problem.k, *problem.outputs, *call.gradients))
    gate = torch.zeros(2, dtype=torch.int64, device="cuda")
    options = dataclasses.replace(problem.options, gate=gate)
    sums = [torch.zeros(len(calls.LAW_HEAD_STATS), 2, device="cuda"),
            torch.zeros(len(calls.LAW_KV_STATS), 2, device="cuda"),
            torch.zeros(12, 2, device="cuda"), torch.zeros(12, 2, device="cuda")]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls.laws(lib, q, k, (v, o, d_o), (dq, dk, dv), options, (sums[0], sums[1]))
        calls.shadow(lib, q, k, (v, o, d_o), (dq, dk, dv), options, (sums[2], sums[3]), 5)
    graph.replay()
    assert not any(bool(t.any()) for t in sums)
    for seed in (0, 1 << 40):
        gate[0], gate[1] = 1, seed
        for t in sums:
            t.zero_()
        graph.replay()
        problem.options = dataclasses.replace(problem.options, seed=3 + seed)
        for keys, (heads, kv_heads) in ((None, (sums[0], sums[1])), (5, (sums[2], sums[3]))):
            want = list(run(lib, call, "cuda", keys=keys).values())[: len(heads) + len(kv_heads)]
            got = [*heads.double().cpu(), *kv_heads.double().cpu()]
            for mine, theirs in zip(got, want):
                assert torch.equal(mine, theirs), (mine, theirs)


def test_refusals_name_field_value_and_range(lib: Lib) -> None:
    def refusal(call: Callable[[], object]) -> str:
        try:
            call()
        except RuntimeError as error:
            return str(error)
        raise AssertionError("was not refused")

    wide = graded(Shape(head_dim=584, v_dim=8), ProbeOptions())
    assert "head_dim is 584, but at most 576" in refusal(lambda: run(lib, wide, "cuda"))
    call = graded(Shape(), ProbeOptions(rows=9))
    for keys in (None, 0):
        said = refusal(lambda keys=keys: run(lib, call, "cuda", keys=keys, arithmetic=2))
        assert "arithmetic is 2, but at most 1" in said, said


def main() -> int:
    why = base.missing_gpu()
    if why:
        print(f"skipped: {why}")
        return 1 if os.environ.get("BELLWETHER_REQUIRE_GPU") == "1" else 77
    lib = attention_calls.load(sys.argv[1])
    wanted = sys.argv[2:]
    failed = 0
    for name, test in list(globals().items()):
        if not name.startswith("test_") or (wanted and not any(w in name for w in wanted)):
            continue
        try:
            test(lib)
            torch.cuda.synchronize()
            print(f"ok   {name}", flush=True)
        except (AssertionError, RuntimeError) as error:
            failed += 1
            print(f"FAIL {name}: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
