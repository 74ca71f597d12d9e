"""sparse_attention through FlashInfer's paged MLA wrapper (fa3 on Hopper, fa2 elsewhere).

FlashInfer cuts the rows of a batch into chunks on the host. Here that happens once for each shape,
before any capture; the lengths of a step then re-cut the same chunks on the device. Shapes that
nobody prepared (prefill) run on the Triton kernels.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (the arguments of kernels have no Python types)

import importlib
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_dsv4.attention import kernels_triton
from sglang_dsv4.attention.kernels_triton import PLAIN, ROTATED, WIDTH, _angles, _rotate
from sglang_dsv4.attention.metadata import IndexList
from sglang_dsv4.backends import compute_capability

TILE = 64  # rows that FlashInfer's kernel takes at a time
WORKS = 16384  # entries of each array of its plan
WORKSPACE_BYTES = 32 << 20  # partial results; shared by all plans, which never run side by side
FOLD_HEADS = 2
INDEX_BLOCK = 1024


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

    Partial results of several chunks, and the result before the sink, are rounded to BF16.
    """
    shape = Shape(q.shape[0], q.shape[1], keys.rows.shape[1], scale)
    plan = _PLANS.get((shape, q.device))
    if plan is None or q.dtype != torch.bfloat16:
        return kernels_triton.sparse_attention(
            q, cache, keys, sink, positions, frequencies, scale=scale
        )
    recut(keys, plan)
    out, statistics = plan.run(q.contiguous(), cache)
    fold_sink(out, statistics, sink, positions, frequencies)
    return out


@dataclass(frozen=True)
class Shape:
    """What a plan is made for: T tokens of `heads` heads, lists of `width` rows, softmax scale."""

    tokens: int
    heads: int
    width: int
    scale: float


def prepare(
    tokens: int, heads: int, width: int, *, scale: float, device: torch.device | str
) -> None:
    """Plan a shape, once, outside of any capture: it waits for the device.

    tokens: of a decode step, padding included; heads: of this rank; width: K of the index lists.
    Raises RuntimeError where FlashInfer's plan is not what this module relies on.
    """
    shape, place = Shape(tokens, heads, width, scale), torch.device(device)
    if place == torch.device("cuda"):
        place = torch.device("cuda", torch.cuda.current_device())
    if (shape, place) not in _PLANS:
        _PLANS[shape, place] = FlashInferPlan(shape, place)


# ---- how many chunks, and the plan that has them ----


