"""RMS norm, mHC and MoE kernels at the model's shapes: what is timed, and what must compile."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import KernelInterface

from kernel_checks import SHARED_MEMORY, CompileCase
from kernel_timings import Call, providers
from sglang_dsv4 import kernels_triton, kernels_triton_mhc
from sglang_dsv4.dequant import MXFP4_GROUP, NVFP4_GROUP
from sglang_dsv4.fp4 import FP4Matrices
from sglang_dsv4.moe import kernels_triton as moe_kernels
from sglang_dsv4.moe import kernels_triton_experts, kernels_triton_fp4

BF16 = torch.bfloat16
STREAMS, ROWS = 4, 24
MHC = {"iterations": 20, "norm_eps": 1e-6, "hc_eps": 1e-6}
VOCABULARY = 129280


@dataclass(frozen=True)
class Shape:
    """What a model, or a rank's part of it, gives these ops."""

    hidden: int
    width: int
    experts: int
    top_k: int = 6


SHAPES = {
    "flash": Shape(4096, 2048, 256),
    "flash, a rank of 8": Shape(4096, 256, 256),
    "pro, a rank of 8": Shape(7168, 384, 384),
}
TOKENS = (1, 2, 8, 32, 128, 512, 2048, 8192)


# ---- inputs ----


