"""A training job that never imports us: examples/tiny_transformer.py without the lines that do,
as a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Optional

from conftest import ROOT

_OURS = """\
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "client_lib" / "python"))
import bellwether
"""
_MODEL = "    model = TinyTransformer(args.attention, args.center)\n"
_CALL = "LOSS_SCALE * (model(tokens) - target)"
_END = "if not math.isfinite(losses[-1]):"
_STOP = 'Path("stop").exists()'
# What a script may do with the model before it trains.
VARIANTS = {
    "eager": "",
    "compiled": """\
    for block in model.blocks:
        block.compile(backend="aot_eager")
""",
    "ranks": """\
    torch.distributed.init_process_group("gloo")
    data.generator.manual_seed(args.seed + 100 * torch.distributed.get_rank())
    args.losses = Path(f"{args.losses}-{torch.distributed.get_rank()}")
    wrapped = nn.parallel.DistributedDataParallel(model)
""",
}


def script(folder: Path, variant: str = "eager") -> Path:
    text = (ROOT / "examples" / "tiny_transformer.py").read_text()
    for part in (_OURS, _MODEL, _CALL, _END):
        assert text.count(part) == 1, part
    text = text.replace(_OURS, "").replace(_MODEL, _MODEL + VARIANTS[variant])
    stop = _STOP
    if variant == "ranks":  # All or none.
        text = text.replace(_CALL, _CALL.replace("model(", "wrapped("))
        stop = f"torch.distributed.all_reduce(stop := torch.tensor(float({_STOP}))) or stop > 0"
    text = text.replace(_END, f"if {stop}:")
    assert "import bellwether" not in text
    path = folder / f"plain_{variant}.py"
    path.write_text(text)
    return path


class Job:
    """The script in a process, until it is told to stop; then its losses are written."""

    def __init__(
        self, folder: Path, name: str, variant: str = "eager", steps: int = 1_000_000
    ) -> None:
        self._stop = folder / "stop"
        self._stop.unlink(missing_ok=True)
        self.losses = folder / f"{name}.losses"
        self._log = folder / f"{name}.log"
        launcher = [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--standalone",
        ]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("BELLWETHER_")}
        with open(self._log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-u", *(launcher if variant == "ranks" else []),
                 str(script(folder, variant)), "--no-watch", "--seed", "2",
                 "--steps", str(steps), "--losses", str(self.losses)],
                stdout=log, stderr=log, cwd=folder,
                env={**environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )  # fmt: skip
        self.pid = self.process.pid

    def said(self) -> str:
        return self._log.read_text()

    def last_words(self) -> str:
        """The end of what it said, without its steps: why it ended."""
        lines = [line for line in self.said().splitlines() if not line.startswith("step ")]
        return "\n".join([f"exit code {self.process.poll()}", *lines[-50:]])

    def step(self) -> int:
        """The last step that it has told of; one in 200 is."""
        return max(
            (int(s) for s in re.findall(r"^step +(\d+)/", self.said(), re.M)),
            default=-1,
        )

    def wait_for_step(self, step: int, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while self.step() < step:
            assert self.process.poll() is None, self.last_words()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def finish(self, stop: bool = True, seconds: float = 120) -> list[str]:
        """The losses of each rank, as text."""
        if stop:
            self._stop.touch()
        assert self.process.wait(seconds) == 0, self.last_words()
        files = sorted(self.losses.parent.glob(f"{self.losses.name}*"))
        return [path.read_text() for path in files]

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        value: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
