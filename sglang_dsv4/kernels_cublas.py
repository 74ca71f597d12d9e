"""Dense products by cuBLAS, through torch, with the result in another dtype than the operands'."""

import torch
from torch.nn import functional


def linear_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A linear layer whose result is not rounded.

    x      [T, K] float: rounded to the weight's dtype first, by kernels.
    weight [N, K] float: the rows of the result's columns.
    Returns [T, N] fp32, summed in fp32.
    """
    x = x.to(weight.dtype)
    if weight.dtype is torch.float32:
        return functional.linear(x, weight)
    return torch.mm(x, weight.T, out_dtype=torch.float32)
