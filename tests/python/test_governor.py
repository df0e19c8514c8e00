"""Goal: the sampling period follows the price of watching, and a jump of the learning rate is
told from its warm-up.  Method: made-up times and rates.
"""

from __future__ import annotations

import pytest

from bellwether.governor import PERIOD_MAX, Governor, RateWatch
from bellwether.step_clock import StepClock


def run(governor: Governor, share: float, samples: int) -> list[int]:
    periods, step = [], 0
    for _ in range(samples):
        while not governor.due(step):
            step += 1
        governor.sampled(step, share, 1.0)
        periods.append(governor.period)
        step += 1
    return periods


def test_within_budget_nothing_changes() -> None:
    assert run(Governor(20, 0.005), 0.004, 30) == [20] * 30


def test_above_budget_the_period_grows_to_its_limit_only() -> None:
    periods = run(Governor(20, 0.005), 0.5, 200)
    assert periods[3] == 20 and periods[4] == 80
    assert periods[-1] == PERIOD_MAX


def test_one_slow_sample_changes_nothing() -> None:
    governor = Governor(20, 0.005)
    for step, share in enumerate([0.001, 0.9, 0.001, 0.9, 0.001]):
        governor.sampled(step * 20, share, 1.0)
    assert governor.period == 20


def test_it_shrinks_again_but_not_below_the_base() -> None:
    governor = Governor(20, 0.005)
    run(governor, 0.02, 5)
    assert governor.period == 80
    assert run(governor, 0.0001, 40)[-1] == 20


def test_samples_are_one_period_apart() -> None:
    governor = Governor(5, 1.0)
    due = []
    for step in range(21):
        if governor.due(step):
            due.append(step)
            governor.sampled(step, 0.0, 1.0)
    assert due == [0, 5, 10, 15, 20]


def test_rate_jumps() -> None:
    watch = RateWatch()
    warm_up = [1e-3 * (i + 1) / 10 for i in range(10)]
    assert not any(watch.jumped(rate) for rate in [*warm_up, 1e-3, 1e-3])
    assert watch.jumped(5e-3)
    assert not watch.jumped(5e-3)
    assert watch.jumped(1e-3)
    assert not any(watch.jumped(rate) for rate in (9e-4, 8e-4, 7e-4))
    assert watch.jumped(7e-4 * 1.5)
    assert not watch.jumped(float("nan"))


def test_a_sampled_step_on_a_gpu_costs_what_it_takes_longer() -> None:
    clock = StepClock()
    clock.add(0.030, sampled=True)
    assert clock.sample_seconds() is None  # Nothing to compare to.
    for seconds in (0.020, 0.021, 0.5, 0.020, 0.019):  # One of them had to wait for data.
        clock.add(seconds, sampled=False)
    clock.add(0.022, sampled=True)
    assert clock.sample_seconds() == pytest.approx(0.002)
