"""Goal: none of the sound trainings that a CPU can do breaks a law.
Method: all set-ups of law_sweep.py, those of attention in two sizes.
"""

from __future__ import annotations

import pytest

import law_sweep


@pytest.mark.parametrize("of, seed", (("attention", 0), ("attention", 1), ("modules", 0)))
def test_no_sound_training_breaks_a_law(
    of: str, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = law_sweep.main(["--of", of, "--seed", str(seed)])
    said = capsys.readouterr().out
    assert failed == 0, said
    print(said.splitlines()[-1])
