"""Goal: what arrives in a recording equals the definitions of the catalogue, computed in fp64 by
other code from the very tensors that the attention kernel got and returned.

Method: small models of many kinds train a few steps under watch with all rows sampled; the
recording is read back with protobuf and compared signal by signal.  Counts are exact but for rows
within fp32 rounding of a threshold, sums agree to 1e-5 and signed bias sums to 1e-3 of the sum of
absolute values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import numpy as np
import pytest
import torch
from comparing import compare, counted
from torch import Tensor, nn

import bellwether
from bellwether._kernels.memory import HostMemory
from bellwether._kernels.probe import Spectra, Spectrum

from definitions import Expected, of_tensors
from gpu import DEVICES
from models import (
    Attention,
    Biased,
    ByAttribute,
    ByMask,
    ByName,
    ByUpperMask,
    CausalMoreKeys,
    Chunked,
    FiveDimensions,
    KeysAlone,
    Masked,
    Model,
    MoreKeys,
    NarrowValues,
    Packed,
    PaddedLeft,
    PaddedRight,
    Shape,
    Window,
    batch,
)
from recording import Recording

GQA = dict(heads=4, kv_heads=2)
CASES: dict[str, dict] = {
    "fused-causal-fp32": dict(shape=Shape()),
    "fused-full-fp32": dict(shape=Shape(causal=False)),
    "separate-causal-bf16": dict(shape=Shape(fused=False, dtype=torch.bfloat16)),
    "separate-full-fp16": dict(shape=Shape(fused=False, causal=False, dtype=torch.float16)),
    "fused-bf16-sharp": dict(shape=Shape(dtype=torch.bfloat16, spread=6.0)),
    "separate-fp32-sharp": dict(shape=Shape(fused=False, spread=4.0)),
    "gqa": dict(shape=Shape(fused=False, **GQA)),
    "gqa-fused-bf16": dict(shape=Shape(dtype=torch.bfloat16, **GQA)),
    "gqa-repeated": dict(shape=Shape(fused=False, repeat=True, **GQA)),
    "gqa-repeated-bf16-full": dict(
        shape=Shape(repeat=True, causal=False, dtype=torch.bfloat16, **GQA)
    ),
    "by-name": dict(shape=Shape(), kind=ByName),
    "by-attribute": dict(shape=Shape(dtype=torch.bfloat16), kind=ByAttribute),
    "causal-lower-right": dict(shape=Shape(), kind=ByMask),
    "causal-upper-left-bf16": dict(shape=Shape(dtype=torch.bfloat16), kind=ByUpperMask),
    "causal-lower-right-more-keys": dict(shape=Shape(), kind=MoreKeys),
    "causal-upper-left-more-keys": dict(shape=Shape(), kind=CausalMoreKeys),
    "padded-right": dict(shape=Shape(), kind=PaddedRight),
    "padded-right-gqa-repeated": dict(
        shape=Shape(fused=False, repeat=True, **GQA), kind=PaddedRight
    ),
    "padded-left-bf16": dict(shape=Shape(dtype=torch.bfloat16), kind=PaddedLeft),
    "padded-left-gqa-fp16": dict(shape=Shape(dtype=torch.float16, **GQA), kind=PaddedLeft),
    "key-padding-alone": dict(shape=Shape(), kind=KeysAlone),
    "window": dict(shape=Shape(), kind=Window),
    "chunks": dict(shape=Shape(dtype=torch.bfloat16), kind=Chunked),
    "documents": dict(shape=Shape(), kind=Packed),
    "learned-bias": dict(shape=Shape(fused=False), kind=Biased),
    "learned-bias-bf16": dict(shape=Shape(dtype=torch.bfloat16), kind=Biased),
    "narrow-values": dict(shape=Shape(), kind=NarrowValues),
    "five-dimensions": dict(shape=Shape(**GQA), kind=FiveDimensions),
    "padded-checkpoint": dict(shape=Shape(), kind=PaddedRight, checkpointing="non-reentrant"),
    "documents-checkpoint": dict(shape=Shape(), kind=Packed, checkpointing="reentrant"),
    "checkpoint-reentrant": dict(shape=Shape(dtype=torch.bfloat16), checkpointing="reentrant"),
    "checkpoint-non-reentrant": dict(shape=Shape(), checkpointing="non-reentrant"),
    "accumulation-all": dict(shape=Shape(), micro=3, microbatches="all"),
    "accumulation-first": dict(shape=Shape(dtype=torch.bfloat16), micro=3, microbatches="first"),
    "accumulation-checkpoint": dict(
        shape=Shape(), micro=2, microbatches="all", checkpointing="non-reentrant"
    ),
}


def expected_of(attention: Attention, calls: Optional[int] = None) -> Expected:
    total: Optional[Expected] = None
    shape = attention.shape
    used = [s for s in attention.saved if s[3].grad is not None][:calls]
    assert used, "nothing was kept"
    for q, k, v, y in used:
        mask: Optional[Tensor] = None
        if isinstance(attention, Masked):
            mask = attention.mask(q, k)
        elif isinstance(attention, CausalMoreKeys):
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        found = of_tensors(
            q, k, v, y, y.grad, shape.dim**-0.5, shape.causal and mask is None, mask,
            k.grad, shape.kv_heads,
        )  # fmt: skip
        total = found if total is None else total + found
    assert total is not None
    return total


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_recorded_statistics_equal_the_definitions(name: str, device: str, tmp_path: Path) -> None:
    case = dict(CASES[name])
    micro, which = case.pop("micro", 1), case.pop("microbatches", "first")
    torch.manual_seed(7)
    model = Model(**case).to(device)
    shape = model.shape
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    path = tmp_path / "run.bwrun"
    monitor = bellwether.attach(
        model, record=str(path), run="statistics", every=2, rows=0, microbatches=which,
        overhead_budget=1e9,
    )  # fmt: skip
    expected: dict[tuple[int, int], Expected] = {}
    for step in range(4):
        for attention in model.attentions():
            attention.saved.clear()
            attention.keep = step % 2 == 0
        for part in range(micro):
            x = batch(shape, 100 * step + part, device=device)
            model(x).square().mean().backward()
        for layer, attention in enumerate(model.attentions()):
            if attention.keep:
                calls = 1 if which == "first" else None
                expected[step, layer] = expected_of(attention, calls)
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss=torch.tensor(0.5))
    assert monitor.flush(20)
    assert monitor.status()["errors"] == 0, monitor.status()["last_error"]
    monitor.detach()
    recorded = Recording(path)
    layout = recorded.hello.run.layout
    assert (layout.layers, layout.heads, layout.kv_heads, layout.head_dim) == (
        shape.layers, shape.heads, shape.kv_heads, shape.dim,
    )  # fmt: skip
    steps = recorded.steps()
    assert sorted(steps) == [0, 1, 2, 3]
    assert "rows" not in steps[1] and "rows" not in steps[3]
    for (step, layer), want in expected.items():
        for signal in want.values:
            rows = float(want.values["rows"][0])
            compare(signal, steps[step][signal][layer], want, rows)


def test_few_rows_are_within_rounding_and_many_count() -> None:
    """Of the cases above; run with them or not at all."""
    if not counted:
        pytest.skip("no case ran before")
    for signal, (unsure, count, rows) in counted.items():
        print(f"{signal}: {unsure:.0f} of {rows:.0f} rows within fp32 rounding, {count:.0f} count")
        assert unsure <= 1e-3 * rows, signal
        assert count > 0, f"no case has a row with {signal}"


def weight_of(attention: Attention, which: str) -> Tensor:
    """[heads, dim, width] of W_Q or W_K, in fp64."""
    s = attention.shape
    if s.fused:
        h, g = s.heads * s.dim, s.kv_heads * s.dim
        part = attention.qkv.weight[:h] if which == "q" else attention.qkv.weight[h : h + g]
    else:
        part = (attention.q_proj if which == "q" else attention.k_proj).weight
    return part.detach().cpu().double().unflatten(0, (-1, s.dim))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [True, False])
def test_spectral_signals_equal_an_svd(fused: bool, device: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Model(Shape(fused=fused, heads=4, kv_heads=2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    path = tmp_path / "run.bwrun"
    monitor = bellwether.attach(model, record=str(path), every=1, run="svd", overhead_budget=1e9)
    want: dict[int, dict[str, np.ndarray]] = {}
    before: dict[int, tuple[Tensor, Tensor]] = {}
    direction: dict[int, Tensor] = {}
    for step in range(3):
        model(batch(model.shape, step, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step()
        rows: dict[str, list] = {}
        for layer, attention in enumerate(model.attentions()):
            wq, wk = weight_of(attention, "q"), weight_of(attention, "k")
            u, sigma, _ = torch.linalg.svd(wq, full_matrices=False)
            rows.setdefault("wq_sigma", []).append(sigma[:, 0])
            rows.setdefault("wk_sigma", []).append(torch.linalg.svdvals(wk)[:, 0])
            stable = (sigma**2).sum(-1) / sigma[:, 0] ** 2
            rows.setdefault("wq_stable_rank", []).append(stable)
            top = u[:, :, 0]
            if layer in direction:
                cosine = (top * direction[layer]).sum(-1).abs()
                rows.setdefault("wq_direction_overlap", []).append(cosine)
            direction[layer] = top
            if layer in before and device == "cpu":  # The rank of the change is not for GPUs yet.
                wq0, wk0 = before[layer]
                ranks = []
                for head in range(wq.shape[0]):
                    g = head // 2
                    change = (wq[head] - wq0[head]).T @ wk[g] + wq[head].T @ (wk[g] - wk0[g])
                    p = torch.linalg.svdvals(change) ** 2
                    p = p / p.sum()
                    p = p[p > 1e-14]
                    ranks.append(torch.exp(-(p * p.log()).sum()))
                rows.setdefault("qk_increment_rank", []).append(torch.stack(ranks))
            before[layer] = wq, wk
        want[step] = {n: torch.stack(r).numpy() for n, r in rows.items()}
    assert monitor.flush(20) and monitor.status()["errors"] == 0, monitor.status()["last_error"]
    monitor.detach()
    steps = Recording(path).steps()
    for step, signals in want.items():
        for name, values in signals.items():
            # First order in the change, against which end of it: that is the tolerance.
            tolerance = 0.05 if name == "qk_increment_rank" else 2e-5
            assert np.allclose(steps[step][name], values, rtol=tolerance), (step, name)
        assert (steps[step]["wq_sigma_residual"] >= 0).all()
    assert "qk_increment_rank" not in steps[0] and "wq_direction_overlap" not in steps[0]


def test_sampled_rows_are_as_many_as_asked(tmp_path: Path) -> None:
    model = Model(Shape())
    path = tmp_path / "run.bwrun"
    with bellwether.attach(
        model, record=str(path), every=1, rows=16, sequences=3, run="rows"
    ) as monitor:
        model(batch(model.shape, 0, size=5, tokens=64)).sum().backward()
        monitor.step()
        assert monitor.flush(20)
    step = Recording(path).steps()[0]
    rows = step["rows"]
    assert (step["sequences"] == 3).all()
    assert (rows == 3 * 16).all(), rows  # Of each of three sequences.


def test_autocast_shows_what_the_kernel_sees(tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain = Model(Shape(fused=False))
    path = tmp_path / "run.bwrun"
    with bellwether.attach(
        plain, record=str(path), every=1, rows=0, run="autocast", overhead_budget=1e9
    ) as monitor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = plain(batch(plain.shape, 0)).float().square().mean()
        loss.backward()
        monitor.step()
        assert monitor.flush(20)
        assert monitor.status()["errors"] == 0, monitor.status()["last_error"]
    recorded = Recording(path)
    assert recorded.hello.run.attention.score_dtype == "bf16"
    assert (recorded.steps()[0]["delta_error_abs_sum"] > 0).all()


def test_a_bias_under_autocast_is_as_the_kernel_adds_it(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Model(Shape(layers=1), kind=Biased)
    (attention,) = model.attentions()
    with torch.no_grad():
        attention.bias.mul_(30)  # Its rounding to 16 bits is seen.
    with bellwether.attach(
        model, record=str(tmp_path / "a.bwrun"), every=1, rows=0, run="bias", overhead_budget=1e9
    ) as monitor:
        attention.keep = True
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(batch(model.shape, 0)).float().square().mean().backward()
        monitor.step()
        assert monitor.flush(20)
    q, k, v, y = (t.bfloat16() for t in attention.saved[0])
    mask = attention.mask(*(t.float() for t in (q, k))).bfloat16()
    want = of_tensors(q, k, v, y, torch.zeros_like(y), 0.25, False, mask).values
    found = Recording(tmp_path / "a.bwrun").steps()[0]
    for signal in ("logit_max", "entropy_sum", "common_mode_sum", "rows"):
        assert np.allclose(found[signal][0], want[signal], rtol=1e-5), signal


def test_multihead_attention_of_torch_is_watched(tmp_path: Path) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    model = Encoder()
    path = tmp_path / "run.bwrun"
    with bellwether.attach(model, record=str(path), every=1, rows=0, run="mha") as monitor:
        model(torch.randn(2, 10, 32)).square().sum().backward()
        monitor.step()
        assert monitor.flush(20)
    step = Recording(path).steps()[0]
    assert step["rows"].tolist() == [[20.0] * 4]
    weight = model.attention.in_proj_weight.detach()[:32].unflatten(0, (4, 8))
    sigma = torch.linalg.matrix_norm(weight, ord=2).numpy()
    assert np.allclose(step["wq_sigma"][0], sigma, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "reason", "has"),
    [
        (dict(scale=-1.0), "scale", {"key_leak_sum"}),
        (dict(dropout_p=0.1), "dropout", {"key_leak_sum", "common_mode_sum"}),
    ],
)
def test_unmeasurable_signals_are_left_out_and_noted(
    arguments: dict, reason: str, has: set[str], tmp_path: Path
) -> None:
    class Odd(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, v, **arguments)

    model = Model(Shape(), kind=Odd)
    path = tmp_path / "run.bwrun"
    with bellwether.attach(model, record=str(path), every=1, run="odd") as monitor:
        model(batch(model.shape, 0)).sum().backward()
        monitor.step()
        assert monitor.flush(20)
        notes = " ".join(n for layer in monitor.status()["layers"] for n in layer["notes"])
    signals = set(Recording(path).steps()[0])
    assert reason in notes
    assert has <= signals and "delta_bias_sum" not in signals
    assert ("common_mode_sum" in signals) == ("common_mode_sum" in has)


def test_weights_that_are_refused_leave_the_others() -> None:
    memory, device = HostMemory(), torch.device("cpu")
    torch.manual_seed(4)
    weights = [torch.randn(2, rows, 24) for rows in (8, 513, 16)]
    spectra = [Spectrum(memory, device, 2, w.shape[1]) for w in weights]
    together, told = Spectra(), []
    for spectrum, weight in zip(spectra, weights):
        together.add(spectrum, weight.double(), told.append)
    assert not any(spectrum.measured for spectrum in spectra)
    together.measure()
    assert [spectrum.measured for spectrum in spectra] == [True, False, True]
    assert told == ["bw_spectral_norms: rows is 513, but only 1..512 is supported"]
    copy = memory.collect(False)
    for spectrum, weight in zip(spectra[::2], weights[::2]):
        found = torch.tensor(list(spectrum.row(copy, "sigma")))
        assert torch.allclose(found, torch.linalg.matrix_norm(weight, 2), rtol=1e-5)
