"""The largest singular values of whole matrices, by a few steps of Golub-Kahan's Lanczos from where
the last sample ended.

    W V = U B, B upper bidiagonal, V and U with orthonormal columns, steps + 1 vectors v
    sigma = largest singular value of B, with the singular vectors p and q
    residual = |W^T (U p) - sigma V q| = beta p_last;  the next start is V q

All matrices of a device go together: a step is two products for each, and a few operations for all.
B comes to the host, where sigma is computed.  Source: Golub and Kahan 1965; what the norm of W_O
and of lm_head says, docs/concepts/granularities.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STEPS = 4
FIRST_STEPS = 12  # Of a matrix that has no start yet.
_AT_ONCE = 1 << 25  # Elements of a matrix in 16 bits that are in float32 at a time.
_SQUARINGS = 12
_TINY = 1e-30
_SPENT = 1e-5


def start(width: int, device: torch.device) -> Tensor:
    """A unit vector, always the same, that no generator of random numbers knows of."""
    at = torch.arange(1, width + 1, dtype=torch.float64, device=device)
    v = torch.cos(at * 1.6180339887498949 * at.sqrt()).float()
    return v * v.square().sum().rsqrt()


def _pieces(w: Tensor) -> Sequence[Tensor]:
    """In float32, some rows at a time."""
    if w.dtype == torch.float32:
        return [w]
    return torch.split(w, max(1, _AT_ONCE // max(1, w.shape[1])))


def _times(w: Tensor, v: Tensor, into: Tensor) -> None:
    begin = 0
    for piece in _pieces(w):
        end = begin + piece.shape[0]
        torch.mv(piece.float(), v, out=into[begin:end])
        begin = end


def _times_transposed(w: Tensor, u: Tensor, into: Tensor) -> None:
    begin = 0
    for piece in _pieces(w):
        end = begin + piece.shape[0]
        if begin == 0:
            torch.mv(piece.float().t(), u[begin:end], out=into)
        else:
            into.addmv_(piece.float().t(), u[begin:end])
        begin = end


def _norm(x: Tensor) -> Tensor:
    """float64 [matrices, 1]"""
    return x.square().sum(1, keepdim=True, dtype=torch.float64).sqrt()


def _unit(x: Tensor, norm: Tensor) -> Tensor:
    """0 where the norm is."""
    return x * torch.where(norm == 0, 0.0, norm.reciprocal()).to(x.dtype)


def _or_none(norm: Tensor, largest: Tensor) -> Tensor:
    """What is left by rounding is 0: there are no more vectors."""
    return torch.where(norm < _SPENT * largest, 0.0, norm)


def bidiagonal(
    matrices: Sequence[Tensor], starts: Sequence[Tensor], steps: int
) -> tuple[Tensor, list[Tensor]]:
    """matrices [outputs, inputs] of one device, float32 or of 16 bits; starts  unit vectors of
    float32 [inputs].  Returns float64 [matrices, 2, steps], the diagonal of B and what stands right
    of it, its last element beta; and the next starts.  Nothing waits for a GPU."""
    device = matrices[0].device
    count = len(matrices)
    rows, width = (max(w.shape[i] for w in matrices) for i in range(2))
    v = torch.zeros(count, width, dtype=torch.float32, device=device)
    for into, of in zip(v, starts):
        into[: of.shape[0]] = of
    vectors, diagonal = [v], list[Tensor]()
    beside: list[Tensor] = []
    largest = torch.zeros(count, 1, dtype=torch.float64, device=device)
    u_before = torch.zeros(count, rows, dtype=torch.float32, device=device)
    for _ in range(steps):
        u = torch.zeros(count, rows, dtype=torch.float32, device=device)
        for at, w in enumerate(matrices):
            _times(w, v[at, : w.shape[1]], u[at, : w.shape[0]])
        if beside:
            u.addcmul_(u_before, beside[-1].float(), value=-1)
        norm = _norm(u)
        largest = torch.maximum(largest, norm)
        diagonal.append(_or_none(norm, largest))
        u = _unit(u, diagonal[-1])
        r = torch.zeros(count, width, dtype=torch.float32, device=device)
        for at, w in enumerate(matrices):
            _times_transposed(w, u[at, : w.shape[0]], r[at, : w.shape[1]])
        r.addcmul_(v, diagonal[-1].float(), value=-1)
        known = torch.stack(vectors, 1)  # [matrices, vectors, width]
        r = r - torch.bmm(torch.bmm(r[:, None], known.mT), known)[:, 0]
        beside.append(_or_none(_norm(r), largest))
        v, u_before = _unit(r, beside[-1]), u
        vectors.append(v)
    b = torch.stack([torch.cat(diagonal, 1), torch.cat(beside, 1)], 1)
    found = torch.bmm(_top(b)[:, None].float(), torch.stack(vectors[:-1], 1))[:, 0]
    norm = _norm(found)
    there = (norm > _TINY) & norm.isfinite()  # Not of what is 0, or not finite.
    found = torch.where(there, _unit(found, norm), vectors[0])
    return b, [of[: w.shape[1]] for of, w in zip(found, matrices)]


def _matrix(b: Tensor) -> Tensor:
    """[matrices, steps, steps]"""
    return torch.diag_embed(b[:, 0]) + torch.diag_embed(b[:, 1, :-1], offset=1)


def _top(b: Tensor) -> Tensor:
    """float64 [matrices, steps]: about the right singular vector of B, by squaring B^T B."""
    power = _matrix(b).mT @ _matrix(b)
    for _ in range(_SQUARINGS):
        size = power.abs().amax((1, 2), keepdim=True).clamp(min=_TINY)
        power = power / size
        power = power @ power
    at = power.diagonal(dim1=1, dim2=2).argmax(1)
    return power.gather(1, at[:, None, None].expand(-1, 1, power.shape[2]))[:, 0]


def sigmas(b: Tensor) -> tuple[Tensor, Tensor]:
    """sigma and residual, float64 [matrices], of what bidiagonal() gave, on the CPU; NaN where
    something is not finite."""
    finite = b.isfinite().flatten(1).all(1)
    sigma = torch.full((len(b),), torch.nan, dtype=torch.float64, device="cpu")
    residual = sigma.clone()
    if bool(finite.any()):
        p, values, _ = torch.linalg.svd(_matrix(b[finite]))
        sigma[finite] = values[:, 0]
        residual[finite] = b[finite, 1, -1] * p[:, -1, 0].abs()
    return sigma, residual
