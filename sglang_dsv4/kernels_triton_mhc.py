"""What mHC does between two sub-layers: for few tokens in two kernels instead of four.

`reference.py` is the definition. More tokens go through the kernels of `kernels_triton.py`, which
are faster then. Of the two, the first kernel writes the streams and multiplies them while it
has them; the second turns the products into the next sub-layer's input, norm included. Sums have a
fixed order, so that two calls on equal tensors of one shape agree bit for bit.

The second kernel has a program for each token, which holds the whole input: so its norm sees the
very values that are normed, rounded as they are. The sum of their squares would also follow from
products of streams with streams, pre^T G pre, and programs could share a token then; but where
streams nearly cancel, G's own rounding is all that is left of it. Few tokens should lose nothing:
Sinkhorn, 39 dependent passes, runs beside.
"""

# Kernels are untyped: what their arguments are, a launch decides.
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from sglang_dsv4 import kernels_triton
from sglang_dsv4.kernels_triton import (
    _column,
    _dot_fp32,
    _mix,
    _power_of_two,
    _write_comb,
    _write_post,
)
from sglang_dsv4.kernels_triton_launch import after_previous, pdl_kernel

# Up to so many tokens the two kernels are as fast as the four, or faster.
FUSED_TOKENS = 32
# Slices of a token's channels, and channels at a time.
_SLICES, _CHANNELS = 128, 32


