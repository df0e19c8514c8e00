"""What is known at the end of a job, for the lines on its terminal."""

from __future__ import annotations

from .._util.ending import Ending
from .health import DETACHED
from .steps import Steps


def ending(steps: Steps) -> Ending:
    reporter = steps.reporter
    link, why = reporter.link, steps.health.why_off
    unsent, sent_some = link.unsent()
    return Ending(
        step=steps.current_step() - 1,
        why_off="" if why == DETACHED else why,
        cost=reporter.cost.sentence(reporter.governor.period),
        data=link.data,
        record_path=link.record_path,
        unsent=unsent,
        sent_some=sent_some,
    )
