"""Goal: the price of watching is what the job loses, the sampling period follows it, and a jump of
the learning rate is told from its warm-up.  Method: made-up jobs, times and rates.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from bellwether._step.governor import PERIOD_MAX, Governor, RateWatch
from bellwether._step.price import PAIRS_MIN, Price
from bellwether._step.step_clock import StepClock
from bellwether._step.volume import Rate, Volume


def run(governor: Governor, share: float, samples: int) -> list[int]:
    periods, step = [], 0
    for _ in range(samples):
        while not governor.due(step):
            step += 1
        governor.sampled(step, share)
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
        governor.sampled(step * 20, share)
    assert governor.period == 20


def test_period_shrinks_again_but_not_below_the_base() -> None:
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
            governor.sampled(step, 0.0)
    assert due == [0, 5, 10, 15, 20]


def test_ranks_of_other_prices_sample_common_steps() -> None:
    sampled = []
    for share in (0.012, 0.004, 0.03):
        governor, steps = Governor(7, 0.005, in_step=True), set()
        governor.restart(100)  # In a job that goes on.
        for step in range(100, 1000):
            if governor.due(step):
                steps.add(step)
                governor.sampled(step, min(share, share * 7 / governor.period))
        sampled.append({step for step in steps if step > 300})
        assert governor.period in (7, 14, 28, 56)
    dear, cheap, dearest = sampled
    assert dearest < dear < cheap and len(dearest) > 10


def test_new_period_counts_from_the_last_sample() -> None:
    governor = Governor(20, 0.005)
    run(governor, 0.5, 200)  # As rare as can be: the next sample is far away.
    step = governor._next - PERIOD_MAX
    governor.set_base(10)
    assert governor.due(step + 10) and not governor.due(step + 9)
    governor.sampled(step + 10, 0.001)
    governor.set_base(1000)
    assert governor.due(step + 1010) and not governor.due(step + 1009)


def test_new_period_keeps_ranks_on_common_steps() -> None:
    governor = Governor(100, 0.005, in_step=True)
    governor.sampled(1000, 0.001)
    governor.set_base(30)
    assert governor.due(1050) and not governor.due(1049)


def sent(governor: Governor, size: float, samples: int, share: float = 0.0) -> list[int]:
    """Periods of a job with a step a second, whose samples have `size` bytes."""
    periods = []
    for step in range(samples):
        governor.sampled(step, share, 0.0, Rate(size / governor.period, 0.0))
        periods.append(governor.period)
    return periods


def test_bytes_above_their_budget_make_samples_rarer() -> None:
    governor = Governor(20, 0.005, byte_budget=1000)
    periods = sent(governor, 60_000.0, 60)
    assert periods[3] == 20 and periods[4] == 60 and periods[-1] <= 61
    assert sent(governor, 10.0, 40)[-1] == 20
    assert sent(Governor(20, 0.005), 1e12, 30) == [20] * 30  # There is no such budget.


def test_the_budget_that_is_exceeded_most_decides() -> None:
    by_time = Governor(20, 0.005, byte_budget=1000)
    assert sent(by_time, 30_000.0, 5, share=0.02)[-1] == 80
    by_bytes = Governor(20, 0.005, byte_budget=1000)
    assert sent(by_bytes, 60_000.0, 5, share=0.0075)[-1] == 60
    assert sent(by_bytes, 40_000.0, 20, share=0.0001)[-1] == 60  # Bytes hold it there.


def test_frames_between_samples_leave_a_quarter_of_the_bytes() -> None:
    governor = Governor(20, 0.005, byte_budget=1000)
    for step in range(5):
        governor.sampled(step, None, 0.0, Rate(240.0, 5000.0))
    assert governor.period == 20
    assert not any(governor.sampled(step, None, 0.0, Rate(240.0, 5000.0)) for step in range(5))
    told = [governor.sampled(step, None, 0.0, Rate(500.0, 5000.0)) for step in range(5)]
    assert governor.period == 40 and told.count(True) == 1


def test_ranks_whose_bytes_differ_sample_common_steps() -> None:
    for size in (30_000.0, 90_000.0):
        governor = Governor(7, 0.005, in_step=True, byte_budget=1000)
        assert sent(governor, size, 60)[-1] in (7, 14, 28, 56, 112)


def test_bytes_are_counted_from_sample_to_sample() -> None:
    now = [10.0]
    volume = Volume(1000, lambda: now[0])
    volume.add(500, True)
    assert volume.closed() is None
    for size, sampled in ((4000, True), (100, False), (100, False)):
        volume.add(size, sampled)
    now[0] += 2.0
    assert volume.closed() == Rate(2000.0, 100.0) and volume.of_sample == 4000
    now[0] += 2.0
    assert volume.closed() == Rate(0.0, 0.0)


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


def test_gpu_sample_costs_its_extra_step_time() -> None:
    clock = StepClock()
    clock.add(0.030, sampled=True)
    plain = (0.020, 0.020, 0.5, 0.020, 0.019)  # One of them had to wait for data.
    for seconds in plain:
        clock.add(seconds, sampled=False)
    clock.add(0.022, sampled=True)
    assert clock.pairs() == 0  # Nothing to compare to.
    for seconds in plain:
        clock.add(seconds, sampled=False)
    clock.add(0.022, sampled=True)
    assert clock.pairs() == 1
    assert clock.sample_steps()[0] * 0.020 == pytest.approx(0.002)


def usual(step: int) -> float:
    return 0.1


class MadeUpJob:
    """Steps of `plain(step)` seconds; a sampled one takes `extra` more, of which the hook's clocks
    see `hook` on the CPU and `kernels` on the GPU; other steps pay `between`."""

    def __init__(
        self, *, extra: float, hook: float, kernels: float = 0.0, between: float = 0.0,
        plain: Callable[[int], float] = usual, gpu: bool = False, period: int = 20,
        noise: float = 0.0, begin: Callable[[int], float] = lambda step: 0.0,
    ) -> None:  # fmt: skip
        self.price, self.period = Price(), period
        self._random, self._next = random.Random(3), 0
        self._told = extra, hook, kernels, between, plain, gpu, noise, begin

    def run(self, steps: int) -> Price:
        extra, hook, kernels, between, plain, gpu, noise, begin = self._told
        for step in range(self._next, self._next + steps):
            sampled = step % self.period == 0
            seconds = plain(step) * (1 + self._random.gauss(0, noise)) + begin(step)
            seconds += extra if sampled else 0.0
            self.price.clock.add(seconds, sampled)
            if sampled:
                self.price.sampled(hook, kernels, seconds, gpu)
            else:
                self.price.between(between)
        self._next += steps
        return self.price


def test_hook_time_hidden_by_the_gpu_is_free() -> None:
    # The hook takes 60 ms of the CPU's time, and the steps take 5 ms longer: its kernels' time.
    price = MadeUpJob(extra=0.005, hook=0.06, kernels=0.005, between=0.01, gpu=True).run(400)
    assert price.known() and price.share(20) == pytest.approx(0.005 / 2.005, rel=0.02)
    assert price.of_step(0.01, 0.0, sampled=False) == pytest.approx(0.0, abs=1e-6)
    assert price.of_step(0.06, 0.005, sampled=True) == pytest.approx(0.005, rel=0.02)


def test_time_regained_after_a_sample_is_subtracted() -> None:
    # At its power limit a GPU makes up for a sample, which draws less power than training.
    job = MadeUpJob(
        extra=0.0043, hook=0.006, kernels=0.0042, gpu=True,
        plain=lambda step: 0.04 - (0.00035 if step % 20 in (1, 2) else 0.0),
    )  # fmt: skip
    assert job.run(1000).share(20) == pytest.approx(0.0036 / 0.8036, rel=0.02)


def test_period_of_two_compares_with_the_step_between() -> None:
    job = MadeUpJob(extra=0.005, hook=0.06, kernels=0.005, gpu=True, period=2)
    assert job.run(100).share(2) == pytest.approx(0.005 / 0.205, rel=0.02)


def test_visible_cpu_time_counts_for_each_step() -> None:
    job = MadeUpJob(extra=0.065, hook=0.06, kernels=0.005, between=0.002, gpu=True)
    assert job.run(400).share(20) == pytest.approx((20 * 0.002 + 0.065) / 2.065, rel=0.02)


def test_gpu_price_is_unknown_until_enough_pairs() -> None:
    job = MadeUpJob(extra=0.005, hook=0.06, kernels=0.005, gpu=True)
    assert not job.run(20 * PAIRS_MIN).known()
    assert job.run(41).known()


def test_steps_say_what_the_clocks_do_not_see() -> None:
    # The taps slow the sampled steps by more than the hook's own time.
    price = MadeUpJob(extra=0.010, hook=0.007).run(400)
    assert price.by_steps() and price.share(20) == pytest.approx(0.010 / 2.010, rel=0.02)


@pytest.mark.parametrize("per_step", [1e-3, -1e-3])
def test_a_drift_of_the_step_time_cancels(per_step: float) -> None:
    # Over a period the step time changes by more than what a sample costs.
    job = MadeUpJob(extra=0.01, hook=0.005, plain=lambda step: 0.5 + per_step * step)
    cost, _ = job.run(300).clock.sample_steps()
    assert cost == pytest.approx(0.01 / (0.5 + 150 * per_step), rel=0.1)


def test_evaluations_checkpoints_and_compiling_count_for_nothing() -> None:
    def begin(step: int) -> float:
        compiled = 30.0 if step < 3 else 5.0 if step == 20 else 0.0
        return compiled + (8.0 if step % 100 == 0 else 0.0) + (3.0 if step % 70 == 1 else 0.0)

    price = MadeUpJob(extra=0.004, hook=0.003, begin=begin).run(800)
    assert price.share(20) == pytest.approx(0.004 / 2.004, rel=0.1)


def test_trainers_own_work_at_samples_does_not_count() -> None:
    # It logs for 0.2 s whenever a sample is taken; the hook took 2 ms.
    price = MadeUpJob(extra=0.202, hook=0.002).run(400)
    assert price.share(20) <= 2 * 0.002 / 2.0


def test_steps_that_vary_leave_the_word_to_the_clocks() -> None:
    shares = []
    for seed in range(20):
        job = MadeUpJob(extra=0.004, hook=0.004, noise=0.5)
        job._random.seed(seed)
        shares.append(job.run(400).share(20))
    assert sorted(shares)[10] == pytest.approx(0.002, rel=0.05)


@pytest.mark.parametrize("noise", [0.0, 0.002, 0.01])
def test_the_price_is_right_within_a_third(noise: float) -> None:
    for seed in range(10):
        job = MadeUpJob(extra=0.007, hook=0.05, kernels=0.006, gpu=True, noise=noise)
        job._random.seed(seed)
        assert job.run(700).share(20) == pytest.approx(0.007 / 2.007, rel=1 / 3)


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_samples_that_are_close_together_have_a_price(period: int) -> None:
    price = MadeUpJob(extra=0.02, hook=0.02, period=period).run(100)
    assert price.known() and price.share(period) == pytest.approx(
        0.02 / (period * 0.1 + 0.02), rel=0.01
    )


def test_the_governor_keeps_the_price_within_its_budget() -> None:
    job = MadeUpJob(extra=0.05, hook=0.4, kernels=0.05, gpu=True)
    governor = Governor(20, 0.005)
    for step in range(6000):
        sampled = governor.due(step)
        seconds = 0.1 + (0.05 if sampled else 0.0)
        job.price.clock.add(seconds, sampled)
        if sampled:
            job.price.sampled(0.4, 0.05, seconds, True)
            share = job.price.share(governor.period) if job.price.known() else 0.0
            governor.sampled(step, share or None)
        else:
            job.price.between(0.0)
    # 0.05 s of a step of 0.1 s each 100 steps are half a per cent; the CPU's 0.4 s are none.
    assert 80 <= governor.period <= 125, governor.period
    assert job.price.share(governor.period) <= 0.0062


def test_cost_of_each_step_does_not_lengthen_the_period() -> None:
    # Each step pays 2 %, four times the budget; a sample of 1 ms each 20 steps 0.05 % more.
    job = MadeUpJob(extra=0.001, hook=0.001, between=0.002)
    price = job.run(400)
    assert price.share(20) == pytest.approx(0.0205, rel=0.02)
    assert price.every_step(20) == pytest.approx(0.02, rel=0.02)
    governor = Governor(20, 0.005)
    for step in range(20):
        governor.sampled(20 * step, price.share(20), price.every_step(20))
    assert governor.period == 20


def test_samples_get_a_quarter_of_the_budget_when_steps_pay() -> None:
    governor = Governor(20, 0.005)
    for step in range(5):
        governor.sampled(20 * step, 0.0225, 0.02)  # Samples cost 0.25 %, twice a quarter of it.
    assert governor.period == 40


def test_free_samples_let_the_period_shrink() -> None:
    # The step with a sample is faster than those around it, beyond what the steps vary.
    job = MadeUpJob(extra=-0.002, hook=0.01, gpu=True)
    price = job.run(400)
    assert price.known() and price.share(20) == 0.0
    assert run(after := Governor(20, 0.005), 0.5, 5)[-1] == 80
    assert run(after, price.share(80), 10)[-1] == 20
