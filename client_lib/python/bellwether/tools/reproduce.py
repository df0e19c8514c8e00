"""python -m bellwether reproduce CAPTURE: a stand-alone script of a captured call of attention.

The script is the text of reproduced.py with the file's name in it.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, Optional

from .._util import files

_TEMPLATE = Path(__file__).with_name("reproduced.py")
_HERE = 'CAPTURE = "call.pt"\n'


def about(path: Path) -> dict[str, Any]:
    """What a captured file says of its call.  Raises ValueError, OSError."""
    import torch

    from .._hook.capture import FORMAT, NAMES

    why = files.why_no_file(path)
    if why is not None or not path.exists():
        raise ValueError(f"{path}: {why or 'there is no such file'}")
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
        told = json.loads(data["about"])
        missing = [name for name in NAMES if not isinstance(data.get(name), torch.Tensor)]
    except Exception as e:  # Whatever a file that is none makes of torch.
        raise ValueError(f"{path} is no captured call: {type(e).__name__}: {e}") from e
    if missing or not isinstance(told, dict):
        raise ValueError(f"{path} is no captured call: {', '.join(missing) or 'about'} is missing")
    if told.get("format") != FORMAT:
        raise ValueError(f"{path} has format {told.get('format')}, this version reads {FORMAT}")
    return told


def script_of(capture: Path, script: Path) -> str:
    """The script's text.  It finds the file from its own place."""
    place = os.path.relpath(capture.resolve(), script.resolve().parent)
    return _TEMPLATE.read_text(encoding="utf-8").replace(_HERE, f"CAPTURE = {json.dumps(place)}\n")


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bellwether reproduce",
        description="Makes a stand-alone script of a captured call of attention, for the kernel's "
        "vendor. It needs torch alone, and prints cosines and largest differences against fp64.",
        epilog="The file is one that doctor --kernels --capture has written, or a training with "
        "capture_dir. It holds q, k, v, mask and gradients of one sequence of a batch: look at "
        "what you pass on.",
    )
    parser.add_argument("capture", metavar="CAPTURE", help="a .pt file that was captured")
    parser.add_argument(
        "-o", "--output", metavar="SCRIPT", help="the script (CAPTURE with .py in place of .pt)"
    )
    given = parser.parse_args(arguments)
    capture = Path(given.capture)
    script = Path(given.output) if given.output else capture.with_suffix(".py")
    try:
        told = about(capture)
        with files.replacing(script) as part:
            part.write_text(script_of(capture, script), encoding="utf-8")
    except (ValueError, OSError) as e:
        print(f"reproduce: {e}")
        return 2
    place = f"layer {told['layer']}, step {told['step']}" if "layer" in told else "doctor"
    print(f"{capture}: {told.get('kernel')}, {told.get('reason')}, {place}")
    print(f"python {script}")
    return 0
