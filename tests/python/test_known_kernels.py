"""Goal: a call that a kernel is known to get wrong is told once, with source and advice.  Other
versions, shapes and masks are not, and no error of the table ends the watching.
Method: the shipped table with versions in place of those that are here; planted entries in a
training, in doctor's script and beside a planted kernel.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch.nn.functional as F
from test_doctor import SOUND
from test_doctor import doctor as run_doctor
from test_not_measured import train

from bellwether._hook.calls import known_kernels, sdpa_call
from bellwether._hook.calls.call import AttentionCall
from bellwether._hook.calls.known_kernels import Entry, Facts, entries, parsed, version_key
from bellwether._hook.layer import seen_calls
from bellwether.tools import doctor as doctor_command
from bellwether.tools.kernel_backends import named
from bellwether.tools.kernel_cases import Case, Shape
from bellwether.tools.kernel_check import as_json, check, table

CPU = torch.device("cpu")
H100 = Facts(
    "cudnn", "sm_90", "bfloat16", "bool", False, False, False, 2, 16, 16, 704, 704, 128, 128
)
PLANTED = Entry(
    "planted", ("flash", "planted_kernels"), {"torch": [["1.0", "99"]]}, ("cpu",), (), {}, ("dq",),
    "it is planted", "another kernel", False, "https://example.org/1",
)  # fmt: skip


def met(facts: Facts, **versions: str) -> set[str]:
    """Ids of the entries that a call fits, where these libraries are installed."""
    version: Callable[[str], Optional[str]] = versions.get
    left = (e for e in entries() if e.possible(facts.architecture, version) is not None)
    return {entry.id for entry in left if entry.fits(facts)}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(known_kernels, "entries", lambda: (PLANTED,))
    monkeypatch.setattr(seen_calls, "_told", set())
    known_kernels.possible.cache_clear()
    yield
    known_kernels.possible.cache_clear()


def test_the_table_has_a_source_and_versions_for_each() -> None:
    assert len(entries()) >= 10
    assert {e.id for e in entries() if e.measured} >= {
        "cudnn-rows-without-keys",
        "cpu-flash-rows-at-the-minimum",
    }
    for entry in entries():
        assert entry.measured or "https://" in entry.source, entry.id
        assert entry.kernels and entry.libraries and entry.what and entry.instead, entry.id


@pytest.mark.parametrize(
    ("change", "words"),
    [({"when": {"length": [1]}}, "first: when: \\['length'\\] are no facts"),
     ({"libraries": {"torch": [["new", "2"]]}}, "first: libraries: a version"),
     ({"color": 1}, "first: fields \\['color'\\]")],
)  # fmt: skip
def test_a_bad_table_names_its_entry(change: dict[str, Any], words: str) -> None:
    row = json.loads(known_kernels.TABLE.read_text())["entries"][0] | {"id": "first"} | change
    with pytest.raises(ValueError, match=words):
        parsed(json.dumps({"entries": [row]}))


def test_versions_are_ordered() -> None:
    rising = ["2.5.0.dev20240427+cu121", "2.5.0a1", "2.5.0b11", "2.5.0rc1", "2.5", "2.5.1", "2.11"]
    keys = [version_key(version) for version in rising]
    assert keys == sorted(keys) and len(set(keys)) == len(keys)
    assert version_key("2.5") == version_key("2.5.0+cu130") and version_key("unknown") == ()


def test_a_mask_meets_both_entries_of_cudnn() -> None:
    both = {"cudnn-rows-without-keys", "cudnn-nan-in-half-tile"}
    assert met(H100, torch="2.11.0+cu130", cudnn="9.19.0") == both
    assert met(H100, torch="2.13.0", cudnn="9.20.0") == {"cudnn-nan-in-half-tile"}


@pytest.mark.parametrize(
    "change",
    [{"mask": "causal"}, {"k_len": 768, "mask": "added"}, {"architecture": "sm_100"},
     {"kernel": "efficient"}, {"dtype": "float32"}, {"architecture": "cpu"}],
)  # fmt: skip
def test_another_call_meets_none(change: dict[str, Any]) -> None:
    assert met(H100._replace(**change), torch="2.11.0", cudnn="9.19.0") == set()


def test_a_mended_version_meets_none() -> None:
    assert met(H100, torch="2.14.0", cudnn="9.26.0") == set()


def test_other_packages_are_asked_for_their_versions() -> None:
    fa4 = H100._replace(
        kernel="flash_attn.cute.interface", architecture="sm_100", mask="causal", head_dim=256
    )
    given = {"torch": "2.11.0", "cudnn": "9.19.0", "flash-attn-4": "4.0.0b11"}
    assert met(fa4, **given) == {"fa4-heads-of-256-in-batches"}
    assert met(fa4._replace(batch=1), **given) == set()
    assert met(fa4, **given | {"flash-attn-4": "4.0.0b36"}) == set()


def _call(q: torch.Tensor, **given: Any) -> AttentionCall:
    call = sdpa_call.read(F.scaled_dot_product_attention, (q, q, q), given)
    assert isinstance(call, AttentionCall)
    return call


def test_the_kernel_is_asked_for_with_the_types_of_autocast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def kernel_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: dict[str, Any]) -> str:
        asked.append((q.dtype, given["attn_mask"].dtype))
        return "cudnn"

    monkeypatch.setattr(known_kernels, "kernel_of", kernel_of)
    with torch.autocast("cpu", torch.bfloat16):
        call = _call(torch.ones(1, 2, 4, 8), attn_mask=torch.zeros(4, 4))
    assert known_kernels.kernel(call) == "cudnn"
    assert asked == [(torch.bfloat16, torch.bfloat16)]


@pytest.mark.usefixtures("planted")
def test_a_shape_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Facts] = []
    monkeypatch.setattr(known_kernels, "fitting", lambda facts: looked.append(facts) or [])
    layer = known_kernels.Met()
    for length in (4, 4, 5, *range(5, 200)):
        q = torch.ones(1, 2, length, 8)
        layer.meet(_call(q, is_causal=True), q, q, q)
    assert [f.q_len for f in looked[:2]] == [4, 5] and len(looked) == known_kernels.SHAPES_MAX
    assert looked[0].mask == "causal" and looked[0].scores == 16


@pytest.mark.usefixtures("planted")
def test_a_training_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("bellwether").propagate = True
    with caplog.at_level(logging.WARNING, "bellwether"):
        train(tmp_path / "a.bwrun")
        train(tmp_path / "b.bwrun")
    said = [r.message for r in caplog.records if "it is planted" in r.message]
    assert len(said) == 1 and "reported, not measured by us: https://example.org/1" in said[0]
    assert "Instead: another kernel" in said[0] and "doctor --kernels" in said[0]


def test_a_table_that_fails_ends_no_watching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(on: str) -> Any:
        raise ValueError("no table")

    monkeypatch.setattr(known_kernels, "possible", fails)
    train(tmp_path / "a.bwrun")  # It asserts that there were no errors.


def test_doctor_tells_what_the_script_meets(tmp_path: Path) -> None:
    script = "from bellwether._hook.calls import known_kernels as k\n" + (
        f"k.entries = lambda: (k.Entry(**{dataclasses.asdict(PLANTED)!r}),)\n{SOUND}"
    )
    done = run_doctor(tmp_path, script)
    assert done.returncode == 0, done.stdout
    assert "known, a hint (--kernels tells): flash/planted_kernels may return" in done.stdout


@pytest.mark.usefixtures("planted")
def test_doctor_alone_tells_what_is_known_here() -> None:
    (told,) = doctor_command.known_findings()
    assert told.ok is None and told.text.startswith(f"known of torch {torch.__version__} on cpu")


@pytest.mark.usefixtures("planted")
def test_a_broken_kernel_is_told_with_what_is_known() -> None:
    tried = [named("planted_kernels:exchanged")]
    results = check([Case("normal", Shape(tokens=40))], tried, CPU, 60.0)
    assert "    known: planted, https://example.org/1" in table(results).splitlines()
    assert as_json(results, CPU)["results"][0]["known"] == ["planted"]
