"""Goal: sound trainings break no law on a GPU; what decides `ON_GPUS` (_step/tapped_modules.py).
Method: the set-ups of law_sweep.py there, as many as there is time for.
"""

from __future__ import annotations

import pytest

import law_sweep
from gpu import LACKS, SKIPPED

pytestmark = pytest.mark.skipif(SKIPPED, reason=LACKS)


@pytest.mark.parametrize("of", ("attention", "modules"))
def test_no_sound_training_breaks_a_law(of: str, capsys: pytest.CaptureFixture[str]) -> None:
    failed = law_sweep.main(["--device", "cuda", "--of", of, "--seconds", "400"])
    said = capsys.readouterr().out
    assert failed == 0, said
