"""Goal: for every cause of "no data" doctor names it, and exits with 1; with none it exits 0.
Method: one script for each cause, run by the command itself; what a sender lost, as a monitor
would tell it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Optional

import pytest

from bellwether._step.replicas import ALONE
from bellwether.client import Counters
from bellwether.tools.coverage import (
    expert_findings,
    fp8_findings,
    given_findings,
    law_findings,
    module_findings,
    rank_norm_findings,
    replica_findings,
    step_findings,
    tensor_findings,
    volume_findings,
)
from bellwether.tools.doctor import layer_findings, monitor_findings

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "support"))
from warm_python import WarmPython

HEAD = """
import torch, torch.nn as nn, torch.nn.functional as F
class A(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.attend(q, k, v)
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)
"""
TAIL = """
opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
for step in range(20):
    loss = model(torch.randn(2, 6, 16)).square().sum()
    loss.backward(); opt.step(); opt.zero_grad()
    assert step < 3, "doctor runs three steps"
"""
SOUND = HEAD + "model = A()" + TAIL
EAGER = HEAD + """
class E(A):
    def attend(self, q, k, v):
        return (q @ k.mT).sin().softmax(-1) @ v
model = E()
""" + TAIL  # fmt: skip
FROZEN = HEAD + """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.head = A(), nn.Linear(8, 1)
        self.a.requires_grad_(False)
    def forward(self, x):
        return self.head(self.a(x))
