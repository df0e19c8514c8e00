"""Goal: the statistics on a GPU are those of the CPU.  Counts agree exactly, but for rows within
float32 rounding of a threshold; sums to 1e-5; the signed bias to 1e-3 of the sum of absolute
values.  A captured graph adds what the calls would.

Method: every call is made twice, on copies of the same tensors, by the CPU's kernels, which
have tests of their own, and by the GPU's.  NaN must be in the same places.  Without a GPU
of compute capability 8.0 it is skipped (exit status 77), or fails if
BELLWETHER_REQUIRE_GPU is 1.

    statistics_gpu_test.py LIBRARY [SUBSTRING ...]
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
import pathlib
import sys
from typing import Callable

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "kernels" / "bench"))
import attention_calls  # noqa: E402
import statistics_calls as calls  # noqa: E402
from statistics_calls import Probed, ProbeOptions, Spectrum  # noqa: E402

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
Lib = ctypes.CDLL
Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
COUNTS = ("rows", "saturated", "nonfinite")
TIES = ("tied_bf16", "tied_eps", "tied_paper")
SUMS = ("common_mode", "spread", "entropy", "sink", "delta_abs", "logit_max", "coherence",
        "sequences")


@dataclasses.dataclass(frozen=True)
class Shape:
    dtype: torch.dtype = BF16
    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    q_len: int = 128
    k_len: int = 128
    head_dim: int = 64
    v_dim: int = 64


@dataclasses.dataclass
class Problem:
    q: torch.Tensor
    k: torch.Tensor
    outputs: Outputs | None  # v, o, d_o
    options: ProbeOptions
    by_token: torch.Tensor | None = None


def randn(*shape: int) -> torch.Tensor:
    """The same on every machine: made on the CPU."""
    return torch.randn(*shape)


def raw_scores(problem: Problem) -> torch.Tensor:
    """[batch][heads][q_len][k_len] in float64, before the cap."""
    group = problem.q.shape[1] // problem.k.shape[1]
    keys = problem.k.double().repeat_interleave(group, dim=1)
    return problem.q.double() @ keys.transpose(-1, -2) / math.sqrt(problem.q.shape[-1])


def in_ranges(o: ProbeOptions, batch: int, n: int, m: int) -> torch.Tensor:
    """[batch][1][n][m]: what causality, windows and ranges allow."""
    row, key = torch.arange(n)[:, None] + (0 if o.top_left else m - n), torch.arange(m)[None]
    allowed = torch.ones(batch, 1, n, m, dtype=torch.bool)
    if o.ranges is not None:
        begin, end, row = (o.ranges[..., i][:, None, :, None] for i in range(3))
        allowed = allowed & (key >= begin) & (key < end)
    if o.causal:
        allowed = allowed & (key <= row)
    if o.window:
        allowed = allowed & (key > row - o.window)
    if o.window_right:
        allowed = allowed & (key < row + o.window_right)
    return allowed


def scores(problem: Problem) -> torch.Tensor:
    """Capped, masked with -inf; a mask by sampled row is written out in problem.by_token."""
    s, o = raw_scores(problem), problem.options
    if o.softcap:
        s = o.softcap * torch.tanh(s / o.softcap)
    s = s.masked_fill(~in_ranges(o, s.shape[0], *s.shape[2:]), -math.inf)
    mask = problem.by_token if o.mask_by_sample else o.mask
    if mask is None:
        return s
    return s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask.double()


def make(shape: Shape, options: ProbeOptions, integers: bool = False, delta: bool = True,
         seed: int = 0, by_token: torch.Tensor | None = None) -> Problem:
    """On the CPU; o is the attention's output rounded to the type, as an op returns it."""
    torch.manual_seed(seed)
    s = shape

    def fill(heads: int, tokens: int, dim: int) -> torch.Tensor:
        of = (s.batch, heads, tokens, dim)
        return (torch.randint(-2, 3, of).to(s.dtype) if integers else randn(*of).to(s.dtype))

    problem = Problem(fill(s.heads, s.q_len, s.head_dim), fill(s.kv_heads, s.k_len, s.head_dim),
                      None, options, by_token)
    problem.k += 1  # a common mode
    if delta:
        v, d_o = fill(s.kv_heads, s.k_len, s.v_dim), fill(s.heads, s.q_len, s.v_dim)
        logits = scores(problem)
        if options.sinks is not None:
            sink = options.sinks.double()[:, None, None].expand(*logits.shape[:3], 1)
            logits = torch.cat((logits, sink), -1)
        p = torch.softmax(logits, -1).nan_to_num()[..., :s.k_len]
        o = p @ v.double().repeat_interleave(s.heads // s.kv_heads, dim=1)
        problem.outputs = v, o.to(s.dtype), d_o
    return problem


def run(lib: Lib, problem: Problem, device: str, times: int = 1) -> Probed:
    into = Probed.fresh(problem.q.shape[1], problem.k.shape[1], device)

    def there(t: torch.Tensor) -> torch.Tensor:
        """A copy with the strides of t, which `to` keeps for dense tensors alone."""
        if device == "cpu":
            return t
        base = t if t._base is None else t._base
        assert base.is_contiguous()
        return base.to(device).as_strided(t.shape, t.stride(), t.storage_offset())

    outputs = problem.outputs
    if outputs is not None:
        outputs = there(outputs[0]), there(outputs[1]), there(outputs[2])
    parts = {f.name: getattr(problem.options, f.name) for f in dataclasses.fields(ProbeOptions)}
    options = ProbeOptions(**{name: part.to(device) if isinstance(part, torch.Tensor) else part
                              for name, part in parts.items()})
    for _ in range(times):
        calls.probe(lib, there(problem.q), there(problem.k), outputs, options, into)
    return into


def near_threshold(problem: Problem) -> dict[str, torch.Tensor]:
    """How many rows of each head float32 rounding of the scores may move over a threshold."""
    top = scores(problem).topk(min(2, problem.k.shape[2]), dim=-1).values
    first, second = top[..., 0], top[..., -1]
    room = 2e-6 * raw_scores(problem).abs().amax(-1) + 1e-12

    def verdicts(rule: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        said = [rule((first + a * room).float(), (second + b * room).float())
                for a in (-1, 0, 1) for b in (-1, 0, 1)]
        differ = torch.stack(said).any(0) & ~torch.stack(said).all(0)
        return differ.sum((0, 2)).double()

    return {"tied_bf16": verdicts(lambda a, b: a.to(BF16) == b.to(BF16)),
            "tied_eps": verdicts(lambda a, b: b.double() >= a.double() - 1.955e-3),
            "tied_paper": verdicts(lambda a, b: b.double() >= a.double() - 1e-3)}


def same_nans(name: str, cpu: torch.Tensor, gpu: torch.Tensor) -> None:
    assert torch.equal(cpu.isnan(), gpu.isnan()), f"{name}: {gpu} but {cpu} on the CPU"


def assert_close(name: str, gpu: torch.Tensor, cpu: torch.Tensor, bar: torch.Tensor) -> None:
    same_nans(name, cpu, gpu)
    off = torch.where((gpu == cpu) | cpu.isnan(), 0, (gpu - cpu).abs())
    assert bool((off <= bar).logical_or(cpu.isnan()).all()), \
        f"{name}: off by {off} with {bar} allowed; {gpu} but {cpu} on the CPU"


def assert_equal_statistics(lib: Lib, problem: Problem, what: str, exact: bool = False) -> Probed:
    cpu, gpu = run(lib, problem, "cpu"), run(lib, problem, "cuda")
    near = {} if exact else near_threshold(problem)
    for name in COUNTS:
        assert_close(f"{name} of {what}", gpu.of(name), cpu.of(name), torch.tensor(0.))
    for name in TIES:
        assert_close(f"{name} of {what}", gpu.of(name), cpu.of(name),
                     near.get(name, torch.tensor(0.)))
    for name in SUMS:
        assert_close(f"{name} of {what}", gpu.of(name), cpu.of(name),
                     1e-5 * cpu.of(name).abs() + 1e-9)
    # What float32 leaves of e where O itself is that precise; else one rounding of each row's sum.
    precise = problem.q.dtype == F32 or problem.k.shape[2] == 1
    floor = (1e-5 if precise else 0.) * cpu.of("delta_abs")
    if problem.outputs is not None and not precise:
        _, o, d_o = problem.outputs
        size = (o.double() * d_o.double()).abs().nan_to_num(posinf=0.).sum((0, 2, 3))
        floor = 2**-24 * size * cpu.of("rows") / (o.shape[0] * o.shape[2])
    size = cpu.of("error_abs")
    assert_close(f"bias of {what}", gpu.of("bias"), cpu.of("bias"), 1e-3 * size + floor)
    assert_close(f"error_abs of {what}", gpu.of("error_abs"), size, 1e-3 * size + floor)
    assert_close(f"bias_sq of {what}", gpu.of("bias_sq"), cpu.of("bias_sq"),
                 4e-3 * cpu.of("bias_sq") + 1e-5 * floor)
    return gpu


# ---- the probe

SHAPES = [
    *(Shape(head_dim=d, v_dim=d) for d in (32, 64, 96, 128, 192, 256)),
    *(Shape(dtype=t, head_dim=d, v_dim=d) for t in (F16, F32) for d in (32, 64, 128, 256)),
    Shape(heads=8, kv_heads=2, q_len=77, k_len=201), Shape(heads=3, kv_heads=1, q_len=1, k_len=1),
    Shape(q_len=1000, k_len=1000), Shape(q_len=200, k_len=65, head_dim=128, v_dim=64),
    Shape(head_dim=40, v_dim=72), Shape(head_dim=33, v_dim=5),
    Shape(dtype=F32, head_dim=7, v_dim=9),
    Shape(batch=1, heads=1, kv_heads=1, q_len=64, k_len=5000),
]
OPTIONS = [
    ProbeOptions(), ProbeOptions(causal=True), ProbeOptions(causal=True, window=33),
    ProbeOptions(window=70, rows=20, seed=5, head_offset=3), ProbeOptions(softcap=2.0),
    ProbeOptions(causal=True, softcap=5.0, rows=17, seed=1 << 60),
]


def test_probe_equals_the_cpu(lib: Lib) -> None:
    for shape in SHAPES:
        for options in OPTIONS:
            problem = make(shape, options)
            assert_equal_statistics(lib, problem, f"{shape} {options}")


# ---- masks


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Hidden by -inf or by the type's least number, else a normal bias."""
    least = torch.where(torch.rand(mask.shape) < 0.5, -math.inf, torch.finfo(F16).min)
    return torch.where(mask, 2 * torch.randn(mask.shape), least).to(dtype)


def masks(lib: Lib, s: Shape) -> list[tuple[str, ProbeOptions, torch.Tensor | None]]:
    """(what, options, the mask by token if that of the options is by sampled row)."""
    torch.manual_seed(11)
    row = torch.arange(s.q_len)
    documents = torch.stack([row // 37 * 37, row // 37 * 37 + 37, row], -1).int()[None]
    left = torch.tensor([[[i + s.k_len // 3, s.k_len, 0]] for i in range(s.batch)]).int()
    padded = left.expand(s.batch, s.q_len, 3).clone()
    padded[..., 2] = row + s.k_len - s.q_len
    padding = torch.ones(s.batch, 1, 1, s.k_len, dtype=torch.bool)
    padding[0, ..., s.k_len // 2:] = False
    some = torch.rand(s.batch, 1, s.q_len, s.k_len) < 0.7
    by_head = torch.rand(1, s.heads, s.q_len, s.k_len) < 0.1
    by_head[..., s.k_len // 2:s.k_len // 2 + 3] = False
    each = torch.rand(s.batch, s.heads, s.q_len, s.k_len) < 0.5
    sinks = torch.linspace(-3, 6, s.heads)
    rows = min(9, s.q_len)
    sample = lib.bw_probe_sampled_row
    sample.restype, sample.argtypes = ctypes.c_int64, [ctypes.c_uint64] * 6
    at = torch.tensor([[[sample(5, b, h, i, rows, s.q_len) for i in range(rows)]
                        for h in range(s.heads)] for b in range(s.batch)])
    sampled = each.gather(2, at[..., None].expand(-1, -1, -1, s.k_len))
    O = ProbeOptions
    some_causal = O(causal=True, mask=some & padding, softcap=3.0, sinks=sinks)
    found: list[tuple[str, ProbeOptions, torch.Tensor | None]] = [
        ("top left", O(causal=True, top_left=True), None),
        ("both windows", O(window=9, window_right=5), None),
        ("top left windows", O(top_left=True, window=30, window_right=1, rows=9), None),
        ("documents", O(causal=True, ranges=documents), None),
        ("documents in windows", O(window=5, ranges=documents, rows=9, seed=5), None),
        ("padding on the left", O(ranges=left), None),
        ("causal padding", O(causal=True, ranges=padded), None),
        ("key padding", O(causal=True, mask=padding), None),
        ("bool", O(mask=some & padding), None),
        ("bool and more", some_causal, None),
        ("bool by head", O(mask=by_head), None),
        ("turned", O(mask=some.transpose(2, 3).contiguous().transpose(2, 3)), None),
        *((f"bias {t}", O(mask=additive(some & padding, t), rows=9), None) for t in (BF16, F16, F32)),
        ("bias by head", O(mask=additive(by_head | some[:1], BF16), causal=True, ranges=padded,
                           softcap=2.0), None),
        ("by sample", O(mask=sampled, mask_by_sample=True, rows=rows, seed=5), each),
        ("sinks", O(causal=True, sinks=sinks), None),
        ("large sinks", O(sinks=torch.full((s.heads,), 200.)), None),
        ("a sink that is none", O(sinks=torch.full((s.heads,), -math.inf), mask=some), None),
    ]
    return [(what, dataclasses.replace(o, visible=visible_keys(o, s, by_token)), by_token)
            for what, o, by_token in found]


def visible_keys(o: ProbeOptions, s: Shape, by_token: torch.Tensor | None) -> torch.Tensor | None:
    """[batch][heads or 1][k_len]; None where V follows from the plain parts."""
    mask = o.mask if by_token is None else by_token
    if mask is None and o.ranges is None:
        return None
    allowed = in_ranges(o, s.batch, s.q_len, s.k_len)
    if mask is not None:
        allowed = allowed & (mask if mask.dtype == torch.bool else mask > -10000)
    return allowed.any(2)


MASK_SHAPES = [
    Shape(), Shape(dtype=F16, heads=4), Shape(dtype=F32, head_dim=40, v_dim=24),
    Shape(heads=8, kv_heads=2, q_len=77, k_len=201), Shape(dtype=F32, heads=6, kv_heads=2, q_len=201, k_len=77),
    Shape(batch=1, q_len=700, k_len=700), Shape(head_dim=192, v_dim=128, heads=4),
    Shape(head_dim=576, v_dim=512, heads=4, kv_heads=1), Shape(dtype=F32, head_dim=300, v_dim=264),
    Shape(batch=3, heads=2, kv_heads=1, q_len=1, k_len=40),
]


def test_masks_equal_the_cpu(lib: Lib) -> None:
    for shape in MASK_SHAPES:
        for what, options, by_token in masks(lib, shape):
            problem = make(shape, options, by_token=by_token)
            assert_equal_statistics(lib, problem, f"{what}, {shape}")


def test_drift_alone_under_masks(lib: Lib) -> None:
    for shape in (*MASK_SHAPES, Shape(dtype=F32, head_dim=576)):
        for what, options, by_token in masks(lib, shape):
            problem = make(shape, options, delta=False, by_token=by_token)
            whole = run(lib, problem, "cuda")
            problem.options = dataclasses.replace(options, drift_only=True)
            cpu, gpu = run(lib, problem, "cpu"), run(lib, problem, "cuda")
            for name in ("rows", "common_mode", "spread", "nonfinite", *calls.KV_STATS):
                bar = 1e-5 * cpu.of(name).abs() + 1e-9
                assert_close(f"{name} of {what}, {shape}", gpu.of(name), cpu.of(name), bar)
                assert_close(f"whole {name} of {what}", gpu.of(name), whole.of(name), bar)


def test_keys_outside_v_are_not_looked_at(lib: Lib) -> None:
    for dtype in (BF16, F32):
        shape = Shape(dtype=dtype, heads=4)
        for what, options, by_token in masks(lib, shape):
            if options.visible is None:
                continue
            problem = make(shape, options, by_token=by_token)
            clean = run(lib, problem, "cuda")
            seen = options.visible.expand(shape.batch, shape.heads, shape.k_len)
            unseen = ~seen.unflatten(1, (shape.kv_heads, -1)).any(2)
            assert problem.outputs is not None
            problem.k[unseen] = math.nan
            problem.outputs[0][unseen] = math.inf
            cpu, dirty = run(lib, problem, "cpu"), run(lib, problem, "cuda")
            for name in (*calls.PROBE_STATS, *calls.KV_STATS):
                bar = 1e-6 * clean.of(name).abs() + 1e-9
                assert_close(f"{name} of {what}", dirty.of(name), clean.of(name), bar)
                same_nans(f"{name} of {what}", cpu.of(name), dirty.of(name))


def test_nonfinite_masks_and_sinks(lib: Lib) -> None:
    """A NaN or infinite bias makes one row non-finite, such a sink all of its head."""
    for dtype in (BF16, F32):
        shape = Shape(dtype=dtype)
        bias = torch.zeros(shape.batch, 1, shape.q_len, shape.k_len)
        bias[0, 0, 7, 9], bias[1, 0, 8, 100] = math.nan, math.inf
        visible = torch.ones(1, 1, shape.k_len, dtype=torch.bool)
        for sink in (0., math.nan, math.inf):
            for drift_only in (False, True):
                sinks = torch.tensor([0., sink])
                options = ProbeOptions(mask=bias, visible=visible, sinks=sinks, drift_only=drift_only)
                problem = make(shape, options, delta=False)
                cpu, gpu = run(lib, problem, "cpu"), run(lib, problem, "cuda")
                assert cpu.of("nonfinite").tolist() == [2, 2 if sink == 0 else 256]
                for name in (*COUNTS, *SUMS):
                    bar = 1e-5 * cpu.of(name).abs() + 1e-9
                    assert_close(f"{name}, sink {sink}", gpu.of(name), cpu.of(name), bar)


def test_ties_are_counted_exactly_where_scores_are_exact(lib: Lib) -> None:
    """Small integers: S is exact in any order of summation."""
    for dtype in (BF16, F16, F32):
        for causal in (False, True):
            shape = Shape(dtype=dtype, heads=4, q_len=300, k_len=300, head_dim=64)
            problem = make(shape, ProbeOptions(causal=causal), integers=True)
            gpu = assert_equal_statistics(lib, problem, f"integers {dtype}", exact=True)
            assert bool((gpu.of("tied_bf16") > 0).all())


def test_without_outputs_the_delta_sums_stay(lib: Lib) -> None:
    for dtype in (BF16, F16, F32):
        problem = make(Shape(dtype=dtype), ProbeOptions(causal=True), delta=False)
        assert_equal_statistics(lib, problem, f"without v {dtype}")


def test_rows_and_heads_may_lie_anywhere(lib: Lib) -> None:
    """[batch][token][head][channel], and rows that no 16-byte load can take."""
    for pad in (0, 1):
        problem = make(Shape(heads=4, kv_heads=2), ProbeOptions(causal=True))

        def moved(t: torch.Tensor, pad: int = pad) -> torch.Tensor:
            b, h, n, d = t.shape
            base = torch.zeros(b, n, h, d + pad, dtype=t.dtype)
            base[..., pad:] = t.transpose(1, 2)
            # One view of one base: run() rebuilds it on the GPU.
            wide = d + pad
            return base.as_strided((b, h, n, d), (n * h * wide, wide, h * wide, 1), pad)

        assert problem.outputs is not None
        problem.q, problem.k = moved(problem.q), moved(problem.k)
        v, o, d_o = problem.outputs
        problem.outputs = moved(v), moved(o), moved(d_o)
        assert_equal_statistics(lib, problem, f"moved, pad {pad}")


def test_a_large_common_mode_leaves_the_spread_its_digits(lib: Lib) -> None:
    problem = make(Shape(q_len=500, k_len=500), ProbeOptions(), delta=False)
    problem.q = (problem.q.float() + 3).to(BF16)
    problem.k = (problem.k.float() + 20).to(BF16)
    gpu = assert_equal_statistics(lib, problem, "common mode")
    assert bool((gpu.of("common_mode") > 30 * gpu.of("spread")).all())


def test_a_sink_and_saturated_rows(lib: Lib) -> None:
    problem = make(Shape(q_len=400, k_len=400), ProbeOptions(causal=True))
    problem.k[:, :, 0] *= 12
    problem.q[:, :, ::2] += 1
    gpu = assert_equal_statistics(lib, problem, "sink")
    assert bool((gpu.of("saturated") > 0).all())


def test_nonfinite_values_stay_in_their_head(lib: Lib) -> None:
    """A NaN or infinity in one tensor of head 0 of sequence 1, alone or masked."""
    for name in ("q", "k", "v", "o", "d_o"):
        for value in (math.nan, math.inf):
            for causal in (False, True):
                problem = make(Shape(batch=2, heads=4, kv_heads=2), ProbeOptions(causal=causal))
                assert problem.outputs is not None
                of = dict(zip(("q", "k", "v", "o", "d_o"),
                              (problem.q, problem.k, *problem.outputs)))
                of[name][1, 0, 100, 3] = value
                cpu, gpu = run(lib, problem, "cpu"), run(lib, problem, "cuda")
                for stat in calls.PROBE_STATS + calls.KV_STATS:
                    same_nans(f"{stat}, {value} in {name}, causal {causal}", cpu.of(stat),
                              gpu.of(stat))
                for stat in COUNTS:
                    assert torch.equal(cpu.of(stat), gpu.of(stat)), f"{stat}, {value} in {name}"


def test_statistics_add(lib: Lib) -> None:
    problem = make(Shape(), ProbeOptions())
    once, twice = run(lib, problem, "cuda"), run(lib, problem, "cuda", times=2)
    for name in SUMS:
        want = once.of(name) * (1 if name == "logit_max" else 2)
        assert_close(name, twice.of(name), want, 1e-5 * want.abs())
    into = Probed.fresh(2, 2, "cuda")
    into.out[:, 0] = math.nan
    into.out[calls.PROBE_STATS.index("logit_max"), 1] = 1e6
    q, k = problem.q.cuda(), problem.k.cuda()
    calls.probe(lib, q, k, None, problem.options, into)
    assert bool(into.out[:, 0].isnan().all()), into.out
    assert into.of("logit_max")[1].item() == 1e6


def test_all_ranks_sample_the_same_rows(lib: Lib) -> None:
    """Two ranks with half of the heads each add what one with all of them does."""
    o = ProbeOptions(causal=True, rows=9, seed=77)
    problem = make(Shape(heads=4, kv_heads=4), o)
    whole = run(lib, problem, "cuda")
    for rank in range(2):
        mine = slice(2 * rank, 2 * rank + 2)
        part = make(Shape(heads=4, kv_heads=4), dataclasses.replace(o, head_offset=2 * rank))
        assert part.outputs is not None
        v, out, d_o = (t[:, mine].clone() for t in part.outputs)
        part.q, part.k = part.q[:, mine].clone(), part.k[:, mine].clone()
        part.outputs = v, out, d_o
        got = run(lib, part, "cuda")
        for name in ("rows", "common_mode", "entropy", "delta_abs"):
            want = whole.of(name)[mine]
            assert_close(name, got.of(name), want, 1e-5 * want.abs())


def test_drift_alone_is_that_of_the_whole_probe(lib: Lib) -> None:
    """As on the CPU, where not another number is touched."""
    for dtype in (BF16, F16, F32):
        for shape in (Shape(dtype, q_len=300, k_len=300, head_dim=128),
                      Shape(dtype, heads=6, kv_heads=2, q_len=77, k_len=1201, head_dim=40),
                      Shape(dtype, batch=1, q_len=20, k_len=5, head_dim=256)):
            for options in (ProbeOptions(drift_only=True), ProbeOptions(
                    causal=True, window=33, rows=20, seed=5, drift_only=True)):
                problem = make(shape, options, delta=False)
                problem.q[0, 1, 2, 3] = math.nan
                cpu, gpu = run(lib, problem, "cpu"), run(lib, problem, "cuda")
                problem.options = dataclasses.replace(options, drift_only=False)
                whole = run(lib, problem, "cuda")
                for name in (*calls.PROBE_STATS, *calls.KV_STATS):
                    what, want = f"{name} of {shape} {options}", cpu.of(name)
                    assert_close(what, gpu.of(name), want, 1e-5 * want.abs() + 1e-9)
                    if name in ("rows", "common_mode", "spread", "nonfinite", *calls.KV_STATS):
                        assert_close(f"whole {what}", gpu.of(name), whole.of(name),
                                     1e-5 * want.abs() + 1e-9)


def test_a_gate_decides_when_the_graph_runs(lib: Lib) -> None:
    """Shut, nothing is written; open, the rows are those of the seed that it gives."""
    problem = make(Shape(q_len=500, k_len=500), ProbeOptions(causal=True, rows=9))
    assert problem.outputs is not None
    q, k, v, o, d_o = (t.cuda() for t in (problem.q, problem.k, *problem.outputs))
    gate = torch.zeros(2, dtype=torch.int64, device="cuda")
    options = dataclasses.replace(problem.options, seed=3, gate=gate)
    into, leak = Probed.fresh(2, 2, "cuda"), torch.zeros(2, 2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls.probe(lib, q, k, (v, o, d_o), options, into)
        calls.key_leak(lib, k, leak, gate)
    untouched = Probed.fresh(2, 2, "cuda")
    graph.replay()
    assert torch.equal(into.out, untouched.out) and torch.equal(into.kv_out, untouched.kv_out)
    assert not leak.any()
    for seed in (0, 1 << 40):
        gate[0], gate[1] = 1, seed
        into.out.copy_(untouched.out)
        graph.replay()
        problem.options = dataclasses.replace(problem.options, seed=3 + seed)
        want = run(lib, problem, "cpu")
        for name in ("rows", "common_mode", "entropy", "logit_max", "delta_abs"):
            assert_close(name, into.of(name), want.of(name), 1e-5 * want.of(name).abs())
    assert bool((leak > 0).all())


# ---- the key-gradient leak


def test_key_leak_equals_the_cpu(lib: Lib) -> None:
    for dtype in (BF16, F16, F32):
        for batch, heads, tokens, dim in ((2, 3, 1000, 64), (1, 2, 1, 128), (16, 2, 333, 256),
                                          (1, 1, 9000, 96), (2, 2, 50, 33), (1, 2, 700, 8)):
            torch.manual_seed(1)
            d_k = randn(batch, heads, tokens, dim)
            d_k -= d_k.mean(2, keepdim=True)  # What is left is the type's rounding.
            for poison in (False, True):
                t = d_k.to(dtype)
                if poison:
                    t[0, 0, tokens // 2, dim - 1] = math.nan
                cpu, gpu = torch.ones(2, heads), torch.ones(2, heads, device="cuda")
                calls.key_leak(lib, t, cpu)
                calls.key_leak(lib, t.cuda(), gpu)
                what = f"leak {dtype} {tuple(t.shape)}"
                assert_close(what, gpu.double().cpu(), cpu.double(), 1e-5 * cpu.double().abs())
                assert bool(cpu[:, 0].isnan().all()) == poison


# ---- spectral norms


def law_pairs(of_x: torch.dtype, of_y: torch.dtype, device: str
              ) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One piece, padded rows, turned around, a row for all, one element for all, few elements."""
    torch.manual_seed(5)
    x, y = randn(3, 260, 516).to(of_x).to(device), randn(3, 260, 516).to(of_y).to(device)
    return [
        (x, y), (x[:, :, :512], y[:, :, 4:]), (x[:, :, 1:], y[:, :, 1:]),
        (x.transpose(0, 2), y.transpose(0, 2)), (x[0], y[0].t().contiguous().t()),
        (x[0, 0].expand(3, 260, 516), y), (x[:1, :1, :1].expand(3, 260, 516), y),
        (x[0, 0, :3], y[0, 0, :3]), (x[:, :0], y[:, :0]),
    ]


def test_law_products_equal_the_cpu(lib: Lib) -> None:
    turn = 0
    for of_x in (BF16, F16, F32):
        for of_y in (BF16, F16, F32):
            pairs = [law_pairs(of_x, of_y, device) for device in ("cpu", "cuda")]
            grids = []
            for _ in pairs[0]:
                turn += 1
                grids.append((turn % calls.GRIDS, turn // 2 % calls.GRIDS))
            sums = [torch.ones(len(grids), calls.LAW_PRODUCT_STATS, dtype=torch.float64,
                               device=device) for device in ("cpu", "cuda")]
            for of, into in zip(pairs, sums):
                calls.law_products(lib, of, grids, into)
            cpu, gpu = sums[0], sums[1].cpu()
            size = cpu.clone()
            size[:, 0] = cpu[:, 1]
            worst = ((cpu - gpu).abs() / size.clamp(min=1)).max()
            assert worst < 1e-12, (of_x, of_y, worst)


def test_law_products_count_what_is_not_finite(lib: Lib) -> None:
    x, y = torch.ones(70, 64, dtype=BF16), torch.ones(70, 64)
    x[3, 5], x[69, 63], y[1, 1] = math.nan, math.inf, -math.inf
    into = torch.zeros(1, calls.LAW_PRODUCT_STATS, dtype=torch.float64, device="cuda")
    calls.law_products(lib, [(x.cuda(), y.cuda())], [(3, 1)], into)
    assert into[0, 4:].tolist() == [2, 1] and not math.isfinite(into[0, 0])


def test_law_sums_equal_the_cpu(lib: Lib) -> None:
    for dtype in (BF16, F16, F32):
        torch.manual_seed(1)
        whole = (randn(700, 901) * torch.logspace(-8, 0, 901)).to(dtype)
        for x in (whole, whole.t(), whole[:, :1], whole[:1], whole[::3, ::2], whole[:, 3:640]):
            for dim in (0, 1):
                shape = x.shape[1 - dim], calls.LAW_SUM_STATS
                cpu = torch.ones(*shape, dtype=torch.float64)
                gpu = cpu.cuda()
                moved = torch.empty(700 * 901, dtype=dtype, device="cuda")
                moved.copy_(whole.flatten())
                calls.law_sums(lib, x, dim, cpu)
                calls.law_sums(lib, moved.as_strided(x.shape, x.stride(), x.storage_offset()), dim, gpu)
                size = cpu.clone()
                size[:, 0] = cpu[:, 1]
                worst = ((cpu - gpu.cpu()).abs() / size).max()
                assert worst < 1e-12, (dtype, list(x.shape), dim, worst)


# ---- what the laws of modules need


def test_sums_of_norms_equal_the_cpu(lib: Lib) -> None:
    for dtype in (BF16, F16, F32):
        for rows, n in ((1, 1), (5, 33), (700, 901), (3000, 256)):
            torch.manual_seed(2)
            whole = [(scale * randn(rows, n + 3)).to(of) for scale, of in (
                (2, dtype), (1, dtype), (0.1, dtype), (1e-3, F32), (0.1, dtype))]
            x, y, first, second, d_y = (t[:, 1:n + 1] for t in whole)
            gain, shift = torch.linspace(0.5, 2, n).double(), torch.linspace(-0.1, 0.1, n).double()
            for centred in (False, True):
                cpu = calls.law_norms(lib, x, y, [first, second], [d_y], gain, shift, centred)
                there = [t.cuda()[:, 1:n + 1] for t in whole]
                gpu = calls.law_norms(lib, *there[:2], there[2:4], there[4:], gain.cuda(),
                                      shift.cuda(), centred)
                bars = [t.abs().clamp(min=1e-300) for t in cpu]
                # Sums may cancel: what is added up in them is larger.
                d_x = first.double() + second.double()
                bars[0][0] = ((x.double().abs() + x.double().mean(1, keepdim=True).abs())
                              * d_x.abs() + y.double().abs() * d_y.double().abs()).sum(1) + 1e-3
                bars[0][3] = d_x.abs().sum(1)
                bars[0][6] = 1
                bars[1][0] = bars[1][3]
                for of, want, got, bar in zip(("rows", "features", "rest"), cpu, gpu, bars):
                    worst = ((want - got.cpu()).abs() / bar).max()
                    assert worst < 1e-11, (dtype, rows, n, centred, of, worst)


def test_logits_say_the_same_as_on_the_cpu(lib: Lib) -> None:
    for dtype in (BF16, F16, F32):
        for rows, classes in ((1, 1), (3, 7), (40, 50257), (5000, 100)):
            for scale in (0.0, 1.0, 20.0):
                torch.manual_seed(4)
                z = (scale * randn(rows, classes + 5)).to(dtype)
                z[0, classes // 2:] = -math.inf
                cpu = calls.law_logits(lib, z[:, :classes])
                gpu = calls.law_logits(lib, z.cuda()[:, :classes]).cpu()
                assert torch.allclose(cpu, gpu, rtol=1e-5, atol=1e-60, equal_nan=True), (dtype, rows)


def test_equal_rows_are_those_of_the_cpu(lib: Lib) -> None:
    for dtype in (BF16, F16, F32):
        torch.manual_seed(5)
        x = randn(50257, 40).to(dtype)
        x[100:5000] = x[7]
        x[6000:7000] = -0.0
        for rows in (x, x.t().contiguous().t(), x[:1], x[::3, 5:], x[:257, :9]):
            cpu, gpu = calls.law_equal_rows(lib, rows), torch.zeros(4, 2)
            moved = torch.empty(x.numel(), dtype=dtype, device="cuda")
            moved.as_strided(rows.shape, rows.stride(), rows.storage_offset()).copy_(rows)
            gpu = calls.law_equal_rows(
                lib, moved.as_strided(rows.shape, rows.stride(), rows.storage_offset()))
            assert torch.equal(cpu, gpu.cpu()), (dtype, list(rows.shape))


# ---- the statistics of tensors


def tensors_of(dtype: torch.dtype) -> list[dict[str, torch.Tensor | None]]:
    """More than a launch takes, of odd sizes, some misaligned, some with elements of no value."""
    torch.manual_seed(3)
    found: list[dict[str, torch.Tensor | None]] = []
    sizes = [0, 1, 3, 4, 5, 1023, 1024, 32767, 32768, 32769, 100_003, 1_000_001] + [257] * 60
    for at, size in enumerate(sizes):
        def part(scale: float, of: torch.dtype = dtype) -> torch.Tensor:
            return (scale * torch.randn(size + 1)).to(of)[at % 2:][:size]

        t = {"grad": part(1e-2), "weight": part(0.1), "before": part(0.1), "moment": part(1e-3, F32),
             "second": part(1e-2, F32).square()}
        for i, value in enumerate((math.nan, math.inf, 0.0)):
            if size > 1000:
                t["grad"][i], t["weight"][7 + i] = value, value
        if at % 7 == 5:
            t["grad"] = t["before"] = t["second"] = None
        found.append(t)
    return found


def test_statistics_of_tensors_equal_the_cpu(lib: Lib) -> None:
    for dtype in (F32, BF16, F16):
        tensors = tensors_of(dtype)
        for scale in (None, torch.tensor([1024.])):
            cpu = torch.empty(len(tensors), len(calls.TENSOR_STATS), dtype=torch.float64)
            gpu, again = torch.empty_like(cpu, device="cuda"), torch.empty_like(cpu, device="cuda")
            there = []
            for t in tensors:
                moved = {}
                for name, part in t.items():
                    if part is not None:  # An offset stays: some are misaligned.
                        whole = torch.empty(part.numel() + 1, dtype=part.dtype, device="cuda")
                        offset = part.storage_offset() % 2
                        moved[name] = whole[offset:offset + part.numel()]
                        moved[name].copy_(part)
                there.append(moved)
            on_gpu = None if scale is None else scale.cuda()
            three = torch.tensor([3.])
            calls.tensor_stats(lib, tensors, cpu, scale, steps=1, steps_at=three)
            for into in (gpu, again):
                calls.tensor_stats(lib, there, into, on_gpu, steps=1, steps_at=three.cuda())
            assert torch.equal(gpu, again), "the same bits each time"
            size = cpu.abs()
            dot = calls.TENSOR_STATS.index("dot")
            for at, t in enumerate(tensors):
                g, m = t["grad"], t["moment"]
                if g is not None and m is not None:
                    products = g.double() * m.double() / (1 if scale is None else float(scale))
                    size[at, dot] = products[g.isfinite()].abs().sum()
            bar = 1e-12 * size
            for stat in ("elements", "grad_nonfinite", "grad_zeros", "weight_nonfinite",
                         "weight_bits", "changed", "grad_max", "weight_max"):
                bar[:, calls.TENSOR_STATS.index(stat)] *= 1 if stat.endswith("max") else 0
            off = (cpu - gpu.cpu()).abs()
            assert bool((off <= bar).all()), (dtype, (off - bar).argmax(), off.max())


def test_statistics_of_tensors_are_captured(lib: Lib) -> None:
    tensors = [{n: p.cuda() for n, p in t.items() if p is not None} for t in tensors_of(BF16)]
    want = torch.empty(len(tensors), len(calls.TENSOR_STATS), dtype=torch.float64, device="cuda")
    got = torch.empty_like(want)
    calls.tensor_stats(lib, tensors, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls.tensor_stats(lib, tensors, got)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(want, got)


def lag_parts(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(4)
    found = []
    for size in (1, 5, 1023, 1025, 4097, 100_003, 1_000_001):
        g, v = (1e-2 * torch.randn(size)).to(dtype), (1e-2 * torch.randn(size)).square()
        if size > 1000:
            g[0], g[7], g[21] = math.nan, math.inf, torch.finfo(dtype).max
        found.append((g, v))
    return found


def test_lags_of_moments_equal_the_cpu(lib: Lib) -> None:
    for dtype in (F32, BF16, F16):
        parts = lag_parts(dtype)
        there = [(g.cuda(), v.cuda()) for g, v in parts]
        for stride in (1, 7):
            cpu = torch.zeros(len(parts), 2, dtype=torch.float64)
            gpu, again = torch.zeros_like(cpu, device="cuda"), torch.zeros_like(cpu, device="cuda")
            scale, three, zero = torch.tensor([1024.]), torch.tensor([3.]), torch.zeros(1)
            for _ in range(2):  # Maxima stay, counts add up.
                calls.moment_lags(lib, parts, stride, cpu, scale, zero, steps=1, steps_at=three)
                for into in (gpu, again):
                    calls.moment_lags(lib, there, stride, into, scale.cuda(), zero.cuda(), steps=1,
                                      steps_at=three.cuda())
            calls.moment_lags(lib, there, stride, gpu, skip=torch.ones(1).cuda())
            assert torch.equal(gpu, again), "the same bits each time, and none of a step not taken"
            assert torch.equal(gpu[:, 1].cpu(), cpu[:, 1]), dtype
            assert torch.allclose(gpu[:, 0].cpu(), cpu[:, 0], rtol=1e-12, atol=0), dtype


def test_lags_of_moments_are_captured(lib: Lib) -> None:
    parts = [(g.cuda(), v.cuda()) for g, v in lag_parts(BF16)]
    want = torch.zeros(len(parts), 2, dtype=torch.float64, device="cuda")
    got = torch.zeros_like(want)
    calls.moment_lags(lib, parts, 3, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls.moment_lags(lib, parts, 3, got)
    got.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(want, got)


# ---- the statistics of activations


def activations_of(dtype: torch.dtype) -> list[torch.Tensor]:
    """Of odd sizes, some with padded rows, misaligned, or with elements of no value."""
    torch.manual_seed(4)
    found = []
    for rows, channels, padding, offset in (
        (1, 1, 0, 0), (33, 7, 0, 0), (1000, 127, 1, 0), (4097, 129, 0, 1), (512, 4096, 0, 0),
        (300, 4100, 4, 3), (8192, 768, 0, 0), (40, 140_000, 0, 0),
    ):
        memory = torch.randn(rows * (channels + padding) + offset).to(dtype)
        x = memory[offset:].view(rows, channels + padding)[:, :channels]
        x[:, channels // 3] *= 8
        if rows > 400:
            x[3, 5], x[401, 6], x[7, 7] = math.nan, math.inf, 0.0
        found.append(x)
    return found


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    """As it lies."""
    memory = torch.empty(x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype)
    memory.set_(x.untyped_storage())  # type: ignore[call-overload]
    there = memory.view(-1).cuda()
    return there.as_strided(x.shape, x.stride(), x.storage_offset())


def test_statistics_of_activations_equal_the_cpu(lib: Lib) -> None:
    for dtype in (F32, BF16, F16):
        for x in activations_of(dtype):
            there = on_gpu(x)
            assert torch.equal(there.cpu().nan_to_num(), x.nan_to_num())
            for with_channels in (True, False):
                results = []
                for of, device in ((x, "cpu"), (there, "cuda"), (there, "cuda")):
                    out = torch.zeros(len(calls.MODULE_STATS), dtype=torch.float64, device=device)
                    channels = torch.zeros(x.shape[1], dtype=torch.float64, device=device)
                    for rows in (of, of[: len(of) // 2]):  # The second one is added.
                        calls.module_stats(lib, rows, out, channels if with_channels else None)
                    results.append((out.cpu(), channels.cpu()))
                (cpu, cpu_channels), (gpu, gpu_channels), (again, again_channels) = results
                assert torch.equal(gpu, again), "the same bits each time"
                assert torch.equal(gpu_channels, again_channels)
                bar = 1e-12 * cpu.abs()
                for stat in ("elements", "largest", "nonfinite", "top"):
                    bar[calls.MODULE_STATS.index(stat)] = 0
                assert bool(((cpu - gpu).abs() <= bar).all()), (dtype, x.shape, cpu, gpu)
                off = (cpu_channels - gpu_channels).abs()
                assert bool((off <= 1e-12 * cpu_channels).all()), (dtype, x.shape)


def test_statistics_of_activations_are_captured(lib: Lib) -> None:
    x = on_gpu(activations_of(BF16)[4])
    sizes = len(calls.MODULE_STATS), x.shape[1]
    want, got = (
        [torch.zeros(size, dtype=torch.float64, device="cuda") for size in sizes] for _ in range(2))
    calls.module_stats(lib, x, *want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls.module_stats(lib, x, *got)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(want[0], got[0]) and torch.equal(want[1], got[1])


def planted(heads: int, rows: int, columns: int, top: float) -> torch.Tensor:
    """Gaussian, with one direction `top` times as strong."""
    torch.manual_seed(rows + columns)
    w = randn(heads, rows, columns)
    u = torch.nn.functional.normalize(randn(heads, rows), dim=1)
    v = torch.nn.functional.normalize(randn(heads, columns), dim=1)
    edge = math.sqrt(rows) + math.sqrt(columns)
    return (w + top * edge * u[:, :, None] * v[:, None]) / edge


def assert_equal_spectra(lib: Lib, weight: torch.Tensor, what: str, top: bool = True) -> None:
    heads, rows, _ = weight.shape
    both: list[Spectrum] = []
    moved = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device="cuda")
    for w in (weight, moved.copy_(weight)):
        s = Spectrum.fresh(heads, rows, w.device, gram=True)
        s.direction.copy_(torch.eye(rows)[0].expand(heads, rows))
        calls.spectral_norms(lib, w, s)
        both.append(s)
    cpu, gpu = ({f.name: getattr(s, f.name).double().cpu() for f in dataclasses.fields(s)}
                for s in both)
    square = cpu["sigma"].square()
    for name, bar in (("sigma", 1e-5 * cpu["sigma"]), ("stable_rank", 2e-5 * cpu["stable_rank"]),
                      ("gram", 1e-5 * square[:, None, None].expand_as(cpu["gram"]))):
        assert_close(f"{name} of {what}", gpu[name], cpu[name], bar)
    if not top:
        return
    assert bool((gpu["residual"] <= 1e-5 * square).all()), f"residual of {what}"
    assert_close(f"overlap of {what}", gpu["overlap"], cpu["overlap"], torch.tensor(1e-4))
    assert_close(f"direction of {what}", gpu["direction"], cpu["direction"], torch.tensor(1e-4))


def test_spectral_norms_equal_the_cpu(lib: Lib) -> None:
    for dtype in (BF16, F16, F32):
        # Few rows first: a kernel that has once had much shared memory may always have it.
        for heads, rows, columns in ((2, 1, 70), (1, 7, 3), (300, 16, 64), (2, 24, 100),
                                     (4, 32, 256), (2, 40, 64), (3, 64, 768), (2, 128, 4096),
                                     (2, 96, 500), (2, 256, 300), (1, 512, 520), (1, 130, 64)):
            weight = planted(heads, rows, columns, top=3.).to(dtype)
            what = f"{dtype} {heads} x {rows} x {columns}"
            assert_equal_spectra(lib, weight, what)
            conv = weight.transpose(1, 2).contiguous().transpose(1, 2)
            assert_equal_spectra(lib, conv, what + " transposed")


def test_weights_measured_together_keep_their_numbers(lib: Lib) -> None:
    """More than a launch takes, of several types, numbers of rows and of heads."""
    shapes = [(1 + i % 5, 64 if i % 7 else 96, 300 + i, (F32, BF16)[i % 11 == 0]) for i in range(80)]
    weights = [planted(h, n, c, top=3.).to(dtype).cuda() for h, n, c, dtype in shapes]
    weights[3] = weights[3].transpose(1, 2).contiguous().transpose(1, 2)
    alone, together = ([Spectrum.fresh(w.shape[0], w.shape[1], "cuda", gram=False) for w in weights]
                       for _ in range(2))
    for weight, spectrum in zip(weights, alone):
        calls.spectral_norms(lib, weight, spectrum)
    calls.spectral_norms_of(lib, list(zip(weights, together)))
    for a, b, shape in zip(alone, together, shapes):
        for name in ("sigma", "residual", "stable_rank", "direction"):
            assert torch.equal(getattr(a, name), getattr(b, name)), (shape, name)


def test_spectra_of_any_scale(lib: Lib) -> None:
    """Squares of squares would leave fp32's range."""
    for scale in (1e-12, 1e12):
        for rows in (128, 200):
            weight = scale * planted(2, rows, 300, top=3.)
            assert_equal_spectra(lib, weight, f"{rows} rows of scale {scale}")


def test_spectra_without_a_gap(lib: Lib) -> None:
    """The value stands though the vector is any of many."""
    assert_equal_spectra(lib, planted(4, 128, 1024, top=0.), "Gaussian", top=False)
    assert_equal_spectra(lib, 3 * torch.eye(64)[None].repeat(2, 1, 1), "identity", top=False)
    one = torch.zeros(2, 64, 128)
    one[:, 5, 7] = 2
    assert_equal_spectra(lib, one, "one element", top=False)


def test_zero_and_nonfinite_weights(lib: Lib) -> None:
    weight = planted(3, 64, 256, top=3.)
    weight[0] = 0
    weight[1, 3, 3] = math.nan
    s = Spectrum.fresh(3, 64, "cuda", gram=False)
    s.direction[:] = 1
    calls.spectral_norms(lib, weight.cuda(), s)
    for values in (s.sigma, s.residual, s.stable_rank):
        assert values[0].item() == 0 and values[1].isnan() and values[2].isfinite(), values
    assert s.overlap[:2].isnan().all() and s.overlap[2].isfinite()
    assert (s.direction[0] == 0).all() and (s.direction[1] == 1).all()


# ---- the rest


def test_a_captured_graph_adds_what_the_calls_would(lib: Lib) -> None:
    problem = make(Shape(), ProbeOptions(causal=True, rows=40))
    assert problem.outputs is not None
    q, k, v, o, d_o = (t.cuda() for t in (problem.q, problem.k, *problem.outputs))
    weight = planted(4, 64, 256, top=3.).to(BF16).cuda()
    into, leak = Probed.fresh(2, 2, "cuda"), torch.zeros(2, 2, device="cuda")
    spectrum = Spectrum.fresh(4, 64, "cuda", gram=False)

    def step() -> None:
        calls.probe(lib, q, k, (v, o, d_o), problem.options, into)
        calls.key_leak(lib, k, leak)
        calls.spectral_norms(lib, weight, spectrum)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(2):
        graph.replay()
    got = [t.clone() for t in (into.out, into.kv_out, leak, spectrum.sigma)]
    for t in (into.out, into.kv_out, leak):
        t.zero_()
    into.out[calls.PROBE_STATS.index("logit_max")] = -math.inf
    for _ in range(2):
        step()
    for mine, want in zip(got, (into.out, into.kv_out, leak, spectrum.sigma)):
        assert_close("replayed", mine.double().cpu(), want.double().cpu(),
                     1e-5 * want.double().cpu().abs() + 1e-7)


def test_refusals_name_field_value_and_range(lib: Lib) -> None:
    def refusal(call: Callable[[], None]) -> str:
        try:
            call()
        except RuntimeError as error:
            return str(error)
        raise AssertionError("was not refused")

    wide = torch.zeros(1, 1, 4, 584, device="cuda", dtype=BF16)
    into = Probed.fresh(1, 1, "cuda")
    said = refusal(lambda: calls.probe(lib, wide, wide, None, ProbeOptions(), into))
    assert "head_dim is 584, but at most 576" in said, said
    wide = torch.zeros(1, 1, 4, 576, device="cuda")
    said = refusal(lambda: calls.probe(lib, wide, wide, (wide, wide, wide), ProbeOptions(), into))
    assert "head_dim is 576 and v_dim 576" in said and "shared memory" in said, said
    said = refusal(lambda: calls.key_leak(lib, wide, torch.zeros(2, 1, device="cuda")))
    assert "head_dim is 576, but 1..256" in said, said
    weight = torch.zeros(1, 129, 64, device="cuda")
    spectrum = Spectrum.fresh(1, 129, "cuda", gram=False)
    said = refusal(lambda: calls.spectral_norms(lib, weight, spectrum))
    assert "gram is NULL" in said and "129" in said, said


def missing_gpu() -> str:
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    if torch.cuda.get_device_capability()[0] < 8:
        return "the GPU has no compute capability 8.0"
    return ""


def main() -> int:
    why = missing_gpu()
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
        except AssertionError as error:
            failed += 1
            print(f"FAIL {name}: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
