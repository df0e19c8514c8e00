"""Goal: a job that runs already is watched and let go without a trace in its losses, and stands
still for a second at most.  Every reason not to attach is reported before the job is touched.
Method: real processes, really entered; the script never imports us, and every
loss is compared with that of a twin that was left alone.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import Server

from bellwether.attach_pid import command as attach_command
from bellwether.attach_pid import debugger, elf, processes
from bellwether.attach_pid.debugger import STOP_SECONDS_MAX, DebuggerError
from bellwether.attach_pid.processes import Refusal

from conftest import ROOT
from plain_job import Job
from recording import Recording

LONG = bool(os.environ.get("BELLWETHER_LONG"))
SICK_LAYER = 1
ALREADY_ILL = 2000  # Its key gradients have leaked since about step 1,200 (seed 2).
SAMPLES_MAX = 64  # Within which a job that is ill already must be called ill.
CYCLES = 100 if LONG else 5
with_long = pytest.mark.skipif(not LONG, reason="takes half a minute: BELLWETHER_LONG")
# A step of this model takes 4 ms: the right share for a real one would leave no samples.
DENSE = ("--every", "20", "--rows", "0", "--sequences", "0", "--overhead-budget", "0.5")


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "bellwether", "attach", *map(str, words)]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "client_lib" / "python")}


def attach(*words: object, fails: bool = False) -> str:
    done = subprocess.run(
        command(*words), capture_output=True, text=True, timeout=120, env=ENVIRONMENT
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    stops = [float(s) for s in re.findall(r"it stood for ([0-9.]+) s", done.stdout + done.stderr)]
    assert all(stop <= STOP_SECONDS_MAX for stop in stops), stops
    return done.stderr if fails else done.stdout


@contextmanager
def twins(folder: Path, variant: str = "eager") -> Iterator[tuple[Job, Job]]:
    with Job(folder, "visited", variant) as job, Job(folder, "alone", variant) as twin:
        yield job, twin


def assert_same(job: Job, twin: Job) -> None:
    """Both are told to stop at once; as far as both came, every loss is the same bit by bit."""
    visited, alone = job.finish()[0], twin.finish()[0]
    length = min(len(visited), len(alone))
    assert visited.count("\n", 0, length) > 200
    assert visited[:length] == alone[:length]


def named(server: Server, run: str) -> dict[int, int]:
    """Layers that alerts of some weight name, and the step at which each was first named."""
    alerts = server.call("ListAlerts", run=run, limit=1000)["alerts"]
    found: dict[int, int] = {}
    for alert in alerts:
        told = server.call("GetAlert", run=run, key=alert["last"]["key"])["alert"]["history"]
        for t in told:
            if t["severity"] in ("SEVERITY_WARNING", "SEVERITY_CRITICAL") and t["layer"] >= 0:
                found[t["layer"]] = min(found.get(t["layer"], 1 << 60), int(t["step"]))
    return found


def test_the_sick_layer_is_named_and_no_loss_differs(tmp_path: Path) -> None:
    with Server(tmp_path) as server, twins(tmp_path) as (job, twin):
        job.wait_for_step(ALREADY_ILL)
        said = attach(job.pid, "--server", server.grpc, "--run", "late", *DENSE)
        assert "2 attention layers of TinyTransformer are watched from step" in said
        # Refused by what /proc shows: the second one does not stop it.
        job.wait_for_step(job.step() + 200)
        refused = attach(job.pid, "--server", server.grpc, fails=True)
        assert refused == f"process {job.pid} is watched already; --detach ends that\n"
        while not named(server, "late"):
            assert job.step() < 6000
            assert job.process.poll() is None, "it ended before an alert"
            time.sleep(0.1)
        assert "run late is no longer watched" in attach(job.pid, "--detach")
        (layer, step), *others = named(server, "late").items()
        assert layer == SICK_LAYER and not others
        samples = sorted(server.series("late", "wq_sigma", SICK_LAYER))
        assert ALREADY_ILL <= samples[0] < ALREADY_ILL + 600  # The optimizer's own count.
        needed = sum(1 for sample in samples if sample <= step)
        print(f"attached at step {samples[0]}, named at {step}: {needed} samples")
        assert needed <= SAMPLES_MAX
        assert_same(job, twin)


@with_long
def test_compiled_blocks_are_left_as_they_are(tmp_path: Path) -> None:
    with twins(tmp_path, "compiled") as (job, twin):
        job.wait_for_step(200)
        said = attach(job.pid, "--record", tmp_path / "c.bwrun", "--run", "compiled", *DENSE)
        assert "Block is compiled: only the norms of W_Q and W_K are measured" in said
        job.wait_for_step(job.step() + 400)
        attach(job.pid, "--detach")
        assert_same(job, twin)
    steps = Recording(tmp_path / "c.bwrun").steps()
    sigma = [signals["wq_sigma"] for signals in steps.values() if "wq_sigma" in signals]
    assert len(sigma) >= 5 and not any("rows" in signals for signals in steps.values())
    healthy, sick = (float(layer[0]) for layer in sigma[-1])
    assert sick > 2 * healthy and sick > 2


def test_both_ranks_of_a_launcher(tmp_path: Path) -> None:
    with Job(tmp_path, "visited", "ranks") as job:
        job.wait_for_step(200)
        said = attach(
            job.pid, "--run-tree", "--ranks", "all", "--record", tmp_path / "r.bwrun",
            "--run", "ranks", *DENSE,
        )  # fmt: skip
        assert said.count("are watched from step") == 2
        job.wait_for_step(job.step() + 200)
        assert attach(job.pid, "--run-tree", "--detach").count("is no longer watched") == 2
        visited = job.finish()
    steps = visited[0].count("\n")
    with Job(tmp_path, "alone", "ranks", steps) as twin:
        assert twin.finish(stop=False) == visited and len(visited) == 2
    recorded = [Recording(tmp_path / name) for name in ("r.bwrun", "r-rank1.bwrun")]
    assert [r.hello.rank for r in recorded] == [0, 1] and recorded[0].hello.run.world == 2
    # Both count as the optimizer does: at the same step both have the same weights.
    first, second = (
        {step: s["wq_sigma"].tolist() for step, s in r.steps().items() if "wq_sigma" in s}
        for r in recorded
    )
    common = first.keys() & second.keys()
    assert all(first[step] == second[step] for step in common)
    assert len({str(first[step]) for step in common}) == len(common)


def test_many_visits_and_a_killed_visitor_harm_nothing(tmp_path: Path) -> None:
    with twins(tmp_path) as (job, twin):
        job.wait_for_step(0)
        for cycle in range(CYCLES):
            attach(
                job.pid,
                "--record",
                tmp_path / "c.bwrun",
                "--run",
                f"cycle-{cycle}",
                *DENSE,
            )
            attach(job.pid, "--detach")
        for way in range(3):
            kill_midway(job, way, tmp_path)
            time.sleep(1)  # What it had begun may end by itself: attached, or not.
            if processes.is_watched(job.pid):
                subprocess.run(command(job.pid, "--detach"), env=ENVIRONMENT, timeout=100)
        job.wait_for_step(250)
        twin.wait_for_step(250)
        assert job.process.poll() is None, "it ended before the visits did"
        assert_same(job, twin)


def kill_midway(job: Job, way: int, folder: Path) -> None:
    """kill -9 for the command: while it enters the process, or just before or after that."""
    visitor = subprocess.Popen(
        command(job.pid, "--record", folder / "k.bwrun", "--run", "killed"),
        env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not entering(visitor.pid):
        assert visitor.poll() is None
    time.sleep(0.02 * way)
    visitor.kill()
    visitor.wait()
    deadline = time.monotonic() + 10
    while traced(job.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def entering(pid: int) -> bool:
    """Whether the command has started the program that enters."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return any(b"ptrace_call" in Path(f"/proc/{c}/cmdline").read_bytes() for c in children)


