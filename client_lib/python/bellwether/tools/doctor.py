"""python -m bellwether doctor [script.py args]: why is there no data?

Without a script it checks the installation: versions, libraries, the server, and one small
model from attach to the statistics.  With a script it runs it for a few optimizer steps under
watch, then says which layers were found and measured, and why the others were not.

With --kernels it says which kernels of attention are right: forward and backward, on this machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from pathlib import Path
from typing import Any, Optional

from .. import __version__
from .._hook.calls import known_kernels
from .._hook.layer.notes import FROZEN, why
from .._hook.model import already_compiled
from .._native import c_api
from .._server import private_server
from .._util.counted import counted
from .._util.ranks import ASIDE
from ..settings import Settings, resolve
from .coverage import Finding, coverage_findings
from .grpc_probe import why_not


def installation() -> list[Finding]:
    """Versions and where the libraries and programs are."""
    found = [Finding(None, f"bellwether {__version__}, Python {platform.python_version()}")]
    try:
        import torch

        from .._hook.patches import intercept

        unsupported = intercept.unsupported()
        found.append(Finding(None, f"torch {torch.__version__}"))
        if unsupported is not None:
            found.append(Finding(False, unsupported))
    except ImportError:
        found.append(Finding(False, "torch is not installed: attach() needs it"))
    for name, load in (
        (c_api.CLIENT_LIBRARY, c_api.client),
        (c_api.KERNELS_LIBRARY, c_api.kernels),
    ):
        try:
            found.append(Finding(True, f"{name}: {load()._name}"))
        except c_api.LibraryError as e:
            found.append(Finding(False, str(e)))
    sender = c_api.find(c_api.SENDER)
    if sender is None:
        found.append(Finding(False, "bellwether-sender not found: nothing can be sent or recorded"))
    else:
        found.append(Finding(True, f"bellwether-sender: {sender}"))
    return found


def server_findings(server: Optional[str]) -> list[Finding]:
    server = server or os.environ.get("BELLWETHER_SERVER")
    if server:
        try:
            settings = resolve({"server": server})
        except ValueError as e:
            return [Finding(False, f"server {server}: {e}")]
        trouble = why_not(server, settings)
        if trouble:
            return [
                Finding(
                    False,
                    f"no server at {server}: {trouble}. Until it takes the run, frames wait and "
                    "are then thinned; training goes on",
                )
            ]
        return [Finding(True, f"server {server} answers, and takes runs of this identity")]
    if c_api.find(c_api.SERVER) is None:
        return [
            Finding(
                False,
                "no server configured and bellwetherd not found: runs are recorded to a .bwrun "
                "file in the working folder (set BELLWETHER_SERVER, or install bellwetherd)",
            )
        ]
    try:
        where = private_server.state_folder()
    except private_server.ServerError as e:
        return [Finding(False, f"no server configured, and {e}: runs are recorded to .bwrun files")]
    return [Finding(True, f"no server configured: a private one is used, its data in {where}")]


def layer_findings(status: dict[str, Any]) -> list[Finding]:
    """What Monitor.status() says about the layers, one finding each, with the cause."""
    layers = status["layers"]
    if status["why_off"] and not status["live"]:
        aside = status["why_off"] in ASIDE
        return [Finding(None if aside else False, f"watching is off: {status['why_off']}")]
    if not layers:
        return [
            Finding(
                False,
                "no attention module found: no module holds query and key projections, and none "
                "calls scaled_dot_product_attention",
            )
        ]
    found = []
    measured = any(layer["index"] >= 0 for layer in layers)
    # What torch.compile has made runs without coming by.
    sees_use = measured and not already_compiled.anything()
    for layer in layers:
        name = layer["name"] or "(the model)"
        notes = "; ".join(layer["notes"])
        if not layer["watched"]:
            found.append(Finding(None, f"{name}: not watched, layers= leaves it out"))
        elif layer["lends"]:
            found.append(Finding(None, f"{name}: holds the projections of an attention beside it"))
        elif not layer["attention"]:
            what = "nothing to watch, unless it writes one by exp, which is not seen"
            found.append(Finding(None, f"{name}: no softmax in its code: {what}"))
        elif layer["unused"] and sees_use:
            found.append(
                Finding(None, f"{name}: not used in these steps, {layer['unused']}: not watched")
            )
        elif layer["calls"] == 0:
            found.append(
                Finding(
                    False,
                    f"{name}: never called scaled_dot_product_attention, or another function that "
                    "is seen, with gradients on: attention that is written out in another way "
                    'than is known (transformers: attn_implementation="sdpa"; else '
                    "bellwether.wrap_attention()), called within torch.jit.script or a "
                    "torch.autograd.Function, compiled with a torch below 2.11, or not used"
                    + (f" [{notes}]" if notes else ""),
                )
            )
        elif FROZEN in layer["notes"] and layer["fired"] == 0 and measured:
            found.append(Finding(None, f"{name}: {FROZEN}: nothing to watch"))
        elif layer["heads"] and layer["fired"] == 0:
            cause = notes or "its output does not reach the loss, or no gradient reaches it"
            found.append(Finding(False, f"{name}: called, but its backward never ran: {cause}"))
        elif layer["fired"] == 0 or not layer["heads"]:
            found.append(Finding(False, f"{name}: called, but not measured: {why(layer['notes'])}"))
        elif layer["index"] < 0:
            late = [note for note in layer["notes"] if "not reported" in note]
            cause = "; ".join(late) or (
                "no optimizer step was seen; if the optimizer is not from torch.optim, call "
                "mon.step() once per step"
            )
            found.append(Finding(False, f"{name}: measured, but nothing is reported: {cause}"))
        elif layer.get("not_judged_by"):
            families = ", ".join(layer["not_judged_by"])
            found.append(
                Finding(
                    False,
                    f"{name}: layer {layer['index']}, measured in part: it is not judged by "
                    f"{families}: {why(layer['notes'])}",
                )
            )
        else:
            where = f", W_Q and W_K: {layer['weights']}" if layer["weights"] else ""
            reasons = "; ".join(layer.get("without_laws", ()))
            where += f"; without the laws of attention: {reasons}" if reasons else ""
            found.append(
                Finding(
                    True,
                    f"{name}: layer {layer['index']}, {counted(layer['heads'], 'head')}"
                    f" ({counted(layer['kv_heads'], 'key head')}) of {layer['head_dim']}{where}"
                    + (f" [{notes}]" if notes else ""),
                )
            )
    return found


def known_findings() -> list[Finding]:
    """What the table of known kernels has for this machine, whatever a model calls."""
    import torch

    places = ["cpu"]
    if torch.cuda.is_available():
        devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
        places += dict.fromkeys(map(known_kernels.architecture, devices))
    found = []
    for place in places:
        for entry in known_kernels.possible(place):
            versions = entry.possible(place)
            found.append(Finding(None, f"known of {versions} on {place}: {entry}"))
    return found


def monitor_findings(monitor: Any) -> list[Finding]:
    """The whole story of one monitor: layers, link, errors, price."""
    status = monitor.status()
    found = layer_findings(status)
    met = {id for layer in status["layers"] for id in layer.get("known_faults", ())}
    for entry in known_kernels.named(met):
        found.append(Finding(None, f"known, a hint (--kernels tells): {entry}"))
    found += coverage_findings(status)
    if status["errors"]:
        found.append(
            Finding(
                False, f"{counted(status['errors'], 'error')}, the last: {status['last_error']}"
            )
        )
    for reason, times in status["numbers_left_out"].items():
        found.append(Finding(False, f"left out of {counted(times, 'step')}: {reason}"))
    counters = status.get("counters")
    if counters is not None:
        sound = counters.link in ("streaming", "recording", "starting")
        trouble = f": {counters.error}" if counters.error else ""
        dropped = counters.frames_dropped_ring + counters.frames_dropped_window
        found.append(
            Finding(
                sound,
                f"link {counters.link}{trouble}, {counted(counters.frames_acked, 'frame')} durable",
            )
        )
        if dropped:
            found.append(Finding(False, f"{counted(dropped, 'frame')} dropped"))
        if counters.frames_stripped:
            without = f"{counted(counters.frames_stripped, 'frame')} sent without their heads"
            found.append(Finding(False, f"{without}: the sender's memory was nearly full"))
        if counters.frames_spooled or counters.spool_bytes:
            waiting = f"{counters.spool_bytes >> 20} MiB of them still there"
            found.append(
                Finding(
                    None, f"{counted(counters.frames_spooled, 'frame')} went to disk, {waiting}"
                )
            )
    if status.get("overhead"):  # Else it is not known yet.
        found.append(
            Finding(
                None,
                f"watching costs about {100 * status['overhead']:.2f} % of the training time, "
                f"one sample every {counted(status['sampling_period'], 'step')}",
            )
        )
    return found


def self_test() -> list[Finding]:
    """A small model, watched for three steps into a recording.  No server gets it, whatever is
    configured: it is not the user's run, and an identity may be restricted to some names."""
    import torch
    from torch import nn
    from torch.nn import functional

    from .._attach import attach

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(32, 96)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            y: torch.Tensor = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return y

    with tempfile.TemporaryDirectory() as folder:
        model = Small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        offline = Settings(mode="offline", record=str(Path(folder) / "doctor.bwrun"), every=1)
        monitor = attach(model, settings=offline, run="doctor")
        try:
            for _ in range(3):
                loss = model(torch.ones(2, 8, 32)).square().mean()
                loss.backward()
                optimizer.step()
                monitor.step(loss=loss)
            monitor.flush(5.0)
            return [Finding(None, "a small model, three steps:"), *monitor_findings(monitor)]
        finally:
            monitor.detach()


