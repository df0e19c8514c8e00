"""Megatron: loss above 10 times the largest of the first 100."""

from . import Alarm, Run
from ._scalar import alarms_of

NAME = "loss 10x max"


def alarms(run: Run) -> list[Alarm]:
    first: list[float] = []

    def judge(value: float) -> bool:
        if len(first) < 100:
            first.append(value)
            return False
        return value > 10 * max(first)

    return alarms_of(((step, loss) for step, loss, _ in run.series), judge)