def traced(pid: int) -> bool:
    return "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text()


def test_a_call_that_does_not_return_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debugger, "STOP_SECONDS_MAX", 0.5)
    monkeypatch.setattr(debugger, "ATTEMPTS", 1)
    with twins(tmp_path) as (job, twin):
        job.wait_for_step(0)
        target = processes.examine(job.pid)
        maps = elf.mappings(Path(f"/proc/{job.pid}/maps").read_text())
        libc = next(m for m in maps if Path(m.path).name.startswith("libc.") and not m.offset)
        pause = elf.addresses(Path("/"), libc, ["pause"])["pause"]
        with pytest.raises(
            DebuggerError, match=f"process {job.pid} was not entered: it took too long"
        ):
            debugger.enter(replace(target, mmap=pause), "pass", tmp_path)
        assert not traced(job.pid)
        job.wait_for_step(400)
        assert_same(job, twin)


BUSY = """\
import math, signal, time
visits = alarms = wrong = 0
def count(*_):
    global alarms
    alarms += 1
signal.signal(signal.SIGALRM, count)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
values = [1 / (1 + i) for i in range(20000)]
exact = math.fsum(values)
print("up", flush=True)
while visits < 100:
    wrong += math.fsum(values) != exact  # Within C, the vector registers in use.
    begin = time.monotonic()
    time.sleep(0.002)                    # Within a system call.
    wrong += time.monotonic() - begin < 0.002
print(visits, wrong, alarms > 50, flush=True)
"""


