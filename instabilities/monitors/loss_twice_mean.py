"""LLM Foundry and Composer: loss above twice the mean of the last 100, 5 times in a row."""

from . import Alarm, Run
from ._scalar import alarms_of, twice_mean

NAME = "loss 2x mean"


def alarms(run: Run) -> list[Alarm]:
    return alarms_of(((step, loss) for step, loss, _ in run.series), twice_mean(100, 5))
