"""bellwether.client: a run of one's own, for programs that have numbers to send.

import bellwether.client
run = bellwether.client.RunClient(bellwether.client.RunOptions("demo", layers=1, heads=1))
"""

from ._native.c_api import MODULE, TENSOR
from ._native.run_client import (
    Block,
    ClientError,
    Counters,
    OwnValues,
    RunClient,
    RunOptions,
    Sampling,
    recording,
)

__all__ = [
    "MODULE",
    "TENSOR",
    "Block",
    "ClientError",
    "Counters",
    "OwnValues",
    "RunClient",
    "RunOptions",
    "Sampling",
    "recording",
]