model = M()
""" + TAIL  # fmt: skip
PART = HEAD + """
class P(A):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, scale=-1.0)
model = P()
""" + TAIL  # fmt: skip
TOWERS = HEAD + """
class T(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.vision, self.teacher = A(), A(), A()
    def forward(self, x):
        with torch.no_grad():
            aim = self.teacher(x)
        return self.text(x) - aim
model = T()
""" + TAIL  # fmt: skip
NO_ATTENTION = "import torch, torch.nn as nn\nmodel = nn.Linear(16, 16)" + TAIL
NO_OPTIMIZER = "import torch\nprint('nothing to see')\n"


@functools.cache
def warm() -> WarmPython:
    return WarmPython("torch", "torch._dynamo")


def doctor(
    folder: Path, script: Optional[str] = None, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = ["-m", "bellwether", "doctor", *options]
    if script is not None:
        (folder / "train.py").write_text(script)
        command.append(str(folder / "train.py"))
    told = {**os.environ, "PYTHONPATH": str(ROOT / "client_lib" / "python"),
            "BELLWETHER_RECORD": str(folder / "doctor.bwrun"), **environment}  # fmt: skip
    return warm().run(command, told, folder)


def failures(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr, done.stderr
    return "\n".join(line for line in done.stdout.splitlines() if line.startswith("FAILED"))


def test_a_sound_script(tmp_path: Path) -> None:
    done = doctor(tmp_path, SOUND)
    assert "layer 0, 2 heads (2 key heads) of 8, W_Q and W_K: fused qkv" in done.stdout
    assert "laws of 1 linear layers are asked" in done.stdout
    assert "off: parameters, activations, experts, " in done.stdout
    assert not [x for x in failures(done).splitlines() if "bellwetherd" not in x], done.stdout


def test_installation_alone(tmp_path: Path) -> None:
    done = doctor(tmp_path)
    assert "a small model, three steps" in done.stdout and "link recording" in done.stdout
    assert not [x for x in failures(done).splitlines() if "bellwetherd" not in x], done.stdout


def test_eager_attention(tmp_path: Path) -> None:
    done = doctor(tmp_path, EAGER)
    assert done.returncode == 1
    assert "written out, with sin between its products: not measured" in failures(done)


def test_partly_measured_layer_fails(tmp_path: Path) -> None:
    done = doctor(tmp_path, PART)
    assert done.returncode == 1, done.stdout
    said = failures(done)
    assert "layer 0, measured in part: it is not judged by drift, ties, logits" in said
    assert "scale is not above 0" in said
    assert "judged in part only: not by drift, ties, logits in 1 of 1 layers" in done.stderr


def test_frozen_upstream(tmp_path: Path) -> None:
    done = doctor(tmp_path, FROZEN)
    assert done.returncode == 1 and "frozen upstream" in failures(done), done.stdout


def test_towers_that_are_not_used_are_no_failure(tmp_path: Path) -> None:
    done = doctor(tmp_path, TOWERS)
    assert not [x for x in failures(done).splitlines() if "bellwetherd" not in x], done.stdout
    assert "text: layer 0" in done.stdout
    assert "vision: not used in these steps, its forward never ran: not watched" in done.stdout
    assert "teacher: not used in these steps, it runs without gradients only" in done.stdout


def test_without_a_layer_that_is_measured_unused_ones_fail(tmp_path: Path) -> None:
    done = doctor(tmp_path, TOWERS.replace("self.text(x) - aim", "self.text.qkv(x)"))
    said = failures(done)
    assert done.returncode == 1 and "text: never called" in said and "vision: never" in said


def test_no_attention_found(tmp_path: Path) -> None:
    done = doctor(tmp_path, NO_ATTENTION)
    assert done.returncode == 1 and "no attention module found" in failures(done)


def test_no_optimizer(tmp_path: Path) -> None:
    done = doctor(tmp_path, NO_OPTIMIZER)
    assert done.returncode == 1 and "before its end" in failures(done)


class Lossy:
    """A monitor whose sender has lost something."""

    def __init__(self, **lost: int) -> None:
        fields = dataclasses.fields(Counters)
        none = {f.name: "" if f.name in ("link", "error", "page_url") else 0 for f in fields}
        self.counters = Counters(**{**none, "link": "streaming", **lost})  # type: ignore[arg-type]

    def status(self) -> dict[str, Any]:
        return {"layers": [], "why_off": "", "live": True, "errors": 0, "numbers_left_out": {},
                "samples": 0, "counters": self.counters}  # fmt: skip


@pytest.mark.parametrize(
    "lost, words",
    [({"frames_dropped_ring": 2, "frames_dropped_window": 3}, "5 frames dropped"),
     ({"frames_stripped": 7}, "7 frames sent without their heads: the sender's memory was")],
)  # fmt: skip
def test_each_loss_is_said(lost: dict[str, int], words: str) -> None:
    bad = [finding.text for finding in monitor_findings(Lossy(**lost)) if finding.ok is False]
    assert [text for text in bad if words in text], bad
    assert words not in str(monitor_findings(Lossy()))


@pytest.mark.parametrize("overhead", [0.0, 0.02])
def test_a_price_that_is_not_known_is_not_told(overhead: float) -> None:
    class Priced(Lossy):
        def status(self) -> dict[str, Any]:
            return {**super().status(), "samples": 3, "overhead": overhead, "sampling_period": 1}

    told = "watching costs about 2.00 %" in str(monitor_findings(Priced()))
    assert told == (overhead > 0)
    assert ("watching costs" in str(monitor_findings(Priced()))) == told


@pytest.mark.parametrize(
    ("notes", "cause"),
    [({}, "no optimizer step was seen"), ({"first called late: not reported": 1}, "called late")],
)
def test_a_layer_that_reports_nothing_is_not_ok(notes: dict[str, int], cause: str) -> None:
    """As with an optimizer whose steps nothing shows."""
    layer = {
        "name": "a", "index": -1, "watched": True, "attention": True, "calls": 3, "fired": 3,
        "heads": 4, "kv_heads": 4, "head_dim": 8, "weights": None, "notes": notes,
        "not_judged_by": [], "lends": False, "unused": "",
    }  # fmt: skip
    (told,) = layer_findings({"layers": [layer], "why_off": "", "live": True})
    assert told.ok is False and cause in told.text


def test_no_server(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/nobody.sock"
    done = doctor(tmp_path, SOUND, "--server", address)
    assert done.returncode == 1 and f"no server at {address}" in failures(done)


def test_the_small_models_run_is_sent_to_no_server(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/nobody.sock"
    done = doctor(tmp_path, None, BELLWETHER_SERVER=address, BELLWETHER_RUN="llama-1")
    (failed,) = failures(done).splitlines()
    assert failed.startswith(f"FAILED no server at {address}")
    assert "link recording" in done.stdout


def test_the_scripts_run_has_the_name_that_is_asked_for(tmp_path: Path) -> None:
    said = "print('named', bellwether.monitor.live_monitors()[0].settings.run)"
    name = "import bellwether.monitor\n" + SOUND.replace("    loss = ", f"    {said}\n    loss = ")
    done = doctor(tmp_path, name, "--run", "llama-7")
    assert "named llama-7" in done.stdout


def test_libraries_not_found(tmp_path: Path) -> None:
    # A copy of the package outside the checkout finds no build folder.
    import shutil

    package = tmp_path / "elsewhere"
    shutil.copytree(ROOT / "client_lib" / "python" / "bellwether", package / "bellwether")
    done = doctor(tmp_path, SOUND, PYTHONPATH=str(package), BELLWETHER_LIB_DIR="")
    assert done.returncode == 1
    assert "libbellwether_kernels.so was not found" in failures(done)
    assert "BELLWETHER_LIB_DIR" in failures(done)


def test_run_leaves_the_script_alone(tmp_path: Path) -> None:
    script = SOUND.replace('assert step < 3, "doctor runs three steps"', "") + (
        "import sys; print('ended', sys.argv[1:], __name__)\n"
        "print('compiler', 'torch._inductor.compile_fx' in sys.modules)\n"
    )
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "bellwether", "run", "--record", "r.bwrun", "--every", "1",
         "train.py", "--mine", "1"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT / "client_lib" / "python")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ended ['--mine', '1'] __main__" in done.stdout
    assert "compiler False" in done.stdout  # Loading it takes a second.
    assert "watching A: 1 attention layer" in done.stderr
    assert "Warning" not in done.stderr
    from recording import Recording

    recorded = Recording(tmp_path / "r.bwrun", ended=True)
    assert [f.step for f in recorded.frames] == list(range(20))
    assert recorded.hello.run.name.startswith("train-")


def test_a_samples_share_of_the_parameters_is_said() -> None:
    left_out = {f"p{i}": "no second moment" for i in range(10)}
    told = {"rows": 60, "elements": 1, "copied": 1, "refused": 0, "left_out": left_out}
    covered, *named = [finding.text for finding in tensor_findings({"tensors": told})]
    assert covered.startswith("60 parameters tell their gradient, and whether they moved, in every")
    assert covered.endswith("moments, and most spectral norms, 3 of them a sample, in turn")
    assert named[0] == "p0: not told, or not all of it: no second moment"
    assert len(named) == 9 and named[8].startswith("2 or more further parameters")
    (refused,) = tensor_findings({"tensors": told | {"rows": 0, "refused": 1, "left_out": {}}})
    assert refused.ok is False and "16384 parameters of 256 bytes" in refused.text
    assert tensor_findings({"tensors": told | {"rows": 0, "left_out": {}}}) == []


def test_a_samples_share_of_8_bits_is_said() -> None:
    told: dict[str, Any] = {"modules": 20, "seen": 7, "not_measured": None, "left_out": {"a: b": 2}}
    covered, named = [finding.text for finding in fp8_findings({"fp8": told})]
    assert covered.startswith("20 modules") and "2 of them a sample" in covered
    assert covered.endswith("of 7 it was seen so far") and named == "FP8, a: b"
    (why,) = fp8_findings({"fp8": told | {"not_measured": "no", "left_out": {}}})
    assert why.text.endswith("no") and fp8_findings({}) == []


def test_activations_and_routers_of_a_sample_are_said() -> None:
    modules = {"rows": 40, "blocks": 12, "not_measured": None, "left_out": {"lm_head: why": 2}}
    told, left_out = module_findings({"modules": modules})
    assert told.text == "40 activations at 12 blocks are told in every sample"
    in_turn = module_findings({"modules": modules | {"turns": 5}})[0]
    assert in_turn.text == "40 activations at 12 blocks are told in turn, each once in 5 samples"
    assert left_out.text == "activation lm_head: why" and module_findings({}) == []
    (none,) = module_findings({"modules": modules | {"not_measured": "compiled", "left_out": {}}})
    assert none.text == "no activations are told: compiled"
    own = modules | {"divided_by": None, "left_out": {}}
    assert "this rank's own loss" in module_findings({"modules": own, "samples": 1})[1].text
    experts = {"routers": {"gate": 0}, "experts": 8, "not_measured": None, "left_out": {"a: b": 1}}
    told, left_out = expert_findings({"experts": experts})
    assert told.text == "1 routers of 8 experts at most are told in every sample"
    assert left_out.text == "router a: b" and expert_findings({}) == []


def test_laws_and_weights_at_rest_are_said() -> None:
    none = {"not_measured": None, "left_out": {}, "faults": {}}
    kinds = {"modules": 14, "norms": 5, "embeddings": 1, "gates": 2, "routers": 0}
    linear = {**kinds, **none, "heads": ["lm_head"]}
    (told,) = law_findings({"linear": linear})
    assert told.text == (
        "laws of 14 linear layers, 5 norms, 1 embeddings, 2 gated MLPs are asked, in turn; "
        "logits are made by lm_head"
    )
    told, fault, left_out = law_findings(
        {"linear": linear | {"heads": [], "faults": {"up": "dW is wrong"}, "left_out": {"a: b": 1}}}
    )
    assert told.text.endswith("no layer makes logits of words")
    assert fault.ok is False and fault.text == "up: dW is wrong" and left_out.text == "laws, a: b"
    (why,) = law_findings({"linear": linear | {"not_measured": "compiled"}})
    assert why.text == "no laws of modules are asked: compiled" and law_findings({}) == []
    rest = {"elements": 90, "compared": 30, "not_measured": None, "flips": {}}
    (told,) = law_findings({"rest": rest})
    assert told.text == "90 elements of weights at rest are compared, in turn"
    why, flip = law_findings({"rest": rest | {"not_measured": "no", "flips": {"w": "bit 3"}}})
    assert why.text == "no weights at rest are compared: no" and flip.ok is False


def test_copies_that_are_compared_are_said() -> None:
    (told,) = replica_findings({"replicas": {"tensors": 9, "not_compared": None}})
    assert told.text.startswith("copies of 9 parameters are compared between ranks, in turn")
    (why,) = replica_findings({"replicas": {"tensors": 0, "not_compared": "no"}})
    assert why.text == "copies of parameters at other ranks are not compared: no"
    assert replica_findings({"replicas": {"tensors": 0, "not_compared": ALONE}}) == []
    assert replica_findings({}) == []


def test_parts_that_are_off_are_said_with_the_remedy() -> None:
    stats = ["drift", "fp8", "steps", "rank_norms"]
    off, losses = given_findings({"stats": stats, "losses": {"step": -1}})
    assert off.text.startswith("off: parameters, activations, experts; tensors, modules, experts: ")
    assert "monitor.losses()" in losses.text and given_findings({}) == []
    (told,) = given_findings({"losses": {"step": 7}})
    assert told.text.endswith("step 7")


def test_own_gradients_of_ranks_are_said_or_why_not() -> None:
    told = {"parameters": 9, "passes": 2, "not_measured": None, "left_out": {}}
    status = {"stats": ["rank_norms"], "rank_norms": told, "ranks": {"reporting": 2, "of": 2}}
    (read,) = rank_norm_findings(status)
    assert read.text == "the norm of this rank's own gradients is read of 9 parameters, in 2 passes"
    (_, silent) = rank_norm_findings(status | {"ranks": {"reporting": 1, "of": 8}})
    assert silent.text.startswith("1 of 8 ranks") and 'attach(ranks="all")' in silent.text
    lacks = told | {"left_out": {"words": "its gradient is sparse"}}
    assert rank_norm_findings(status | {"rank_norms": lacks})[1].text == (
        "words: the norm is without it: its gradient is sparse"
    )
    none = told | {"not_measured": "no"}
    (why,) = rank_norm_findings(status | {"rank_norms": none})
    assert why.text == "the norm of this rank's own gradients is not told: no"
    assert rank_norm_findings({"stats": ["drift"], "rank_norms": told}) == []
    assert rank_norm_findings({}) == []


def test_bytes_of_a_sample_are_said() -> None:
    volume = {"sample": 20480, "second": 0.0, "budget": 0, "rarer": 0}
    (told,) = volume_findings({"volume": volume})
    assert told.text == "a sample has 20 KiB" and told.ok is None
    full = volume | {"second": 4096.0, "budget": 2048, "rarer": 3}
    (told,) = volume_findings({"volume": full})
    assert told.text.endswith(
        "KiB, 4 KiB a second of byte_budget's 2: samples became rarer 3 times"
    )
    assert volume_findings({}) == []


def test_elements_read_in_every_step_are_said() -> None:
    told = {"on": True, "parameters": 6, "elements": 262_144, "norm_left_out": {}}
    (read,) = step_findings({"steps": told})
    assert read.text.startswith("262144 elements of 6 parameters are read in every step")
    (none,) = step_findings({"steps": told | {"parameters": 0, "elements": 0}})
    assert "is not told: no optimizer" in none.text
    assert step_findings({"steps": told | {"on": False}}) == [] and step_findings({}) == []
    left_out = step_findings({"steps": told | {"norm_left_out": {"norms on several devices": 3}}})
    assert left_out[0].text.endswith("was not told in 3 steps: norms on several devices")
