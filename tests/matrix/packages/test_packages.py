"""Goal: trainings by the loops of real packages are watched whole, with numbers that are right,
and train the same bits as without us.
Method: trainings.py, one process each, in an environment that is made here from
deploy/requirements-matrix.txt beside .venv, whose torch and transformers it shares.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE.parent)]

import two_processes  # noqa: E402
from bellwether_process import Server, wait_for  # noqa: E402

import matrix  # noqa: E402
import trainings  # noqa: E402

REQUIREMENTS = ROOT / "deploy" / "requirements-matrix.txt"
TORCHVISION = (
    "torchvision==0.28.0"  # Apart: transformers takes it wherever it is, and it is CUDA's.
)
SECONDS = 600  # Of one training, with what it compiles.
# May be less than full, each with what does not exist there.
LESS: dict[str, tuple[frozenset[str], str]] = {
    "megatron_sinks": (
        frozenset({"leak"}),
        "a sum of key gradients that is zero: with learnable sinks no law says so",
    ),
}


@pytest.fixture(scope="module")
def python() -> Path:
    """That of the environment, which is made anew where what it is made of has changed."""
    environment = ROOT / "build" / "matrix_packages"
    made_of = REQUIREMENTS.read_text() + TORCHVISION + sys.version
    mark = environment / "made_of"
    word = hashlib.sha256(made_of.encode()).hexdigest()
    found = environment / "bin" / "python"
    if mark.exists() and mark.read_text() == word:
        return found
    subprocess.run(
        [sys.executable, "-m", "venv", "--clear", "--without-pip", environment], check=True
    )
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(found), "install", "-q", "--no-deps"]
    subprocess.run([*pip, "-r", str(REQUIREMENTS)], check=True)
    subprocess.run([*pip, "--target", str(environment / "torchvision"), TORCHVISION], check=True)
    mark.write_text(word)
    return found


@pytest.mark.parametrize("name", trainings.ALL)
def test_a_training_has_every_signal_and_right_numbers(name: str, python: Path) -> None:
    ran = subprocess.run(
        [python, HERE / "trainings.py", name], capture_output=True, text=True, timeout=SECONDS
    )
    assert ran.returncode == 0 and ran.stdout, ran.stderr[-2000:]
    result = json.loads(ran.stdout)
    less = LESS.get(name, (frozenset[str](), ""))[0]
    partly = result["outcome"] == "partly" and set(result["missing"]) <= less
    passed = partly or result["outcome"] == "full"
    result |= {"package": trainings.ALL[name][0], "passed": passed}
    with (ROOT / "build" / "matrix_packages.jsonl").open("a") as file:
        file.write(json.dumps(result) + "\n")  # For support_table.py.
    assert passed, matrix.describe(result)


@pytest.mark.parametrize("way", ["tensor", "pipeline"])
def test_megatron_in_two_processes_is_watched_whole(way: str, python: Path, tmp_path: Path) -> None:
    for result in two_processes.megatron(str(python), "cpu", way, tmp_path):
        assert result["outcome"] == "full", matrix.describe(result)


@pytest.mark.parametrize("way", ["deepspeed_1", "deepspeed_2", "deepspeed_3", "megatron"])
def test_ranks_of_a_split_optimizer_report_one_run(way: str, python: Path, tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        command = [str(python), str(HERE / "optimizer_ranks.py"), way, server.grpc]
        answers = two_processes.answers(command)
        for found in answers:
            assert found["same"] and not found["errors"], found
        (run,) = server.call("ListRuns")["runs"]
        assert run["description"]["world"] == run["description"]["reporters"] == 2, run
        # Both ranks' frames of a step are merged to one sample.
        want = dict.fromkeys(range(4), sum(found["rows"] for found in answers))
        name = run["description"]["name"]
        told = wait_for("all steps are told", lambda: at_least(server.series(name, "rows"), want))
        assert told == want


def at_least(told: dict[int, float], want: dict[int, int]) -> dict[int, float]:
    """Once every rank's part of every step has come."""
    return told if all(told.get(step, 0.0) >= rows for step, rows in want.items()) else {}
