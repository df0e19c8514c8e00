"""Goal: checkpoints of every supported format give the spectral norms of every head, by an SVD of
the weights.  What cannot be read or understood is reported in a sentence and never guessed.  A run
that is followed misses nothing, sends nothing twice, and ends cleanly.
Method: checkpoints written by the libraries that people write them with, scanned by the command.
(That the sick layer of a failing run is named is shown by tests/e2e/test_live_detection.py.)
"""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import Server, free_port, wait_for

from bellwether.scan import checkpoints, command, scan_layout
from bellwether.scan.scan_layout import Told, UnknownLayout

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
    names, shards = (
        sorted(state),
        [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)],
    )
    index = {name: shards[i % 2] for i, name in enumerate(names)}
    for shard in shards:
        save_file({n: state[n] for n in names if index[n] == shard}, place / shard)
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (place / "optimizer.pt").write_bytes(b"not looked at")


def as_torch_saved(folder: Path, step: int, state: State, config: dict[str, Any]) -> None:
    """As nanoGPT does: one file for ever, its step and its configuration inside."""
    saved = {
        "model": state,
        "model_args": config,
        "iter_num": step,
        "optimizer": {"state": {}},
    }
    torch.save(saved, folder / "ckpt.pt")


def as_lightning(folder: Path, step: int, state: State, config: dict[str, Any]) -> None:
    content = {
        "state_dict": state,
        "global_step": step,
        "epoch": 9,
        "hyper_parameters": config,
    }
    torch.save(content, folder / f"epoch=9-step={step}.ckpt")


