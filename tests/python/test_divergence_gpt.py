"""Goal: the experiment trains with every attention, switches in flight, goes on where it stopped,
and draws what it measured; its measures are right.
Method: the script itself, at a size of seconds on the CPU.  (That the set-up of its defaults fails
and is rescued takes a GPU and minutes.)
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import ROOT

sys.path.insert(0, str(ROOT / "examples"))
import divergence_gpt as example

from recording import Recording

TINY = ["--device", "cpu", "--layers", "2", "--width", "32", "--head-dim", "16", "--context", "32",
        "--batch", "2", "--vocab", "512", "--every", "3", "--steps", "9"]  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.py"
    path.write_bytes((ROOT / "examples" / "divergence_gpt.py").read_bytes())
    return path


def run(text: Path, *options: str) -> dict[str, Any]:
    folder = text.parent / "out"
    command = [*TINY, "--text", str(text), "--out", str(folder), "--name", "run", *options]
    assert example.main(command) == 0
    assert (folder / "run.png").read_bytes().startswith(b"\x89PNG")
    result: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return result


@pytest.mark.parametrize(
    ("attention", "center"),
    [("sdpa-flash", False), ("sdpa-flash", True), *((ours, False) for ours in example.OURS)],
)
def test_trains(attention: str, center: bool, text: Path) -> None:
    # The learning rate still rises all the while: so high a one shows in 31 steps.
    learn = ["--steps", "31", "--every", "10", "--lr", "0.1"]
    got = run(text, "--attention", attention, *["--center"] * center, *learn)
    assert got["steps"] == [0, 10, 20, 30] and got["ended"] == "done"
    assert got["attention"] == [[0, attention + " centred" * center]]
    for curve in example.CURVES:
        assert len(got[curve]) == 4
    assert got["loss"][-1] < 0.95 * got["loss"][0] < 1.1 * math.log(512)
    assert all(len(layers) == 2 for layers in got["sigma_wq"] + got["drift_ratio"])


def test_a_watched_run_is_recorded_and_the_same(text: Path, tmp_path: Path) -> None:
    alone = run(text, "--attention", "sdpa-flash")
    file = tmp_path / "run.bwrun"
    watched = run(text, "--attention", "sdpa-flash", "--record", str(file))
    assert watched["loss"] == alone["loss"]
    recording = Recording(file, ended=True)
    assert recording.hello.run.layout.layers == 2
    steps = recording.steps()
    assert sorted(steps) == list(range(9)) and all("loss" in step for step in steps.values())
    assert {"common_mode_sum", "key_leak_sum", "wq_sigma"} <= set(steps[0]) & set(steps[3])


def test_switched_in_flight(text: Path) -> None:
    plain = run(text, "--attention", "bellwether-fa")
    options = ["--switch-at", "4", "--switch-to", "bellwether-hp", "--switch-center"]
    switched = run(text, "--attention", "bellwether-fa", *options)
    assert switched["attention"] == [[0, "bellwether-fa"], [4, "bellwether-hp centred"]]
    assert switched["loss"][:2] == plain["loss"][:2]  # Up to step 3.
    assert switched["grad_norm"][2:] != plain["grad_norm"][2:]


def test_goes_on_where_it_stopped(text: Path) -> None:
    options = ["--attention", "bellwether-fa", "--switch-at", "5", "--switch-to", "bellwether-hp"]
    whole = run(text, *options)
    checkpoint = text.parent / "run.pt"
    options += ["--checkpoint", str(checkpoint), "--tokens", str(text.parent / "tokens.npy")]
    for points in (1, 2):
        part = run(text, *options, "--minutes", "0")
        assert part["steps"] == whole["steps"][:points] and "stopped" in part["ended"]
    last = run(text, *options)
    for name in ("steps", "attention", *example.CURVES):
        assert last[name] == whole[name], name
    # Another run may branch off from it, if it is the same model on the same text.
    branch = ["--start-from", str(checkpoint), "--steps", "12", "--attention", "sdpa-flash"]
    assert run(text, *branch)["attention"] == [*whole["attention"], [9, "sdpa-flash"]]
    with pytest.raises(SystemExit, match="seed is 1 there, but 2 in this command"):
        run(text, *branch, "--seed", "2")


def test_checkpoints_on_the_way_are_like_the_last_one(text: Path) -> None:
    folder = text.parent / "ckpt"
    whole = run(text, "--checkpoints", str(folder), "--checkpoint-every", "4")
    assert sorted(path.name for path in folder.iterdir()) == ["step-0.pt", "step-4.pt", "step-8.pt"]
    part = run(text, "--start-from", str(folder / "step-4.pt"))
    # The last point of the curves before it was that of step 3.
    assert part["steps"] == whole["steps"] and part["loss"][3:] == whole["loss"][3:]


def test_stops_behind_an_explosion(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "STEPS_AFTER_SIGMA", 4)
    got = run(text, "--stop-sigma", "0.001")
    assert got["ended"] == "sigma(W_Q) has passed 0.001 at step 1" and got["steps"] == [0, 3, 6]


def test_runs_are_drawn_together(text: Path) -> None:
    run(text)
    folder = text.parent / "out"
    (folder / "other.json").write_text((folder / "run.json").read_text())
    assert example.main(["--compare", *map(str, folder.glob("*.json")), "--out", str(folder)]) == 0
    assert (folder / "compared.png").read_bytes().startswith(b"\x89PNG")


def test_a_kernel_that_is_missing_is_not_replaced(text: Path) -> None:
    with pytest.raises(SystemExit, match="sdpa-cudnn does not run here: "):
        run(text, "--switch-at", "2", "--switch-to", "sdpa-cudnn")


def test_help_explains_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example.main(["--help"])
    said = capsys.readouterr().out
    for word in ("--attention bellwether-hp", "Rescued in flight", "9 minutes", "--compare"):
        assert word in said


def test_tokens_spell_the_text() -> None:
    text = b"def f(x):\n    return x + 12  # \xc3\xa9t\xc3\xa9\n" * 3 + b"rare_word"
    vocabulary = 256 + 8
    tokens = example.tokenize([text], vocabulary)
    assert tokens.max() < vocabulary and len(tokens) < len(text)
    assert len(example.tokenize([text], 256)) == len(text)  # Bytes alone.
    assert bytes(example.tokenize([text], 256).astype("uint8")) == text


def test_watched_values_match_their_definitions() -> None:
    torch.manual_seed(0)
    args = example.parse(TINY)
    model = example.GPT(args, example.How("bellwether-hp", center=False))
    weight = model.blocks[1].attention.qkv.weight.detach()
    heads = [torch.linalg.matrix_norm(weight[h * 16 : h * 16 + 16], ord=2) for h in range(2)]
    assert example.sigma_of_queries(model)[1] == pytest.approx(float(max(heads)), rel=1e-4)

    q, k = torch.randn(2, 3, 40, 16), torch.randn(2, 3, 40, 16) + 1
    common, spread = torch.zeros(3), torch.zeros(3)
    for b in range(2):
        for t in range(20, 40):
            row = (q[b, :, t, None] * k[b, :, : t + 1]).sum(-1) / 4
            common += row.mean(-1).abs()
            spread += row.std(-1, unbiased=False)
    assert float(example.drift_ratio(q, k)) == pytest.approx(
        float((common / spread).max()), rel=1e-4
    )
