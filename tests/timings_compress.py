"""Compressors and indexer at the model's shapes: what is timed, and what must compile."""

from collections.abc import Callable
from typing import Any

import torch

from kernel_checks import CompileCase
from kernel_timings import Call, providers
from sglang_dsv4.attention import kernels_triton_compress, kernels_triton_index
from sglang_dsv4.attention.cache import PAGE, RING
from sglang_dsv4.attention.metadata import Batch, EntryTable, Metadata
from sglang_dsv4.attention.reference_metadata import build_metadata

WIDTH, INDEX_WIDTH, HEADS = 512, 128, 64
DECODES = (1, 8, 32, 128)
PREFILLS = (2048, 8192)  # new tokens of one request, from the middle of a ring and of a window on
CONTEXTS = {"8k": 2048, "32k": 8192, "128k": 32768}  # entries
KEY_PAGES = 1 << 14  # 256 MiB of index keys, more than any L2
EPS = 1e-6

Cases = dict[str, tuple[Callable[[], Call], int]]


def cases() -> Cases:
    """Every op of this file by every provider that the machine can run."""
    found: Cases = {}
    for requests, new in [*((count, 1) for count in DECODES), *((1, count) for count in PREFILLS)]:
        tokens = requests * new
        shape = f"prefill {new}" if new > 1 else f"decode {requests}"
        for name, op in providers("compress_csa").items():
            for kind, width in (("main", WIDTH), ("index", INDEX_WIDTH)):
                read, written = 4 * width, 4 * width * min(requests, tokens)
                moved = 4 * (tokens * read + written) + tokens // 4 * width * 2
                setup = _csa_setup(op, requests, new, width)
                found[f"compress_csa {name}, {kind}, {shape}"] = (setup, moved)
        for name, op in providers("compress_hca").items():
            moved = 4 * WIDTH * (2 * tokens + min(tokens, 128) + 6 * requests)
            found[f"compress_hca {name}, {shape}"] = (_hca_setup(op, requests, new), moved)
        for name, op in providers("index_query").items():
            moved = 2 * tokens * HEADS * INDEX_WIDTH * 2
            found[f"index_query {name}, {shape}"] = (_query_setup(op, tokens), moved)
    for context, entries in CONTEXTS.items():
        for requests in (1, 32):
            for top_k in (512, 1024):
                found |= _select_cases(context, entries, requests, top_k)
    return found


def _select_cases(context: str, entries: int, requests: int, top_k: int) -> Cases:
    """Decode with the table as wide as its longest context, and with one of 128k."""
    found: Cases = {}
    for name, op in providers("select_entries").items():
        for width in sorted({entries, CONTEXTS["128k"]}):
            setup = _select_setup(op, requests, entries, width, top_k)
            case = f"select_entries {name}, context {context}, width {width}, k {top_k}"
            moved = requests * entries * INDEX_WIDTH * 2
            found[f"{case}, decode {requests}"] = (setup, moved)
    return found


def _randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, device="cuda")


