"""The commands of docs/tutorial.md, one after the other in one shell, do what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, free_port

PAGE = (ROOT / "docs/tutorial.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
MARK = "---- the next block"


def test_the_tutorial(tmp_path: Path) -> None:
    for name in ("examples", "client_lib", "deploy"):
        (tmp_path / name).symlink_to(ROOT / name)
    grpc, web = free_port(), free_port()
    script = f"\necho '{MARK}'\n".join(BLOCKS).replace("127.0.0.1:7070", f"127.0.0.1:{grpc}")
    script = script.replace("plot sick", f"plot sick --page http://127.0.0.1:{web}")
    # The page's server listens where nobody else does.
    script = script.replace(
        "& server=$!",
        f"--grpc.listen-address=127.0.0.1:{grpc} --web.listen-address=127.0.0.1:{web} & server=$!",
    )
    environment = {**os.environ, "BELLWETHER_SERVER": f"127.0.0.1:{grpc}", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = os.pathsep.join(
        [str(BIN), str(Path(sys.executable).parent), environment["PATH"]]
    )
    done = subprocess.run(
        ["bash", "-euc", "trap 'kill $server 2>/dev/null' EXIT\n" + script],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    watched, story, compared, judged, rescued = done.stdout.split(MARK)
    losses = [float(loss) for loss in re.findall(r"loss +([0-9.]+)", watched)]
    assert losses and losses[-1] < losses[0]
    # How bad it is by step 2,000 depends on how the processor rounds.
    assert re.search("warning|critical", story.lower()) and "LAYER" in compared
    worst = re.search(
        r"^ *(\d+) +(\d+) ", story[story.index("LAYER") :].split("\n", 1)[1], re.MULTILINE
    )
    assert worst and worst[1] == "1", story
    assert xml.parse(tmp_path / "sick.svg").getroot().tag.endswith("svg")
    assert "attention.center_k" in judged or "attention.mode" in judged
    assert re.search(r"attention\.(center_k|mode)", rescued) and "proposed" not in rescued
    sigma = [float(value) for value in re.findall(r"layer 1 ([0-9.]+)", done.stdout)]
    sick, well, healed = sigma
    print(f"sigma(W_Q) of layer 1: bf16 {sick}, fp32 {well}, repaired {healed}")
