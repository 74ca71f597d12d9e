"""RMS norm and manifold-constrained hyper-connections (mHC) as Triton kernels.

Source: the DeepSeek-V4 paper, section 2.2, and Xie et al., 2026; `reference.py` is the definition.
Arithmetic is fp32, each result is rounded once, and sums have a fixed order, so that two calls on
equal tensors of one shape agree bit for bit. Grids depend on shapes alone.
"""

# Kernels are untyped: what their arguments are, a launch decides.
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_dsv4.kernels_triton_launch import after_previous, pdl_kernel


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, *, eps: float) -> torch.Tensor:
    """Divide every vector by its root mean square, then multiply by the weight.

    x      [..., D] float: the vectors.
    weight [D] float or None: plain factors (not 1 + w); None means all ones.
    eps    added to the mean square.
    Returns [..., D] in x's dtype.
    """
    rows = x.reshape(-1, x.shape[-1])
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0] == 0:
        return result
    block = triton.next_power_of_2(rows.shape[1])
    _rms_norm_kernel[(rows.shape[0],)](
        rows,
        rows if weight is None else weight.contiguous(),
        result,
        rows.stride(0),
        rows.stride(1),
        rows.shape[1],
        eps,
        WEIGHTED=weight is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),  # 16 elements a thread: two 16-byte loads of bf16
    )
    return result


