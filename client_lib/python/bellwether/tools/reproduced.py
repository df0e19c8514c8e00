"""A call of attention, taken from a training run: what its kernel returned, against fp64.

Needs torch alone, and the file CAPTURE, whose place is told from this script on.  It prints what
the kernel returned in the run, and what each kernel of PyTorch returns here for the same q, k, v,
mask and dO.  It exits with 1 where one of those here is not finite, or has a head with a cosine
below 0.999.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any, Union

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

CAPTURE = "call.pt"
COSINE_MIN = 0.999
BACKENDS = ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")


Data = dict[str, Tensor]
About = dict[str, Any]
Found = dict[str, tuple[int, float, float]]


def loaded(path: Path) -> tuple[Data, About]:
    """(the tensors, [heads, tokens, dim] each; what is said of the call)"""
    data = torch.load(path, map_location="cpu", weights_only=True)
    about = json.loads(data.pop("about"))
    if about["format"] != 1:
        raise SystemExit(f"{path} has format {about['format']}, this script reads 1")
    return data, about


def shown(data: Data, about: About) -> Tensor:
    """Which keys a row may see but for a mask of numbers: bool, [1 or heads, rows, keys]."""
    rows, keys = data["q"].shape[1], data["k"].shape[1]
    key = torch.arange(keys)
    if "ranges" in data:
        begin, end, diagonal = data["ranges"].long().expand(rows, -1).unbind(-1)
    else:
        diagonal = torch.arange(rows) + (0 if about["top_left"] else keys - rows)
        begin, end = torch.zeros(rows).long(), torch.full((rows,), keys)
    if about["causal"]:
        end = torch.minimum(end, diagonal + 1)
    if about["window_right"] is not None:
        end = torch.minimum(end, diagonal + about["window_right"] + 1)
    if about["window_left"] is not None:
        begin = torch.maximum(begin, diagonal - about["window_left"])
    seen = ((key >= begin[:, None]) & (key < end[:, None]))[None]
    mask = data.get("mask")
    return seen if mask is None or mask.dtype != torch.bool else seen & mask


def exact(data: Data, about: About) -> Data:
    """o, dq, dk, dv in fp64."""
    heads, kv_heads = data["q"].shape[0], data["k"].shape[0]
    group, seen, mask = heads // kv_heads, shown(data, about), data.get("mask")
    found = {name: torch.zeros(t.shape, dtype=torch.float64) for name, t in data.items()
             if name in ("o", "dq", "dk", "dv")}  # fmt: skip
    for head in range(heads):
        of = [data[name][h].double().requires_grad_()
              for name, h in (("q", head), ("k", head // group), ("v", head // group))]  # fmt: skip
        q, k, v = of
        s = about["scale"] * (q @ k.T)
        if about["softcap"]:
            s = about["softcap"] * torch.tanh(s / about["softcap"])
        if mask is not None and mask.dtype != torch.bool:
            s = s + mask[head if mask.shape[0] > 1 else 0].double()
        allowed = seen[head if seen.shape[0] > 1 else 0]
        s = s.masked_fill(~allowed, -math.inf)
        if "sinks" in data:
            s = torch.cat((s, data["sinks"][head].double().expand(len(s), 1)), -1)
        nothing = (s == -math.inf).all(-1, keepdim=True)
        p = s.masked_fill(nothing, 0.0).softmax(-1)
        # A row that sees no key is 0, or the mean of all: as the kernel had it.
        was_mean = torch.isfinite(data["o"][head]) & (data["o"][head] != 0)
        p = p.masked_fill(nothing & ~was_mean.any(-1, keepdim=True), 0.0)
        o = p[:, : len(k)] @ v
        of_head = torch.autograd.grad(o, of, data["d_o"][head].double())
        found["o"][head] = o.detach()
        found["dq"][head] = of_head[0]
        found["dk"][head // group] += of_head[1]
        found["dv"][head // group] += of_head[2]
    return found


def attend(q: Tensor, k: Tensor, v: Tensor, data: Data, about: About) -> Tensor:
    """The call as PyTorch makes it.  Put another kernel here to try that."""
    rows, keys, mask = q.shape[2], k.shape[2], data.get("mask")
    plain = "ranges" not in data and about["window_left"] is None and about["window_right"] is None
    given: dict[str, Any] = {"scale": about["scale"], "enable_gqa": q.shape[1] != k.shape[1]}
    if plain and not about["causal"]:
        given["attn_mask"] = None if mask is None else mask.to(q.device)[None]
    elif plain and mask is None and (rows == keys or about["top_left"]):
        given["is_causal"] = True
    else:
        allowed = shown(data, about)
        if mask is not None and mask.dtype != torch.bool:
            allowed = mask.masked_fill(~allowed, torch.finfo(mask.dtype).min)
        given["attn_mask"] = allowed.to(q.device)[None]
    o: Tensor = F.scaled_dot_product_attention(q, k, v, **given)
    return o


def returned(backend: str, data: Data, about: About, device: str) -> Union[Data, str]:
    """o, dq, dk, dv of a kernel here; or why it does not take the call."""
    if about["softcap"] or "sinks" in data:
        return "has neither softcap nor sinks"
    q, k, v = (data[name][None].to(device).requires_grad_() for name in ("q", "k", "v"))
    with warnings.catch_warnings(), sdpa_kernel(getattr(SDPBackend, backend)):
        warnings.simplefilter("ignore")
        try:
            o = attend(q, k, v, data, about)
            gradients = torch.autograd.grad(o, (q, k, v), data["d_o"][None].to(device, o.dtype))
        except RuntimeError as e:
            return str(e).strip().split("\n")[0][:100] or "is not offered"
    return dict(zip(("o", "dq", "dk", "dv"), (t[0].detach().cpu() for t in (o, *gradients))))


def against(got: Data, want: Data) -> Found:
    """{tensor: (elements that are not finite, least cosine of a head, largest difference)}; the
    last two of the finite ones."""
    found = {}
    for name in ("o", "dq", "dk", "dv"):
        a, b = got[name].double().flatten(1), want[name].flatten(1)
        finite = torch.isfinite(a)
        a, b = (t.masked_fill(~finite, 0.0) for t in (a, b))
        norms = a.norm(dim=1) * b.norm(dim=1)
        alike = torch.where(
            norms > 0, (a * b).sum(1) / norms, (a.norm(dim=1) == b.norm(dim=1)) * 1.0
        )
        largest = float((a - b).abs().max())
        found[name] = int((~finite).sum()), float(alike.min()), largest
    return found


def line(name: str, found: Found) -> str:
    cells = (
        f"{tensor} {cosine:.6f} {largest:.2e}" + (f" {bad} NAN/INF" if bad else "")
        for tensor, (bad, cosine, largest) in found.items()
    )
    return f"{name:24}" + "   ".join(cells)


def main() -> int:
    data, about = loaded(Path(__file__).resolve().parent / CAPTURE)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"q {list(data['q'].shape)}, k {list(data['k'].shape)}, {data['q'].dtype}")
    print(f"in the run: {about.get('kernel')}, {about['versions']}")
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    print(f"here: torch {torch.__version__}, cuDNN {cudnn}, {device}")
    want = exact(data, about)
    print("each tensor: least cosine of a head with fp64, largest difference")
    print(line("in the run", against(data, want)))
    wrong = False
    for backend in BACKENDS:
        got = returned(backend, data, about, device)
        if isinstance(got, str):
            print(f"{backend:24}{got}")
            continue
        found = against(got, want)
        wrong |= any(bad or cosine < COSINE_MIN for bad, cosine, _ in found.values())
        print(line(backend, found))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
