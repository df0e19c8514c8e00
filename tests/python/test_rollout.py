"""Goal: what mon.rollout() tells of the log-probs of a trainer and of its rollout equals a
recomputation token by token in float64, under verl's names; whatever is given, nothing raises,
waits or changes.
Method: made-up log-probs, recorded and read back; loops over single tokens give the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

import bellwether
from bellwether import rl
from bellwether._step import rollouts
from bellwether._step.rollouts import CHUNK, NAMES, read

from gpu import LACKS, SKIPPED
from models import Model, Shape, batch
from no_waiting import DEVICE, NoWaiting
from recording import Recording

SHAPE = Shape(layers=1)
ROWS, TOKENS = 5, 12
SUM, MAX, MEAN = 1, 2, 3  # Merge of signals.proto.
Tell = Callable[[Any, int], None]
OF_PAIR = {
    "rollout_corr/tokens", "rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/chi2_token",
    "rollout_corr/chi2_seq", "rollout_corr/ess", "rollout_corr/rollout_is_eff_sample_size",
    "rollout_corr/rollout_is_mean", "rollout_corr/rollout_is_ratio_fraction_high",
    "rollout_corr/rollout_is_ratio_fraction_low", "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_max", "training/rollout_logp_max_abs_diff",
}  # fmt: skip


def trained(path: Optional[Path], tell: Tell, steps: int = 3) -> tuple[list[Tensor], Any]:
    """The weights, and the status before it ends."""
    torch.manual_seed(0)
    model = Model(SHAPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor, status = None, None
    if path is not None:
        monitor = bellwether.attach(model, run="r", record=str(path), every=1, overhead_budget=1e9)
    for step in range(steps):
        model(batch(SHAPE, step)).square().mean().backward()
        tell(monitor, step)
        optimizer.step()
        optimizer.zero_grad()
    if monitor is not None:
        assert monitor.flush(20) and monitor.why_off == "", monitor.why_off
        status = monitor.status()
        assert status["errors"] == 0, status["last_error"]
        monitor.detach()
    return [p.detach() for p in model.parameters()], status


def told(path: Path, step: int) -> dict[str, float]:
    for frame in Recording(path, ended=True).frames:
        if frame.step == step:
            return {own.name: own.values[0] for own in frame.own}
    raise AssertionError(f"no frame of step {step}")


def made(seed: int, rows: int = ROWS, apart: float = 0.3) -> dict[str, Tensor]:
    """Log-probs of both, of the policy before, and a mask that leaves rows of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = -3 * torch.rand(rows, TOKENS, generator=generator)
    lengths = torch.randint(1, TOKENS + 1, (rows, 1), generator=generator)
    return {
        "log_probs": log_probs,
        "rollout_log_probs": log_probs + apart * torch.randn(rows, TOKENS, generator=generator),
        "old_log_probs": log_probs + apart * torch.randn(rows, TOKENS, generator=generator),
        "mask": (torch.arange(TOKENS) < lengths).long(),
        "entropy": torch.rand(rows, TOKENS, generator=generator),
        "advantages": torch.randn(rows, TOKENS, generator=generator),
        "rewards": torch.randn(rows, generator=generator),
    }


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def size(weights: list[float]) -> float:
    return math.fsum(weights) ** 2 / len(weights) / math.fsum(w * w for w in weights)


def bounded(x: float) -> float:
    return min(max(x, -20.0), 20.0)


