"""The largest singular values of whole matrices, by a few steps of Lanczos from where the last
sample ended.

    G = W^T W,  G V = V T + beta v e^T, T tridiagonal, V with orthonormal columns, one for each step
    sigma = root of theta, the largest eigenvalue of T, with the eigenvector y
    residual = |G V y - theta V y| / sigma = beta |y_last| / sigma;  the next start is V y

Matrices of a device go together, as many as WORKSPACE_MAX has room for: a step is two products for
each, and a few operations for all.
On a CPU both are made of a piece of the matrix while it is in the cache, so a step reads the matrix
once.  T comes to the host, where sigma is computed.  Source: textbook, as kernels/.../spectral.h.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

STEPS = 4
FIRST_STEPS = 12  # Of a matrix that has no start yet.
_PIECE = 1 << 18  # Elements of a matrix that are read at a time on a CPU,
_PIECE_ON_GPUS = 1 << 25  # and on a GPU, of one in 16 bits, which becomes float32.
WORKSPACE_MAX = 64 << 20  # Bytes of vectors, beside one matrix alone.
_SQUARINGS = 7
_TINY = 1e-30
_SPENT = 1e-5


def pieces(w: Tensor) -> Sequence[Tensor]:
    """Some rows of a matrix at a time: what float32 copies are made of, or what fits a cache."""
    on_gpu = w.device.type != "cpu"
    if on_gpu and w.dtype == torch.float32:
        return [w]
    return torch.split(w, max(1, (_PIECE_ON_GPUS if on_gpu else _PIECE) // max(1, w.shape[1])))


def start(width: int, device: torch.device) -> Tensor:
    """A unit vector, always the same, that no generator of random numbers knows of."""
    at = torch.arange(1, width + 1, dtype=torch.float64, device=device)
    v = torch.cos(at * 1.6180339887498949 * at.sqrt()).float()
    return v * v.square().sum().rsqrt()


def _times_gram(w: Tensor, v: Tensor, into: Tensor) -> None:
    """into = W^T W v; it begins as 0."""
    for piece in pieces(w):
        rows = piece.float()
        into.addmv_(rows.t(), torch.mv(rows, v))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """float64 [matrices, 1]"""
    return (a * b).sum(1, keepdim=True, dtype=torch.float64)


def _combined(shares: Tensor, vectors: Tensor) -> Tensor:
    """Sums of [matrices, vectors, width].  As a matrix product a GPU may round it to 10 bits."""
    return (vectors * shares[:, :, None]).sum(1)


def _unit(x: Tensor, norm: Tensor) -> Tensor:
    """0 where the norm is."""
    return x * torch.where(norm == 0, 0.0, norm.reciprocal()).to(x.dtype)


def together(widths: Sequence[int], steps: int) -> Iterator[range]:
    """Places of matrices in a row that go together.  Each has a vector as wide as the widest for
    each step, four times: as it was made, twice beside the others, and in what these give."""
    begin = widest = 0
    for at, width in enumerate(widths):
        widest = max(widest, width)
        if at > begin and (at + 1 - begin) * widest * 4 * 4 * (steps + 1) > WORKSPACE_MAX:
            yield range(begin, at)
            begin, widest = at, width
    yield range(begin, len(widths))


def tridiagonal(
    matrices: Sequence[Tensor], starts: Sequence[Tensor], steps: int
) -> tuple[Tensor, list[Tensor]]:
    """matrices [outputs, inputs] of one device, float32 or of 16 bits; starts  unit vectors of
    float32 [inputs].  Returns float64 [matrices, 2, steps], the diagonal of T and what stands right
    of it, its last element beta; and the next starts.  Nothing waits for a GPU."""
    found: list[Tensor] = []
    after: list[Tensor] = []
    for places in together([w.shape[1] for w in matrices], steps):
        of = slice(places.start, places.stop)
        t, ends = _tridiagonal(matrices[of], starts[of], steps)
        found.append(t)
        after += ends
    return found[0] if len(found) == 1 else torch.cat(found), after


def _tridiagonal(
    matrices: Sequence[Tensor], starts: Sequence[Tensor], steps: int
) -> tuple[Tensor, list[Tensor]]:
    device, count = matrices[0].device, len(matrices)
    width = max(w.shape[1] for w in matrices)
    v = torch.zeros(count, width, dtype=torch.float32, device=device)
    for into, of in zip(v, starts):
        into[: of.shape[0]] = of
    vectors, diagonal = [v], list[Tensor]()
    beside: list[Tensor] = []
    largest = torch.zeros(count, 1, dtype=torch.float64, device=device)
    for _ in range(steps):
        r = torch.zeros(count, width, dtype=torch.float32, device=device)
        for at, w in enumerate(matrices):
            _times_gram(w, v[at, : w.shape[1]], r[at, : w.shape[1]])
        diagonal.append(_dot(v, r))
        largest = torch.maximum(largest, diagonal[-1])
        known = torch.stack(vectors, 1)  # [matrices, vectors, width]
        for _ in range(2):  # The second one takes off what rounding has left of the first.
            r = r - _combined((known * r[:, None]).sum(2), known)
        norm = _dot(r, r).sqrt()
        # What rounding alone has left is nothing: there are no more vectors.
        beside.append(torch.where(norm < _SPENT * largest, 0.0, norm))
        v = _unit(r, beside[-1])
        vectors.append(v)
    t = torch.stack([torch.cat(diagonal, 1), torch.cat(beside, 1)], 1)
    found = _combined(_top(t).float(), torch.stack(vectors[:-1], 1))
    norm = _dot(found, found).sqrt()
    there = (norm > _TINY) & norm.isfinite()  # Not of what is 0, or not finite.
    found = torch.where(there, _unit(found, norm), vectors[0])
    return t, [of[: w.shape[1]] for of, w in zip(found, matrices)]


def _matrix(t: Tensor) -> Tensor:
    """[matrices, steps, steps]"""
    beside = torch.diag_embed(t[:, 1, :-1], offset=1)
    return torch.diag_embed(t[:, 0]) + beside + beside.mT


def _top(t: Tensor) -> Tensor:
    """float64 [matrices, steps]: about the first eigenvector of T, by squaring."""
    power = _matrix(t)
    # Then no eigenvalue is above 1, and the largest is not below 1 over the steps.
    power = power / power.abs().sum(2, keepdim=True).amax(1, keepdim=True).clamp(min=_TINY)
    for _ in range(_SQUARINGS):
        power = power @ power
    at = power.diagonal(dim1=1, dim2=2).argmax(1)
    return power.gather(1, at[:, None, None].expand(-1, 1, power.shape[2]))[:, 0]


def sigmas(t: Tensor) -> tuple[Tensor, Tensor]:
    """sigma and residual, float64 [matrices], of what tridiagonal() gave, on the CPU; NaN where
    something is not finite."""
    finite = t.isfinite().flatten(1).all(1)
    sigma = torch.full((len(t),), torch.nan, dtype=torch.float64, device="cpu")
    residual = sigma.clone()
    if bool(finite.any()):
        values, vectors = torch.linalg.eigh(_matrix(t[finite]))
        sigma[finite] = root = values[:, -1].clamp(min=0).sqrt()
        rest = t[finite, 1, -1] * vectors[:, -1, -1].abs()
        residual[finite] = torch.where(root > 0, rest / root, 0.0)
    return sigma, residual
