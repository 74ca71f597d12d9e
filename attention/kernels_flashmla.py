"""sparse_attention by shape on Hopper: FlashMLA's BF16 sparse kernel for many tokens, ours for few.

FlashMLA does not split a token over its rows, so it needs about a fifth of an H200's
multiprocessors in tokens before it leads; and it knows 64 and 128 heads only.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (the arguments of kernels have no Python types)

import torch
import triton
import triton.language as tl

from sglang_dsv4.attention import kernels_triton
from sglang_dsv4.attention.kernels_triton import PLAIN, ROTATED, WIDTH, _angles, _rotate
from sglang_dsv4.attention.metadata import IndexList
from sglang_dsv4.kernels_triton_launch import after_previous, pdl_kernel

FEWEST_TOKENS = 24
HEADS = (64, 128)
LIST_MULTIPLE = 128  # FlashMLA reads whole blocks of row indices
TURNED_HEADS = 8


def sparse_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    keys: IndexList,
    sink: torch.Tensor,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Softmax attention of every head over a token's rows, which are both keys and values; a sink
    logit per head takes part in the denominator only; then the rotation of the values is undone.

    q [T, heads, 512]; cache [rows, 512]; keys: rows [T, K], lengths [T]; sink [heads] float32;
    positions [T] int64; frequencies [32] float32. Returns q's shape and dtype. A token without
    rows gets zeros. Rows past the length are never read into the result.

    FlashMLA's result is rounded to BF16 before the rotation is undone.
    """
    if not suits_flashmla(q.shape[0], q.shape[1], q.dtype):
        return kernels_triton.sparse_attention(
            q, cache, keys, sink, positions, frequencies, scale=scale
        )
    import flash_mla  # here, so that the kernels below can be tested where it is not installed

    rows, lengths = narrow(keys)
    out, _, _ = flash_mla.flash_mla_sparse_fwd(
        q.contiguous(),
        cache.unsqueeze(1),
        rows.unsqueeze(1),
        scale,
        WIDTH.value,
        sink,
        lengths,
        use_legacy=True,
        return_log2_lse=False,
    )
    turn_back(out, lengths, positions, frequencies)
    return out


def suits_flashmla(tokens: int, heads: int, dtype: torch.dtype) -> bool:
    """Whether FlashMLA takes this shape, and was the faster one on an H200."""
    return tokens >= FEWEST_TOKENS and heads in HEADS and dtype == torch.bfloat16


def narrow(keys: IndexList) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists as FlashMLA reads them: rows [T, K'] int32, K' a multiple of 128, -1 past the length;
    lengths [T] int32."""
    tokens, width = keys.rows.shape
    padded = triton.cdiv(width, LIST_MULTIPLE) * LIST_MULTIPLE
    rows = torch.empty(tokens, padded, dtype=torch.int32, device=keys.rows.device)
    lengths = torch.empty(tokens, dtype=torch.int32, device=keys.rows.device)
    block = min(triton.next_power_of_2(padded), 1024)
    _narrow_kernel[(tokens, triton.cdiv(padded, block))](
        keys.rows,
        keys.rows.stride(0),
        keys.rows.stride(1),
        keys.lengths,
        keys.lengths.stride(0),
        rows,
        lengths,
        padded,
        BLOCK=block,
        num_warps=4,
    )
    return rows, lengths


def turn_back(
    out: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor
) -> None:
    """Undo the rotation of finished attention [T, heads, 512] in place; zeros where a length is."""
    tokens, heads = out.shape[:2]
    assert out.is_contiguous()
    _turn_back_kernel[(tokens * triton.cdiv(heads, TURNED_HEADS),)](
        out,
        lengths,
        positions,
        positions.stride(0),
        frequencies,
        heads,
        HEADS=TURNED_HEADS,
        num_warps=4,
    )


@pdl_kernel(do_not_specialize=["rows_token"])
def _narrow_kernel(
    rows,
    rows_token,
    rows_column,
    lengths,
    length_stride,
    narrow_rows,
    narrow_lengths,
    padded,
    BLOCK: tl.constexpr,
):
    after_previous()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths + token * length_stride).to(tl.int32)
    source = rows + token * rows_token + column * rows_column
    row = tl.load(source, mask=column < length, other=-1)
    tl.store(narrow_rows + token * padded + column, row.to(tl.int32), mask=column < padded)
    tl.store(narrow_lengths + token, length, mask=tl.program_id(1) == 0)


@pdl_kernel
def _turn_back_kernel(
    out, lengths, positions, position_stride, frequencies, heads, HEADS: tl.constexpr
):
    after_previous()
    blocks = tl.cdiv(heads, HEADS)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = (tl.program_id(0) % blocks) * HEADS + tl.arange(0, HEADS)
    exists = (head < heads)[:, None]
    is_empty = tl.load(lengths + token) == 0
    column, rotated = tl.arange(0, WIDTH)[None, :], tl.arange(0, ROTATED)[None, :] + PLAIN
    target = out + (token * heads + head)[:, None] * WIDTH
    tail = tl.load(target + rotated, mask=exists, other=0.0).to(tl.float32)
    angles = _angles(tl.load(positions + token * position_stride), frequencies)
    tail = _rotate(tail, tl.cos(angles), -tl.sin(angles), HEADS)
    tail = tl.where(is_empty, 0.0, tail)
    tl.store(target + rotated, tail.to(out.dtype.element_ty), mask=exists)
    zeros = tl.zeros((HEADS, WIDTH), out.dtype.element_ty)
    tl.store(target + column, zeros, mask=exists & (column < PLAIN) & is_empty)
