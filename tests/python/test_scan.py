"""Goal: checkpoints of every supported format give the spectral norms of every head, by an SVD of
the weights; what cannot be read or understood is said in a sentence and never guessed; a run
that is followed misses nothing, sends nothing twice, and ends cleanly.
Method: checkpoints written by the libraries that people write them with, scanned by the command.
(That the sick layer of a failing run is named is shown by tests/e2e/test_live_detection.py.)
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import Server, free_port, wait_for

from bellwether import checkpoints, scan_command, scan_layout
from bellwether.scan_layout import Told, UnknownLayout

from conftest import ROOT
from recording import Recording

LAYERS, HEADS, DIM, WIDTH = 2, 4, 8, 32
State = dict[str, Tensor]


def drawn(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


class Kind:
    """One way to keep q, k and v: names, and what the configuration says."""

    def __init__(self, kv_heads: int, config: dict[str, Any], pack: Callable[..., State]) -> None:
        self.kv_heads, self.config, self.pack = kv_heads, config, pack

    def state(self, seed: int) -> State:
        found: State = {"embedding.weight": drawn(50, 1)}
        for layer in range(LAYERS):
            q, k, v = self.parts(seed, layer)
            found.update(self.pack(layer, q, k, v))
        return found

    def parts(self, seed: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = self.kv_heads * DIM
        first = 100 * seed + 10 * layer
        return drawn(HEADS * DIM, first), drawn(rows, first + 1), drawn(rows, first + 2)

    def norms(self, seed: int, which: int) -> np.ndarray:
        return np.stack(
            [
                torch.linalg.matrix_norm(
                    self.parts(seed, layer)[which].unflatten(0, (-1, DIM)), ord=2
                ).numpy()
                for layer in range(LAYERS)
            ]
        )


def llama(layer: int, q: Tensor, k: Tensor, v: Tensor) -> State:
    at = f"model.layers.{layer}.self_attn"
    return {f"{at}.q_proj.weight": q, f"{at}.k_proj.weight": k, f"{at}.v_proj.weight": v,
            f"model.layers.{layer}.mlp.up_proj.weight": drawn(8, 3)}  # fmt: skip


def nano_gpt(layer: int, q: Tensor, k: Tensor, v: Tensor) -> State:
    return {f"_orig_mod.transformer.h.{layer}.attn.c_attn.weight": torch.cat([q, k, v])}


def gpt2(layer: int, q: Tensor, k: Tensor, v: Tensor) -> State:
    return {f"h.{layer}.attn.c_attn.weight": torch.cat([q, k, v]).t().contiguous()}


def phi3(layer: int, q: Tensor, k: Tensor, v: Tensor) -> State:
    return {f"model.layers.{layer}.self_attn.qkv_proj.weight": torch.cat([q, k, v])}


def neox(layer: int, q: Tensor, k: Tensor, v: Tensor) -> State:
    grouped = torch.stack([t.unflatten(0, (HEADS, DIM)) for t in (q, k, v)], 1).flatten(0, 2)
    return {f"gpt_neox.layers.{layer}.attention.query_key_value.weight": grouped}


def grouped_queries(model: str) -> dict[str, Any]:
    return {"model_type": model, "num_attention_heads": 4, "num_key_value_heads": 2}


KINDS = {
    "llama": Kind(2, grouped_queries("llama"), llama),
    "nanogpt": Kind(4, {"n_layer": 2, "n_head": 4, "n_embd": 32}, nano_gpt),
    "gpt2": Kind(4, {"model_type": "gpt2", "n_head": 4, "n_embd": 32}, gpt2),
    "phi3": Kind(2, grouped_queries("phi3"), phi3),
    "neox": Kind(4, {"model_type": "gpt_neox", "num_attention_heads": 4}, neox),
}


def with_config(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def as_safetensors(folder: Path, step: int, state: State, config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    with_config(folder, config)
    save_file(state, folder / f"step_{step}.safetensors")


def as_sharded_safetensors(folder: Path, step: int, state: State, config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    place = folder / f"checkpoint-{step}"
    with_config(place, config)
    names, shards = sorted(state), [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {name: shards[i % 2] for i, name in enumerate(names)}
    for shard in shards:
        save_file({n: state[n] for n in names if index[n] == shard}, place / shard)
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (place / "optimizer.pt").write_bytes(b"not looked at")


def as_torch_saved(folder: Path, step: int, state: State, config: dict[str, Any]) -> None:
    """As nanoGPT does: one file for ever, its step and its configuration inside."""
    saved = {"model": state, "model_args": config, "iter_num": step, "optimizer": {"state": {}}}
    torch.save(saved, folder / "ckpt.pt")


def as_lightning(folder: Path, step: int, state: State, config: dict[str, Any]) -> None:
    content = {"state_dict": state, "global_step": step, "epoch": 9, "hyper_parameters": config}
    torch.save(content, folder / f"epoch=9-step={step}.ckpt")


def as_bin(folder: Path, step: int, state: State, config: dict[str, Any]) -> None:
    place = folder / f"iter_{step:07d}"
    with_config(place, config)
    torch.save(state, place / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def as_distributed(folder: Path, step: int, state: State, config: dict[str, Any]) -> None:
    from torch.distributed import checkpoint

    with_config(folder, config)
    content = {"model": state, "optimizer": {"q_proj": drawn(8, 1)}, "step": torch.tensor(step)}
    checkpoint.save(content, checkpoint_id=folder / f"step-{step}", no_dist=True)


FORMATS = (as_safetensors, as_sharded_safetensors, as_torch_saved, as_lightning, as_bin,
           as_distributed)  # fmt: skip
CASES = [("llama", f) for f in FORMATS] + [
    ("nanogpt", as_torch_saved), ("gpt2", as_safetensors), ("phi3", as_safetensors),
    ("neox", as_distributed),
]  # fmt: skip


def scan(*words: object, code: int = 0) -> Any:
    assert scan_command.main([str(word) for word in words]) == code


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(("name", "write"), CASES)
def test_norms_of_every_format_and_layout(
    name: str, write: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, folder = KINDS[name], tmp_path / "run"
    folder.mkdir()
    record = tmp_path / "a.bwrun"
    told = []
    for step, seed in ((20, 1), (110, 2)):  # Names that are not in the order of the letters.
        write(folder, step, kind.state(seed), kind.config)
        if write is as_torch_saved:  # Overwritten by the next one.
            scan(folder, "--record", record, "--json")
            told += lines_of(capsys.readouterr().out)
    if write is not as_torch_saved:
        scan(folder, "--record", record, "--json")
        told = lines_of(capsys.readouterr().out)
    assert [line["step"] for line in told] == [20, 110]
    for line, seed in zip(told, (1, 2)):
        for which, signal_name in enumerate(("wq_sigma", "wk_sigma")):
            got = np.array([layer[signal_name] for layer in line["layers"]])
            assert np.allclose(got, kind.norms(seed, which), rtol=1e-5), signal_name
    q = kind.parts(2, 0)[0].double().unflatten(0, (-1, DIM))
    values = torch.linalg.svdvals(q)
    stable = (values**2).sum(-1) / values[:, 0] ** 2
    assert np.allclose(told[1]["layers"][0]["wq_stable_rank"], stable.numpy(), rtol=1e-4)
    assert "qk_increment_rank" not in told[0]["layers"][0]
    recorded = Recording(record)
    layout = recorded.hello.run.layout
    assert (layout.layers, layout.heads, layout.kv_heads, layout.head_dim) == (
        LAYERS, HEADS, kind.kv_heads, DIM,
    )  # fmt: skip
    sent = recorded.steps()[110]
    assert np.allclose(sent["wq_sigma"], kind.norms(2, 0), rtol=1e-5)
    if write is as_torch_saved:  # The one before is gone.
        assert "qk_increment_rank" not in told[1]["layers"][0]
        return
    ranks = [rank for layer in told[1]["layers"] for rank in layer["qk_increment_rank"]]
    assert all(1 <= rank <= 2 * DIM for rank in ranks)


def opened(folder: Path, state: State, name: str = "ckpt-5.pt") -> checkpoints.Checkpoint:
    torch.save(state, folder / name)
    return checkpoints.read(folder / name)


def test_what_cannot_be_told_is_asked_for(tmp_path: Path) -> None:
    def why(state: State, told: Told) -> str:
        with pytest.raises(UnknownLayout) as refused:
            scan_layout.layers_of(opened(tmp_path, state), told)
        return str(refused.value)

    assert "nothing tells the number of heads: give --heads" in why(KINDS["llama"].state(1), Told())
    assert "do not fit 3 heads" in why(KINDS["llama"].state(1), Told(heads=3))
    wqkv = {"a.wqkv.weight": drawn(96, 1)}
    assert "give --layout fused" in why(wqkv, Told(heads=4))
    latent = {"layers.0.self_attn.q_a_proj.weight": drawn(8, 1),
              "layers.0.self_attn.kv_a_proj_with_mqa.weight": drawn(8, 2)}  # fmt: skip
    said = why(latent, Told(heads=4))
    assert "no module holds W_Q and W_K under a name that is known here" in said
    assert "layers.0.self_attn.kv_a_proj_with_mqa.weight" in said
    assert "does not fit 4 heads and key heads that nobody told" in why(
        {"a.qkv.weight": drawn(64, 1)}, Told(heads=4)
    )


@pytest.mark.parametrize("layout", ["fused", "grouped"])
def test_what_a_person_tells_counts(layout: str, tmp_path: Path) -> None:
    pack = nano_gpt if layout == "fused" else neox
    (packed,) = pack(0, *KINDS["nanogpt"].parts(1, 0)).values()
    checkpoint = opened(tmp_path, {"a.wqkv.weight": packed})
    (layer,) = scan_layout.layers_of(checkpoint, Told(heads=4, layout=layout))
    views = layer.views(checkpoint)
    assert views is not None
    for view, part in zip(views, KINDS["nanogpt"].parts(1, 0)):
        assert torch.equal(view.reshape(part.shape), part)


def test_only_layers_that_are_asked_for(tmp_path: Path) -> None:
    state = {**KINDS["llama"].state(1), "vision.q_proj.weight": drawn(9, 1)}
    state["vision.k_proj.weight"] = drawn(9, 2)
    found = scan_layout.layers_of(opened(tmp_path, state), Told(heads=4), r"^model\.")
    assert [layer.name for layer in found] == [f"model.layers.{i}.self_attn" for i in range(2)]
    assert found[0].location.kv_heads == 2


class Planted:
    """Would leave a mark if it was ever unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


