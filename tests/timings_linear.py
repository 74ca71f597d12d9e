"""Linear layers at the model's shapes, with weights in BF16, FP8 and NVFP4: what is timed, and what
must compile."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernel_checks import SHARED_MEMORY, CompileCase
from kernel_timings import Call
from sglang_dsv4 import kernels_triton_linear as kernels
from sglang_dsv4 import kernels_triton_linear_fp4 as kernels_fp4
from sglang_dsv4.dequant import NVFP4_GROUP
from sglang_dsv4.fp4 import FP4Matrices
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
                found[f"linear_{way}, {name}, {tokens} tokens"] = (setup, moved)
    return found


def _ways(
    tokens: int, width: int, depth: int, groups: int
) -> Iterator[tuple[str, Callable[[], Call], float]]:
    """Its name, its setup, and bytes of a value of the weight."""

    def cublas() -> Call:
        x, weight = _inputs(tokens, width, depth, groups)
        dense = weight.to(BF16)
        return lambda: kernels.dense_product(x, dense, BF16, groups)

    def fp8(product: Callable[..., Any]) -> Callable[[], Call]:
        def setup() -> Call:
            (x, weight), scales = _inputs(tokens, width, depth, groups), _scales(width, depth)
            return lambda: product(x, weight, scales)

        return setup

    def by_tiles(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return kernels._tiled_product(x, weight.view(torch.uint8), scales, BF16, groups)

    def dequantised(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return kernels.dense_product(x, kernels.dequantised(weight, scales), BF16, groups)

    def fp4(product: Callable[..., Any]) -> Callable[[], Call]:
        def setup() -> Call:
            with torch.device("cuda"):
                weight = fp4_weight(width, depth)
                x = torch.randn(tokens, groups * depth, dtype=BF16)
            return lambda: product(x, weight)

        return setup

    def fp4_by_tiles(x: torch.Tensor, weight: FP4Matrices) -> torch.Tensor:
        return kernels_fp4._tiled_product(x, weight, BF16, groups)

    def fp4_dequantised(x: torch.Tensor, weight: FP4Matrices) -> torch.Tensor:
        return kernels.dense_product(x, kernels_fp4.dequantised(weight), BF16, groups)

    nvfp4 = 0.5 + 1 / NVFP4_GROUP
    yield "fp8 (bf16 by cublas)", cublas, 2
    if tokens <= 512:
        yield "fp8 tiles", fp8(by_tiles), 1
        yield "fp4 tiles", fp4(fp4_by_tiles), nvfp4
    if tokens >= 64:
        yield "fp8 dequantised", fp8(dequantised), 1
        yield "fp4 dequantised", fp4(fp4_dequantised), nvfp4
    if groups == 1 and tokens <= 128:
        yield "fp4 (as an expert)", lambda: _one_expert(tokens, width, depth), nvfp4


def fp4_weight(width: int, depth: int) -> FP4Matrices:
    """Packed, with random codes and scales of one; a factor for every 16 rows."""
    weight = FP4Matrices(1, width, depth, group=NVFP4_GROUP, parts=width // 16)
    weight.codes.random_(0, 256)
    weight.factors.fill_(depth**-0.5)
    weight.packed = True
    return weight


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
        for case in _fp4_cases():
            key = repr((case.kernel.__name__, case.signature, case.constexprs, case.capabilities))
            found.setdefault(key, case)
    return list(found.values())


def _fp4_cases() -> Iterator[CompileCase]:
    """The same of NVFP4, and Pro's products that are not in slices; Hopper's tiles are others, and
    read in another order."""
    flash, pro = LINEARS["flash o_b"], LINEARS["pro, a rank of 8, q_b"]
    some = [(flash, 1, (80, 90, 120)), (flash, 64, (89, 100))]
    some += [(pro, 1, (90,)), (pro, 16, ()), (pro, 33, (80,))]
    for capabilities in ((90,), tuple(each for each in SHARED_MEMORY if each != 90)):
        capability = mock.Mock(return_value=capabilities[0])
        with mock.patch.object(kernels_fp4, "compute_capability", capability):
            for (width, depth, _), tokens, usual in some:
                x, weight = torch.empty(tokens, depth, dtype=BF16), fp4_weight(width, depth)
                chosen = tuple({*usual} & {*capabilities})
                options: dict[str, Any] = {"usual": chosen, "capabilities": capabilities}
                for case in launched(kernels_fp4.linear_fp4, x, weight, dtype=BF16, **options):
                    if case.kernel is not kernels._add_slices_kernel:
                        yield replace(case, name=f"{case.name}, {width} x {depth}")
    yield from launched(kernels_fp4.dequantised, weight)
