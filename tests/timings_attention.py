"""The attention kernels at the model's shapes: what kernel_timings times, and what must compile."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kernel_checks import CompileCase
from kernel_timings import Call, providers
from sglang_dsv4.attention import (
    kernels_flashinfer,
    kernels_flashmla,
    kernels_triton,
    kernels_triton_metadata,
)
from sglang_dsv4.attention.cache import PAGE
from sglang_dsv4.attention.metadata import LOOKBACK, Batch, EntryTable, IndexList

WIDTH = 512
POOL_ROWS = 1 << 20
SCALE = WIDTH**-0.5
ATTENTION_SHAPES = {
    "flash csa": (64, 640),
    "flash hca 8k": (64, 192),
    "flash hca 128k": (64, 1152),
    "pro csa": (128, 1152),
    "8 heads": (8, 640),
}
TOKENS = (1, 8, 32, 128, 2048)
WINDOW = 128
# requests, new tokens of each, and how long each is then
FORWARDS = {
    "decode 1, 128k": (1, 1, 1 << 17),
    "decode 64, 128k": (64, 1, 1 << 17),
    "prefill 8192": (1, 8192, 8192),
    "chunk of 8192, 128k": (1, 8192, 1 << 17),
}


def cases() -> dict[str, tuple[Callable[[], Call], int]]:
    """Every op of this file by every provider that the machine can run."""
    found = {}
    for tokens in TOKENS:
        for shape, (heads, width) in ATTENTION_SHAPES.items():
            for name, op in providers("sparse_attention").items():
                moved = tokens * (width + 2 * heads) * WIDTH * 2
                setup = _attention_setup(op, tokens, heads, width)
                found[f"sparse_attention {name}, {shape}, {tokens} tokens"] = (setup, moved)
        for name, op in providers("query_norm_rope").items():
            setup = _query_setup(op, tokens, 64)
            moved = 2 * tokens * 64 * WIDTH * 2
            found[f"query_norm_rope {name}, 64 heads, {tokens} tokens"] = (setup, moved)
        for name, op in providers("kv_norm_rope_store").items():
            moved = 2 * tokens * WIDTH * 2
            found[f"kv_norm_rope_store {name}, {tokens} tokens"] = (_kv_setup(op, tokens), moved)
        for name, op in providers("csa_index_list").items():
            moved = 2 * tokens * (128 + 512) * 8
            found[f"csa_index_list {name}, {tokens} tokens"] = (_list_setup(op, tokens), moved)
    for shape, sizes in FORWARDS.items():
        for name, op in providers("build_metadata").items():
            requests, new, length = sizes
            # Rows of windows are read and twice written; HCA's, what CSA looks back at, the rest.
            each = 3 * WINDOW + length // 128 + 3 * LOOKBACK + 12
            setup = _metadata_setup(op, *sizes)
            found[f"build_metadata {name}, {shape}"] = (setup, requests * new * each * 8)
    return found


def _frequencies() -> torch.Tensor:
    return torch.rand(32, device="cuda")


def _attention_setup(op: Any, tokens: int, heads: int, width: int) -> Callable[[], Call]:
    def setup() -> Call:
        prepare = getattr(importlib.import_module(op.__module__), "prepare", None)
        if prepare is not None and tokens <= 256:
            prepare(tokens, heads, width, scale=SCALE, device="cuda")
        pool = torch.randn(POOL_ROWS, WIDTH, dtype=torch.bfloat16, device="cuda")
        pool[0] = 0
        rows = torch.randint(1, POOL_ROWS, (tokens, width), device="cuda")
        keys = IndexList(rows, torch.full((tokens,), width, device="cuda"))
        q = torch.randn(tokens, heads, WIDTH, dtype=torch.bfloat16, device="cuda")
        sink = torch.randn(heads, device="cuda")
        positions, frequencies = torch.arange(tokens, device="cuda"), _frequencies()
        return lambda: op(q, pool, keys, sink, positions, frequencies, scale=SCALE)

    return setup


def _query_setup(op: Any, tokens: int, heads: int) -> Callable[[], Call]:
    def setup() -> Call:
        q = torch.randn(tokens, heads, WIDTH, dtype=torch.bfloat16, device="cuda")
        positions, frequencies = torch.arange(tokens, device="cuda"), _frequencies()
        return lambda: op(q, positions, frequencies, eps=1e-6)

    return setup


def _kv_setup(op: Any, tokens: int) -> Callable[[], Call]:
    def setup() -> Call:
        kv, weight = (torch.randn(*s, dtype=torch.bfloat16, device="cuda")
                      for s in ((tokens, WIDTH), (WIDTH,)))  # fmt: skip
        cache = torch.zeros(POOL_ROWS, WIDTH, dtype=torch.bfloat16, device="cuda")
        rows = torch.randperm(POOL_ROWS - 1, device="cuda")[:tokens] + 1
        positions, frequencies = torch.arange(tokens, device="cuda"), _frequencies()
        return lambda: op(kv, weight, positions, frequencies, rows, cache, eps=1e-6)

    return setup


def _list_setup(op: Any, tokens: int) -> Callable[[], Call]:
    def setup() -> Call:
        selected = torch.randint(0, 16384, (tokens, 512), device="cuda")
        window = IndexList(
            torch.randint(1, 4096, (tokens, 128), device="cuda"),
            torch.full((tokens,), 128, device="cuda"),
        )
        requests = min(tokens, 128)
        table = EntryTable(
            request=torch.arange(tokens, device="cuda") % requests,
            page_table=torch.randint(1, 9999, (requests, 256), device="cuda"),
            visible=torch.full((tokens,), 16384, device="cuda"),
            width=16384,
            first_row=4096,
        )
        return lambda: op(selected, window, table)

    return setup


def _metadata_setup(op: Any, requests: int, new: int, length: int) -> Callable[[], Call]:
    """Requests of `length` tokens, the new ones included, whose pages lie anywhere."""

    def setup() -> Call:
        pages = requests * length // PAGE
        table = 1 + torch.randperm(pages, device="cuda").view(requests, -1)
        prefix = torch.full((requests,), length - new, device="cuda")
        batch = Batch(
            positions=(prefix[:, None] + torch.arange(new, device="cuda")).flatten(),
            request=torch.arange(requests, device="cuda").repeat_interleave(new),
            request_slots=1 + torch.arange(requests, device="cuda"),
            prefix_lens=prefix,
            new_lens=torch.full((requests,), new, device="cuda"),
            page_table=table,
            window_map=torch.arange((1 + pages) * PAGE, device="cuda"),
            max_len=length,
        )
        return lambda: op(batch, window=WINDOW, window_rows=(1 + pages) * PAGE)

    return setup


# ---- what must compile ----

_ATTENTION = {
    "q": "*bf16", "q_token": "i32", "q_head": "i32", "cache": "*bf16", "cache_row": "i32",
    "rows": "*i64", "rows_token": "i32", "lengths": "*i64", "sink": "*fp32", "positions": "*i64",
    "frequencies": "*fp32", "out": "*bf16", "parts": "*fp32", "statistics": "*fp32",
    "heads": "i32", "splits": "i32", "scale": "fp32",
}  # fmt: skip
# Triton makes a constant of an integer argument that is 1, as these strides are.
_UNIT = {"rows_column": 1, "length_stride": 1, "position_stride": 1}


_TOKEN_METADATA = (
    *("positions", "requests", "prefix_lens", "new_lens", "page_table", "window_map"),
    *("window_store", "window_rows", "window_lengths", "hca_rows", "hca_lengths", "visible"),
    *("csa_position", "csa_token", "csa_ring", "csa_ring_store", "csa_entry", "csa_row"),
    *("hca_segment", "hca_row"),
)


def _attention_tiles(heads: int, whole: bool) -> Callable[[int], Mapping[str, Any]]:
    def tiles(capability: int) -> dict[str, Any]:
        chosen = kernels_triton.attention_tiles(512 if whole else 32, heads, 2, capability)
        return {"HEADS": chosen.heads, "ROWS": chosen.rows, "num_warps": chosen.warps,
                "num_stages": chosen.stages}  # fmt: skip

    return tiles


def _attention_case(name: str, heads: int, whole: bool, **options: Any) -> CompileCase:
    constexprs = {**_UNIT, "WHOLE": whole, "HEADS": None, "ROWS": None}
    tiles = _attention_tiles(heads, whole)
    kernel = kernels_triton._attention_kernel
    return CompileCase(name, kernel, _ATTENTION, constexprs, {}, tiles, **options)


def compile_cases() -> list[CompileCase]:
    """One configuration of each kernel; of the attention kernel, both of its endings."""
    triton, flashinfer, flashmla = kernels_triton, kernels_flashinfer, kernels_flashmla
    metadata = kernels_triton_metadata
    turned = {"positions": "*i64", "frequencies": "*fp32"}
    return [
        _attention_case("64 heads, split", 64, False, usual=(80, 90, 120)),
        _attention_case("64 heads, whole", 64, True, usual=(89, 90, 100)),
        _attention_case("16 heads, whole", 16, True, usual=(), capabilities=(80, 90, 120)),
        _attention_case("32 heads, split", 32, False, usual=(), capabilities=(90, 120)),
        CompileCase(
            "merge", triton._merge_kernel,
            {"parts": "*fp32", "statistics": "*fp32", "sink": "*fp32", "out": "*bf16",
             "heads": "i32", "splits": "i32", **turned},
            {"position_stride": 1, "SPLIT_BLOCK": 32}, {"num_warps": 8},
        ),
        CompileCase(
            "query_norm_rope", triton._query_norm_rope_kernel,
            {"q": "*bf16", "q_token": "i32", "q_head": "i32", "out": "*bf16", "heads": "i32",
             "eps": "fp32", **turned},
            {"position_stride": 1, "HEADS": 4}, {"num_warps": 4},
        ),
        CompileCase(
            "kv_norm_rope_store", triton._kv_norm_rope_store_kernel,
            {"kv": "*bf16", "kv_token": "i32", "weight": "*bf16", "rows": "*i64",
             "cache": "*bf16", "cache_row": "i32", "eps": "fp32", **turned},
            {"position_stride": 1, "rows_stride": 1}, {"num_warps": 1},
        ),
        CompileCase(
            "csa_index_list", triton._csa_index_list_kernel,
            {"selected": "*i64", "selected_token": "i32", "window": "*i64", "window_token": "i32",
             "window_lengths": "*i64", "requests": "*i64", "page_table": "*i64",
             "page_table_request": "i32", "rows": "*i64", "lengths": "*i64", "window_width": "i32",
             "chosen": "i32", "first_row": "i32"},
            {"selected_column": 1, "window_column": 1, "window_length_stride": 1,
             "request_stride": 1, "page_table_page": 1, "PER_PAGE": 64, "BLOCK": 1024},
            {"num_warps": 4},
        ),
        CompileCase(
            "token_metadata", metadata._token_metadata_kernel,
            {**dict.fromkeys(_TOKEN_METADATA, "*i64"), "csa_is_new": "*i1",
             "page_table_request": "i32", "page_table_page": "i32", "window": "i32",
             "width": "i32", "first_row": "i32"},
            {"COLUMNS": metadata.COLUMNS}, {"num_warps": 2},
        ),
        CompileCase(
            "segment_metadata", metadata._segment_metadata_kernel,
            {"prefix_lens": "*i64", "new_lens": "*i64", "request_slots": "*i64",
             "carried": "*i1", "carried_slots": "*i64", "last_segments": "*i64",
             "segments": "i32"},
            {}, {"num_warps": 2},
        ),
        CompileCase(
            "recut", flashinfer._recut_kernel,
            {"rows": "*i64", "rows_token": "i32", "lengths": "*i64", "order": "*i32",
             "work_length": "*i32", "work_first": "*i32", "work_last": "*i32",
             "plan_rows": "*i32", "width": "i32", "chunks": "i32"},
            {"rows_column": 1, "length_stride": 1, "ROWS": 64, "CHUNK_BLOCK": 16, "BLOCK": 1024},
            {"num_warps": 4},
        ),
        CompileCase(
            "fold_sink", flashinfer._fold_sink_kernel,
            {"out": "*bf16", "statistics": "*fp32", "sink": "*fp32", "heads": "i32", **turned},
            {"position_stride": 1, "HEADS": 2}, {"num_warps": 2},
        ),
        CompileCase(
            "narrow", flashmla._narrow_kernel,
            {"rows": "*i64", "rows_token": "i32", "lengths": "*i64", "narrow_rows": "*i32",
             "narrow_lengths": "*i32", "padded": "i32"},
            {"rows_column": 1, "length_stride": 1, "BLOCK": 1024}, {"num_warps": 4},
            capabilities=(90,),
        ),
        CompileCase(
            "turn_back", flashmla._turn_back_kernel,
            {"out": "*bf16", "lengths": "*i32", "heads": "i32", **turned},
            {"position_stride": 1, "HEADS": 8}, {"num_warps": 4}, capabilities=(90,),
        ),
    ]  # fmt: skip
