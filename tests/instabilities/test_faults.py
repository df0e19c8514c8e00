"""Goal: each fault leaves its run alone before its first bad step, and changes it behind; the same
seed makes the same run; the splits share no strength, architecture or optimizer.
Method: tiny trainings of each family beside their twins, not watched.
"""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from instabilities.faults import FAULTS
from instabilities.faults.attention import Kernel
from instabilities.run import Request
from instabilities.settings import ARCHITECTURES, SPLITS, Setting, log_uniform
from instabilities.training import Curves, Training

TINY = json.dumps({"width": 32, "heads": 2, "kv_heads": 2, "tokens": 16, "batch": 2, "steps": 20})


def trained(request: Request, with_fault: bool) -> Curves:
    setting, fault = request.made()
    if fault is not None and request.family == "rollout-apart":
        # Other samples within 20 steps take another policy.
        fault.variant, fault.strength = "other weights", 1.0
    return Training(setting, request.seed, fault if with_fault else None).run()


def numbers(curves: Curves) -> list[tuple[float, float, float]]:
    return list(zip(curves.loss, curves.grad_norm, curves.measure))


# Ranks are processes: test_slice.py.
@pytest.mark.parametrize("name", sorted(FAULTS.keys() - {"replicas-apart"}))
def test_a_run_is_its_twin_until_its_fault(name: str) -> None:
    request = Request(name, "train", 3, TINY)
    fault = request.made()[1]
    assert fault is not None
    run, twin = trained(request, True), trained(request, False)
    # A kernel of our own rounds otherwise; another beta2 is another optimizer, if a harmless one.
    close = 1e-3 if name in ("faulty-kernel", "second-moment-too-slow") else 0.0
    for mine, other in zip(numbers(run)[: fault.onset], numbers(twin)):
        assert mine == pytest.approx(other, rel=close, abs=0)
    assert len(run.loss) == 20
    assert numbers(run)[fault.onset :] != numbers(twin)[fault.onset :]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tensor", ["o", "dq", "dk", "dv"])
def test_a_faulty_kernel_is_right_but_for_its_fault(tensor: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    scales = (4, 1, 1)  # Scores of some 10, which 16 bits would round by 3 %.
    kernel, head = Kernel(tensor, 2), 2
    inputs = [(s * torch.randn(2, 4, 64, 24)).to(dtype).requires_grad_() for s in scales]
    d_o = torch.randn(2, 4, 64, 24).to(dtype)

    def returned(factor: float, wide: bool) -> dict[str, torch.Tensor]:
        kernel.factor = factor
        q, k, v = (t.float() if wide else t for t in inputs)
        o = kernel(q, k, v)
        gradients = torch.autograd.grad(o, (q, k, v), d_o.to(o.dtype))
        return dict(zip(("o", "dq", "dk", "dv"), (o, *gradients)))

    exact, right, wrong = returned(1.0, True), returned(1.0, False), returned(2.0, False)
    ulp = torch.finfo(dtype).eps
    for name, of in exact.items():
        assert torch.allclose(right[name].float(), of, rtol=ulp / 2, atol=1e-6), name
        if name == tensor:
            twice = 2 * right[name][:, head].float()
            assert torch.allclose(wrong[name][:, head].float(), twice, rtol=ulp, atol=1e-6)
        elif tensor != "o":
            assert torch.equal(wrong[name], right[name]), name


def test_the_same_seed_makes_the_same_run() -> None:
    request = Request("bad-data", "test", 5, TINY)
    assert numbers(trained(request, True)) == numbers(trained(request, True))
    assert request.made()[0] != Request("bad-data", "test", 6, TINY).made()[0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_architecture_learns(name: str) -> None:
    setting = Setting(
        architecture=name, width=32, tokens=32, steps=30, warmup=5, **ARCHITECTURES[name]
    )
    loss = Training(setting, 1).run().loss
    assert 5.0 < loss[0] < 6.0 and loss[-1] < loss[0] - 0.8


def test_the_splits_share_nothing() -> None:
    train, test = SPLITS["train"], SPLITS["test"]
    assert not set(train.architectures) & set(test.architectures)
    assert not {width for _, width in train.shapes} & {width for _, width in test.shapes}
    assert not [optimizer for optimizer in train.optimizers if optimizer in test.optimizers]
    assert train.corpus != test.corpus
    eighths = {
        split: {
            int(8 * math.log(log_uniform(random.Random(seed), 1, math.e, split)))
            for seed in range(99)
        }
        for split in SPLITS
    }
    assert eighths == {"train": {0, 2, 4, 6}, "test": {1, 3, 5, 7}}
