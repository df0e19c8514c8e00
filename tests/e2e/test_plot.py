"""`python -m bellwether plot`: a picture of runs as SVG, PNG and PDF.

Goal: each series of each panel is a line at the places that its values give, of the heads of the
alerts first. Alerts, limits, notes and the expected divergence are there, and foreign words stay
words. A picture that cannot be drawn leaves no file.
Method: the command against a real bellwetherd with recorded runs; SVG is read as XML.
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
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import ROOT, Server

from bellwether.tools import plot

SVG = "{http://www.w3.org/2000/svg}"
NOTE = 'data <b>&"mix" $x_1$'


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder)) as started:
        runs = ROOT / "tests/testdata/runs"
        started.run("run", "import", str(runs / "gpt-live-flash-s14.bwrun"), "--name", "drifts")
        started.run("run", "import", str(runs / "gpt-flash-s4.bwrun"), "--name", "_twin")
        started.run("run", "annotate", "drifts", NOTE, "--step", "2000")
        yield started


def draw(server: Server, *words: str) -> int:
    return plot.main([*words, "--page", f"http://{server.http}"])


def svg(server: Server, folder: Path, *words: str) -> ElementTree.Element:
    file = folder / "plot.svg"
    assert draw(server, *words, "-o", str(file)) == plot.OK
    assert os.listdir(folder) == ["plot.svg"]
    return ElementTree.parse(file).getroot()


def lines(root: ElementTree.Element) -> dict[str, list[list[tuple[float, float]]]]:
    """The points of each named line, in pieces where values are not finite."""
    found: dict[str, list[list[tuple[float, float]]]] = {}
    for group in root.iter(f"{SVG}g"):
        path = group.find(f"{SVG}path")
        if " " in group.get("id", "") and path is not None:
            pieces = path.attrib["d"].split("M ")[1:]
            numbers = [re.findall(r"-?[\d.]+ -?[\d.]+", piece) for piece in pieces]
            found[group.attrib["id"]] = [[(float(x), float(y)) for x, y in map(str.split, piece)] for piece in numbers]
    return found


def texts(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def alerting_heads(server: Server, run: str) -> list[str]:
    """Of what fires, the worst first."""
    order = ["SEVERITY_CRITICAL", "SEVERITY_WARNING", "SEVERITY_INFO"]
    lasts = [alert["last"] for alert in server.json("alert", "list", "--run", run)["alerts"]]
    lasts.sort(key=lambda last: (last["state"] != "ALERT_STATE_FIRING", order.index(last["severity"])))
    return list(dict.fromkeys(f"L{at['layer']} H{at['head']}" for last in lasts for at in last["heads"]))


def test_default_plot_shows_the_alerts_heads_first(server: Server, tmp_path: Path) -> None:
    root = svg(server, tmp_path, "drifts")
    assert root.findtext(f"{SVG}title") == "drifts"
    ranked = server.json("head", "top", "drifts", "--limit", "36")["heads"]
    ranked.sort(key=lambda head: -head["stage"])  # Stable: by drift within a stage.
    worst = [f"L{head['layer']} H{head['head']}" for head in ranked]
    ill = alerting_heads(server, "drifts")
    assert ill and ill != worst[: len(ill)]
    heads = list(dict.fromkeys([*ill, *worst]))[:4]
    named = [f"{signal} {head}" for signal in plot.STORY[:-1] for head in heads] + ["loss run"]
    drawn = {name: at for name, at in lines(root).items() if " limit " not in name}
    assert [name for name in drawn if name != plot.EXPECTED] == named
    # From cause to effect, from above, by the page's names.
    titles = [text.removesuffix(", log") for text in texts(root)]
    wanted = [f"{label} ({unit})" if unit else label for label, unit in map(plot.LABELS.get, plot.STORY)]
    assert [text for text in titles if text in wanted] == wanted
    heights = [min(y for piece in drawn[name] for _, y in piece) for name in named[::4]]
    assert heights == sorted(heights)
    assert (tmp_path / "plot.svg").stat().st_size < 500_000


def test_panels_have_the_limits_of_the_alerts(server: Server, tmp_path: Path) -> None:
    root = svg(server, tmp_path, "drifts")
    limits = {name for name in lines(root) if " limit " in name}
    evidence = [
        each
        for alert in server.json("alert", "list", "--run", "drifts")["alerts"]
        for each in alert["last"]["evidence"]
    ]
    possible = {f"{each['signal']} limit {each['threshold']:.4g}" for each in evidence}
    assert limits and limits <= possible
    assert {name.partition(" ")[0] for name in limits} <= set(plot.STORY)
    said = texts(root)
    assert all(name.partition(" ")[2] in said for name in limits)


def test_names_are_those_of_the_page() -> None:
    page = (ROOT / "dashboards/console/src/signals.ts").read_text()
    shown = dict(re.findall(r"name: '(\w+)', label: '([^']+)'", page))
    assert {name: label for name, (label, _) in plot.LABELS.items()} == {name: shown[name] for name in plot.LABELS}


def test_lines_are_where_the_values_are(server: Server, tmp_path: Path) -> None:
    root = svg(server, tmp_path, "drifts", "--signal", "wq_sigma", "--head", "1/4", "--from", "0", "--to", "5000", "--points", "1000")
    drawn = lines(root)
    (points,) = drawn["wq_sigma L1 H4"]
    values = server.series("drifts", "wq_sigma", 1, 4)
    values = {step: value for step, value in values.items() if step < 5000}
    assert len(points) == len(values)
    # Places are a linear function of steps and values, and two points tell which.
    for axis, numbers in ((0, list(values)), (1, list(values.values()))):
        low, high = numbers.index(min(numbers)), numbers.index(max(numbers))
        scale = (points[high][axis] - points[low][axis]) / (numbers[high] - numbers[low])
        assert scale > 0 if axis == 0 else scale < 0
        for point, number in zip(points, numbers, strict=True):
            expected = points[low][axis] + scale * (number - numbers[low])
            assert abs(point[axis] - expected) < 0.02


def test_plot_shows_alerts_notes_and_expected_divergence(server: Server, tmp_path: Path) -> None:
    root = svg(server, tmp_path, "drifts", "--points", "1000")
    said = texts(root)
    for alert in server.json("alert", "list", "--run", "drifts")["alerts"]:
        last = alert["last"]
        severity = last["severity"].removeprefix("SEVERITY_").lower()
        assert f"{severity} {last['rule']} L{last['layer']} H{last['head']}" in said
    assert f"ANNOTATION {NOTE}" in said
    run = server.json("run", "get", "drifts")
    drawn = lines(root)
    (loss,), (expected,) = drawn["loss run"], drawn[plot.EXPECTED]
    steps = int(run["step"]) / (loss[-1][0] - loss[0][0])
    assert abs((expected[0][0] - loss[-1][0]) * steps - run["eta"]["steps"]) < 20
    # Outside of what is drawn, nothing is told of it.
    early = texts(svg(server, tmp_path, "drifts", "--to", "500"))
    assert not [text for text in early if "mix" in text or text == plot.EXPECTED]


def test_several_runs_stand_in_one_panel(server: Server, tmp_path: Path) -> None:
    words = ("drifts", "_twin", "--signal", "drift_ratio", "--signal", "loss", "--head", "1/4", "--head", "2/1")
    root = svg(server, tmp_path, *words)
    heads = [f"drift_ratio {head} of {run}" for run in ("drifts", "_twin") for head in ("L1 H4", "L2 H1")]
    assert [name for name in lines(root) if " limit " not in name] == [*heads, plot.EXPECTED, "loss run of drifts", "loss run of _twin"]
    assert {"L1 H4 of drifts", "run of _twin"} <= set(texts(root))


def test_values_that_are_no_numbers_are_gaps(server: Server, tmp_path: Path) -> None:
    loss = np.linspace(4, 2, 100, dtype=np.float32)
    loss[40:50], loss[70] = np.nan, np.inf
    cfg = json.dumps({"n_layer": 1, "n_head": 1, "n_embd": 16, "steps": 100})
    trace, recording = tmp_path / "trace.npz", tmp_path / "gaps.bwrun"
    np.savez(trace, steps=np.arange(100), loss=loss, cfg=cfg)
    made = [sys.executable, "-m", "bellwether", "npz2run", str(trace), str(recording)]
    path = {**os.environ, "PYTHONPATH": str(ROOT / "client_lib/python")}
    subprocess.run(made, check=True, capture_output=True, env=path, timeout=60)
    server.run("run", "import", str(recording), "--name", "gaps")
    (tmp_path / "plot").mkdir()
    root = svg(server, tmp_path / "plot", "gaps", "--signal", "loss")
    assert [len(piece) for piece in lines(root)["loss run"]] == [40, 20, 29]
    # One mark, at the first of them.
    (mark,) = [group for group in root.iter(f"{SVG}g") if group.get("id") == "loss run gap"]
    assert len(list(mark.iter(f"{SVG}use"))) == 1


def test_the_files_name_tells_the_format(server: Server, tmp_path: Path) -> None:
    for name in ("a.png", "a.pdf", "a.svg", "b.png", "b.pdf", "b.svg"):
        assert draw(server, "drifts", "-o", str(tmp_path / name), "--signal", "loss") == plot.OK
    for kind in ("png", "pdf", "svg"):  # The same values give the same file.
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes(), kind
    head = (tmp_path / "a.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", head[16:]) == (1200, 900)
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")


def test_refused_plots_leave_no_file(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = str(tmp_path / "plot.svg")
    for words, why in (
        (("drifts", "-o", str(tmp_path / "plot.jpg")), "plot.jpg' must end in .svg, .png, .pdf"),
        (("drifts",), "required: -o/--output"),
        (("drifts", "-o", good, "--head", "1"), "'1' must be LAYER/HEAD, such as 3/5"),
        (("drifts", "-o", good, "--head", "1/4", "--heads", "2"), "not allowed with"),
        (("drifts", "-o", good, "--heads", "9"), "--heads: 9 is outside of 1 to 8"),
        (("drifts", "-o", good, "--points", "9"), "--points: 9 is outside of 10 to 1000"),
        (("drifts", "-o", good, "--from", "5", "--to", "5"), "--from: 5 must be at least 0 and below --to, 5"),
        (("drifts", "drifts", "-o", good), "RUN: 2 are given: must be 1 to 8, each once"),
    ):
        with pytest.raises(SystemExit) as ended:
            draw(server, *words)
        assert ended.value.code == plot.USAGE and why in capsys.readouterr().err, words
    for words, why in (
        (("drifts", "-o", good, "--signal", "no_such"), 'signal "no_such": must be a name'),
        (("drifts", "-o", good, "--head", "9/9"), "series.layer 9: must be 0..5"),
        (("drifts", "-o", good, "--from", "900000"), "no value of drift_ratio"),
        (("nobody", "-o", good), "no run has this name"),
        (("drifts", "-o", str(tmp_path / "no" / "plot.svg")), "No such file"),
    ):
        assert draw(server, *words) == plot.FAILED
        assert why in capsys.readouterr().err, words
    assert os.listdir(tmp_path) == []
    os.mkfifo(good)
    assert draw(server, "drifts", "-o", good) == plot.FAILED
    assert "it is a FIFO, must be a regular file" in capsys.readouterr().err
    assert plot.main(["drifts", "-o", good, "--page", "http://127.0.0.1:9"]) == plot.UNREACHABLE


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot.main(["any", "-o", str(tmp_path / "plot.svg")]) == plot.FAILED
    assert "pip install 'bellwether[plot]'" in capsys.readouterr().err