def chunk_count(tokens: int, width: int, clusters: int) -> int:
    """Chunks per token that fill the device's clusters once, at the longest list."""
    tiles = triton.cdiv(width, TILE)
    per_chunk = triton.cdiv(tiles, max(1, clusters // tokens))
    return triton.cdiv(tiles, per_chunk)


def planned_length(tokens: int, chunks: int, clusters: int) -> int:
    """A length, the same for every token, that FlashInfer's plan cuts into this many chunks.

    Raises ValueError if there is none.
    """
    for length in range(chunks * 32, WORKS * TILE, 32):
        limit = _chunk_limit(triton.cdiv(tokens * length, clusters))
        cut = triton.cdiv(length, limit)
        if cut == chunks:
            return length
        if cut > chunks and limit > 192:
            break
    raise ValueError(f"no plan of {tokens} tokens has {chunks} chunks on {clusters} clusters")


def _chunk_limit(average: int) -> int:
    """Longest chunk of a plan by the rows per cluster, as FlashInfer decides it."""
    for bound, limit in ((8, 32), (16, 64), (32, 128), (64, 192)):
        if average <= bound:
            return limit
    return triton.cdiv(average, 256) * 256


@dataclass(frozen=True)
class Works:
    """A plan's work items, as views of FlashInfer's own workspace.

    request, row_start, length, first, last [WORKS] int32: the token that a work belongs to, where
    its list begins among all row indices, the token's number of rows, and the work's part of it.
    """

    request: torch.Tensor
    row_start: torch.Tensor
    length: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor

    @classmethod
    def of(cls, workspace: torch.Tensor, plan_info: Any) -> "Works":
        """Views of the arrays at the byte offsets that `MLAPlanInfo` lists, in its order."""
        offsets = [int(plan_info[place]) for place in (2, 3, 11, 13, 14)]
        return cls(*(workspace[at : at + 4 * WORKS].view(torch.int32) for at in offsets))


def check_works(works: Works, tokens: int, chunks: int, length: int) -> torch.Tensor:
    """Reads a fresh plan back: each token has `chunks` works that follow each other up to length.

    Returns [tokens, chunks] int32: the work that is each token's n-th chunk. Raises RuntimeError
    where the arrays hold anything else: then FlashInfer's layout is not the expected one.
    """
    count = tokens * chunks
    request, first, last, whole = (
        array[:count].cpu() for array in (works.request, works.first, works.last, works.length)
    )
    order = (request.long() * (length + 1) + first.long()).argsort()
    starts, ends = first[order].view(tokens, chunks), last[order].view(tokens, chunks)
    expected = torch.arange(tokens).repeat_interleave(chunks)
    fits = (
        bool((request[order] == expected).all())
        and bool((whole == length).all())
        and bool((starts[:, 0] == 0).all())
        and bool((ends[:, -1] == length).all())
        and bool((starts[:, 1:] == ends[:, :-1]).all())
        and bool((ends > starts).all())
    )
    if not fits:
        raise RuntimeError(
            f"FlashInfer's plan of {tokens} tokens of {length} rows is not laid out as expected in "
            f"{chunks} chunks each; use SGLANG_DSV4_OPS=sparse_attention=triton with this version"
        )
    return order.view(tokens, chunks).int()


class FlashInferPlan:
    """A planned wrapper and its re-cuttable works: all that touches FlashInfer's private state.

    Relied on, and checked here: `_planned_backend`, with `_plan_info` (the order of MLAPlanInfo),
    `_int_workspace_buffer` and `_kv_indices_buf`.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        mla = importlib.import_module("flashinfer.mla")
        multiprocessors = importlib.import_module("flashinfer.utils").get_device_sm_count(device)
        clusters = multiprocessors // (2 if shape.heads > TILE else 1)
        self.width = shape.width
        self.chunks = chunk_count(shape.tokens, shape.width, clusters)
        length = planned_length(shape.tokens, self.chunks, clusters)
        self.rows = torch.zeros(
            shape.tokens * max(length, shape.width), dtype=torch.int32, device=device
        )
        start = torch.arange(shape.tokens + 1, dtype=torch.int32)
        lengths = torch.full((shape.tokens,), length, dtype=torch.int32)
        reserved = [tensor.to(device) for tensor in (start, start * length, lengths)]
        self.wrapper = mla.BatchMLAPagedAttentionWrapper(
            _workspace(device),
            use_cuda_graph=True,
            qo_indptr=reserved[0],
            kv_indptr=reserved[1],
            kv_indices=self.rows,
            kv_len_arr=reserved[2],
            backend="fa3" if compute_capability() == 90 else "fa2",
        )
        self.wrapper.plan(
            metadata=mla.MLAPlanMetadata.csr(
                start,
                start * length,
                torch.zeros(shape.tokens * length, dtype=torch.int32),
                lengths,
            ),
            num_heads=shape.heads,
            head_dim_ckv=WIDTH.value,
            head_dim_kpe=0,
            page_size=1,
            causal=False,
            sm_scale=shape.scale,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
            lse_mode="base2",
        )
        self._adopt(shape, length)

    def _adopt(self, shape: Shape, length: int) -> None:
        """Keep the used part of the plan, check it, and let each token's list begin at its own."""
        planned = self.wrapper._planned_backend
        used = int(planned._plan_info[15]) + 4 * WORKS
        planned._int_workspace_buffer = planned._int_workspace_buffer[:used].clone()
        planned._pin_memory_int_workspace_buffer = None
        if planned._kv_indices_buf.data_ptr() != self.rows.data_ptr():
            raise RuntimeError("FlashInfer does not read the row indices that were reserved for it")
        self.works = Works.of(planned._int_workspace_buffer, planned._plan_info)
        self.order = check_works(self.works, shape.tokens, self.chunks, length).to(self.rows.device)
        count = shape.tokens * self.chunks
        self.works.row_start[:count] = self.works.request[:count] * shape.width

    def run(self, q: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention without sinks [T, heads, 512], and the base-2 logarithm [T, heads] fp32 of the
        sum of exponentials; of the rows and lengths that `recut` left."""
        out, statistics = self.wrapper.run(query=q, kv_cache=cache.unsqueeze(1), return_lse=True)
        return out, statistics


_PLANS: dict[tuple[Shape, torch.device], FlashInferPlan] = {}
_WORKSPACES: dict[torch.device, torch.Tensor] = {}


def _workspace(device: torch.device) -> torch.Tensor:
    if device not in _WORKSPACES:
        _WORKSPACES[device] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return _WORKSPACES[device]


# ---- kernels around it ----


def recut(keys: IndexList, plan: Any) -> None:
    """Write a step's rows and lengths into the plan, each token cut evenly into its chunks.

    keys: rows [T, K], lengths [T]; plan: `works`, `order` [T, chunks], `rows` [T * K] int32. A
    token without rows gets the null row, since FlashInfer wants one.
    """
    tokens, chunks = plan.order.shape
    works = plan.works
    _recut_kernel[(tokens,)](
        keys.rows,
        keys.rows.stride(0),
        keys.rows.stride(1),
        keys.lengths,
        keys.lengths.stride(0),
        plan.order,
        works.length,
        works.first,
        works.last,
        plan.rows,
        keys.rows.shape[1],
        chunks,
        ROWS=TILE,
        CHUNK_BLOCK=triton.next_power_of_2(chunks),
        BLOCK=INDEX_BLOCK,
        num_warps=4,
    )


def fold_sink(
    out: torch.Tensor,
    statistics: torch.Tensor,
    sink: torch.Tensor,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
) -> None:
    """Let the sinks into the denominators of finished attention, and undo the rotation, in place.

    out [T, heads, 512]; statistics [T, heads] fp32: log2 of each sum of exponentials.
    """
    tokens, heads = out.shape[:2]
    assert out.is_contiguous() and statistics.is_contiguous()
    _fold_sink_kernel[(tokens * triton.cdiv(heads, FOLD_HEADS),)](
        out,
        statistics,
        sink,
        positions,
        positions.stride(0),
        frequencies,
        heads,
        HEADS=FOLD_HEADS,
        num_warps=FOLD_HEADS,
    )


# Launched as usual: which blocks of FlashInfer's kernels wait for those ahead is its own affair.
@triton.jit
def _recut_kernel(
    rows,
    rows_token,
    rows_column,
    lengths,
    length_stride,
    order,
    work_length,
    work_first,
    work_last,
    plan_rows,
    width,
    chunks,
    ROWS: tl.constexpr,
    CHUNK_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    given = tl.load(lengths + token * length_stride).to(tl.int32)
    length = tl.maximum(given, 1)
    number = tl.arange(0, CHUNK_BLOCK)
    chunk = tl.cdiv(tl.cdiv(length, ROWS), chunks) * ROWS
    first = number * chunk
    last = tl.minimum(first + chunk, length)
    exists, used = number < chunks, first < length
    work = tl.load(order + token * chunks + number, mask=exists, other=0)
    # An empty work is [0, 0): the kernel then skips it.
    tl.store(work_first + work, tl.where(used, first, 0), mask=exists)
    tl.store(work_last + work, tl.where(used, last, 0), mask=exists)
    tl.store(work_length + work, tl.zeros((CHUNK_BLOCK,), tl.int32) + length, mask=exists)
    for start in range(0, length, BLOCK):
        column = start + tl.arange(0, BLOCK)
        source = rows + token * rows_token + column * rows_column
        row = tl.load(source, mask=column < given, other=0)
        tl.store(plan_rows + token * width + column, row.to(tl.int32), mask=column < length)


@triton.jit
def _fold_sink_kernel(
    out,
    statistics,
    sink,
    positions,
    position_stride,
    frequencies,
    heads,
    HEADS: tl.constexpr,
):
    blocks = tl.cdiv(heads, HEADS)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = (tl.program_id(0) % blocks) * HEADS + tl.arange(0, HEADS)
    exists = head < heads
    total = tl.load(statistics + token * heads + head, mask=exists, other=0.0)
    sinks = tl.load(sink + head, mask=exists, other=0.0) * 1.4426950408889634  # log2(e)
    share = (1 / (1 + tl.exp2(sinks - total)))[:, None]
    column, rotated = tl.arange(0, WIDTH)[None, :], tl.arange(0, ROTATED)[None, :] + PLAIN
    target = out + (token * heads + head)[:, None] * WIDTH
    is_plain = exists[:, None] & (column < PLAIN)
    plain = tl.load(target + column, mask=is_plain, other=0.0).to(tl.float32) * share
    tail = tl.load(target + rotated, mask=exists[:, None], other=0.0).to(tl.float32) * share
    angles = _angles(tl.load(positions + token * position_stride), frequencies)
    tail = _rotate(tail, tl.cos(angles), -tl.sin(angles), HEADS)
    tl.store(target + column, plain.to(out.dtype.element_ty), mask=is_plain)
    tl.store(target + rotated, tail.to(out.dtype.element_ty), mask=exists[:, None])