def norm_inputs(tokens: int, shape: Shape, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """x and weight of rms_norm."""
    return _randn(tokens, shape.hidden, device=device), _randn(shape.hidden, device=device)


def mhc_inputs(
    tokens: int, shape: Shape, rows: int = ROWS, device: str = "cuda"
) -> tuple[torch.Tensor, ...]:
    """streams, fn, base and scale of mhc_pre, or with 4 rows of mhc_head."""
    width = STREAMS * shape.hidden
    fn = torch.randn(rows, width, device=device) / math.sqrt(width)
    scale = torch.ones(3 if rows > STREAMS else 1, device=device)
    streams = _randn(tokens, STREAMS, shape.hidden, device=device)
    return streams, fn, torch.randn(rows, device=device), scale


def between_inputs(tokens: int, shape: Shape, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """Those of mhc_post_pre_norm."""
    _, *site = mhc_inputs(tokens, shape, device=device)
    return *post_inputs(tokens, shape, device), *site, _randn(shape.hidden, device=device)


def post_inputs(tokens: int, shape: Shape, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """y, streams, post and comb of mhc_post."""
    return (
        _randn(tokens, shape.hidden, device=device),
        _randn(tokens, STREAMS, shape.hidden, device=device),
        torch.rand(tokens, STREAMS, device=device),
        torch.rand(tokens, STREAMS, STREAMS, device=device),
    )


def chosen_experts(tokens: int, shape: Shape) -> torch.Tensor:
    """[tokens, k] on the CPU, the same in every run: uniform, distinct within a token."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(tokens, shape.experts, generator=generator).topk(shape.top_k).indices


def expert_inputs(tokens: int, shape: Shape, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """x, weights, experts, w13 and w2 of routed_experts."""
    hidden, width, experts = shape.hidden, shape.width, shape.experts
    return (
        _randn(tokens, hidden, device=device),
        torch.rand(tokens, shape.top_k, device=device),
        chosen_experts(tokens, shape).to(device),
        _randn(experts, 2 * width, hidden, device=device) / math.sqrt(hidden),
        _randn(experts, hidden, width, device=device) / math.sqrt(width),
    )


def fp4_inputs(tokens: int, shape: Shape, group: int) -> tuple[Any, ...]:
    """x, weights, experts, w13 and w2 of routed_experts_fp4."""
    return (
        _randn(tokens, shape.hidden, device="cuda"),
        torch.rand(tokens, shape.top_k, device="cuda"),
        chosen_experts(tokens, shape).to("cuda"),
        *fp4_weights(shape, group),
    )


def _randn(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(*shape, dtype=BF16, device=device)


# ---- what is timed ----


def cases() -> dict[str, tuple[Callable[[], Call], int]]:
    """Every op of this file by every provider that the machine can run."""
    found = {}
    for tokens in TOKENS:
        for name, shape in SHAPES.items():
            for op, setup, moved in _cases_of(tokens, shape):
                for provider, function in providers(op.split()[0]).items():
                    label = f"{op} {provider}, {name}, {tokens} tokens"
                    found[label] = (_bound(function, setup), moved)
    return found


def _cases_of(
    tokens: int, shape: Shape
) -> Iterator[tuple[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]], int]]:
    """op (and kind), setup of its arguments, and the bytes that it has to move at least."""
    states, gates = tokens * shape.hidden * 2, tokens * shape.experts * 4
    fn = STREAMS * shape.hidden * 4
    rows = shape.experts + 2 * shape.width  # router and shared expert
    yield (
        "linear_fp32",
        lambda: (tuple(_randn(n, shape.hidden, device="cuda") for n in (tokens, rows)), {}),
        states + rows * shape.hidden * 2 + tokens * rows * 4,
    )
    yield "rms_norm", lambda: (norm_inputs(tokens, shape), {"eps": 1e-6}), 2 * states
    yield (
        "mhc_post_pre_norm",
        lambda: (between_inputs(tokens, shape), MHC),
        (2 * STREAMS + 2) * states + ROWS * fn,
    )
    yield "mhc_post", lambda: (post_inputs(tokens, shape), {}), (2 * STREAMS + 1) * states
    yield (
        "mhc_head",
        lambda: (mhc_inputs(tokens, shape, STREAMS), {"norm_eps": 1e-6, "hc_eps": 1e-6}),
        (STREAMS + 1) * states + STREAMS * fn,
    )
    yield (
        "route_scored",
        lambda: (_gates(tokens, shape), {"top_k": shape.top_k, "scale": 1.5}),
        gates,
    )
    yield "route_hashed", lambda: (_hashes(tokens, shape), {"scale": 1.5}), gates
    yield (
        "swiglu",
        lambda: ((torch.randn(tokens, 2 * shape.width, device="cuda"),), {"limit": 10.0}),
        tokens * 3 * shape.width * 4,
    )
    used = chosen_experts(tokens, shape).unique().numel()
    weights = used * 3 * shape.width * shape.hidden * 2
    for name, group in (("NVFP4", NVFP4_GROUP), ("MXFP4", MXFP4_GROUP)):
        yield (
            f"routed_experts_fp4 {name}",
            lambda group=group: (fp4_inputs(tokens, shape, group), {"limit": 10.0}),
            weights // 4 + weights // 2 // group + 3 * states,
        )
    yield (
        "routed_experts",
        lambda: (expert_inputs(tokens, shape), {"limit": 10.0}),
        weights + 3 * states,
    )


def _gates(tokens: int, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    experts = shape.experts
    return torch.randn(tokens, experts, device="cuda"), torch.randn(experts, device="cuda")


def _hashes(tokens: int, shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    table = torch.randint(0, shape.experts, (VOCABULARY, shape.top_k), device="cuda")
    token_ids = torch.randint(0, VOCABULARY, (tokens,), device="cuda")
    return torch.randn(tokens, shape.experts, device="cuda"), token_ids, table


def _bound(op: Any, setup: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]) -> Any:
    def prepared() -> Call:
        arguments, options = setup()
        return lambda: op(*arguments, **options)

    return prepared


# ---- what must compile ----


def compile_cases() -> list[CompileCase]:
    """Each kernel as an op launches it on Flash's shapes; each tile for some architectures."""
    flash = SHAPES["flash"]
    half, of_two = replace(flash, experts=flash.experts // 2), {"first": 128, "total": 256}
    with FakeTensorMode():
        gates = torch.empty(1, flash.experts), torch.empty(flash.experts)
        ids = torch.empty(1, dtype=torch.int64)
        table = torch.empty(VOCABULARY, flash.top_k, dtype=torch.int64)
        gate_up = torch.empty(1, 2 * flash.width)
        found = [
            *launched(kernels_triton.rms_norm, *norm_inputs(1, flash, "cpu"), eps=1e-6),
            *_mhc_cases(1, flash, capabilities=(80, 90, 120)),
            *_mhc_cases(2048, flash, capabilities=(89, 90, 100), usual=(89, 100)),
            *_fused_mhc_cases(),
            *launched(kernels_triton.mhc_post, *post_inputs(1, flash, "cpu")),
            *launched(moe_kernels.route_scored, *gates, top_k=flash.top_k, scale=1.5),
            *launched(moe_kernels.route_hashed, gates[0], ids, table, scale=1.5),
            *launched(moe_kernels.swiglu, gate_up, limit=10.0),
            *launched(moe_kernels.scaled_swiglu, *_products(flash), limit=10.0),
            *_expert_cases(1, flash, usual=(80, 90, 120)),
            *_expert_cases(8192, flash, usual=(89, 100)),
            *_expert_cases(512, flash, capabilities=(80, 90, 120), usual=()),
            *_expert_cases(2048, flash, capabilities=(80, 90, 120), usual=()),
            *_fp4_cases(1, flash, MXFP4_GROUP, usual=(80, 90, 120)),
            *_fp4_cases(4096, flash, NVFP4_GROUP, usual=(89, 100)),
            *_fp4_cases(1, Shape(96, 32, 8), MXFP4_GROUP, usual=(90,)),  # tiles of 32 inputs
            *_fp4_cases(1, flash, NVFP4_GROUP, usual=(90,)),
            *_fp4_cases(512, flash, NVFP4_GROUP, usual=()),
            *_fp4_cases(256, flash, MXFP4_GROUP, usual=(90,)),
            *_fp4_cases(8192, flash, NVFP4_GROUP, usual=(90,)),
            # Experts divided among ranks.
            *_expert_cases(1, half, usual=(80,), **of_two),
            *_expert_cases(8192, half, usual=(90,), **of_two),
            *_fp4_cases(1, half, MXFP4_GROUP, usual=(90,), **of_two),
            *_fp4_cases(8, half, MXFP4_GROUP, usual=(120,), **of_two),
            *_fp4_cases(4096, half, NVFP4_GROUP, usual=(89,), **of_two),
        ]
    unique: dict[str, CompileCase] = {}
    for case in found:
        key = repr((case.kernel.__name__, case.signature, case.constexprs))
        if case.kernel is kernels_triton_experts._sort_pairs_kernel:  # of large batches
            case = replace(case, usual=tuple(SHARED_MEMORY))
        same = unique.get(key, case)
        unique[key] = replace(
            same,
            capabilities=sorted({*same.capabilities, *case.capabilities}),
            usual=sorted({*same.usual, *case.usual}),
        )
    return list(unique.values())


def _products(shape: Shape) -> tuple[torch.Tensor, ...]:
    """gate_up, experts and factors of scaled_swiglu."""
    gate_up = torch.empty(shape.top_k, 2 * shape.width, dtype=BF16)
    return gate_up, torch.zeros(1, shape.top_k, dtype=torch.int64), torch.empty(shape.experts, 2)


def _mhc_cases(tokens: int, shape: Shape, **options: Any) -> list[CompileCase]:
    inputs = mhc_inputs(tokens, shape, device="cpu")
    return launched(kernels_triton.mhc_pre, *inputs, **MHC, **options)


def _fused_mhc_cases() -> list[CompileCase]:
    """Every tile, those of a batch's extremes in every run; the output in FP32, as of experts, or
    in BF16, as of attention; and what the first site does."""
    found: list[CompileCase] = []
    op = kernels_triton_mhc.mhc_post_pre_norm
    for name in ("flash", "pro, a rank of 8"):
        for tokens in (1, kernels_triton_mhc.FUSED_TOKENS):
            y, streams, post, comb, *site = between_inputs(tokens, SHAPES[name], "cpu")
            usual = tuple(SHARED_MEMORY) if name == "flash" else ()
            found += launched(op, y.float(), streams, post, comb, *site, **MHC, usual=usual)
            found += launched(op, y, streams, post, comb, *site, **MHC, usual=())
            found += launched(op, None, streams, None, None, *site, **MHC, usual=())
    return found


def _expert_cases(tokens: int, shape: Shape, **options: Any) -> list[CompileCase]:
    hidden, width, experts = shape.hidden, shape.width, shape.experts
    return launched(
        kernels_triton_experts.routed_experts,
        torch.empty(tokens, hidden, dtype=BF16),
        torch.empty(tokens, shape.top_k),
        torch.empty(tokens, shape.top_k, dtype=torch.int64),
        torch.empty(experts, 2 * width, hidden, dtype=BF16),
        torch.empty(experts, hidden, width, dtype=BF16),
        limit=10.0,
        base=torch.empty(tokens, hidden),
        **options,
    )


def fp4_weights(shape: Shape, group: int, device: str = "cuda") -> tuple[FP4Matrices, FP4Matrices]:
    """Packed w13 and w2 of routed_experts_fp4, with random codes and scales of one."""
    sizes = (2 * shape.width, shape.hidden, 2), (shape.hidden, shape.width, 1)
    found = []
    with torch.device(device):
        for rows, columns, parts in sizes:
            weight = FP4Matrices(shape.experts, rows, columns, group=group, parts=parts)
            weight.codes.random_(0, 256)
            weight.factors.fill_(columns**-0.5)
            weight.packed = True
            found.append(weight)
    return found[0], found[1]


def _fp4_cases(
    tokens: int, shape: Shape, group: int, usual: tuple[int, ...] = (), **options: Any
) -> list[CompileCase]:
    """Hopper's tiles are others, and read in another order."""
    found: list[CompileCase] = []
    for capabilities in ((90,), tuple(each for each in SHARED_MEMORY if each != 90)):
        capability = mock.Mock(return_value=capabilities[0])
        with mock.patch.object(kernels_triton_fp4, "compute_capability", capability):
            found += launched(
                kernels_triton_fp4.routed_experts_fp4,
                torch.empty(tokens, shape.hidden, dtype=BF16),
                torch.empty(tokens, shape.top_k),
                torch.empty(tokens, shape.top_k, dtype=torch.int64),
                *fp4_weights(shape, group, "cpu"),
                limit=10.0,
                base=torch.empty(tokens, shape.hidden),
                usual=tuple({*usual} & {*capabilities}),
                capabilities=capabilities,
                **options,
            )
    return found


def launched(
    op: Any,
    *args: Any,
    capabilities: tuple[int, ...] = tuple(SHARED_MEMORY),
    usual: tuple[int, ...] = tuple(SHARED_MEMORY),
    **options: Any,
) -> list[CompileCase]:
    """The kernels that the op launches on these tensors without values, as it launches them."""
    tokens = next(one for one in args if one is not None).shape[0]
    name = f"{op.__name__}, {tokens} tokens"
    found: list[CompileCase] = []

    def launch(kernel: Any, grid: Any) -> Any:
        def call(*values: Any, **named: Any) -> None:
            positional = (parameter for parameter in kernel.arg_names if parameter not in named)
            arguments = {**dict(zip(positional, values, strict=True)), **named}
            case = _as_case(f"{name}, {kernel.__name__}", kernel, arguments)
            found.append(replace(case, capabilities=capabilities, usual=usual))

        return call

    with mock.patch.object(KernelInterface, "__getitem__", launch):
        op(*args, **options)
    return found


def _as_case(name: str, kernel: Any, arguments: dict[str, Any]) -> CompileCase:
    """What Triton would specialise a launch on: dtypes, None, 1, and multiples of 16."""
    signature, constexprs, unaligned = {}, {}, []
    for parameter in kernel.params:
        value = arguments.pop(parameter.name)
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _TYPES[value.dtype]
        elif parameter.is_constexpr or value is None:
            constexprs[parameter.name] = value
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            constexprs[parameter.name] = value
        else:
            signature[parameter.name] = "i32" if value < 2**31 else "i64"
            if value % 16 or parameter.do_not_specialize:
                unaligned.append(parameter.name)
    options = {"unaligned": unaligned, **arguments}
    return CompileCase(name, kernel, signature, constexprs, options)


_TYPES = {
    torch.float32: "fp32",
    torch.int16: "i16",
    BF16: "bf16",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