KERNELS_HELP = """
--kernels runs each kernel of attention that torch can choose here, and ours in all modes, forward
and backward.  Its inputs are those that kernels get wrong: rows that see nothing, tails of tiles,
grouped and strided heads, peaked and broad scores.  With a script it takes heads, sizes and types
from that model's attention.  Each result is held against sums that exact arithmetic makes equal,
and against fp64.  A kernel is "right" where rounding gives all differences.  It is "biased" where
only roundings that are alike give them: evidence, no fault.  It is "broken" where no rounding does;
the tensor, the head and a kernel that is right are named.  It is "not judged" where it does not
take the input, or the time was over.  The exit code is 1 if a kernel is broken or none could be
judged.  docs/concepts/laws.md says more.

Examples:
  python -m bellwether doctor train.py --batch 8
  python -m bellwether doctor --kernels
  python -m bellwether doctor --kernels --json kernels.json train.py --batch 8
  python -m bellwether doctor --kernels --function mypackage.attention:flash
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bellwether doctor", description="Says why there is no data.",
        epilog=KERNELS_HELP, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--server", help="host:port or unix:/path that the run would use")
    parser.add_argument("--run", help="the name of the script's run; default: as without doctor")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps to run a script for")
    parser.add_argument(
        "--kernels", action="store_true", help="say which kernels of attention are right"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write all verdicts of --kernels with numbers"
    )
    parser.add_argument(
        "--seconds", type=float, default=50.0, metavar="N", help="that --kernels may take"
    )
    parser.add_argument(
        "--device", help="of --kernels: cpu or cuda; default: a GPU if there is one"
    )
    parser.add_argument(
        "--function", metavar="MODULE:NAME",
        help="one more kernel, with the arguments of scaled_dot_product_attention",
    )  # fmt: skip
    parser.add_argument(
        "--capture", metavar="DIR",
        help="keep up to four broken calls there, for python -m bellwether reproduce",
    )  # fmt: skip
    parser.add_argument("script", nargs="?", help="a training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's arguments")
    return parser


def _kernels(given: argparse.Namespace, shapes: Optional[list[Any]], calls_flex: bool) -> int:
    from . import kernel_check

    try:
        return kernel_check.run(
            shapes, device=given.device, seconds=given.seconds, function=given.function,
            json_path=given.json, calls_flex=calls_flex, capture=given.capture,
        )  # fmt: skip
    except (ValueError, OSError) as e:
        print(Finding(False, str(e)))
        return 2


def main(arguments: Optional[list[str]] = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    if not given.seconds > 0:
        parser.error(f"--seconds is {given.seconds:g}, but must be above 0")
    if not given.kernels and (given.json or given.function or given.device or given.capture):
        parser.error("--json, --function, --device and --capture go with --kernels")
    findings = installation()
    if given.kernels and given.script is None:
        bad = [finding for finding in findings if finding.ok is False]
        for finding in bad:
            print(finding)
        return max(_kernels(given, None, True), int(bool(bad)))
    findings += server_findings(given.server)
    ready = all(f.ok is not False for f in findings if "server" not in f.text)
    shapes: Optional[list[Any]] = None
    calls_flex = True
    if given.script is not None and ready:
        from .runner import run_steps

        watcher, ended = run_steps(
            given.script, given.arguments, given.steps, given.server, given.run
        )
        if watcher.monitor is None:
            findings.append(
                Finding(
                    False,
                    f"{given.script}: no nn.Module gave its parameters to an optimizer of "
                    f"torch.optim before {ended}",
                )
            )
        else:
            findings += monitor_findings(watcher.monitor)
            shapes = _shapes(watcher.monitor) if given.kernels else None
            calls_flex = any("flex" in layer.seen.kernel for layer in watcher.monitor.layers)
            watcher.monitor.detach()
    elif ready:
        findings += self_test() + known_findings()
    for finding in findings:
        print(finding)
    bad_findings = any(finding.ok is False for finding in findings)
    if not given.kernels:
        return 1 if bad_findings else 0
    if not shapes:
        print(Finding(False, f"{given.script}: no layer whose attention --kernels could try"))
        return 1
    return max(_kernels(given, shapes, calls_flex), int(bad_findings))


def _shapes(monitor: Any) -> list[Any]:
    """What the layers that were called ask of their attention."""
    from .kernel_cases import Shape

    found = []
    for layer in monitor.layers:
        seen = layer.seen
        if layer.watched and layer.heads and seen.dtype is not None:
            heads = layer.heads, layer.kv_heads, layer.head_dim
            found.append(Shape(*heads, seen.dtype, seen.seq_len, seen.causal))
    return found
