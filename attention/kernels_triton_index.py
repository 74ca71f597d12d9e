"""The lightning indexer as Triton kernels for NVIDIA GPUs from compute capability 8.0.

See reference.py. Products of BF16 vectors accumulate in fp32, everything else is fp32. Nothing but
shapes decides about launches; how many entries a token sees is read on the device and bounds the
loops, so all of it can be captured in a CUDA graph, and the cost follows the true lengths.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (the arguments of kernels have no Python types)

import torch
import triton
import triton.language as tl

from sglang_dsv4.attention.cache import PAGE
from sglang_dsv4.attention.metadata import EntryTable
from sglang_dsv4.config import LayerKind
from sglang_dsv4.kernels_triton_launch import after_previous, pdl_kernel

WIDTH = tl.constexpr(128)  # channels of an index query or key
PAIRS = tl.constexpr(32)  # rotated pairs of channels, the last of a vector
FP4_BLOCK = tl.constexpr(32)  # channels that share a scale
STAGES = tl.constexpr(7)  # of the Hadamard transform: log2 of the channels
QUERY_HEADS = 4  # per program of `index_query`, one warp: they share a token's cosines

PER_PAGE = tl.constexpr(PAGE // LayerKind.CSA.value)  # entries in a page: a tile of keys
MIN_HEADS = 16  # the least that a tensor core multiplies
# Programs that keep an H200 busy while they score: as many as its 132 multiprocessors hold.
SCORE_PROGRAMS = 3 * 132
SCORE_BUFFER = 1 << 25  # scores that are kept at a time: 128 MiB

LOWEST = tl.constexpr(-(1 << 31))  # order of a NaN score: below that of any number
NOTHING = tl.constexpr(-(1 << 63))  # what is sorted in place of an entry that is not there
# Three counts in an integer: each lane of SELECT_BLOCK counts as far as 10 bits go.
LANE_BITS = tl.constexpr(10)
LANE_MASK = tl.constexpr((1 << LANE_BITS.value) - 1)
ONE = tl.constexpr(1)
TWO = tl.constexpr(1 + (1 << LANE_BITS.value))
THREE = tl.constexpr(TWO.value + (1 << 2 * LANE_BITS.value))
SELECT_BLOCK = 2048  # scores that `_select_kernel` looks at together; at most 2^15
MOST_ENTRIES = LANE_MASK.value * SELECT_BLOCK
# Left alone, the assembler spills registers to fit more programs on a multiprocessor.
SELECT_OPTIONS = {"num_warps": 8, "maxnreg": 128}


def index_query(
    q: torch.Tensor,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    *,
    fp4: bool,
) -> torch.Tensor:
    """Rotate index queries by position, then (fp4) put them on the indexer's grid.

    q [T, index heads, 128]; positions [T] int64; frequencies [32] float32.
    Returns q's shape and dtype.
    """
    tokens, heads, width = q.shape
    assert width == WIDTH.value, f"index queries have {WIDTH.value} channels, not {width}"
    assert q.stride(2) == 1 and positions.is_contiguous() and frequencies.is_contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    blocks = triton.cdiv(heads, QUERY_HEADS)
    _index_query_kernel[(tokens * blocks,)](
        q,
        q.stride(0),
        q.stride(1),
        positions,
        frequencies,
        out,
        heads,
        HEADS=QUERY_HEADS,
        FP4=fp4,
        num_warps=1,
    )
    return out


def select_entries(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    keys: torch.Tensor,
    table: EntryTable,
    *,
    top_k: int,
    nan_scores: torch.Tensor,
) -> torch.Tensor:
    """The lightning indexer: the top_k best of the entries that each token may see.

    score(t, e) = sum over heads of head_weights[t, h] * relu(q[t, h] . keys[e]).

    q [T, index heads, 128]; head_weights [T, index heads] float32 (signed, scales included);
    keys [entries, 128]. Returns [T, top_k] int64: entry numbers within the request, best first, -1
    past the visible ones. Ties go to the lower number; a NaN score counts as the lowest, and how
    many of the visible entries' scores are NaN is added to nan_scores [1] int64.

    Two launches, for as many tokens at a time as their scores leave room for.
    """
    tokens, heads, width = q.shape
    assert width == WIDTH.value, f"index queries have {WIDTH.value} channels, not {width}"
    assert q.dtype == keys.dtype, f"index keys in {keys.dtype} for queries in {q.dtype}"
    assert q.stride(2) == head_weights.stride(1) == keys.stride(1) == 1
    assert table.page_table.stride(1) == 1
    assert table.width <= MOST_ENTRIES, f"{table.width} entries: at most {MOST_ENTRIES} are counted"
    assert table.request.is_contiguous() and table.visible.is_contiguous()
    assert nan_scores.dtype is torch.int64, f"NaN scores are counted in {nan_scores.dtype}"
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=q.device)
    stride = triton.cdiv(table.width, PER_PAGE.value) * PER_PAGE.value
    block = max(1, SCORE_BUFFER // stride)
    orders = torch.empty(min(tokens, block), stride, dtype=torch.int32, device=q.device)
    for first in range(0, tokens, block):
        part = slice(first, first + block)
        count, visible = min(block, tokens - first), table.visible[part]
        _score_kernel[(count, score_splits(count, table.width))](
            q[part],
            q.stride(0),
            q.stride(1),
            head_weights[part],
            head_weights.stride(0),
            keys,
            keys.stride(0),
            table.request[part],
            table.page_table,
            table.page_table.stride(0),
            visible,
            table.width,
            orders,
            stride,
            nan_scores,
            heads,
            HEADS=max(triton.next_power_of_2(heads), MIN_HEADS),
            **score_options(q.element_size()),
        )
        _select_kernel[(count,)](
            orders,
            stride,
            visible,
            table.width,
            chosen[part],
            top_k,
            BLOCK=SELECT_BLOCK,
            CHOSEN=max(triton.next_power_of_2(top_k), 32),
            **SELECT_OPTIONS,
        )
    return chosen


def score_splits(tokens: int, width: int) -> int:
    """Programs that share the entries of one token.

    They take its pages in turn, so that whatever the true length is, each has as many as the next.
    """
    pages = triton.cdiv(width, PER_PAGE.value)
    return max(min(SCORE_PROGRAMS // tokens, pages), 1)


def score_options(element_size: int) -> dict[str, int]:
    """Warps and pipeline stages of `_score_kernel`: for BF16, page numbers come one step ahead of
    keys, and keys two ahead of the products. For fp32 shared memory is short."""
    return {"num_warps": 4, "num_stages": 5 if element_size == 2 else 1}


# ---- kernels ----


@pdl_kernel
def _index_query_kernel(
    q,
    q_token,
    q_head,
    positions,
    frequencies,
    out,
    heads,
    HEADS: tl.constexpr,
    FP4: tl.constexpr,
):
    after_previous()
    blocks = tl.cdiv(heads, HEADS)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS)
    exists, column = (head < heads)[:, None], tl.arange(0, WIDTH)[None, :]
    source = q + token * q_token + head.to(tl.int64)[:, None] * q_head + column
    vectors = tl.load(source, mask=exists, other=0.0).to(tl.float32)
    vectors = rotate(vectors, tl.load(positions + token), frequencies, HEADS, WIDTH)
    if FP4:
        vectors = fp4_grid(vectors, HEADS)
    target = out + (token * heads + head)[:, None] * WIDTH + column
    tl.store(target, vectors.to(out.dtype.element_ty), mask=exists)


@pdl_kernel(do_not_specialize=["page_table_request", "width"])
def _score_kernel(
    q,
    q_token,
    q_head,
    head_weights,
    head_weights_token,
    keys,
    keys_row,
    requests,
    page_table,
    page_table_request,
    visible,
    width,
    orders,
    orders_token,
    nan_scores,
    heads,
    HEADS: tl.constexpr,
):
    """Scores of one token's entries, as integers in the same order, for every n-th of its pages.

    A page is written whole, so that what reads the scores may read words of several. A program
    that met NaN adds their number to the count, once; all others leave memory alone.
    """
    after_previous()
    token = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(visible + token), width).to(tl.int32)
    head, column = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    exists, slot = head < heads, tl.arange(0, PER_PAGE)
    query = q + token * q_token + head[None, :] * q_head + column[:, None]
    query = tl.load(query, mask=exists[None, :], other=0.0)  # [WIDTH, HEADS]
    weight = tl.load(head_weights + token * head_weights_token + head, mask=exists, other=0.0)
    pages = page_table + tl.load(requests + token) * page_table_request
    unordered = tl.zeros((PER_PAGE,), tl.int32)  # NaN, by their place in a page
    for number in tl.range(tl.program_id(1), tl.cdiv(count, PER_PAGE), tl.num_programs(1)):
        entry = number * PER_PAGE + slot
        row = tl.load(pages + number) * PER_PAGE + slot
        # What lies past the visible entries is not read: it may be NaN.
        key = tl.load(
            keys + row[:, None] * keys_row + column[None, :],
            mask=(entry < count)[:, None],
            other=0.0,
        )
        products = tl.dot(key, query, input_precision="ieee")  # [PER_PAGE, HEADS]
        # Not a maximum, which would lose NaN.
        products = tl.where((products <= 0) | (exists == 0)[None, :], 0.0, products)
        score = tl.sum(products * weight[None, :], axis=1)
        order = tl.where(entry < count, _order_of(score), LOWEST)
        tl.store(orders + token * orders_token + entry, order)
        unordered += ((entry < count) & (score != score)).to(tl.int32)
    found = tl.sum(unordered, axis=0).to(tl.int64)
    tl.atomic_add(nan_scores, found, mask=found > 0, sem="relaxed")


@triton.jit
def _order_of(score):
    """Integers that compare as the scores do: infinity as the largest number, NaN below all.

    Zeros of one token all have one sign: a sum is -0.0 only where every weight is negative.
    """
    limit = 3.4028234663852886e38
    bounded = tl.minimum(tl.maximum(score, -limit), limit)
    bits = bounded.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(score == score, order, LOWEST)


@pdl_kernel(do_not_specialize=["width"])
def _select_kernel(
    orders,
    orders_token,
    visible,
    width,
    chosen,
    top_k,
    BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """The top_k of one token's visible entries, best first.

    Every chosen entry is packed with its order into one integer, and these are sorted. An entry's
    number counts down in there, so that of equal scores the lower one comes first.
    """
    after_previous()
    token = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(visible + token), width).to(tl.int32)
    orders += token * orders_token
    chosen += token * top_k
    place = tl.arange(0, CHOSEN)
    if count > top_k:
        floor, ceiling, above = _search(orders, count, top_k, BLOCK)
        _collect(orders, count, chosen, top_k, floor, ceiling, above, BLOCK)
        # Threads read what others of this program stored, and later overwrite what others read.
        tl.debug_barrier()
        packed = tl.load(chosen + place, mask=place < top_k, other=NOTHING)
        tl.debug_barrier()
    else:
        order = tl.load(orders + place, mask=place < count, other=LOWEST)
        packed = tl.where(place < count, _pack(order, place), NOTHING)
    packed = tl.sort(packed, descending=True)
    entry = tl.where(packed == NOTHING, -1, 0xFFFFFFFF - (packed & 0xFFFFFFFF))
    tl.store(chosen + place, entry, mask=place < top_k)


@triton.jit
def _pack(order, entry):
    return order.to(tl.int64) * 0x100000000 + (0xFFFFFFFF - entry.to(tl.int64))


@triton.jit
def _search(orders, count, top_k, BLOCK: tl.constexpr):
    """Which orders are chosen: the `above` ones over `ceiling`, and then the first from `floor` to
    `ceiling` until there are top_k.

    Each pass counts how many lie above a quarter, a half and three quarters of the range that is
    left, and so divides it by four. It ends when all that is left is chosen, or is one order.
    """
    floor = tl.full((), LOWEST, tl.int64)
    shift = 32  # 2^shift orders are left
    above, reach = count * 0, count  # entries over the range, and those with the ones in it
    written = tl.cdiv(count, PER_PAGE) * PER_PAGE
    while (shift > 0) & (reach > top_k):
        shift -= 2
        step = tl.full((), 1, tl.int64) << shift
        first, second = (floor + step).to(tl.int32), (floor + 2 * step).to(tl.int32)
        third = (floor + 3 * step).to(tl.int32)
        counts = tl.zeros((BLOCK,), tl.int32)  # three, of LANE_BITS each
        for start in range(0, count, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            order = tl.load(orders + entry, mask=entry < written, other=LOWEST)
            upper = tl.where(order >= third, THREE, TWO)
            lower = tl.where(order >= first, ONE, 0)
            counts += tl.where(order >= second, upper, lower)
        one = tl.sum(counts & LANE_MASK, axis=0)
        two = tl.sum(counts >> LANE_BITS & LANE_MASK, axis=0)
        three = tl.sum(counts >> 2 * LANE_BITS, axis=0)
        quarter = (one >= top_k).to(tl.int32) + (two >= top_k) + (three >= top_k)
        reach = tl.where(quarter > 0, tl.where(quarter > 1, two, one), reach)
        reach = tl.where(quarter > 2, three, reach)
        above = tl.where(quarter < 3, tl.where(quarter < 2, two, three), above)
        above = tl.where(quarter < 1, one, above)
        floor += quarter * step
    ceiling = floor + (tl.full((), 1, tl.int64) << shift) - 1
    return floor.to(tl.int32), ceiling.to(tl.int32), above


@triton.jit
def _collect(orders, count, chosen, top_k, floor, ceiling, above, BLOCK: tl.constexpr):
    """Packs the chosen entries: those over the ceiling first, each kind in order of its numbers."""
    written = tl.cdiv(count, PER_PAGE) * PER_PAGE
    over, within = count * 0, count * 0  # how many of either kind there are so far
    for start in range(0, count, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        order = tl.load(orders + entry, mask=entry < written, other=LOWEST)
        is_over = (entry < count) & (order > ceiling)
        is_within = (entry < count) & (order >= floor) & (order <= ceiling)
        # Both are counted at once, in the two halves of an integer.
        kinds = is_over.to(tl.int32) + is_within.to(tl.int32) * 0x10000
        ranks = tl.cumsum(kinds, axis=0)
        place = tl.where(is_over, over + (ranks & 0xFFFF), above + within + (ranks >> 16)) - 1
        is_in = is_over | (is_within & (place < top_k))
        tl.store(chosen + place, _pack(order, entry), mask=is_in)
        found = tl.sum(kinds, axis=0)
        over += found & 0xFFFF
        within += found >> 16


# ---- what the compressor of index keys does as well ----


@triton.jit
def rotate(vectors, position, frequencies, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Turns the last pairs of [ROWS, CHANNELS] by position * frequency, and the others by zero."""
    pair = tl.arange(0, CHANNELS // 2) - (CHANNELS // 2 - PAIRS)
    frequency = tl.load(frequencies + pair, mask=pair >= 0, other=0.0)
    angle = (position.to(tl.float32) * frequency)[None, :]
    cos, sin = tl.cos(angle), tl.sin(angle)
    even, odd = tl.split(tl.reshape(vectors, (ROWS, CHANNELS // 2, 2)))
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    return tl.reshape(turned, (ROWS, CHANNELS))


@triton.jit
def fp4_grid(vectors, ROWS: tl.constexpr):
    """reference.fp4_grid of [ROWS, WIDTH].

    The transform adds in a tree of 7 stages, neighbours first, and scales the sum; a product with
    the matrix adds scaled terms one after another. Nothing else differs: from the same
    transformed numbers both give the same bits.
    """
    return _round_to_grid(_transform(vectors, ROWS), ROWS)


@triton.jit
def _transform(vectors, ROWS: tl.constexpr):
    """Orthonormal Hadamard transform of [ROWS, WIDTH], in Sylvester's order."""
    for _ in tl.static_range(STAGES):
        # Sums of neighbours to the front half, differences to the back: after as many stages as
        # an index has bits, these are in order again.
        left, right = tl.split(tl.reshape(vectors, (ROWS, WIDTH // 2, 2)))
        halves = tl.permute(tl.join(left + right, left - right), (0, 2, 1))
        vectors = tl.reshape(halves, (ROWS, WIDTH))
    return vectors * WIDTH**-0.5


@triton.jit
def _round_to_grid(vectors, ROWS: tl.constexpr):
    """[ROWS, WIDTH]: blocks share a scale 2^ceil(log2(amax / 6)), values round to E2M1."""
    blocks = tl.reshape(vectors, (ROWS, WIDTH // FP4_BLOCK, FP4_BLOCK))
    # The exponent field of the scale, the least with amax <= 6 * 2^e = 1.5 * 2^(e + 2): a mantissa
    # over 1.5 carries into it. 1 is that of 2^-126; 254 minus the field is that of the inverse.
    amax = tl.max(tl.abs(blocks), axis=2).to(tl.int32, bitcast=True)
    field = tl.minimum(tl.maximum(((amax + 0x3FFFFF) >> 23) - 2, 1), 253)[:, :, None]
    scale = (field << 23).to(tl.float32, bitcast=True)
    magnitude = tl.abs(blocks) * ((254 - field) << 23).to(tl.float32, bitcast=True)
    # Next to 1.5 * 2^23 steps, float32 itself rounds to whole steps, ties to even.
    step = tl.where(magnitude >= 4, 2.0, tl.where(magnitude >= 2, 1.0, 0.5))
    anchor = step * 12582912.0
    rounded = ((magnitude + anchor) - anchor) * scale
    sign = blocks.to(tl.int32, bitcast=True) & -0x80000000
    signed = (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.reshape(signed, (ROWS, WIDTH))
