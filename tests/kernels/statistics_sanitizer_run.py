"""Small launches of every kind of statistics kernel, for compute-sanitizer.

    compute-sanitizer --tool racecheck python3 statistics_sanitizer_run.py LIBRARY [probe|spectral|laws ...]
"""

from __future__ import annotations

import ctypes
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "kernels" / "bench"))
import attention_calls  # noqa: E402
import statistics_calls as calls  # noqa: E402
from statistics_calls import Probed, ProbeOptions, Spectrum  # noqa: E402

OPTIONS = [ProbeOptions(), ProbeOptions(causal=True, window=50, rows=17),
           ProbeOptions(softcap=3.0, causal=True)]
DRIFT = ProbeOptions(causal=True, rows=17, drift_only=True)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def masked(n: int, m: int, batch: int) -> list[ProbeOptions]:
    """A tensor by token and one by sampled row, documents, keys that no row sees."""
    row = torch.arange(n, device="cuda")
    ranges = torch.stack([row // 30 * 30, row // 30 * 30 + 30, row], -1).int()[None]
    mask = torch.rand(batch, 4, n, m, device="cuda") < 0.5
    seen = torch.rand(batch, 4, m, device="cuda") < 0.9
    bias = torch.where(mask[:, :1, :17], 0., -torch.inf).to(torch.bfloat16)
    sinks = torch.zeros(4, device="cuda")
    return [ProbeOptions(mask=mask, visible=seen, sinks=sinks, causal=True),
            ProbeOptions(mask=bias, mask_by_sample=True, rows=17, visible=seen[:, :1], softcap=3.0),
            ProbeOptions(ranges=ranges, visible=seen[:1, :1], window_right=5)]


def probes(lib: ctypes.CDLL) -> None:
    for dtype in DTYPES:
        # Rows of 16-byte vectors and others, one stage of tiles and two, clusters of 1 to 8.
        for d, n, m, batch in ((64, 100, 777, 1), (33, 70, 70, 2), (256, 65, 130, 2),
                               (128, 40, 90, 200), (384, 33, 100, 1)):
            q, o, g = (torch.randn(batch, 4, n, d, device="cuda").to(dtype) for _ in range(3))
            k, v = (torch.randn(batch, 2, m, d, device="cuda").to(dtype) for _ in range(2))
            for options in (*OPTIONS, *masked(n, m, batch)):
                for outputs in (None, (v, o, g)):
                    calls.probe(lib, q, k, outputs, options, Probed.fresh(4, 2, "cuda"))
            calls.probe(lib, q, k, None, DRIFT, Probed.fresh(4, 2, "cuda"))
            if d <= 256:
                calls.key_leak(lib, k, torch.zeros(2, 2, device="cuda"))


def laws(lib: ctypes.CDLL) -> None:
    """Laws and shadow check: vectors and single elements, wide heads, masks, rows that see nothing."""
    for dtype in DTYPES:
        for d, e, n, m, batch in ((64, 64, 100, 777, 1), (33, 5, 70, 70, 2), (256, 256, 65, 130, 2),
                                  (128, 64, 300, 90, 3), (576, 512, 33, 100, 1)):
            if dtype == torch.float32 and d > 256:
                continue
            q, dq = (torch.randn(batch, 4, n, d, device="cuda").to(dtype) for _ in range(2))
            o, g = (torch.randn(batch, 4, n, e, device="cuda").to(dtype) for _ in range(2))
            k, dk = (torch.randn(batch, 2, m, d, device="cuda").to(dtype) for _ in range(2))
            v, dv = (torch.randn(batch, 2, m, e, device="cuda").to(dtype) for _ in range(2))
            o[:, 0, :5], o[:, 1, 3:9] = 0, torch.nan
            for options in (*OPTIONS, *masked(n, m, batch)):
                into = (torch.zeros(len(calls.LAW_HEAD_STATS), 4, device="cuda"),
                        torch.zeros(len(calls.LAW_KV_STATS), 2, device="cuda"))
                calls.laws(lib, q, k, (v, o, g), (dq, dk, dv), options, into)
                keys = 0 if options.mask_by_sample else 9
                calls.shadow(lib, q, k, (v, o, g), (dq, dk, dv), options, into, keys)


def spectral_norms(lib: ctypes.CDLL) -> None:
    for dtype in DTYPES:
        for rows, columns in ((64, 300), (128, 129), (200, 70), (3, 5)):
            weight = torch.randn(2, rows, columns, device="cuda").to(dtype)
            for w in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
                calls.spectral_norms(lib, w, Spectrum.fresh(2, rows, "cuda", gram=True))


def main() -> int:
    lib = attention_calls.load(sys.argv[1])
    parts = {"probe": probes, "spectral": spectral_norms, "laws": laws}
    for name in sys.argv[2:] or parts:
        parts[name](lib)
    torch.cuda.synchronize()
    print("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