def _metadata(requests: int, new: int) -> tuple[Metadata, int]:
    """New tokens of each request after 1,001 and more old ones, and the number of pages."""
    prefix = 1001 + torch.arange(requests, device="cuda")
    longest = 1001 + requests + new
    each = -(-longest // PAGE)
    pages = requests * each + 1
    table = 1 + torch.arange(requests * each, device="cuda").view(requests, each)
    batch = Batch(
        positions=(prefix[:, None] + torch.arange(new, device="cuda")).flatten(),
        request=torch.arange(requests, device="cuda").repeat_interleave(new),
        request_slots=1 + torch.arange(requests, device="cuda"),
        prefix_lens=prefix,
        new_lens=torch.full((requests,), new, device="cuda"),
        page_table=table,
        window_map=torch.arange(pages * PAGE, device="cuda"),
        max_len=longest,
    )
    return build_metadata(batch, window=128, window_rows=pages * PAGE), pages


def _csa_setup(op: Any, requests: int, new: int, width: int) -> Callable[[], Call]:
    def setup() -> Call:
        meta, pages = _metadata(requests, new)
        kv, gate = _randn(requests * new, 2 * width), _randn(requests * new, 2 * width)
        weight, frequencies = _randn(width, dtype=torch.bfloat16), torch.rand(32, device="cuda")
        is_index = width == INDEX_WIDTH
        rows = meta.csa.entry if is_index else meta.csa.row
        state = _randn(pages * RING, 4 * width)
        cache = torch.zeros(pages * (PAGE + 64), width, dtype=torch.bfloat16, device="cuda")
        given = (kv, gate, _randn(4, 2 * width), weight, frequencies, meta.csa, rows, state, cache)
        return lambda: op(*given, eps=EPS, fp4=is_index)

    return setup


def _hca_setup(op: Any, requests: int, new: int) -> Callable[[], Call]:
    def setup() -> Call:
        meta, pages = _metadata(requests, new)
        kv, gate = _randn(requests * new, WIDTH), _randn(requests * new, WIDTH)
        weight, frequencies = _randn(WIDTH, dtype=torch.bfloat16), torch.rand(32, device="cuda")
        state = _randn(requests + 1, 3 * WIDTH).abs()
        cache = torch.zeros(pages * (PAGE + 2), WIDTH, dtype=torch.bfloat16, device="cuda")
        given = (kv, gate, _randn(128, WIDTH), weight, frequencies, meta.hca, meta.positions)
        return lambda: op(*given, state, cache, eps=EPS)

    return setup


def _query_setup(op: Any, tokens: int) -> Callable[[], Call]:
    def setup() -> Call:
        q = _randn(tokens, HEADS, INDEX_WIDTH, dtype=torch.bfloat16)
        positions, frequencies = torch.arange(tokens, device="cuda"), torch.rand(32, device="cuda")
        return lambda: op(q, positions, frequencies, fp4=True)

    return setup


def _select_setup(
    op: Any, requests: int, entries: int, width: int, top_k: int
) -> Callable[[], Call]:
    def setup() -> Call:
        pages = width // 64
        order = torch.randperm(max(KEY_PAGES, requests * pages), device="cuda") + 1
        keys = _randn((len(order) + 1) * 64, INDEX_WIDTH, dtype=torch.bfloat16)
        table = EntryTable(
            request=torch.arange(requests, device="cuda"),
            page_table=order[: requests * pages].view(requests, pages),
            visible=torch.full((requests,), entries, device="cuda"),
            width=width,
            first_row=PAGE,
        )
        q = _randn(requests, HEADS, INDEX_WIDTH, dtype=torch.bfloat16)
        weights = _randn(requests, HEADS)
        found = torch.zeros(1, dtype=torch.int64, device="cuda")
        return lambda: op(q, weights, keys, table, top_k=top_k, nan_scores=found)

    return setup


# ---- what must compile ----

_COMPRESS = {
    "kv": "*fp32", "kv_token": "i32", "gate": "*fp32", "gate_token": "i32", "ape": "*fp32",
    "weight": "*bf16", "frequencies": "*fp32", "rows": "*i64", "state": "*fp32", "cache": "*bf16",
    "cache_row": "i32", "tokens": "i32", "eps": "fp32",
}  # fmt: skip
_CSA = {
    **_COMPRESS, "position": "*i64", "is_new": "*i1", "new_token": "*i64", "ring": "*i64",
    "ring_store": "*i64",
}  # fmt: skip
_HCA = {
    **_COMPRESS, "positions": "*i64", "segments": "*i64", "carried": "*i1",
    "carried_slots": "*i64", "last_segments": "*i64", "request_slots": "*i64", "requests": "i32",
}  # fmt: skip
_SCORE = {
    "q": "*bf16", "q_token": "i32", "q_head": "i32", "head_weights": "*fp32",
    "head_weights_token": "i32", "keys": "*bf16", "keys_row": "i32", "requests": "*i64",
    "page_table": "*i64", "page_table_request": "i32", "visible": "*i64", "width": "i32",
    "orders": "*i32", "orders_token": "i32", "nan_scores": "*i64", "heads": "i32",
}  # fmt: skip
_SELECT = {
    "orders": "*i32", "orders_token": "i32", "visible": "*i64", "width": "i32",
    "chosen": "*i64", "top_k": "i32",
}  # fmt: skip
_QUERY = {
    "q": "*bf16", "q_token": "i32", "q_head": "i32", "positions": "*i64", "frequencies": "*fp32",
    "out": "*bf16", "heads": "i32",
}  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """One configuration of each kernel, and of `compress_hca` both."""
    compress, index = kernels_triton_compress, kernels_triton_index
    csa, hca = compress._compress_csa_kernel, compress._compress_hca_kernel
    return [
        CompileCase(
            "compress_csa", csa, _CSA, {"WIDTH": WIDTH, "FP4": False}, compress.csa_options(WIDTH),
            usual=(80, 90, 120),
        ),
        CompileCase(
            "index keys", csa, _CSA, {"WIDTH": INDEX_WIDTH, "FP4": True},
            compress.csa_options(INDEX_WIDTH), usual=(89, 100),
        ),
        *(
            CompileCase(f"compress_hca, {name}", hca, _HCA, {"WIDTH": WIDTH, "ROWS": rows},
                        {"num_warps": compress.warps_of(WIDTH)}, usual=usual)
            for name, rows, usual in (
                ("decode", compress.fold_rows(8, 8), (89, 100)),
                ("prefill", compress.fold_rows(800, 8), (80, 90, 120)),
            )
        ),
        CompileCase(
            "index_query", index._index_query_kernel, _QUERY,
            {"HEADS": index.QUERY_HEADS, "FP4": True}, {"num_warps": 1},
        ),
        CompileCase(
            "scores", index._score_kernel, _SCORE, {"HEADS": HEADS}, index.score_options(2)
        ),
        *(
            CompileCase(
                f"top {chosen}", index._select_kernel, _SELECT,
                {"BLOCK": index.SELECT_BLOCK, "CHOSEN": chosen}, index.SELECT_OPTIONS, usual=usual,
            )
            for chosen, usual in ((512, (80, 90, 120)), (64, (89, 100)))
        ),
    ]  # fmt: skip
