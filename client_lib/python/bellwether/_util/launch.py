"""When this job's processes were started, as one number that all its ranks report.

Launchers do not number their starts alike on all nodes (torchrun's TORCHELASTIC_RESTART_COUNT is
each node's own count of failures), nor do all of them number them.  The time of the start does.
The first rank that asks writes its clock into the store through which torch.distributed's
processes found each other, and the others read it there.  No rank waits for another.

torchrun keeps that store over restarts.  A time from an earlier start is older than this process,
which a start's own is not: all ranks run before the first can ask.  That takes clocks that agree
to the seconds in which a process imports PyTorch.
"""

from __future__ import annotations

import datetime
import functools
import os
import threading
import time

import torch

from . import log
from .integers import LAUNCH_MS_MAX, whole
from .ranks import rank_and_world

_KEY = "bellwether/launch_unix_ms"
# A store that nobody answers for any more must not hold training up.
_SECONDS_MAX = 5.0

_imported_ms = int(time.time() * 1000)


def launch_unix_ms() -> int:
    """0 where the ranks cannot agree on it: no process group yet, or one without a store."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        alone = rank_and_world()[1] == 1
        return min(max(0, _started_unix_ms(os.getpid())), LAUNCH_MS_MAX) if alone else 0
    agreed: list[int] = []
    try:
        asking = threading.Thread(
            target=_agree, args=(agreed,), name="bellwether-launch", daemon=True
        )
        asking.start()
        asking.join(_SECONDS_MAX)
    except RuntimeError:  # No more threads.
        pass
    if not agreed:
        log.info("the ranks cannot agree on when they were launched: their attempt's number counts")
        return 0
    return agreed[0]


def _agree(agreed: list[int]) -> None:
    try:
        # There is no public name for it.
        store = torch.distributed.distributed_c10d._get_default_store()
        if hasattr(store, "clone"):  # A connection of its own: what waits on the job's holds it.
            store = store.clone()
            store.set_timeout(datetime.timedelta(seconds=_SECONDS_MAX))
        mine = str(int(time.time() * 1000))
        found = store.compare_set(_KEY, "", mine)
        if int(found) < _started_unix_ms(os.getpid()):
            found = store.compare_set(_KEY, found.decode(), mine)
        agreed.append(whole("launch_unix_ms", int(found), 0, LAUNCH_MS_MAX))
    except Exception:  # Another release's, or a store that cannot do it.
        return


@functools.lru_cache(maxsize=4)
def _started_unix_ms(pid: int) -> int:
    """When the process was started, by the wall clock as it was set at the first call: a run that
    is watched anew from the same process is not launched anew."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return int((time.time() - age) * 1000)
    except (OSError, ValueError, IndexError, AttributeError):  # Not Linux.
        return _imported_ms