def by_hand(
    *given: dict[str, Tensor], clip: Optional[tuple[float, float]] = None, threshold: float = 2.0
) -> dict[str, float]:
    """Of micro-batches, token by token."""
    pairs: list[tuple[float, float]] = []
    sequences: list[float] = []
    others: dict[str, list[float]] = {"old": [], "clipped": [], "outside": []}
    others.update(entropy=[], advantages=[], rewards=[])
    for one in given:
        double = {name: t.double().tolist() for name, t in one.items()}
        for row, counts in enumerate(one["mask"].tolist()):
            at = [i for i, counted in enumerate(counts) if counted]
            if not at:
                continue
            here = [(double["log_probs"][row][i], double["rollout_log_probs"][row][i]) for i in at]
            pairs += here
            sequences.append(math.fsum(a - b for a, b in here))
            others["rewards"].append(double["rewards"][row])
            for i in at:
                others["entropy"].append(double["entropy"][row][i])
                advantage = double["advantages"][row][i]
                others["advantages"].append(advantage)
                log = bounded(double["log_probs"][row][i] - double["old_log_probs"][row][i])
                others["old"].append(-log)
                low, high = clip if clip is not None else (0.2, 0.2)
                above, below = math.exp(log) > 1 + high, math.exp(log) < 1 - low
                others["clipped"].append((advantage > 0 and above) or (advantage < 0 and below))
                others["outside"].append(above or below)
    ratios = [a - b for a, b in pairs]
    weights = [math.exp(bounded(d)) for d in ratios]
    differences = [abs(math.exp(a) - math.exp(b)) for a, b in pairs]
    return {
        "rollout_corr/tokens": len(pairs),
        "rollout_corr/kl": mean([-d for d in ratios]),
        "rollout_corr/k3_kl": mean([math.exp(d) - d - 1 for d in ratios]),
        "rollout_corr/chi2_token": mean([w * w for w in weights]) - 1,
        "rollout_corr/chi2_seq": mean([math.exp(2 * bounded(s)) for s in sequences]) - 1,
        "rollout_corr/ess": size(weights),
        "rollout_corr/rollout_is_eff_sample_size": size(
            [min(max(w, 1 / threshold), threshold) for w in weights]
        ),
        "rollout_corr/rollout_is_mean": mean(weights),
        "rollout_corr/rollout_is_ratio_fraction_high": mean([w > threshold for w in weights]),
        "rollout_corr/rollout_is_ratio_fraction_low": mean([w < 1 / threshold for w in weights]),
        "training/rollout_probs_diff_mean": mean(differences),
        "training/rollout_probs_diff_max": max(differences),
        "training/rollout_logp_max_abs_diff": max(map(abs, ratios)),
        "actor/ppo_kl": mean(others["old"]),
        "actor/pg_clipfrac": mean(others["clipped"]),
        "actor/clipfrac": mean(others["outside"]),
        "actor/entropy": mean(others["entropy"]),
        "critic/advantages/mean": mean(others["advantages"]),
        "critic/advantages/max": max(others["advantages"]),
        "critic/rewards/mean": mean(others["rewards"]),
        "critic/rewards/max": max(others["rewards"]),
    }


def check(found: dict[str, float], wanted: dict[str, float], names: set[str]) -> None:
    assert set(found) == names
    for name in names:
        assert found[name] == pytest.approx(wanted[name], rel=1e-6, abs=1e-12), name


def test_numbers_are_those_of_single_tokens(tmp_path: Path) -> None:
    given = [made(1), made(2), made(3)]

    def tell(monitor: Any, step: int) -> None:
        monitor.rollout(**given[step], clip=0.2)

    path = tmp_path / "a.bwrun"
    _, status = trained(path, tell)
    assert status["numbers_left_out"] == {}
    for step in range(3):
        wanted = by_hand(given[step], clip=(0.2, 0.2))
        check(told(path, step), wanted, set(wanted) - {"actor/clipfrac"})


def test_only_what_was_given_is_told(tmp_path: Path) -> None:
    given = made(1)

    def tell(monitor: Any, step: int) -> None:
        pair, mask = (given["log_probs"], given["rollout_log_probs"]), given["mask"]
        old = given["old_log_probs"]
        if step == 0:
            monitor.rollout(*pair, mask)
        elif step == 1:
            monitor.rollout(*pair, mask, old_log_probs=old, clip=(0.1, 0.3))
        else:
            monitor.rollout(*pair, mask.bool(), threshold=1.2)

    path = tmp_path / "a.bwrun"
    trained(path, tell)
    wanted = by_hand(given, clip=(0.1, 0.3))
    check(told(path, 0), wanted, OF_PAIR)
    check(told(path, 1), wanted, OF_PAIR | {"actor/ppo_kl", "actor/clipfrac"})
    check(told(path, 2), by_hand(given, threshold=1.2), OF_PAIR)


def test_all_names_are_those_that_rl_takes() -> None:
    assert set(NAMES) == set(by_hand(made(1)))
    assert rl.metrics_of(dict.fromkeys(NAMES, 1.0)).keys() == set(NAMES)