def as_bin(folder: Path, step: int, state: State, config: dict[str, Any]) -> None:
    place = folder / f"iter_{step:07d}"
    with_config(place, config)
    torch.save(state, place / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def as_distributed(folder: Path, step: int, state: State, config: dict[str, Any]) -> None:
    from torch.distributed import checkpoint

    with_config(folder, config)
    content = {
        "model": state,
        "optimizer": {"q_proj": drawn(8, 1)},
        "step": torch.tensor(step),
    }
    checkpoint.save(content, checkpoint_id=folder / f"step-{step}", no_dist=True)


FORMATS = (as_safetensors, as_sharded_safetensors, as_torch_saved, as_lightning, as_bin,
           as_distributed)  # fmt: skip
CASES = [("llama", f) for f in FORMATS] + [
    ("nanogpt", as_torch_saved), ("gpt2", as_safetensors), ("phi3", as_safetensors),
    ("neox", as_distributed),
]  # fmt: skip


def scan(*words: object, code: int = 0) -> Any:
    assert command.main([str(word) for word in words]) == code


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(("name", "write"), CASES)
def test_norms_of_every_format_and_layout(
    name: str,
    write: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kind, folder = KINDS[name], tmp_path / "run"
    folder.mkdir()
    record = tmp_path / "a.bwrun"
    told = []
    for step, seed in (
        (20, 1),
        (110, 2),
    ):  # Names that are not in the order of the letters.
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


def test_unknown_heads_and_layouts_name_their_flags(tmp_path: Path) -> None:
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
def test_given_heads_and_layout_are_used(layout: str, tmp_path: Path) -> None:
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


def saved(path: Path, **content: Any) -> None:
    torch.save({"model": KINDS["llama"].state(1), **content}, path)


def with_query(path: Path, query: Any) -> None:
    """A checkpoint whose first W_Q is something else than a matrix of floats."""
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.save({**KINDS["llama"].state(1), name: query, "step": 3}, path)


def holding_itself(path: Path) -> None:
    inner: dict[str, Any] = {}
    inner["again"] = inner
    torch.save({"model": inner, "step": 1}, path)


def of_few_that_stand_for_many(path: Path) -> None:
    inner: dict[str, Any] = KINDS["llama"].state(1)
    for _ in range(28):
        inner = {"a": inner, "b": inner}
    torch.save({"model": inner, "step": 1}, path)


def indexed(path: Path, names: Any) -> None:
    path.mkdir()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def of_json(path: Path, text: str) -> None:
    path.mkdir()
    (path / "pytorch_model.bin.index.json").write_text(text)


def naming_no_pickle(path: Path) -> None:
    indexed(path, {"a": "shard-1.bin"})
    (path / "shard-1.bin").write_bytes(b"\x80\x02.")


def in_a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def of_tuples() -> bytes:
    """A pickle of {((...)): 1}, whose hash alone once ended the process."""
    return b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s."


def of_tuples_in_an_archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", of_tuples())
        archive.writestr("a/version", "3")


def of_tuples_as_metadata(path: Path) -> None:
    path.mkdir()
    (path / ".metadata").write_bytes(of_tuples())


def packed(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(80 << 20))


def with_metadata(path: Path, change: Callable[[Any], None]) -> None:
    """A distributed checkpoint of a whole one, with what tells of its tensors changed."""
    whole = path.parents[1] / "spare"
    if not whole.exists():
        as_distributed(whole, 77, KINDS["llama"].state(1), KINDS["llama"].config)
    shutil.copytree(whole / "step-77", path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def elsewhere(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../../secret"


def in_a_fifo(path: Path) -> None:
    with_metadata(path, lambda metadata: None)
    for part in path.glob("*.distcp"):
        part.unlink()
        os.mkfifo(part)


def larger_than_the_disk(metadata: Any) -> None:
    for name, entry in metadata.state_dict_metadata.items():
        if name.endswith("q_proj.weight"):
            entry.size = torch.Size((1 << 20, 1 << 20))


DEEP = '{"a": ' * 100_000
STEP_RANGE = "must be an integer of 0 to 9007199254740992"
# What may be wrong with one checkpoint: name -> how it is made, what is said of it.
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "inf.pt": (lambda p: saved(p, step=math.inf), f"its step: step is inf, {STEP_RANGE}"),
    "nan.pt": (lambda p: saved(p, step=math.nan), "its step: step is nan, must"),
    "tensor.pt": (lambda p: saved(p, step=torch.tensor(math.inf)), "its step: step is inf"),
    "below.pt": (lambda p: saved(p, global_step=-4), "its global_step: step is -4"),
    "part.pt": (lambda p: saved(p, step=2.5), "its step: step is 2.5"),
    "wide.pt": (lambda p: saved(p, step=10**30), "its step: step is an integer of 100 bits"),
    "huge.pt": (lambda p: saved(p, step="9" * 5000), "its step: step is '999"),
    "square.pt": (lambda p: saved(p, step="\u00b2"), "its step: step is '\u00b2'"),
    "step99999999999999999999.pt": (saved, "its name: step is 99999999999999999999, must"),
    "no-number.pt": (saved, "tells its step"),
    "itself-1.pt": (holding_itself, "nested more than 32 deep"),
    "many-1.pt": (of_few_that_stand_for_many, "more than 262144 entries"),
    "sparse.pt": (lambda p: with_query(p, drawn(32, 1).to_sparse()), "it is sparse_coo, no dense"),
    "rows.pt": (lambda p: with_query(p, drawn(32, 1).to_sparse_csr()), "it is sparse_csr, no"),
    "quantized.pt": (
        lambda p: with_query(p, torch.quantize_per_tensor(drawn(32, 1), 0.1, 0, torch.qint8)),
        "it is quantized, no dense matrix",
    ),
    "int8.pt": (lambda p: with_query(p, drawn(32, 1).char()), "it has int8s, no plain floats"),
    "eighths.pt": (
        lambda p: with_query(p, drawn(32, 1).to(torch.float8_e4m3fn)), "it has float8_e4m3fns, no"
    ),
    "meta.pt": (lambda p: with_query(p, torch.empty(32, 32, device="meta")), "it is on meta"),
    "wider.pt": (
        lambda p: with_query(p, torch.zeros(1).expand(1 << 20, 1 << 20)), "do not fit 4 heads"
    ),
    "spread.pt": (
        lambda p: with_query(p, torch.zeros(1).expand(32, 1 << 40)), "bytes on disk can hold"
    ),
    "list-1.pt": (lambda p: torch.save([1, 2], p), "it holds a list, no state_dict"),
    "empty-1.pt": (lambda p: torch.save({}, p), "there is no tensor in it"),
    "code-1.pt": (lambda p: saved(p, args=Planted(p)), "never executed here"),
    "text-1.pt": (lambda p: p.write_text("no pickle"), "opcode b'n' unknown"),
    "cut-1.safetensors": (lambda p: p.write_bytes(b"\xff" * 9), "SafetensorError"),
    "long-1.safetensors": (lambda p: p.write_bytes(b"\xff" * 7 + b"\0{"), "SafetensorError"),
    "packed-1.pt": (packed, "is packed and unpacks to 83886080 bytes"),
    "deep-1.pt": (of_tuples_in_an_archive, "tuples are nested more than 64 deep"),
    "deep-old-1.pt": (lambda p: p.write_bytes(of_tuples()), "tuples are nested more than 64 deep"),
    "deep-1": (of_tuples_as_metadata, "tuples are nested more than 64 deep"),
    "fifo-1.pt": (os.mkfifo, "it is a FIFO, must be a regular file"),
    "socket-1.pt": (in_a_socket, "it is a socket, must be a regular file"),
    "folder-link-1.pt": (lambda p: p.symlink_to("/dev/zero"), "it is a device, must be"),
    "loop-1.pt": (lambda p: p.symlink_to(p.name), "Too many levels of symbolic links"),
    "nowhere-1.pt": (lambda p: p.symlink_to("nothing"), "it is a link to nothing"),
    "index-1": (naming_no_pickle, "index"),
    "deep-index-1": (lambda p: of_json(p, DEEP), "it is nested too deeply"),
    "odd-index-1": (lambda p: of_json(p, "[1]"), "it holds a list, no object"),
    "lists-1": (lambda p: indexed(p, {"a": ["b"]}), "it is not there (yet)"),
    "no-map-1": (lambda p: of_json(p, "{}"), "weight_map"),
    "above-1": (lambda p: indexed(p, {"a": "../z_5.safetensors"}), "which is not in its folder"),
    "root-1": (lambda p: indexed(p, {"a": "/etc/passwd"}), "which is not in its folder"),
    "outside-1": (lambda p: with_metadata(p, elsewhere), "'../../secret', which is not in"),
    "waiting-1": (in_a_fifo, "it is a FIFO, must be a regular file"),
    "beyond-1": (lambda p: with_metadata(p, larger_than_the_disk), "do not fit 4 heads"),
    "esc\x1b[31m-1.pt": (lambda p: p.write_text(""), "exhausted before seeing STOP"),
    os.fsdecode(b"raw\xff-1.pt"): (lambda p: p.write_text(""), "exhausted before seeing STOP"),
}  # fmt: skip


def test_bad_checkpoints_do_not_block_good_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, kind = tmp_path / "run", KINDS["llama"]
    as_safetensors(folder, 5, kind.state(5), kind.config)
    long = {**kind.config, "model_type": "\x1b" + "long" * 100}
    (folder / "config.json").write_text(json.dumps(long))
    first = folder / "step_0.pt"
    heads = {"q": 4, "k": 2}
    names = [(i, n) for i in range(513) for n in heads]
    few = {f"layers.{i}.self_attn.{n}_proj.weight": torch.zeros(heads[n], 4) for i, n in names}
    torch.save({"model": few}, first)
    for name, (make, _) in BAD.items():
        make(folder / name)
    words = (folder, "--record", tmp_path / "a.bwrun", "--heads", 4, "--json")
    scan(*words, code=1)
    out, said = capsys.readouterr()
    (line,) = lines_of(out)
    assert line["step"] == 5  # A whole safetensors file, number by number:
    for which, signal_name in enumerate(("wq_sigma", "wk_sigma")):
        got = np.array([layer[signal_name] for layer in line["layers"]])
        assert np.allclose(got, kind.norms(5, which), rtol=1e-5), signal_name
    skipped = [text for text in said.splitlines() if text.startswith("skipped ")]
    assert "layers is 513, must be 1..512" in said
    wrong = {}
    for name, (_, why) in BAD.items():
        shown = "".join(c if c.isprintable() else " " for c in str(folder / name))
        told = [text for text in skipped if text.startswith(f"skipped {shown}: ")]
        if len(told) != 1 or why not in told[0]:
            wrong[name] = (why, told)
    assert not wrong
    assert len(skipped) == len(BAD) + 1
    assert said.splitlines()[-1] == f"{len(skipped)} checkpoints were skipped"
    assert "Traceback" not in said and "\x1b" not in said


@pytest.mark.parametrize("config", [DEEP, "[]", "{", '{"n_head": 1e999}', "fifo"])
def test_unreadable_config_is_ignored_and_no_layout_guessed(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, kind = tmp_path / "run", KINDS["llama"]
    as_safetensors(folder, 1, kind.state(1), {})
    as_safetensors(folder, 2, KINDS["phi3"].state(1), {})
    (folder / "config.json").unlink()
    if config == "fifo":
        os.mkfifo(folder / "config.json")
    else:
        (folder / "config.json").write_text(config)
    scan(folder, "--record", tmp_path / "a.bwrun", "--heads", 4, "--json", code=1)
    out, said = capsys.readouterr()
    assert [line["step"] for line in lines_of(out)] == [1]
    assert said.count("skipped ") == 1 and f"skipped {folder / 'step_2.safetensors'}: " in said


def test_invalid_state_file_is_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = os.fsdecode(os.fsencode(tmp_path) + b"/st\xffate")  # Which need not be UTF-8.
    monkeypatch.setenv("XDG_STATE_HOME", state)
    as_safetensors(tmp_path / "run", 7, KINDS["llama"].state(1), KINDS["llama"].config)
    words = (tmp_path / "run", "--record", tmp_path / "a.bwrun", "--json")
    for told in (None, '{"attempt": Infinity, "step": 1, "sent": {}, "newest": ""}',
                 '{"attempt": 0, "step": 1e300, "sent": {}, "newest": ""}', DEEP):  # fmt: skip
        if told is not None:
            (remembered,) = Path(state).glob("bellwether/scans/*.json")
            remembered.write_text(told)
        scan(*words)
        assert [line["step"] for line in lines_of(capsys.readouterr().out)] == [7]
    scan(*words)
    assert capsys.readouterr().out == ""


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
            command.main([str(word) for word in words])
        assert ended.value.code == 2 and why in capsys.readouterr().err
    scan(tmp_path, "--record", tmp_path / "a.bwrun", code=1)
    assert "no checkpoint was found in it" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["--help"])
    assert "exit codes:" in capsys.readouterr().out


def test_a_server_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind = KINDS["llama"]
    as_safetensors(tmp_path, 1, kind.state(1), kind.config)
    nobody = f"127.0.0.1:{free_port()}"
    scan(tmp_path, "--server", nobody, "--timeout", 0.2, code=4)
    assert "was not taken within 0.2 s" in capsys.readouterr().err


def test_unsent_checkpoints_wait_in_the_spool(
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
    monkeypatch.setattr(command.Scan, "take", interrupted)
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
    saved(folder / "bad.pt", step=math.inf)  # Looked at before the others, and no reason to end.
    with Server(tmp_path) as server:
        scan = Following(folder, server.grpc, tmp_path / "first")
        scan.wait("the first one is sent", lambda: scan.steps() == [1])
        whole = written(2)
        with open(folder / "step_2.safetensors", "wb") as growing:
            growing.write(whole[: len(whole) // 2])
            growing.flush()
            half = f"skipped {folder / 'step_2.safetensors'}: "
            scan.wait("half a file waits", lambda: half in scan.said())
            assert "bad.pt: its step: step is inf" in scan.said()
            growing.write(whole[len(whole) // 2 :])
        scan.wait("the whole one is sent", lambda: scan.steps() == [1, 2])
        scan.end(signal.SIGINT)
        assert "the same command goes on from here" in scan.said()
        assert "1 checkpoint was skipped" in scan.said()
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
        wait_for(
            "4 is told of",
            lambda: int(server.call("GetRun", run="followed")["step"]) == 4,
        )
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
