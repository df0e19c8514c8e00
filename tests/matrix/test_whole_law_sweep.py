"""Goal: none of the sound trainings that a CPU can do breaks a law.
Method: all set-ups of law_sweep.py, of two sizes each.
"""

from __future__ import annotations

import pytest

import law_sweep


@pytest.mark.parametrize("seed", (0, 1))
def test_no_sound_training_breaks_a_law(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    failed = law_sweep.main(["--seed", str(seed)])
    said = capsys.readouterr().out
    assert failed == 0, said
    print(said.splitlines()[-1])