def test_micro_batches_count_by_their_tokens(tmp_path: Path) -> None:
    given = [made(1, rows=2), made(2, rows=9, apart=0.8)]

    def tell(monitor: Any, step: int) -> None:
        for one in given:
            monitor.rollout(**one, clip=0.2)

    path = tmp_path / "a.bwrun"
    trained(path, tell)
    wanted = by_hand(*given, clip=(0.2, 0.2))
    check(told(path, 1), wanted, set(wanted) - {"actor/clipfrac"})


@pytest.mark.parametrize("padding", (math.nan, -math.inf, 1e30))
def test_padding_has_no_part(padding: float, tmp_path: Path) -> None:
    given = made(1)
    given["mask"][2] = 0  # A whole row, too.
    wanted = by_hand(given)
    out = given["mask"] == 0
    for name in ("log_probs", "rollout_log_probs", "old_log_probs", "entropy", "advantages"):
        given[name] = given[name].masked_fill(out, padding)
    given["rewards"][2] = padding
    path = tmp_path / "a.bwrun"
    trained(path, lambda monitor, step: monitor.rollout(**given, clip=0.2))
    check(told(path, 0), wanted, set(wanted) - {"actor/clipfrac"})


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
def test_log_probs_that_are_not_finite_give_nan(bad: float, tmp_path: Path) -> None:
    given = made(1)
    given["rollout_log_probs"][0, 0] = bad
    path = tmp_path / "a.bwrun"
    _, status = trained(path, lambda monitor, step: monitor.rollout(**given, clip=0.2))
    assert status["numbers_left_out"] == {}
    found, wanted = told(path, 0), by_hand(made(1), clip=(0.2, 0.2))
    of_probs = {"training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"}
    of_pair = OF_PAIR - {"rollout_corr/tokens"} - of_probs
    assert all(math.isnan(found[name]) for name in of_pair)
    sound = set(found) - of_pair - of_probs
    check({name: found[name] for name in sound}, wanted, sound)


def test_ratios_beyond_e_to_the_20_are_bounded(tmp_path: Path) -> None:
    log_probs = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]])
    apart = torch.tensor([[-200.0, 0.0], [900.0, 0.0]])

    def tell(monitor: Any, step: int) -> None:
        monitor.rollout(log_probs, log_probs + apart, old_log_probs=log_probs + apart)

    path = tmp_path / "a.bwrun"
    trained(path, tell)
    found, most, least = told(path, 0), math.exp(20), math.exp(-20)
    assert found["rollout_corr/kl"] == pytest.approx((900 - 200) / 4)
    assert found["rollout_corr/k3_kl"] == pytest.approx((most - 21 + 900 - 1) / 4)
    assert found["rollout_corr/chi2_token"] == pytest.approx((most**2 + 2 + least**2) / 4 - 1)
    assert found["rollout_corr/chi2_seq"] == pytest.approx((most**2 + least**2) / 2 - 1)
    assert found["rollout_corr/ess"] == pytest.approx(0.25)
    assert found["training/rollout_logp_max_abs_diff"] == 900
    assert found["actor/ppo_kl"] == 0


def test_small_differences_keep_their_digits(tmp_path: Path) -> None:
    """exp(d) - d - 1 has none left in float32 where d is 1e-4."""
    log_probs = torch.full((4, 8), -1.0, dtype=torch.float64)
    path = tmp_path / "a.bwrun"
    trained(path, lambda monitor, step: monitor.rollout(log_probs, log_probs - 1e-6))
    found = told(path, 0)
    assert found["rollout_corr/k3_kl"] == pytest.approx(0.5e-12, rel=1e-4)
    assert found["rollout_corr/chi2_token"] == pytest.approx(2e-6, rel=1e-5)


@pytest.mark.parametrize("kind", (torch.bfloat16, torch.float16, torch.float64))
def test_other_types_are_read_as_they_are(kind: torch.dtype, tmp_path: Path) -> None:
    given = {k: t.to(kind) if t.is_floating_point() else t for k, t in made(1).items()}
    path = tmp_path / "a.bwrun"
    trained(path, lambda monitor, step: monitor.rollout(**given, clip=0.2))
    wanted = by_hand(given)
    check(told(path, 0), wanted, set(wanted) - {"actor/clipfrac"})


