"""`bellwether run plot`: a picture of a run as SVG and as PNG.

Goal: each series of each panel is a line at the places that its values give.  Alerts, notes and the
expected divergence are there, and foreign words stay words.  A picture that cannot be drawn leaves
no file behind.
Method: the real command, a real bellwetherd with a recorded run; SVG is read as XML, PNG decoded
here down to its pixels.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, Server

SVG = "{http://www.w3.org/2000/svg}"
STORY = (
    "drift_ratio",
    "key_leak",
    "tied_fraction_bf16",
    "delta_bias_t",
    "wq_sigma",
    "logit_max",
    "loss",
)
NOTE = 'data <b>&"mix"</b>'


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder)) as started:
        recording = ROOT / "tests/testdata/runs/gpt-live-flash-s14.bwrun"
        started.run("run", "import", str(recording), "--name", "drifts")
        started.run("run", "annotate", "drifts", NOTE, "--step", "2000")
        yield started


def svg(server: Server, folder: Path, *words: str) -> ElementTree.Element:
    file = folder / "plot.svg"
    assert server.run("run", "plot", "drifts", "-o", str(file), *words) == ""
    assert os.listdir(folder) == ["plot.svg"]
    return ElementTree.parse(file).getroot()


def lines(root: ElementTree.Element) -> dict[str, list[list[tuple[float, float]]]]:
    """The points of each named line, in pieces where values are not finite."""
    found: dict[str, list[list[tuple[float, float]]]] = {}
    for line in root.iter(f"{SVG}polyline"):
        if name := line.get("data-series"):
            pairs = [pair.split(",") for pair in line.attrib["points"].split()]
            found.setdefault(name, []).append([(float(x), float(y)) for x, y in pairs])
    return found


def texts(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def test_the_story_of_the_worst_heads(server: Server, tmp_path: Path) -> None:
    root = svg(server, tmp_path)
    assert (root.get("width"), root.get("height")) == ("1200", "900")
    assert root.findtext(f"{SVG}title") == "drifts"
    ranked = server.json("head", "top", "drifts", "--limit", "36")["heads"]
    ranked.sort(key=lambda head: -head["stage"])  # Stable: by drift within a stage.
    worst = [f"L{head['layer']} H{head['head']}" for head in ranked[:4]]
    named = [f"{signal} {head}" for signal in STORY[:-1] for head in worst] + ["loss run"]
    drawn = lines(root)
    assert list(drawn) == [*named, "expected divergence"]
    # From cause to effect, from above.
    titles = [text.removesuffix(" (log)") for text in texts(root)]
    assert [text for text in titles if text in STORY] == list(STORY)
    heights = [min(y for piece in drawn[name] for _, y in piece) for name in named[::4]]
    assert heights == sorted(heights)


def test_lines_are_where_the_values_are(server: Server, tmp_path: Path) -> None:
    root = svg(
        server, tmp_path, "--signal", "wq_sigma", "--head", "1/4", "--from", "0", "--to", "5000"
    )
    (points,) = lines(root)["wq_sigma L1 H4"]
    values = server.series("drifts", "wq_sigma", 1, 4)
    values = {step: value for step, value in values.items() if step < 5000}
    assert len(points) == len(values)
    # Pixels are a linear function of steps and values, and two points tell which.
    for axis, numbers in ((0, list(values)), (1, list(values.values()))):
        low, high = numbers.index(min(numbers)), numbers.index(max(numbers))
        scale = (points[high][axis] - points[low][axis]) / (numbers[high] - numbers[low])
        assert scale > 0 if axis == 0 else scale < 0
        for point, number in zip(points, numbers):
            expected = points[low][axis] + scale * (number - numbers[low])
            assert abs(point[axis] - expected) < 0.02


def test_alerts_notes_and_what_is_expected(server: Server, tmp_path: Path) -> None:
    root = svg(server, tmp_path)
    said = texts(root)
    for alert in server.json("alert", "list", "--run", "drifts")["alerts"]:
        last = alert["last"]
        severity = last["severity"].removeprefix("SEVERITY_").lower()
        assert f"{severity} {last['rule']} L{last['layer']} H{last['head']}" in said
    assert f"ANNOTATION: {NOTE}" in said
    run = server.json("run", "get", "drifts")
    ((expected, _),) = [line[:2] for line in lines(root)["expected divergence"]]
    # The axis: step 0 to where the plot ends.
    (loss,) = lines(root)["loss run"]
    steps = int(run["step"]) / (loss[-1][0] - loss[0][0])
    assert abs((expected[0] - loss[-1][0]) * steps - run["eta"]["steps"]) < 20
    # Outside of what is drawn, nothing is told of it.
    early = texts(svg(server, tmp_path, "--to", "500"))
    assert not [text for text in early if "mix" in text or text == "expected divergence"]


def test_values_that_are_no_numbers_are_gaps(server: Server, tmp_path: Path) -> None:
    loss = np.linspace(4, 2, 100, dtype=np.float32)
    loss[40:50], loss[70] = np.nan, np.inf
    cfg = json.dumps({"n_layer": 1, "n_head": 1, "n_embd": 16, "steps": 100})
    np.savez(tmp_path / "trace.npz", steps=np.arange(100), loss=loss, cfg=cfg)
    made = [sys.executable, "-m", "bellwether", "npz2run"]
    made += [str(tmp_path / "trace.npz"), str(tmp_path / "gaps.bwrun")]
    path = {**os.environ, "PYTHONPATH": str(ROOT / "client_lib/python")}
    subprocess.run(made, check=True, capture_output=True, env=path, timeout=60)
    server.run("run", "import", str(tmp_path / "gaps.bwrun"), "--name", "gaps")
    file = tmp_path / "gaps.svg"
    server.run("run", "plot", "gaps", "-o", str(file), "--signal", "loss")
    root = ElementTree.parse(file).getroot()
    assert [len(piece) for piece in lines(root)["loss run"]] == [40, 20, 29]
    # One mark, at the first of them.
    (mark,) = [shape for shape in root.iter(f"{SVG}polygon") if shape.get("fill") == "#000000"]
    assert mark.attrib["points"].count(",") == 3


def pixels(file: Path) -> tuple[int, int, set[tuple[int, int, int]]]:
    """Width, height and colours of a PNG of 8-bit RGB."""
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed, header = 8, b"", b""
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert (
            zlib.crc32(kind + body) == struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0]
        )
        header = body if kind == b"IHDR" else header
        packed += body if kind == b"IDAT" else b""
        at += 12 + size
    width, height, depth, colour = struct.unpack(">IIBB", header[:10])
    assert (depth, colour) == (8, 2)
    raw = zlib.decompress(packed)
    stride = width * 3
    assert len(raw) == height * (stride + 1)
    colours: set[tuple[int, int, int]] = set()
    above = bytearray(stride)
    for row in range(height):
        begin = row * (stride + 1)
        kind, line = raw[begin], bytearray(raw[begin + 1 : begin + 1 + stride])
        for i in range(stride):
            left = line[i - 3] if i >= 3 else 0
            corner = above[i - 3] if i >= 3 else 0
            if kind == 1:
                line[i] = (line[i] + left) & 255
            elif kind == 2:
                line[i] = (line[i] + above[i]) & 255
            elif kind == 3:
                line[i] = (line[i] + (left + above[i]) // 2) & 255
            elif kind == 4:
                guess = left + above[i] - corner
                near = min((left, above[i], corner), key=lambda value: abs(guess - value))
                line[i] = (line[i] + near) & 255
        colours.update(zip(line[0::3], line[1::3], line[2::3]))
        above = line
    return width, height, colours


def test_png(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "plot.png"
    words = ("--size", "640x400", "--signal", "drift_ratio", "--signal", "loss")
    assert server.run("run", "plot", "drifts", "-o", str(file), *words) == ""
    width, height, colours = pixels(file)
    assert (width, height) == (640, 400)
    # Paper, and the lines of four heads and of the run where they cover a pixel wholly.
    for colour in (0xFFFFFF, 0x0072B2, 0xD55E00, 0x009E73, 0xCC79A7):
        assert (colour >> 16, colour >> 8 & 255, colour & 255) in colours, hex(colour)
    assert len(colours) > 200  # Smoothed letters and lines.
    assert os.listdir(tmp_path) == ["plot.png"]


def test_what_cannot_be_drawn_leaves_no_file(server: Server, tmp_path: Path) -> None:
    good = str(tmp_path / "plot.svg")
    for words, code in (
        (("drifts", "-o", str(tmp_path / "plot.jpg")), 2),
        (("drifts",), 2),
        (("drifts", "-o", good, "--signal", "no_such"), 2),
        (("drifts", "-o", good, "--head", "9/9"), 2),
        (("drifts", "-o", good, "--head", "1"), 2),
        (("drifts", "-o", good, "--head", "1/4", "--heads", "2"), 2),
        (("drifts", "-o", good, "--heads", "9"), 2),
        (("drifts", "-o", good, "--size", "399x300"), 2),
        (("drifts", "-o", good, "--size", "10001x300"), 2),
        (("nobody", "-o", good), 1),
        (("drifts", "-o", str(tmp_path / "no" / "plot.svg")), 1),
        (("drifts", "-o", str(tmp_path / "no" / "plot.png")), 1),
    ):
        assert server.run("run", "plot", *words, exit_code=code) == "", words
    assert os.listdir(tmp_path) == []
    server.run("run", "plot", "drifts", "-o", good, "--size", "400x300", "--heads", "8")


def test_the_command_starts_without_cairo() -> None:
    needed = subprocess.run(["ldd", BIN / "bellwether"], capture_output=True, text=True, check=True)
    assert not re.search("cairo|X11|freetype", needed.stdout)
