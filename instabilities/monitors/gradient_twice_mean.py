"""A dashboard's threshold: gradient norm above twice the mean of the last 100."""

from . import Alarm, Run
from ._scalar import alarms_of, twice_mean

NAME = "gradient 2x mean"


def alarms(run: Run) -> list[Alarm]:
    return alarms_of(((step, norm) for step, _, norm in run.series), twice_mean(100, 1))