def test_forms_of_entropy_advantages_and_rewards(tmp_path: Path) -> None:
    given = made(1)
    given["advantages"] = given["advantages"][:, :1].expand(ROWS, TOKENS)
    wanted = by_hand(given)
    split = torch.rand(ROWS, TOKENS) * given["mask"]
    split[:, 0] += given["rewards"] - split.sum(1)

    def tell(monitor: Any, step: int) -> None:
        more = (
            {"advantages": given["advantages"][:, 0], "rewards": given["rewards"].tolist()},
            {"advantages": given["advantages"][:, :1], "rewards": split},
            {"entropy": 0.5, "rewards": given["rewards"].numpy()},
        )[step]
        monitor.rollout(given["log_probs"], given["rollout_log_probs"], given["mask"], **more)

    path = tmp_path / "a.bwrun"
    trained(path, tell)
    for step in range(2):
        found = told(path, step)
        for name in ("advantages/mean", "advantages/max", "rewards/mean", "rewards/max"):
            assert found[f"critic/{name}"] == pytest.approx(wanted[f"critic/{name}"], rel=1e-5)
    assert told(path, 2)["actor/entropy"] == pytest.approx(0.5)


def test_packed_tokens_have_no_sequences(tmp_path: Path) -> None:
    given = made(1)
    flat = {name: given[name].reshape(-1) for name in ("log_probs", "rollout_log_probs", "mask")}

    def tell(monitor: Any, step: int) -> None:
        monitor.rollout(**flat, rewards=[1.0, 2.0])

    path = tmp_path / "a.bwrun"
    trained(path, tell)
    found = told(path, 0)
    assert found.pop("critic/rewards/mean") == 1.5 and found.pop("critic/rewards/max") == 2
    check(found, by_hand(given), OF_PAIR - {"rollout_corr/chi2_seq"})