def mhc_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    iterations: int,
    norm_eps: float,
    hc_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collapse the residual streams into a sub-layer's input; derive how its output is mixed back.

    streams [T, m, D] float: the residual streams.
    fn      [(2 + m) * m, m * D] fp32: projects the flattened streams to pre, post and comb logits.
    base    [(2 + m) * m] fp32: added to the logits.
    scale   [3] fp32: factors of the pre, post and comb logits.
    iterations: Sinkhorn rounds (columns, and rows between them), a fixed count.
    Returns
      x    [T, D] in streams' dtype: the sub-layer's input, before its norm.
      post [T, m] fp32: weight of the sub-layer's output in each stream.
      comb [T, m, m] fp32, indexed [source, destination]: mixes the old streams into the new ones.
    """
    tokens, m, _ = streams.shape
    streams = streams.contiguous()
    tiles = _tiles(tokens)
    sums = _project(streams, fn, tiles)
    post = torch.empty(tokens, m, dtype=torch.float32, device=streams.device)
    comb = torch.empty(tokens, m, m, dtype=torch.float32, device=streams.device)
    x = _collapse(streams, sums, base, scale, tiles, norm_eps, hc_eps, (post, comb), iterations)
    return x, post, comb


def mhc_post(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """Write a sub-layer's output into the residual streams and mix these.

    y       [T, D] float: the sub-layer's output.
    streams [T, m, D] float: the streams that mhc_pre saw.
    post    [T, m] fp32, comb [T, m, m] fp32 [source, destination]: as mhc_pre returned them.
    Returns [T, m, D] in streams' dtype: post[k] * y + sum over j of comb[j, k] * streams[j].
    """
    tokens, m, hidden = streams.shape
    streams = streams.contiguous()
    result = torch.empty_like(streams)
    if tokens == 0:
        return result
    blocks = triton.cdiv(hidden, _BLOCK_D)
    _post_kernel[(tokens * blocks,)](
        y.contiguous(),
        streams,
        post.contiguous(),
        comb.contiguous(),
        result,
        hidden,
        blocks,
        M=_power_of_two(m),
        BLOCK_D=_BLOCK_D,
        num_warps=4,
    )
    return result


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
    if y is not None:
        assert post is not None and comb is not None
        streams = mhc_post(y, streams, post, comb)
    x, post, comb = mhc_pre(
        streams, fn, base, scale, iterations=iterations, norm_eps=norm_eps, hc_eps=hc_eps
    )
    return streams, rms_norm(x, weight, eps=norm_eps), post, comb


def mhc_head(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """Collapse the residual streams after the last layer into the hidden state of the LM head.

    streams [T, m, D] float: the residual streams.
    fn [m, m * D], base [m], scale [1], all fp32: projection to one logit per stream.
    Returns [T, D] in streams' dtype, before the final norm.
    """
    streams = streams.contiguous()
    tiles = _tiles(streams.shape[0])
    sums = _project(streams, fn, tiles)
    return _collapse(streams, sums, base, scale, tiles, norm_eps, hc_eps)


# Channels of a program that collapses or mixes streams: 16 bytes a thread and stream at 4 warps.
_BLOCK_D = 1024


@dataclass(frozen=True)
class _Tiles:
    """How the projection is cut: tokens and columns of a tile, slices of the long dimension."""

    tokens: int
    columns: int
    slices: int
    warps: int
    tokens_per_collapse: int


def _tiles(tokens: int) -> _Tiles:
    """Few variants, since each is compiled; in each about a program per processor or more.

    With few tokens the time goes into reading fn once, so it is cut into many slices; with many
    into reading the streams, where a larger tile reads fn less often.
    """
    if tokens <= 32:
        return _Tiles(tokens=16, columns=64, slices=128, tokens_per_collapse=1, warps=4)
    if tokens <= 256:
        return _Tiles(tokens=16, columns=64, slices=64, tokens_per_collapse=1, warps=4)
    return _Tiles(tokens=64, columns=64, slices=8, tokens_per_collapse=4, warps=4)


def _power_of_two(m: int) -> int:
    """m; the kernels index streams by ranges, which are powers of two."""
    if m != triton.next_power_of_2(m):
        raise ValueError(f"the number of residual streams must be a power of two, found {m}")
    return m


def _project(streams: torch.Tensor, fn: torch.Tensor, tiles: _Tiles) -> torch.Tensor:
    """Partial sums of fn times the flattened streams, and of their squares: [slices, T, rows + 1].

    The slices are to be added in their order; nobody else's order enters.
    """
    tokens, width, rows = streams.shape[0], fn.shape[1], fn.shape[0]
    slices = min(tiles.slices, triton.cdiv(width, tiles.columns))
    slice_width = triton.cdiv(triton.cdiv(width, slices), tiles.columns) * tiles.columns
    sums = torch.empty(slices, tokens, rows + 1, dtype=torch.float32, device=streams.device)
    if tokens == 0:
        return sums
    _project_kernel[(slices, triton.cdiv(tokens, tiles.tokens))](
        streams,
        fn.contiguous(),
        sums,
        tokens,
        width,
        slice_width,
        ROWS=rows,
        BLOCK_T=tiles.tokens,
        BLOCK_K=tiles.columns,
        BLOCK_R=max(triton.next_power_of_2(rows), 16),
        num_warps=tiles.warps,
        num_stages=4,
        maxnreg=128 if tiles.tokens <= 16 else None,  # left alone, the assembler spills (sm_120)
    )
    return sums


def _collapse(
    streams: torch.Tensor,
    sums: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    tiles: _Tiles,
    norm_eps: float,
    hc_eps: float,
    mix_back: tuple[torch.Tensor, torch.Tensor] | None = None,
    iterations: int = 0,
) -> torch.Tensor:
    """The weighted sum of the streams [T, D]; also writes (post, comb) where they are given."""
    tokens, m, hidden = streams.shape
    x = torch.empty(tokens, hidden, dtype=streams.dtype, device=streams.device)
    if tokens == 0:
        return x
    post, comb = mix_back or (None, None)
    blocks = triton.cdiv(hidden, _BLOCK_D)
    groups = triton.cdiv(tokens, tiles.tokens_per_collapse)
    mixing = groups if mix_back else 0
    _collapse_kernel[(mixing + groups * blocks,)](
        streams,
        sums,
        base.contiguous(),
        scale.contiguous(),
        x,
        post,
        comb,
        tokens,
        hidden,
        blocks,
        sums.shape[0],
        mixing,
        norm_eps,
        hc_eps,
        ITERATIONS=iterations,
        M=_power_of_two(m),
        ROWS=sums.shape[2] - 1,
        BLOCK_T=tiles.tokens_per_collapse,
        BLOCK_D=_BLOCK_D,
        BLOCK_S=tiles.slices,
        num_warps=4,
    )
    return x


# ---- kernels ----


@triton.constexpr_function
def _least_power(least):
    """The smallest power of two that is at least this. Kernels cannot call
    `triton.next_power_of_2`, in whose place SGLang puts a plain function."""
    return 1 << (least - 1).bit_length()


@pdl_kernel
def _rms_norm_kernel(
    x,
    weight,
    result,
    row_stride,
    column_stride,
    width,
    eps,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program."""
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * row_stride + columns * column_stride, mask=inside, other=0.0)
    values = values.to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    if WEIGHTED:
        values *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + row * width + columns, values, mask=inside)


