"""Linear layers at the model's shapes, with weights in BF16, FP8 and NVFP4: what is timed, and what
must compile."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
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
from sglang_dsv4.fp8 import FP8Matrix
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


def fp8_weight(width: int, depth: int) -> FP8Matrix:
    """Packed, with scales of one size."""
    weight = FP8Matrix(width, depth, kernels.linear_fp8)
    weight.codes.random_(0, 0x78)  # no NaN among them
    weight.scales.fill_(2.0**-8)
    weight.packed = True
    return weight


def fp4_weight(width: int, depth: int) -> FP4Matrices:
    """Packed, with random codes and scales of one; a factor for every 16 rows."""
    weight = FP4Matrices(1, width, depth, group=NVFP4_GROUP, parts=width // 16)
    weight.codes.random_(0, 256)
    weight.factors.fill_(depth**-0.5)
    weight.packed = True
    return weight


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
        with torch.device("cuda"):
            x = torch.randn(tokens, groups * depth, dtype=BF16)
            dense = torch.randn(width, depth, dtype=BF16)
        return lambda: kernels.dense_product(x, dense, BF16, groups)

    def tiles(module: ModuleType, made: Callable[[int, int], Any]) -> Callable[[], Call]:
        def setup() -> Call:
            with torch.device("cuda"):
                x, weight = torch.randn(tokens, groups * depth, dtype=BF16), made(width, depth)
            return lambda: module._tiled_product(x, weight, BF16, groups)

        return setup

    def dequantised(module: ModuleType, made: Callable[[int, int], Any]) -> Callable[[], Call]:
        def setup() -> Call:
            with torch.device("cuda"):
                x, weight = torch.randn(tokens, groups * depth, dtype=BF16), made(width, depth)
            return lambda: kernels.dense_product(x, module.dequantised(weight), BF16, groups)

        return setup

    nvfp4 = 0.5 + 1 / NVFP4_GROUP
    yield "fp8 (bf16 by cublas)", cublas, 2
    if tokens <= 512:
        yield "fp8 tiles", tiles(kernels, fp8_weight), 1
        yield "fp4 tiles", tiles(kernels_fp4, fp4_weight), nvfp4
    if tokens >= 64:
        yield "fp8 dequantised", dequantised(kernels, fp8_weight), 1
        yield "fp4 dequantised", dequantised(kernels_fp4, fp4_weight), nvfp4
    if groups == 1 and tokens <= 128:
        yield "fp4 (as an expert)", lambda: _one_expert(tokens, width, depth), nvfp4


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
    """Each tile as Flash's o_b launches it, in slices, and some of Pro's that are not; the usual
    ones for some architectures."""
    found: dict[str, CompileCase] = {}
    with FakeTensorMode():
        for case in (*_cases(kernels, "linear_fp8", fp8_weight),
                     *_cases(kernels_fp4, "linear_fp4", fp4_weight)):  # fmt: skip
            key = repr((case.kernel.__name__, case.signature, case.constexprs, case.capabilities))
            found.setdefault(key, case)
    return list(found.values())


def _cases(module: ModuleType, op: str, made: Callable[[int, int], Any]) -> Iterator[CompileCase]:
    """Hopper's tiles are others, or read in another order."""
    flash, pro = LINEARS["flash o_b"], LINEARS["pro, a rank of 8, q_b"]
    some = [(flash, 1, (80, 90, 120)), (flash, 64, (89, 100)), (flash, 17, ()), (flash, 128, ())]
    some += [(pro, 1, (90,)), (pro, 16, ()), (pro, 33, (80,))]
    every = tuple(SHARED_MEMORY)
    tiles = (90,), tuple(each for each in every if each != 90)
    for capabilities, ((width, depth, _), tokens, usual) in itertools.product(tiles, some):
        x, weight = torch.empty(tokens, depth, dtype=BF16), made(width, depth)
        chosen = tuple({*usual} & {*capabilities})
        options: dict[str, Any] = {"usual": chosen, "capabilities": capabilities}
        capability = mock.Mock(return_value=capabilities[0])
        with mock.patch.object(module, "compute_capability", capability):
            found = launched(getattr(module, op), x, weight, dtype=BF16, **options)
        for case in found:
            if case.kernel is not kernels._add_slices_kernel:
                yield replace(case, name=f"{case.name}, {width} x {depth}")
            elif tokens == 1 and module is kernels:
                yield replace(case, usual=every, capabilities=every)
    yield from launched(module.dequantised, weight)