@pytest.mark.parametrize("packed", (False, True))
def test_many_tokens_are_read_in_parts(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = made(1)
    names = ("log_probs", "rollout_log_probs", "mask", "entropy", "advantages")
    if packed:
        given = {name: given[name].reshape(-1) for name in names}
    values = []
    for chunk in (CHUNK, 2 * TOKENS):
        monkeypatch.setattr(rollouts, "CHUNK", chunk)
        values.append(rollouts.merged([read(**given, clip=0.2)]))
    for name, value in values[0].items():
        assert value == pytest.approx(values[1][name], rel=1e-12), name


def test_a_mask_without_tokens_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = made(1)
    empty = {**made(2), "mask": torch.zeros(ROWS, TOKENS)}

    def tell(monitor: Any, step: int) -> None:
        if step > 0:
            monitor.rollout(**given)
        monitor.rollout(**empty)

    path = tmp_path / "a.bwrun"
    _, status = trained(path, tell)
    assert told(path, 0) == {}
    wanted = by_hand(given)
    clips = {"actor/clipfrac", "actor/pg_clipfrac"}
    check(told(path, 1), wanted, set(wanted) - clips)
    [(reason, times)] = status["numbers_left_out"].items()
    assert "no token" in reason and times == 3
    assert caplog.text.count(reason) == 1


@pytest.mark.parametrize(
    "wrong, word",
    (
        ({"rollout_log_probs": torch.zeros(ROWS, TOKENS + 1)}, "rollout_log_probs"),
        ({"mask": torch.ones(ROWS)}, "mask"),
        ({"old_log_probs": torch.zeros(ROWS)}, "old_log_probs"),
        ({"entropy": torch.zeros(3)}, "entropy"),
        ({"advantages": torch.zeros(ROWS + 1)}, "advantages"),
        ({"rewards": [1.0]}, "rewards"),
        ({"log_probs": None}, "log_probs"),
        ({"log_probs": torch.zeros(ROWS, TOKENS, dtype=torch.int64)}, "log_probs"),
        ({"log_probs": torch.zeros(0, TOKENS), "rollout_log_probs": torch.zeros(0, TOKENS)}, "0"),
        ({"rollout_log_probs": [[0.0], [0.0, 1.0]]}, ""),
        ({"rollout_log_probs": "none"}, ""),
        ({"clip": -0.1}, "clip"),
        ({"clip": (0.1, math.nan)}, "clip"),
        ({"threshold": 0.5}, "threshold"),
    ),
)
def test_bad_arguments_cost_themselves_alone(
    wrong: dict[str, Any], word: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {name: made(1)[name] for name in ("log_probs", "rollout_log_probs")}

    def tell(monitor: Any, step: int) -> None:
        monitor.rollout(**{**given, **wrong})
        monitor.log("kl", 1.0)

    path = tmp_path / "a.bwrun"
    _, status = trained(path, tell)
    [(reason, times)] = status["numbers_left_out"].items()
    assert reason.startswith("rollout: ") and word in reason and times == 3
    assert caplog.text.count(reason) == 1
    assert told(path, 1) == {"kl": 1.0}


def test_another_step_costs_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.bwrun"
    _, status = trained(path, lambda monitor, step: monitor.rollout(**made(1), step=step + 7))
    assert sum(status["numbers_left_out"].values()) == 3 and told(path, 0) == {}


def test_a_name_of_another_kind_costs_itself(tmp_path: Path) -> None:
    def tell(monitor: Any, step: int) -> None:
        monitor.log("rollout_corr/kl", 1.0, merge="sum")
        monitor.rollout(**made(1))

    path = tmp_path / "a.bwrun"
    _, status = trained(path, tell)
    [(reason, times)] = status["numbers_left_out"].items()
    assert reason.startswith("log rollout_corr/kl: ") and times == 3
    found = told(path, 0)
    assert found["rollout_corr/kl"] == 1 and "rollout_corr/k3_kl" in found


def test_how_ranks_merge_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.bwrun"
    trained(path, lambda monitor, step: monitor.rollout(**made(1)))
    merges = {own.name: own.merge for own in Recording(path, ended=True).frames[0].own}
    largest = {name for name, merge in merges.items() if merge == MAX}
    assert merges.pop("rollout_corr/tokens") == SUM
    assert largest == {
        "training/rollout_probs_diff_max", "training/rollout_logp_max_abs_diff",
        "critic/advantages/max", "critic/rewards/max",
    }  # fmt: skip
    assert {merges[name] for name in set(merges) - largest} == {MEAN}


def test_no_bit_of_a_training_changes(tmp_path: Path) -> None:
    given = {k: t.double() for k, t in made(1).items() if k != "mask"}  # Nothing is converted.
    for t in given.values():
        t.requires_grad_()
    before = {name: t.detach().clone() for name, t in given.items()}

    def tell(monitor: Any, step: int) -> None:
        torch.rand(1)
        if monitor is not None:
            monitor.rollout(**given, clip=0.2)

    plain, _ = trained(None, tell)
    watched, status = trained(tmp_path / "a.bwrun", tell)
    assert status["numbers_left_out"] == {}
    assert all(torch.equal(a, b) for a, b in zip(plain, watched))
    for name, t in given.items():
        assert torch.equal(t, before[name]) and t.grad is None and t.requires_grad


def test_no_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Copied:
        def __init__(self, tensors: list[Tensor]) -> None:
            assert all(t.device.type == DEVICE for t in tensors)

    monkeypatch.setattr(rollouts, "Arriving", Copied)
    monkeypatch.setattr(rollouts, "DEVICES", (DEVICE,))
    given = {name: t.to(DEVICE) for name, t in made(1).items()}
    with NoWaiting() as seen:
        read(**given, clip=0.2)
    assert seen.operations


@pytest.mark.skipif(SKIPPED, reason=LACKS or "there is one")
@pytest.mark.parametrize("beside", ("cuda", "cpu"))
def test_a_gpu_gives_the_same_and_is_not_waited_for(beside: str) -> None:
    given = made(1)
    there = {name: t.cuda() for name, t in given.items()}
    for name in ("rollout_log_probs", "rewards"):
        there[name] = given[name].to(beside)
    mode: Any = torch.cuda.set_sync_debug_mode
    read(**there, clip=0.2).values()  # Kernels are loaded.
    mode("error")
    try:
        told_there = read(**there, clip=0.2)
    finally:
        mode("default")
    torch.cuda.synchronize()
    assert rollouts.merged([told_there]) == pytest.approx(
        rollouts.merged([read(**given, clip=0.2)]), rel=1e-12
    )


def test_a_handle_that_is_off_takes_it(tmp_path: Path) -> None:
    from bellwether._unwatched import Unwatched

    Unwatched("a test").rollout(**made(1))
    model = Model(SHAPE)
    monitor = bellwether.attach(model, run="r", record=str(tmp_path / "a.bwrun"))
    monitor.detach()
    monitor.rollout(**made(1))
    assert monitor.status()["numbers_left_out"] == {}