@triton.jit
def _dot_fp32(x, factors):
    """x @ factors, as exact as fp32 products of the fp32 factors.

    A bf16 x meets the factors cut into three bf16 parts, 24 bits together, on tensor cores: each
    product is exact there. But their sums are cut off instead of rounded, so they should be short:
    longer ones are the caller's to add. Any other x takes the fp32 units.
    """
    if x.dtype == tl.bfloat16:
        high = factors.to(tl.bfloat16)
        rest = factors - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(x, high, tl.dot(x, middle, tl.dot(x, low)))
    else:
        total = tl.dot(x.to(tl.float32), factors, input_precision="ieee")
    return total


@pdl_kernel(do_not_specialize=["tokens"])
def _project_kernel(
    streams,
    fn,
    sums,
    tokens,
    width,
    slice_width,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One slice of the long dimension for one tile of tokens: ROWS sums, then that of squares."""
    after_previous()
    part = tl.program_id(0)
    token = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    row = tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    squares = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    end = tl.minimum((part + 1) * slice_width, width)
    for first in range(part * slice_width, end, BLOCK_K):
        column = first + columns
        x = tl.load(
            streams + token[:, None] * width + column[None, :],
            mask=(token < tokens)[:, None] & (column < end)[None, :],
            other=0.0,
        )
        factors = tl.load(
            fn + row[None, :] * width + column[:, None],
            mask=(row < ROWS)[None, :] & (column < end)[:, None],
            other=0.0,
        )
        wide = x.to(tl.float32)
        squares += wide * wide
        total += _dot_fp32(x, factors)
    line = sums + (part * tokens + token) * (ROWS + 1)
    written = (token < tokens)[:, None] & (row < ROWS)[None, :]
    tl.store(line[:, None] + row[None, :], total, mask=written)
    tl.store(line + ROWS, tl.sum(squares, 1), mask=token < tokens)


@pdl_kernel(do_not_specialize=["tokens", "slices", "mixing"])
def _collapse_kernel(
    streams,
    sums,
    base,
    scale,
    x,
    post,
    comb,
    tokens,
    hidden,
    blocks,
    slices,
    mixing,
    norm_eps,
    hc_eps,
    ITERATIONS: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Collapses streams; with comb, the first `mixing` programs, which take longest, mix back."""
    after_previous()
    program = tl.program_id(0)
    if comb is not None:
        if program < mixing:
            token = (program * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
            mix = _mix(sums, token, tokens, slices, M * hidden, norm_eps, ROWS, BLOCK_S)
            _write_post(mix, base, scale, post, token, tokens, M)
            _write_comb(mix, base, scale, comb, token, tokens, hc_eps, ITERATIONS, M)
            return
        program -= mixing
    token = ((program // blocks) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    channel = (program % blocks) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (token < tokens)[:, None] & (channel < hidden)[None, :]
    mix = _mix(sums, token, tokens, slices, M * hidden, norm_eps, ROWS, BLOCK_S)
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for i in tl.static_range(M):
        logit = _column(mix, i) * tl.load(scale) + tl.load(base + i)
        stream = streams + ((token * M + i) * hidden)[:, None] + channel[None, :]
        values = tl.load(stream, mask=inside, other=0.0).to(tl.float32)
        total += (tl.sigmoid(logit) + hc_eps)[:, None] * values
    tl.store(x + (token * hidden)[:, None] + channel[None, :], total, mask=inside)


@triton.jit
def _mix(sums, token, tokens, slices, width, norm_eps, ROWS: tl.constexpr, BLOCK_S: tl.constexpr):
    """fn times the normalised streams: [tokens of a program, ROWS or more], zeros beyond ROWS."""
    BLOCK_R: tl.constexpr = _least_power(ROWS + 1)
    part = tl.arange(0, BLOCK_S)
    row = tl.arange(0, BLOCK_R)
    line = sums + (part.to(tl.int64)[:, None] * tokens + token[None, :]) * (ROWS + 1)
    there = (part < slices)[:, None] & (token < tokens)[None, :]
    parts = tl.load(
        line[:, :, None] + row[None, None, :],
        mask=there[:, :, None] & (row <= ROWS)[None, None, :],
        other=0.0,
    )
    total = tl.sum(parts, 0)
    inverse_rms = tl.rsqrt(_column(total, ROWS) / width + norm_eps)
    return tl.where((row < ROWS)[None, :], total, 0.0) * inverse_rms[:, None]


@triton.jit
def _column(table, index: tl.constexpr):
    """Column `index` of [n, columns], as [n]."""
    columns = tl.arange(0, table.shape[1])
    return tl.sum(tl.where((columns == index)[None, :], table, 0.0), 1)


@triton.jit
def _write_post(mix, base, scale, post, token, tokens, M: tl.constexpr):
    for i in tl.static_range(M):
        logit = _column(mix, M + i) * tl.load(scale + 1) + tl.load(base + M + i)
        tl.store(post + token * M + i, 2.0 * tl.sigmoid(logit), mask=token < tokens)


@triton.jit
def _comb_kernel(mix, base, scale, eps, M: tl.constexpr):
    """softmax of the rows of the comb logits, plus eps: a tuple of M * M, each [tokens]."""
    kernel: tl.tuple = ()
    for i in tl.static_range(M):
        powers: tl.tuple = ()
        for j in tl.static_range(M):
            logit = _column(mix, (2 + i) * M + j) * tl.load(scale + 2)
            logit += tl.load(base + (2 + i) * M + j)
            powers = powers + (logit,)
        largest = powers[0]
        for j in tl.static_range(1, M):
            largest = tl.maximum(largest, powers[j])
        total = tl.zeros_like(largest)
        for j in tl.static_range(M):
            total += tl.exp(powers[j] - largest)
        for j in tl.static_range(M):
            kernel = kernel + (tl.exp(powers[j] - largest) / total + eps,)
    return kernel


@triton.jit
def _sums(kernel, inverse, before, eps, M: tl.constexpr, ROWS: tl.constexpr):
    """eps * before + kernel @ inverse (its transpose unless ROWS), element by element."""
    result: tl.tuple = ()
    for i in tl.static_range(M):
        total = eps * before[i]
        for j in tl.static_range(M):
            total += kernel[i * M + j if ROWS else j * M + i] * inverse[j]
        result = result + (total,)
    return result


@triton.jit
def _inverse(values, M: tl.constexpr):
    result: tl.tuple = ()
    for i in tl.static_range(M):
        result = result + (1.0 / values[i],)
    return result


@triton.jit
def _write_comb(
    mix, base, scale, comb, token, tokens, eps, ITERATIONS: tl.constexpr, M: tl.constexpr
):
    """Sinkhorn on C = kernel / (rows * columns), where a pass only changes rows or columns.

    A thread holds a whole matrix, so that its 2 * ITERATIONS - 1 dependent passes need no exchange.
    """
    kernel = _comb_kernel(mix, base, scale, eps, M)
    rows: tl.tuple = ()
    for _ in tl.static_range(M):
        rows = rows + (tl.full(token.shape, 1.0, tl.float32),)
    columns = _sums(kernel, rows, rows, eps, M, False)
    for _ in range(ITERATIONS - 1):
        rows = _sums(kernel, _inverse(columns, M), rows, eps, M, True)
        columns = _sums(kernel, _inverse(rows, M), columns, eps, M, False)
    for i in tl.static_range(M):
        for j in tl.static_range(M):
            value = kernel[i * M + j] / (rows[i] * columns[j])
            tl.store(comb + (token * M + i) * M + j, value, mask=token < tokens)


@pdl_kernel
def _post_kernel(
    y, streams, post, comb, result, hidden, blocks, M: tl.constexpr, BLOCK_D: tl.constexpr
):
    """One block of channels of one token, all streams at once.

    Sums are spelled out as fma: which of two products a compiler rounds would depend on y's dtype.
    """
    after_previous()
    program = tl.program_id(0)
    token = (program // blocks).to(tl.int64)
    channel = (program % blocks) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = channel < hidden
    stream = tl.arange(0, M)
    output = tl.load(y + token * hidden + channel, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(post + token * M + stream)[:, None] * output[None, :]
    for j in tl.static_range(M):
        weights = tl.load(comb + (token * M + j) * M + stream)
        values = tl.load(streams + (token * M + j) * hidden + channel, mask=inside, other=0.0)
        values = tl.broadcast_to(values.to(tl.float32)[None, :], (M, BLOCK_D))
        total = tl.fma(tl.broadcast_to(weights[:, None], (M, BLOCK_D)), values, total)
    place = result + (token * M + stream)[:, None] * hidden + channel[None, :]
    tl.store(place, total, mask=inside[None, :])