def mhc_post_pre_norm(
    y: torch.Tensor | None,
    streams: torch.Tensor,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    *,
    iterations: int,
    norm_eps: float,
    hc_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Between two sub-layers: mhc_post of the one, then mhc_pre and RMS norm of the other.

    y       [T, D] float or None: the first one's output; None before the first of all, where the
            streams stay as they are.
    streams [T, m, D] float: those that it read.
    post    [T, m] fp32, comb [T, m, m] fp32 [source, destination]: as it got them; None where y is.
    fn      [(2 + m) * m, m * D], base [(2 + m) * m], scale [3], all fp32: of the other, as in
            mhc_pre; iterations and hc_eps too.
    weight  [D] float: of its norm.
    norm_eps: added to the mean square, by both norms.
    Returns the streams [T, m, D] that the other reads, its input x [T, D] in their dtype, and the
    post [T, m] and comb [T, m, m] of its output. Rounded where the three ops round.
    """
    eps = {"norm_eps": norm_eps, "hc_eps": hc_eps}
    if streams.shape[0] > FUSED_TOKENS:
        return kernels_triton.mhc_post_pre_norm(
            y, streams, post, comb, fn, base, scale, weight, iterations=iterations, **eps
        )
    streams, sums = _post_and_project(y, streams, post, comb, fn)
    x, post, comb = _mix_and_norm(streams, sums, base, scale, weight, iterations=iterations, **eps)
    return streams, x, post, comb


def _post_and_project(
    y: torch.Tensor | None,
    streams: torch.Tensor,
    post: torch.Tensor | None,
    comb: torch.Tensor | None,
    fn: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The streams with y in them, and partial sums [slices, T, rows + 1] of fn times these and of
    their squares, to be added in the slices' order.

    The time goes into reading fn once, so it is cut into many slices. Tensor cores take 16 tokens;
    up to 4 have programs of their own, without the way through memory that those need: so often
    they read fn, all but once out of the L2.
    """
    streams = streams.contiguous()
    (tokens, m, hidden), rows = streams.shape, fn.shape[0]
    slice_width = triton.cdiv(triton.cdiv(hidden, _SLICES), _CHANNELS) * _CHANNELS
    slices = triton.cdiv(hidden, slice_width)
    sums = torch.empty(slices, tokens, rows + 1, dtype=torch.float32, device=streams.device)
    result = streams if y is None else torch.empty_like(streams)
    if tokens == 0:
        return result, sums
    arguments = (
        None if y is None else y.contiguous(),
        streams,
        None if post is None else post.contiguous(),
        None if comb is None else comb.contiguous(),
        fn.contiguous(),
        result,
        sums,
        tokens,
        hidden,
        slice_width,
    )
    widths = {"M": _power_of_two(m), "ROWS": rows, "BLOCK_D": _CHANNELS}
    widths["BLOCK_R"] = max(triton.next_power_of_2(rows), 16)
    if tokens <= 4:
        _post_project_token_kernel[(slices, tokens)](*arguments, **widths, num_warps=4)
    else:
        _post_project_tile_kernel[(slices, triton.cdiv(tokens, 16))](
            *arguments,
            **widths,
            BLOCK_T=16,
            num_warps=4,
            num_stages=4,
            maxnreg=128,  # left alone, it spills (sm_89)
        )
    return result, sums


def _mix_and_norm(
    streams: torch.Tensor,
    sums: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    *,
    iterations: int,
    norm_eps: float,
    hc_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, post and comb from the streams and their sums."""
    tokens, m, hidden = streams.shape
    x = torch.empty(tokens, hidden, dtype=streams.dtype, device=streams.device)
    post = torch.empty(tokens, m, dtype=torch.float32, device=streams.device)
    comb = torch.empty(tokens, m, m, dtype=torch.float32, device=streams.device)
    if tokens == 0:
        return x, post, comb
    block = triton.next_power_of_2(hidden)
    _mix_norm_kernel[(2 * tokens,)](
        streams,
        sums,
        base.contiguous(),
        scale.contiguous(),
        weight.contiguous(),
        x,
        post,
        comb,
        tokens,
        hidden,
        sums.shape[0],
        norm_eps,
        hc_eps,
        ITERATIONS=iterations,
        M=m,
        ROWS=sums.shape[2] - 1,
        BLOCK_D=block,
        BLOCK_S=_SLICES,
        # Every warp of a program that mixes back does all of it: more than two on each of a
        # processor's four schedulers would be in each other's way.
        num_warps=min(max(block // 256, 1), 8),
    )
    return x, post, comb


# ---- kernels ----


@pdl_kernel(do_not_specialize=["tokens"])
def _post_project_token_kernel(
    y,
    streams,
    post,
    comb,
    fn,
    result,
    sums,
    tokens,
    hidden,
    slice_width,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One slice of the channels of one token: its streams with y in them (y None: as they are), and
    what they add to ROWS sums and to that of squares. Products are exchanged last."""
    after_previous()
    part = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    stream, row = tl.arange(0, M), tl.arange(0, BLOCK_R)
    total = tl.zeros((M, BLOCK_D, BLOCK_R), tl.float32)
    squares = tl.zeros((M, BLOCK_D), tl.float32)
    end = tl.minimum((part + 1) * slice_width, hidden)
    for first in range(part * slice_width, end, BLOCK_D):
        channel = first + tl.arange(0, BLOCK_D)
        column = stream[:, None] * hidden + channel[None, :]
        inside = (channel < end)[None, :]
        factors = tl.load(
            fn + row[None, None, :] * M * hidden + column[:, :, None],
            mask=inside[:, :, None] & (row < ROWS)[None, None, :],
            other=0.0,
        )
        if y is None:
            new = tl.load(streams + token * M * hidden + column, mask=inside, other=0.0)
        else:
            one = token + tl.arange(0, 1)
            new = _posted(y, streams, post, comb, one, channel, tokens, end, hidden, M)
            new = tl.reshape(new, (M, BLOCK_D))
            tl.store(result + token * M * hidden + column, new, mask=inside)
        wide = new.to(tl.float32)
        squares += wide * wide
        total += wide[:, :, None] * factors
    line = sums + (part * tokens + token) * (ROWS + 1)
    tl.store(line + row, tl.sum(tl.sum(total, 1), 0), mask=row < ROWS)
    tl.store(line + ROWS, tl.sum(tl.sum(squares, 1), 0))


@pdl_kernel(do_not_specialize=["tokens"])
def _post_project_tile_kernel(
    y,
    streams,
    post,
    comb,
    fn,
    result,
    sums,
    tokens,
    hidden,
    slice_width,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """The same for a tile of tokens, by tensor cores. These want values in other threads than those
    that make them: so they are read back, out of the L2, which takes fewer registers."""
    after_previous()
    part = tl.program_id(0)
    token = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    there = token < tokens
    start, stream, row = part * slice_width, tl.arange(0, M), tl.arange(0, BLOCK_R)
    end = tl.minimum(start + slice_width, hidden)
    if y is not None:
        for first in range(start, end, BLOCK_D):
            channel = first + tl.arange(0, BLOCK_D)
            new = _posted(y, streams, post, comb, token, channel, tokens, end, hidden, M)
            line = (token[:, None] * M + stream[None, :]) * hidden
            tl.store(
                result + line[:, :, None] + channel[None, None, :],
                new,
                mask=there[:, None, None] & (channel < end)[None, None, :],
            )
        tl.debug_barrier()  # what other threads of the program have written is there
    total = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    squares = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    steps = tl.cdiv(end - start, BLOCK_D)
    for step in range(M * steps):
        channel = start + (step % steps) * BLOCK_D + tl.arange(0, BLOCK_D)
        column = (step // steps) * hidden + channel
        x = tl.load(
            result + token[:, None] * M * hidden + column[None, :],
            mask=there[:, None] & (channel < end)[None, :],
            other=0.0,
        )
        factors = tl.load(
            fn + row[None, :] * M * hidden + column[:, None],
            mask=(row < ROWS)[None, :] & (channel < end)[:, None],
            other=0.0,
        )
        wide = x.to(tl.float32)
        squares += wide * wide
        total += _dot_fp32(x, factors)
    line = sums + (part * tokens + token) * (ROWS + 1)
    tl.store(line[:, None] + row[None, :], total, mask=there[:, None] & (row < ROWS)[None, :])
    tl.store(line + ROWS, tl.sum(squares, 1), mask=there)


@triton.jit
def _posted(y, streams, post, comb, token, channel, tokens, end, hidden, M: tl.constexpr):
    """Some channels of all streams with y in them: [tokens of a program, M, channels], rounded."""
    stream = tl.arange(0, M)
    there = (token < tokens)[:, None]
    inside = there & (channel < end)[None, :]
    place = token[:, None] * hidden + channel[None, :]
    output = tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(post + token[:, None] * M + stream[None, :], mask=there, other=0.0)
    total = weights[:, :, None] * output[:, None, :]
    for j in tl.static_range(M):
        source = token * M + j
        place = source[:, None] * hidden + channel[None, :]
        old = tl.load(streams + place, mask=inside, other=0.0).to(tl.float32)
        weights = tl.load(comb + source[:, None] * M + stream[None, :], mask=there, other=0.0)
        total += weights[:, :, None] * old[:, None, :]
    return total.to(streams.dtype.element_ty)


@pdl_kernel(do_not_specialize=["tokens", "slices"])
def _mix_norm_kernel(
    streams,
    sums,
    base,
    scale,
    weight,
    x,
    post,
    comb,
    tokens,
    hidden,
    slices,
    norm_eps,
    hc_eps,
    ITERATIONS: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The first programs, which take longest, mix back a token each; every other one makes the
    input of one. Streams are asked for before the sums are waited for."""
    after_previous()
    program = tl.program_id(0)
    if program < tokens:
        token = (program + tl.arange(0, 1)).to(tl.int64)
        mix = _mix(sums, token, tokens, slices, M * hidden, norm_eps, ROWS, BLOCK_S)
        _write_post(mix, base, scale, post, token, tokens, M)
        _write_comb(mix, base, scale, comb, token, tokens, hc_eps, ITERATIONS, M)
        return
    token = (program - tokens).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    inside = channel < hidden
    factors = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    values: tl.tuple = ()
    for i in tl.static_range(M):
        place = streams + (token * M + i) * hidden + channel
        values = values + (tl.load(place, mask=inside, other=0.0),)
    mix = _mix(sums, token + tl.arange(0, 1), tokens, slices, M * hidden, norm_eps, ROWS, BLOCK_S)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for i in tl.static_range(M):
        logit = tl.sum(_column(mix, i), 0) * tl.load(scale) + tl.load(base + i)
        total += (tl.sigmoid(logit) + hc_eps) * values[i].to(tl.float32)
    total = total.to(streams.dtype.element_ty).to(tl.float32)
    total *= tl.rsqrt(tl.sum(total * total, 0) / hidden + norm_eps)
    tl.store(x + token * hidden + channel, total * factors, mask=inside)