def test_nothing_in_a_checkpoint_is_executed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, mark = tmp_path / "run", tmp_path / "mark"
    folder.mkdir()
    torch.save({"model": KINDS["llama"].state(1), "args": Planted(mark)}, folder / "step_1.pt")
    as_distributed(folder, 2, KINDS["llama"].state(1), KINDS["llama"].config)
    (folder / "step-2" / ".metadata").write_bytes(pickle.dumps(Planted(mark)))
    scan(folder, "--record", tmp_path / "a.bwrun", code=1)
    said = capsys.readouterr().err
    assert "torch.load with weights_only=True refuses it" in said
    assert "mkdir has no business in a .metadata" in said
    assert not mark.exists()


def test_damaged_files_are_named_and_the_others_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, kind = tmp_path / "run", KINDS["llama"]
    folder.mkdir()
    for step in (1, 2, 3):
        as_safetensors(folder, step, kind.state(step), kind.config)
    whole = (folder / "step_2.safetensors").read_bytes()
    (folder / "step_2.safetensors").write_bytes(whole[: len(whole) // 2])
    torch.save(kind.state(4), folder / "step_4.pt")
    whole = (folder / "step_4.pt").read_bytes()
    (folder / "step_4.pt").write_bytes(whole[:-100])
    (folder / "step_5.pt").write_bytes(b"")
    scan(folder, "--record", tmp_path / "a.bwrun", "--json", code=1)
    out, said = capsys.readouterr()
    assert [line["step"] for line in lines_of(out)] == [1, 3]
    for name in ("step_2.safetensors", "step_4.pt", "step_5.pt"):
        assert f"{folder / name}: " in said


def test_wrong_usage_and_empty_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, why in (
        ((tmp_path / "nowhere",), "DIR: "),
        ((tmp_path, "--heads", 0), "--heads: 0 is outside of 1 to 1024"),
        ((tmp_path, "--settle", -1), "--settle: -1 is outside of 0 to 3600 seconds"),
        ((tmp_path, "--layers", "("), "--layers: '(' is no regular expression"),
    ):
        with pytest.raises(SystemExit) as ended:
            scan_command.main([str(word) for word in words])
        assert ended.value.code == 2 and why in capsys.readouterr().err
    scan(tmp_path, "--record", tmp_path / "a.bwrun", code=1)
    assert "no checkpoint was found in it" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        scan_command.main(["--help"])
    assert "exit codes:" in capsys.readouterr().out


def test_a_server_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind = KINDS["llama"]
    as_safetensors(tmp_path, 1, kind.state(1), kind.config)
    nobody = f"127.0.0.1:{free_port()}"
    scan(tmp_path, "--server", nobody, "--timeout", 0.2, code=4)
    assert "was not taken within 0.2 s" in capsys.readouterr().err


def test_what_the_server_did_not_take_waits_in_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, spool, kind = tmp_path / "run", tmp_path / "spool", KINDS["llama"]
    folder.mkdir()
    as_safetensors(folder, 1, kind.state(1), kind.config)
    with Server(tmp_path) as server:
        server.kill()
        words = ("--server", server.grpc, "--run", "spooled", "--timeout", 0.2)
        with pytest.raises(SystemExit):
            scan(folder, *words, "--spool-dir", spool, "--spool-bytes", 1000)
        wrong = "--spool-bytes: 1000 is outside of 1048576 to 17592186044416"
        assert wrong in capsys.readouterr().err
        scan(folder, *words, "--spool-dir", spool, "--spool-bytes", 1 << 20, code=4)
        # The sender's own, for as long as it tries.
        wait_for(
            "the sender has begun",
            lambda: any(hello.stat().st_size > 0 for hello in spool.glob("*/hello")),
        )
        (own,) = spool.iterdir()
        assert own.name.endswith("-0-1") and (own / "hello").stat().st_size > 0
        server.start()
        wait_for("it was taken", lambda: not any(spool.iterdir()), 60)
        # What was taken is in the log, and told a moment later.
        wait_for("it is told", lambda: server.series("spooled", "wq_sigma", 1, 3))
        assert sorted(server.series("spooled", "wq_sigma", 1, 3)) == [1]


def test_ended_by_the_keyboard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    as_safetensors(tmp_path, 1, KINDS["llama"].state(1), KINDS["llama"].config)
    monkeypatch.setattr(scan_command.Scan, "take", interrupted)
    scan(tmp_path, "--record", tmp_path / "a.bwrun", code=130)
    assert "the same command goes on from here" in capsys.readouterr().err


class Following:
    """The command in a process of its own."""

    def __init__(self, folder: Path, server: str, log: Path) -> None:
        self._log, self._out = log, log.with_suffix(".out")
        with open(log, "wb") as said, open(self._out, "wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bellwether", "scan", str(folder), "--follow", "--json",
                 "--settle", "0.3", "--server", server, "--run", "followed"],
                env={**os.environ, "PYTHONPATH": str(ROOT / "client_lib" / "python")},
                stdout=out, stderr=said,
            )  # fmt: skip

    def said(self) -> str:
        return self._log.read_text()

    def steps(self) -> list[int]:
        written = self._out.read_text()
        whole = written[: written.rfind("\n") + 1]  # A line may be under way.
        return [line["step"] for line in lines_of(whole) if line]

    def wait(self, what: str, condition: Callable[[], Any]) -> None:
        wait_for(what, lambda: self.process.poll() is not None or condition(), 60)
        assert self.process.poll() is None, self.said()

    def end(self, how: signal.Signals, code: Optional[int] = 0) -> None:
        self.process.send_signal(how)
        assert self.process.wait(60) == (code if code is not None else -how), self.said()


def test_following_a_run_and_going_on_after_any_end(tmp_path: Path) -> None:
    folder, kind = tmp_path / "run", KINDS["llama"]
    folder.mkdir()
    spare = tmp_path / "spare"

    def written(step: int) -> bytes:
        as_safetensors(spare, step, kind.state(step), kind.config)
        return (spare / f"step_{step}.safetensors").read_bytes()

    with_config(folder, kind.config)
    (folder / "step_1.safetensors").write_bytes(written(1))
    with Server(tmp_path) as server:
        scan = Following(folder, server.grpc, tmp_path / "first")
        scan.wait("the first one is sent", lambda: scan.steps() == [1])
        whole = written(2)
        with open(folder / "step_2.safetensors", "wb") as growing:
            growing.write(whole[: len(whole) // 2])
            growing.flush()
            scan.wait("half a file waits", lambda: "waiting for it to change" in scan.said())
            growing.write(whole[len(whole) // 2 :])
        scan.wait("the whole one is sent", lambda: scan.steps() == [1, 2])
        scan.end(signal.SIGINT)
        assert "the same command goes on from here" in scan.said()
        assert "Traceback" not in scan.said()
        (folder / "step_3.safetensors").write_bytes(written(3))
        scan = Following(folder, server.grpc, tmp_path / "second")
        scan.wait("only the new one is sent", lambda: scan.steps() == [3])
        scan.end(signal.SIGKILL, None)
        (folder / "step_4.safetensors").write_bytes(written(4))
        scan = Following(folder, server.grpc, tmp_path / "third")
        scan.wait("it goes on after kill -9", lambda: scan.steps() == [4])
        scan.end(signal.SIGTERM)
        # What was sent is in the log, and told a moment later.
        wait_for("4 is told of", lambda: int(server.call("GetRun", run="followed")["step"]) == 4)
        run = server.call("GetRun", run="followed")
        assert int(run["frames"]) == 4 and int(run["step"]) == 4
        assert sorted(server.series("followed", "wq_sigma", 1, 3)) == [1, 2, 3, 4]
        # The change since a checkpoint that was sent before the restart is known too.
        assert sorted(server.series("followed", "qk_increment_rank")) == [2, 3, 4]


def test_training_that_went_back_is_another_attempt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = KINDS["llama"]
    words = (tmp_path / "run", "--record", tmp_path / "a.bwrun", "--json")
    for step in (10, 20, 20, 15):
        as_torch_saved_in(tmp_path / "run", step, kind)
        scan(*words)
    out, said = capsys.readouterr()
    assert [line["step"] for line in lines_of(out)] == [10, 20, 15]
    assert "its step was sent already" in said
    assert Recording(tmp_path / "a.bwrun").hello.run.attempt == 1
    scan(*words)
    assert capsys.readouterr().out == ""
    scan(*words, "--again")
    assert [line["step"] for line in lines_of(capsys.readouterr().out)] == [15]


def as_torch_saved_in(folder: Path, step: int, kind: Kind) -> None:
    folder.mkdir(exist_ok=True)
    time.sleep(0.01)  # The times of files are that coarse.
    as_torch_saved(folder, step, kind.state(step), kind.config)
