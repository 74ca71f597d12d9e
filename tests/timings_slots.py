"""decode_slots at a server's sizes: what kernel_timings times, and what must compile."""

from collections.abc import Callable
from typing import Any

import torch

from kernel_checks import CompileCase
from kernel_timings import Call, providers
from sglang_dsv4 import kernels_triton_slots
from sglang_dsv4.attention.cache import PAGE

CONTEXT = 1 << 17
REQUESTS = (1, 64, 256)


def cases() -> dict[str, tuple[Callable[[], Call], int]]:
    """The op by every provider that the machine can run."""
    return {
        f"decode_slots {name}, {requests} requests": (_setup(op, requests), requests * 52)
        for requests in REQUESTS
        for name, op in providers("decode_slots").items()
    }


def _setup(op: Any, requests: int) -> Callable[[], Call]:
    """Requests out of step, every other of which begins a page."""

    def setup() -> Call:
        table = torch.randint(1, 1 << 20, (requests + 1, CONTEXT), device="cuda").int()
        window_map = torch.arange((1 << 20) + PAGE, device="cuda")
        rows = torch.randperm(requests, device="cuda") + 1
        lengths = torch.arange(1, requests + 1, device="cuda") * (PAGE // 2)
        pages = torch.randperm(1 << 12, device="cuda")
        return lambda: op(table, window_map, rows, lengths, pages, pages, page=PAGE)

    return setup


def compile_cases() -> list[CompileCase]:
    """The one variant that there is."""
    pointers = ("window_map", "request_slots", "seq_lens", "pages", "window_pages", "slots")
    return [
        CompileCase(
            "decode_slots",
            kernels_triton_slots._decode_slots_kernel,
            {**dict.fromkeys(pointers, "*i64"), "req_to_token": "*i32",
             "context": "i32", "requests": "i32"},
            {"PAGE": PAGE, "REQUESTS": kernels_triton_slots.REQUESTS},
            {"num_warps": 4},
        )
    ]  # fmt: skip
