"""OLMo-core: loss above mean + 6 standard deviations of the last 128."""

from . import Alarm, Run
from ._scalar import Window, alarms_of

NAME = "loss 6 sigma"


def alarms(run: Run) -> list[Alarm]:
    window = Window(128)

    def judge(value: float) -> bool:
        fires = window.full() and value > window.mean() + 6 * window.deviation()
        window.add(value)
        return fires

    return alarms_of(((step, loss) for step, loss, _ in run.series), judge)
