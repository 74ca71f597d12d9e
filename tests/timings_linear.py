"""Linear layers at the model's shapes, with weights in BF16, FP8 and NVFP4: what is timed, and what
must compile."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernel_checks import SHARED_MEMORY, CompileCase
from kernel_timings import Call
from sglang_dsv4 import kernels_triton_linear as kernels
from sglang_dsv4.dequant import NVFP4_GROUP
from sglang_dsv4.moe.fp4 import FP4Matrices
from sglang_dsv4.moe.kernels_triton_experts import Choices, _find_blocks
from sglang_dsv4.moe.kernels_triton_fp4 import _FP4
from timings_moe import launched

BF16 = torch.bfloat16

# name -> outputs N, inputs K of one group, groups
LINEARS = {
    "flash q_b": (32768, 1024, 1),
    "flash q_a+kv": (1536, 4096, 1),
    "flash o_a": (8192, 4096, 8),
    "flash o_b": (4096, 8192, 1),
    "flash shared w13": (4096, 4096, 1),
    "flash shared w2": (4096, 2048, 1),
    "flash index q_b": (8192, 1024, 1),
    "pro, a rank of 8, q_b": (8192, 1536, 1),
    "pro, a rank of 8, q_a+kv": (2048, 7168, 1),
    "pro, a rank of 8, o_a": (2048, 4096, 2),
    "pro, a rank of 8, o_b": (7168, 2048, 1),
    "pro, a rank of 8, shared w13": (768, 7168, 1),
    "pro, a rank of 8, shared w2": (7168, 384, 1),
}
TOKENS = (1, 8, 64, 512, 4096)


# ---- inputs ----


def _inputs(tokens: int, width: int, depth: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x in BF16, and a weight in E4M3."""
    x = torch.randn(tokens, groups * depth, device="cuda").to(BF16)
    weight = torch.randn(width, depth, device="cuda").to(torch.float8_e4m3fn)
    return x, weight


def _scales(width: int, depth: int) -> torch.Tensor:
    return torch.full((-(-width // 128), -(-depth // 128)), 2.0**-5, device="cuda")


# ---- what is timed ----


def cases() -> dict[str, tuple[Callable[[], Call], int]]:
    """Every way to multiply each weight."""
    found = {}
    for tokens in TOKENS:
        for name, shape in LINEARS.items():
            for way, setup, value_bytes in _ways(tokens, *shape):
                width, depth, groups = shape
                states = 2 * tokens * (groups * depth + width)
                moved = int(width * depth * value_bytes) + states
                found[f"linear_fp8 {way}, {name}, {tokens} tokens"] = (setup, moved)
    return found


def _ways(
    tokens: int, width: int, depth: int, groups: int
) -> Iterator[tuple[str, Callable[[], Call], float]]:
    """Its name, its setup, and bytes of a value of the weight."""

    def cublas() -> Call:
        x, weight = _inputs(tokens, width, depth, groups)
        dense = weight.to(BF16)
        return lambda: kernels._dense_product(x, dense, BF16, groups)

    def fp8(product: Callable[..., Any]) -> Callable[[], Call]:
        def setup() -> Call:
            (x, weight), scales = _inputs(tokens, width, depth, groups), _scales(width, depth)
            return lambda: product(x, weight, scales)

        return setup

    def by_tiles(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return kernels._tiled_product(x, weight.view(torch.uint8), scales, BF16, groups)

    def dequantised(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return kernels._dense_product(x, kernels.dequantised(weight, scales), BF16, groups)

    yield "(bf16 by cublas)", cublas, 2
    if tokens <= 512:
        yield "tiles", fp8(by_tiles), 1
    if tokens >= 64:
        yield "dequantised", fp8(dequantised), 1
    if groups > 1 or tokens > 128:
        return

    yield "(nvfp4 as an expert)", lambda: _one_expert(tokens, width, depth), 0.5 + 1 / NVFP4_GROUP


def _one_expert(tokens: int, width: int, depth: int) -> Call:
    """The product that routed experts use, with one of them, which every token chooses."""
    with torch.device("cuda"):
        weight = FP4Matrices(1, width, depth, group=NVFP4_GROUP, parts=1)
        weight.codes.random_(0, 256)
        weight.factors.fill_(depth**-0.5)
        weight.packed = True
        x = torch.randn(tokens, depth, dtype=BF16)
        chosen = torch.zeros(tokens, 1, dtype=torch.int64)
    matrix, tiles, choices = _FP4(weight), _FP4.tiles(tokens, 2), Choices(chosen, 1)

    def call() -> None:
        out = torch.empty(tokens, width, dtype=BF16, device="cuda")
        matrix.multiply(x, out, _find_blocks(choices, tiles), tiles)

    return call


# ---- what must compile ----


def compile_cases() -> list[CompileCase]:
    """Each tile as Flash's o_b launches it, in slices; the usual ones for some architectures."""
    width, depth, _ = LINEARS["flash o_b"]
    found: dict[str, CompileCase] = {}
    with FakeTensorMode():
        weight = torch.empty(width, depth, dtype=torch.float8_e4m3fn)
        scales = torch.empty(width // 128, depth // 128)
        for tokens, usual in ((1, (80, 90, 120)), (64, (89, 100)), (17, ()), (128, ())):
            x = torch.empty(tokens, depth, dtype=BF16)
            options: dict[str, Any] = {"dtype": BF16, "usual": usual}
            for case in launched(kernels.linear_fp8, x, weight, scales, **options):
                if case.kernel is kernels._add_slices_kernel:
                    case = replace(case, usual=tuple(SHARED_MEMORY) if tokens == 1 else ())
                key = repr((case.kernel.__name__, case.signature, case.constexprs))
                found.setdefault(key, case)
        for case in launched(kernels.dequantised, weight, scales):
            found[case.name] = case
    return list(found.values())
