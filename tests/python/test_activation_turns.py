"""Goal: a sample looks at some blocks, and five samples come by all activations: each value is what
a sample of everything says.  Blocks without a turn have no taps.  Ranks of a job look at the same
blocks, also where one samples more rarely.  Training and its graphs stay the same.
Method: trainings of models of more blocks than are told whole, compared with their recordings, with
one of which every sample tells all, and with what was kept in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch._dynamo
from rank_jobs import run_ranks
from test_activations import SHAPE, WATCHED, Block, Gpt, Kept, told_in, wanted_of
from told_tensors import Told
from torch import Tensor, nn
from torch.nn import functional as F

import bellwether
from bellwether._hook.layer.activation_tap import ActivationTap
from bellwether._hook.layer.linear_tap import Taps
from bellwether._hook.model.parallel import Parallel
from bellwether._step import activations
from bellwether._step.activations import TOLD_WHOLE, TURNS, Activations
from bellwether._step.governor import Governor

from conftest import ROOT
from gpu import DEVICES
from models import batch
from tap_host import Host

BLOCKS = 9
WORDS = 41


class Language(nn.Module):
    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, SHAPE.width)
        self.layers = nn.ModuleList(Block(SHAPE) for _ in range(blocks))
        self.head = nn.Linear(SHAPE.width, WORDS, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def parts_of(blocks: range) -> set[str]:
    return {f"layers.{at}{p}" for at in blocks for p in ("", ".attention", ".mlp product")}


AROUND = {"embed", "head", "head input"}
# By turn: what is around the blocks, and then every fourth block.
TOLD = [AROUND, *(parts_of(range(at, BLOCKS, TURNS - 1)) for at in range(TURNS - 1))]


def trained(
    path: Optional[Path], steps: int = 2 * TURNS + 2, blocks: int = BLOCKS, device: str = "cpu",
    explicit: bool = False, **watch: Any,
) -> tuple[Kept, Any, list[Tensor]]:  # fmt: skip
    """What was kept, the status, and the weights at the end."""
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = Language(blocks).to(device)
    monitor = None
    if path is not None:
        monitor = bellwether.attach(model, record=str(path), **(WATCHED | watch))
    kept = Kept(model)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        kept.begin()
        words = torch.randint(WORDS, (2, 9), generator=torch.Generator().manual_seed(step))
        words = words.to(device)
        logits = model(words[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if explicit and monitor is not None:
            monitor.step(loss=loss)
    status = None
    if monitor is not None:
        status = monitor.status()
        assert status["errors"] == 0 and status["live"], status["last_error"]
        monitor.detach()
    return kept, status, [p.detach().clone() for p in model.parameters()]


def turns_told(told: Told) -> dict[int, int]:
    """By step, which turn it told.  The first sample that tells anything may lack its beginning."""
    return {
        step: next(turn for turn, rows in enumerate(TOLD) if rows == set(of))
        for step, of in told.items()
        if step > 1
    }


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_a_turn_tells_everything_as_whole_samples_do(
    device: str, explicit: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_turn, whole = tmp_path / "in_turn.bwrun", tmp_path / "whole.bwrun"
    kept, status, _ = trained(in_turn, device=device, explicit=explicit)
    assert status["modules"]["turns"] == TURNS and status["modules"]["blocks"] == BLOCKS
    monkeypatch.setattr(activations, "TOLD_WHOLE", BLOCKS)
    _, status, _ = trained(whole, device=device, explicit=explicit)
    assert status["modules"]["turns"] == 1
    told, all_told = told_in(in_turn), told_in(whole)
    turns = turns_told(told)
    assert set(list(turns.values())[:TURNS]) == set(range(TURNS))
    assert set().union(*(told[step] for step in list(turns)[:TURNS])) == set(all_told[4])
    for step in turns:
        for name, got in told[step].items():
            assert got == pytest.approx(all_told[step][name], rel=1e-5), (step, name)
            if name in kept.x[step]:
                want = wanted_of(kept.x[step][name])
                assert {k: got[k] for k in want} == pytest.approx(want, rel=1e-5, abs=1e-40)
            if name in kept.grad[step]:
                want = float(torch.cat(kept.grad[step][name]).square().sum())
                assert got["module_grad_sumsq"] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_training_is_the_same_bit_for_bit(device: str, tmp_path: Path) -> None:
    _, _, watched = trained(tmp_path / "a.bwrun", device=device)
    _, _, alone = trained(None, device=device)
    assert all(torch.equal(a, b) for a, b in zip(watched, alone))


def test_few_blocks_are_told_whole_in_each_sample(tmp_path: Path) -> None:
    trained(tmp_path / "a.bwrun", steps=5, blocks=TOLD_WHOLE)
    told = told_in(tmp_path / "a.bwrun")
    for step in range(2, 5):
        assert set(told[step]) == AROUND | parts_of(range(TOLD_WHOLE))


def test_only_blocks_in_turn_have_taps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tapped: list[nn.Module] = []
    add = Taps.add

    def counted(self: Taps, module: nn.Module, tap: Any) -> None:
        if isinstance(tap, ActivationTap):
            tapped.append(module)
        add(self, module, tap)

    monkeypatch.setattr(Taps, "add", counted)
    # The first step knows no blocks yet, and one more begins where the watching ends.
    trained(tmp_path / "a.bwrun", steps=TURNS)
    assert len(tapped) == len(AROUND) + 3 * BLOCKS


def test_compiling_gives_no_further_graphs(tmp_path: Path) -> None:
    graphs = []
    for at, stats in enumerate((["drift"], ["drift", "modules"])):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model = Gpt(blocks=TOLD_WHOLE + 2)
        monitor = bellwether.attach(
            model, record=str(tmp_path / f"{at}.bwrun"), **(WATCHED | {"stats": stats})
        )
        compiled = torch.compile(model, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(TURNS + 2):
            compiled(batch(SHAPE, step)).square().mean().backward()
            optimizer.step()
        assert monitor.status()["errors"] == 0
        monitor.detach()
        counters = torch._dynamo.utils.counters
        graphs.append((counters["stats"]["unique_graphs"], dict(counters["graph_break"])))
    assert graphs[0] == graphs[1] and graphs[0][0] > 0


# ---- whose turn it is ----


class Watching(Host):
    def cannot_measure_on(self, device: str) -> Optional[str]:
        return None


def rows_of(model: nn.Module, placed: Parallel) -> Callable[[int], set[str]]:
    """What a sample looks at, behind so many others."""

    class Attends:
        def __init__(self, module: nn.Module) -> None:
            self.index, self._module = 0, module

        def module(self) -> nn.Module:
            return self._module

    layers = [Attends(block.attention) for block in model.layers]
    found = Activations(Watching(), lambda: model, layers, placed)  # type: ignore[arg-type]
    found.watch()

    def looks(samples: int) -> set[str]:
        found.counts(samples)
        found.begin_step(True)
        found.stop()
        return {found.names[of.row] for of in found._taken()}

    return looks


def test_a_stage_without_embeddings_shares_all_turns_out() -> None:
    torch._dynamo.utils.counters.clear()
    looks = rows_of(Gpt(blocks=BLOCKS), Parallel(pipeline=(1, 3), first_layer=BLOCKS, layers=27))
    told = [looks(samples) for samples in range(TURNS)]
    assert [len(rows) // 3 for rows in told] == [2, 2, 2, 2, 1]
    assert set().union(*told) == parts_of(range(BLOCKS, 2 * BLOCKS))


@pytest.mark.parametrize("more_rarely", [1, 2, 4, 8, 64])
def test_a_rank_that_samples_more_rarely_comes_by_all(more_rarely: int) -> None:
    base = 20
    governor = Governor(base, 0.005, in_step=True)
    steps = range(0, TURNS * base * more_rarely, base * more_rarely)
    turns = [governor.samples_before(step, 0) % TURNS for step in steps]
    assert sorted(turns) == list(range(TURNS))
    assert Governor(base, 0.005).samples_before(7 * base, 3) == 3  # By itself it counts its own.


JOB = """
import sys, torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
sys.path.insert(0, {tests!r})
import bellwether
from models import batch
from test_activations import SHAPE, WATCHED, Gpt

dist.init_process_group("gloo")
torch.manual_seed(0)
model = Gpt(blocks=9)
fully_shard(model)
monitor = bellwether.attach(model, record=sys.argv[1], ranks="all", **WATCHED)
if dist.get_rank() == 1:
    monitor.steps.reporter.governor.period = 2
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(14):
    model(batch(SHAPE, step + 50 * dist.get_rank())).square().mean().backward()
    optimizer.step()
status = monitor.status()
monitor.detach()
assert status["errors"] == 0, status["last_error"]
"""


def test_ranks_look_at_the_same_blocks_of_a_step(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB.format(tests=str(ROOT / "tests" / "python")))
    run_ranks(script, str(tmp_path / "a.bwrun"), ranks=2)
    first, second = (told_in(tmp_path / name) for name in ("a.bwrun", "a-rank1.bwrun"))
    both = [step for step in second if second[step] and step > 1]
    assert len(both) < len(first) - 4  # It samples more rarely.
    assert all(set(first[step]) == set(second[step]) for step in both)
    for told, steps in ((first, range(3, 3 + TURNS)), (second, both[:TURNS])):
        assert set().union(*(told[step] for step in steps)) == parts_of(range(BLOCKS))
