"""The commands of docs/operate/security.md, in one shell, do what the page says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, free_port

PAGE = (ROOT / "docs/operate/security.md").read_text()
OURS = "<!-- run by tests/docs/test_security.py -->"
BLOCKS = re.findall(rf"^{OURS}\n```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_set_up_works_as_it_stands(tmp_path: Path) -> None:
    assert len(BLOCKS) == 6
    script = (
        "\n".join(BLOCKS).replace(":7070", f":{free_port()}").replace(":7071", f":{free_port()}")
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("BELLWETHER_")
    }
    environment["PATH"] = os.pathsep.join(
        [str(BIN), str(Path(sys.executable).parent), environment["PATH"]]
    )
    environment |= {"PYTHONPATH": str(ROOT / "client_lib/python"), "BELLWETHER_LIB_DIR": str(BIN)}
    done = subprocess.run(
        ["bash", "-euc", "trap 'kill $server 2>/dev/null || true' EXIT\n" + script],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "acknowledged: True" in said
    assert re.search(r"^bellwether_connections \d", said, re.MULTILINE)
    assert re.search(r"\bdemo\b", said)
    audit = [json.loads(line) for line in (tmp_path / "data/audit.log").read_text().splitlines()]
    assert {"who": "trainers", "call": "Attach", "run": "demo", "result": "OK"}.items() <= audit[
        0
    ].items()
    for secret in (tmp_path / "alice.token", tmp_path / "prometheus.token"):
        assert secret.stat().st_mode & 0o077 == 0
        assert secret.read_text().strip() not in said + (tmp_path / "data/audit.log").read_text()
