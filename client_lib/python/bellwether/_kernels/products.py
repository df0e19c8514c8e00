"""Sums of products of two tensors by the kernels library, for the laws of linear layers.

kernels/include/bellwether/kernels/law_products.h says what is added.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .._native import c_api
from .memory import Memory
from .probe import DTYPES, call

DIMS = 3
NO_GRID = c_api.GRID_NONE


@dataclasses.dataclass(frozen=True)
class Product:
    """Two tensors of one shape, at most three dimensions, of the types in DTYPES; NO_GRID = the
    variance of what rounding has added is not measured."""

    x: Tensor
    y: Tensor
    x_grid: int = NO_GRID
    y_grid: int = NO_GRID


def grids(dtype: torch.dtype) -> tuple[int, int]:
    """Of a matrix product's results, and of its operands, which are rounded where they are fp32:
    to what torch may use inside, since no result says it."""
    if dtype == torch.bfloat16:
        return c_api.GRID_BF16, NO_GRID
    if dtype == torch.float16:
        return c_api.GRID_F16, NO_GRID
    medium = torch.get_float32_matmul_precision() == "medium"
    return (c_api.GRID_BF16,) * 2 if medium else (c_api.GRID_TF32,) * 2


def own_grid(dtype: torch.dtype) -> int:
    """Of numbers that were rounded to a type itself."""
    return {torch.bfloat16: c_api.GRID_BF16, torch.float16: c_api.GRID_F16}.get(
        dtype, c_api.GRID_F32
    )


def new_sums(count: int, device: torch.device) -> Tensor:
    """Zeros for so many products: float64 [count, LAW_PRODUCT_STATS]."""
    shape = (count, len(c_api.LAW_PRODUCT_STATS))
    return torch.zeros(shape, dtype=torch.float64, device=device)


def _operand(to: c_api.LawOperand, tensor: Tensor, grid: int) -> None:
    to.data, to.dtype, to.grid = tensor.data_ptr(), DTYPES[tensor.dtype], grid
    for at, stride in enumerate(tensor.stride(), DIMS - tensor.dim()):
        to.strides[at] = stride


def add_products(memory: Memory, products: list[Product], sums: Tensor) -> None:
    """Adds what the products give to `sums`, a row each, where they are.  One pass over all of
    them; on a GPU one kernel on the current stream.  Raises ValueError for what does not fit,
    KernelError for what the library refuses."""
    each = (c_api.LawProduct * len(products))()
    for to, product in zip(each, products):
        shape = product.x.shape
        if product.y.shape != shape or len(shape) > DIMS:
            raise ValueError(f"shapes are {list(shape)} and {list(product.y.shape)}")
        for at in range(DIMS):
            to.extents[at] = 1
        for at, extent in enumerate(shape, DIMS - len(shape)):
            to.extents[at] = extent
        _operand(to.x, product.x, product.x_grid)
        _operand(to.y, product.y, product.y_grid)
    if sums.shape[0] != len(products) or not sums.is_contiguous() or sums.dtype != torch.float64:
        raise ValueError(f"sums are {sums.dtype} {list(sums.shape)}, products {len(products)}")
    params = c_api.struct(
        c_api.LawProductsParams, count=len(products), out=sums.data_ptr(), **memory.call_fields()
    )
    params.products = each
    with memory.running():
        call("bw_law_products", params)