@with_long
def test_a_hundred_entries_disturb_neither_sums_nor_sleeps_nor_signals(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        maps = elf.mappings(Path(f"/proc/{process.pid}/maps").read_text())
        symbols = processes._python_symbols(process.pid, maps)[1]
        libc = next(m for m in maps if Path(m.path).name.startswith("libc.") and not m.offset)
        target = processes.Target(
            process.pid, 0, 0, "busy", (3, 11), "2.13.0", symbols["Py_AddPendingCall"],
            symbols["PyRun_SimpleString"], elf.addresses(Path("/"), libc, ["mmap"])["mmap"],
        )  # fmt: skip
        for _ in range(100):
            assert debugger.enter(target, "visits += 1", tmp_path) < STOP_SECONDS_MAX
        assert process.stdout.read() == b"100 0 True\n"


# ---- refusals ----


@contextmanager
def running(*words: str) -> Iterator[int]:
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # It is up.
            yield process.pid
        finally:
            process.kill()


def python(code: str) -> tuple[str, ...]:
    return (
        sys.executable,
        "-c",
        f"{code}\nprint('up', flush=True)\nimport time\ntime.sleep(99)",
    )


def refusal(pid: int, detach: bool = False) -> str:
    with pytest.raises(Refusal) as refused:
        processes.examine(pid, detach)
    return str(refused.value)


def test_a_process_that_is_not_there() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert attach(gone.pid, fails=True) == f"there is no process {gone.pid}\n"
    with subprocess.Popen(["true"]) as zombie:
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        assert refusal(zombie.pid) == f"process {zombie.pid} has ended"
    assert "is this command itself" in refusal(os.getpid())


def test_a_process_that_is_no_python(tmp_path: Path) -> None:
    with running("sh", "-c", "echo up; sleep 99; true") as pid:
        assert refusal(pid) == f"process {pid} (sh -c echo up; sleep 99; true) is not Python"
    source, program = tmp_path / "s.c", tmp_path / "static"
    source.write_text('#include <unistd.h>\nint main() { write(1, "up\\n", 3); pause(); }\n')
    subprocess.run(["gcc", "-static", "-o", program, source], check=True)
    with running(str(program)) as pid:
        assert refusal(pid).endswith("is not Python; it is linked statically")


def test_a_python_on_musl(tmp_path: Path) -> None:
    loader = tmp_path / "ld-musl-x86_64.so.1"
    loader.write_bytes(b"x" * 4096)
    code = f"import mmap; f = open({str(loader)!r}, 'rb'); m = mmap.mmap(f.fileno(), 0, prot=1)"
    with running(*python(code)) as pid:
        assert "runs on musl: Bellwether's libraries need the GNU C library" in refusal(pid)


def test_a_python_without_torch() -> None:
    with running(*python("pass")) as pid:
        assert "has not imported torch: there is nothing to watch yet" in refusal(pid)


def test_no_optimizer_step_within_the_wait() -> None:
    loop = "import torch, time\nprint('up', flush=True)\nwhile True: time.sleep(0.01)"
    with running(*python(loop)) as pid:
        assert (
            refusal(pid, detach=True) == f"process {pid} is not watched: there is nothing to detach"
        )
        # It imports the package first, which takes seconds on a machine that is busy.
        said = attach(pid, "--wait", 10, fails=True)
        assert "no optimizer of torch.optim made a step within 10 s; nothing was changed" in said
    busy = "import torch, time\nprint('up', flush=True)\ntime.sleep(60)"
    with running(*python(busy)) as pid:
        assert "ran no Python within 1 s" in attach(pid, "--wait", 1, fails=True)


def test_an_import_that_outlasts_the_wait() -> None:
    """A process whose first word from us is a slow import is not called stuck in C."""
    slow = """\
import sys, time, torch
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "bellwether.attach_pid.inside":
            time.sleep(3)
sys.meta_path.insert(0, Slow())
print("up", flush=True)
while True: time.sleep(0.01)
"""
    with running(*python(slow)) as pid:
        said = attach(pid, "--wait", 1, fails=True)
        assert "it was still importing bellwether after 1 s; nothing was changed" in said


def test_an_optimizer_without_attention() -> None:
    code = """\
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("up", flush=True)
while True:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""
    with running(*python(code)) as pid:
        said = attach(pid, "--wait", 2, fails=True)
        assert "no attention module was found in Linear, within 2 s; nothing was changed" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_process_of_another_user_is_refused() -> None:
    with running(*python("pass")) as pid:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:  # Real ids, so that the kernel and not a stub says no.
            try:
                os.setgid(65534)
                os.setuid(65534)
                processes.examine(pid)
            except Refusal as e:
                os.write(writer, str(e).encode())
            os._exit(0)
        os.waitpid(child, 0)
        told = os.read(reader, 1000).decode()
        assert (
            told == f"process {pid} belongs to root and you are nobody: run this as root or as root"
        )


def test_a_process_that_is_stopped_or_traced() -> None:
    with running(*python("pass")) as pid:
        os.kill(pid, signal.SIGSTOP)
        while "T (" not in Path(f"/proc/{pid}/status").read_text():
            time.sleep(0.01)
        assert f"is stopped: let it go on first (kill -CONT {pid})" in refusal(pid)
        os.kill(pid, signal.SIGCONT)
        with subprocess.Popen(["strace", "-o", "/dev/null", "-p", str(pid)], stderr=-1) as tracer:
            while not traced(pid):
                time.sleep(0.01)
            assert f"is traced by process {tracer.pid} already" in refusal(pid)
            tracer.kill()


def test_yama_refusals_are_explained() -> None:
    assert processes.yama_refusal(0) == ""
    for scope in (1, 2):
        assert f"ptrace_scope is {scope}): run this as root" in processes.yama_refusal(scope)
    assert "no process may attach to another" in processes.yama_refusal(3)


def test_versions_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    check = processes._check_versions
    check(7, (3, 11), "2.13.0+cpu")
    for python_version, torch_version, why in (
        ((3, 8), "2.4.1", "process 7 runs Python 3.8: the package needs 3.9 or newer"),
        ((3, 9), "2.3.1", "process 7 runs torch 2.3.1: the package needs 2.8 or newer"),
        ((3, 99), "9.0.0", "process 7 runs Python 3.99 and this is Python"),
    ):
        with pytest.raises(Refusal, match=re.escape(why)):
            check(7, python_version, torch_version)
    monkeypatch.setattr(processes.platform, "machine", lambda: "aarch64")
    with pytest.raises(Refusal, match=r"Python 3\.11 on aarch64: before 3\.14 only x86_64"):
        check(7, (3, 11), "2.13.0")


def test_bad_arguments_never_reach_the_process() -> None:
    for words, why in (
        (("--every", "0"), "every: 0 is below 1"),
        (("--ranks", "some"), "ranks: 'some' is not one of dp0, all"),
    ):
        assert why in attach(1, *words, fails=True)
    assert "--wait: 0 is outside of 0 to 86400 seconds" in attach(1, "--wait", 0, fails=True)
    assert "pid: 0 is not above 0" in attach(0, fails=True)


def test_the_line_leaves_no_name_behind(tmp_path: Path) -> None:
    """What is brought in runs in the script's namespace and must not be seen there."""
    box = attach_command.Mailbox(tmp_path / "nobody")
    namespace: dict[str, object] = {"sys": 1, "module": 2, "error": 3}
    exec(attach_command._line(box), namespace)
    namespace.pop("__builtins__")
    assert namespace == {"sys": 1, "module": 2, "error": 3}


def test_remote_exec_gets_the_same_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.14's own way in, by its documented contract."""
    called: list[tuple[int, str]] = []
    monkeypatch.setattr(
        sys,
        "remote_exec",
        lambda pid, path: called.append((pid, Path(path).read_text())),
        raising=False,
    )
    target = processes.Target(7, 0, 0, "python", (3, 14), "2.13.0", 0, 0, 0)
    assert debugger.enter(target, "try: pass", tmp_path) == 0.0
    assert called == [(7, "try: pass")]
