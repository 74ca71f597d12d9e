"""routed_experts_fp4 against routed_experts with the same values in dense matrices."""

import importlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import assembly
from op_checks import MACHINE, implementations, randn, thorough
from sglang_dsv4 import backends, dequant
from sglang_dsv4.fp4 import FP4Matrices
from sglang_dsv4.kernels_triton_fp4 import _unpacked
from sglang_dsv4.moe import kernels_marlin, kernels_triton_fp4, reference
from tolerance import assert_close

LIMIT = 1.0  # low enough that the clamp bites
NVFP4, MXFP4 = dequant.NVFP4_GROUP, dequant.MXFP4_GROUP


def matrices(experts, rows, columns, *, group, parts, seed=0):
    """Every code and many scales, subnormal ones among them."""
    weight = FP4Matrices(experts, rows, columns, group=group, parts=parts).to(MACHINE.device)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, weight.codes.shape, generator=generator)
    low, high = (1, 0x48) if group == NVFP4 else (118, 128)
    scales = torch.randint(low, high, weight.scales.shape, generator=generator)
    weight.codes.copy_(codes)
    weight.scales.copy_(scales)
    weight.factors.copy_(torch.rand(weight.factors.shape, generator=generator) + 0.5)
    weight.factors.mul_(columns**-0.5)
    return weight


def dense(weight):
    """[E, N, K] fp32, by dequant, one matrix at a time."""
    values = []
    for codes, scales, factors in zip(weight.codes, weight.scales, weight.factors, strict=True):
        if weight.group == MXFP4:
            matrix = dequant.mxfp4(codes, scales)
        else:
            matrix = dequant.nvfp4(codes, scales, torch.ones(1, device=codes.device))
        parts = matrix.chunk(weight.parts)
        values.append(torch.cat([p * f for p, f in zip(parts, factors, strict=True)]))
    return torch.stack(values)


def inputs(tokens, hidden, width, experts, top_k, *, group, dtype=torch.float32):
    """x, weights, experts, w13, w2."""
    chosen = randn(tokens, experts, seed=1).argsort(dim=1)[:, :top_k].contiguous()
    return (
        randn(tokens, hidden, dtype=dtype),
        randn(tokens, top_k, seed=2).abs(),
        chosen,
        matrices(experts, 2 * width, hidden, group=group, parts=2, seed=3),
        matrices(experts, hidden, width, group=group, parts=1, seed=4),
    )


def prepared(op, *weights):
    """Packed as the op's module wants it."""
    module = importlib.import_module(op.__module__)
    for weight in weights:
        if hasattr(module, "pack"):
            module.pack(weight)
    return weights


def check(op, arguments, limit=LIMIT):
    """In BF16 the activation is off by 2^-9 of itself, once, unless the reference computes it."""
    x, weights, experts, w13, w2 = arguments
    values = dense(w13), dense(w2)
    expected = reference.routed_experts(x, weights, experts, *values, limit=limit)
    result = op(x, weights, experts, *prepared(op, w13, w2), limit=limit)
    assert result.dtype is torch.float32
    if x.dtype is torch.float32 or op is reference.routed_experts_fp4:
        assert_close(result, expected)
        return
    error = (result - expected).double().norm(dim=1) / expected.double().norm(dim=1)
    assert error.max() <= 2**-8, f"relative error {error.max()}"


EVERY = implementations("routed_experts_fp4")


# Those of libraries multiply BF16 alone, and large matrices: real shapes are theirs.
@pytest.fixture(params=[one for one in EVERY if one.id in ("triton", "reference")])
def op(request):
    return request.param


@pytest.fixture(params=EVERY)
def any_op(request):
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [NVFP4, MXFP4])
@pytest.mark.parametrize(
    ("tokens", "hidden", "width", "experts", "top_k"),
    [(1, 128, 64, 8, 2), (9, 64, 32, 4, 3), (2, 256, 96, 3, 2), thorough(300, 64, 32, 3, 2)],
)
def test_equals_dense_matrices(op, dtype, group, tokens, hidden, width, experts, top_k):
    check(op, inputs(tokens, hidden, width, experts, top_k, group=group, dtype=dtype))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("tokens", "dtype"), [(2, torch.float32), (9, torch.bfloat16)])
def test_inputs_are_multiplied_in_either_order(op, capability, tokens, dtype, monkeypatch):
    """That of wgmma's operands, and that of mma.sync's, whatever this machine's own is."""
    monkeypatch.setattr(kernels_triton_fp4, "compute_capability", lambda: capability)
    check(op, inputs(tokens, 256, 64, 4, 2, group=MXFP4, dtype=dtype))


def part_of(weight, first, end):
    """Some of its matrices."""
    _, rows, columns = weight.shape
    some = FP4Matrices(end - first, rows, columns, group=weight.group, parts=weight.parts)
    for name, values in weight.named_parameters():
        getattr(some, name).copy_(values[first:end])
    return some.to(MACHINE.device)


@pytest.mark.parametrize("group", [NVFP4, MXFP4])
@pytest.mark.parametrize("tokens", [1, 4, thorough(300)])
def test_parts_of_the_experts_add_up(op, tokens, group):
    """Of a token whose experts are all elsewhere a part is the base, whatever the token is."""
    count, parts = 5, [(0, 1), (1, 4), (4, 5)]
    x, weights, experts, *pair = inputs(tokens, 64, 32, count, 2, group=group)
    sums, base = torch.zeros(tokens, 64, device=MACHINE.device), randn(tokens, 64, seed=5)
    for first, end in parts:
        held = prepared(op, *(part_of(weight, first, end) for weight in pair))
        options = {"limit": LIMIT, "first": first, "total": count}
        here = ((experts >= first) & (experts < end)).any(dim=1)
        poisoned = x.masked_fill(~here[:, None], math.nan)
        part = op(poisoned, weights, experts, *held, **options, base=base)
        assert torch.equal(part[~here], base[~here])
        sums = op(x, weights, experts, *held, **options, base=sums)
    assert_close(sums, op(x, weights, experts, *prepared(op, *pair), limit=LIMIT))


def test_adds_to_a_base(op):
    """The last addition, so that it is exact to a rounding."""
    arguments = inputs(9, 64, 32, 4, 2, group=NVFP4)
    weights, base = prepared(op, *arguments[3:]), randn(9, 70, seed=5)[:, :64]
    alone = op(*arguments[:3], *weights, limit=LIMIT)
    kept = base.clone()
    assert torch.equal(op(*arguments[:3], *weights, limit=LIMIT, base=base), base + alone)
    assert torch.equal(base, kept)
    nothing = [each[:0] for each in arguments[:3]]
    assert op(*nothing, *weights, limit=LIMIT, base=base[:0]).shape == (0, 64)


def test_no_tokens(op):
    x, weights, experts, w13, w2 = inputs(0, 64, 32, 4, 2, group=NVFP4)
    result = op(x, weights, experts, *prepared(op, w13, w2), limit=LIMIT)
    assert result.shape == (0, 64) and result.dtype is torch.float32


PICKED = (0, 1, 62, 63, 64, 65, 127, 128, 255, 300, 510, 511)  # inputs, in both halves of tiles


@pytest.mark.parametrize(
    ("group", "scales"), [(NVFP4, [*range(0x7F), *range(0x80, 0xFF)]), (MXFP4, range(100, 137))]
)
def test_every_code_and_scale_is_exact(op, group, scales):
    """w2 has every byte of codes in each row and one scale a row; each token's activation is 20 for
    one input, else 0, so that its result is a column of w2."""
    hidden, columns, device = 256, 512, MACHINE.device
    w2 = FP4Matrices(1, hidden, columns, group=group, parts=1).to(device)
    w2.codes.copy_(torch.arange(columns // 2, device=device))
    w2.scales[0, : len(scales)].copy_(torch.tensor(scales, device=device)[:, None])
    w2.factors.fill_(0.75)
    w13 = FP4Matrices(1, 2 * columns, hidden, group=group, parts=2).to(device)
    w13.codes.zero_()
    for token, column in enumerate(PICKED):  # 1.0 for gate and up; silu(20) is 20 to 4e-8
        w13.codes[0, [column, columns + column], token // 2] |= 2 << 4 * (token % 2)
    w13.factors.copy_(torch.tensor([[20.0, 1.0]], device=device))
    x = torch.eye(len(PICKED), hidden, dtype=torch.bfloat16, device=device)
    routes = torch.ones(len(PICKED), 1), torch.zeros(len(PICKED), 1, dtype=torch.int64)
    weights, experts = (each.to(device) for each in routes)
    expected = dense(w2)[0][:, PICKED].T
    result = op(x, weights, experts, *prepared(op, w13, w2), limit=math.inf) / 20
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)


def test_stays_on_device(op):
    x, weights, experts, w13, w2 = inputs(5, 64, 32, 4, 2, group=NVFP4)
    prepared(op, w13, w2)
    op(x, weights, experts, w13, w2, limit=LIMIT)  # its tables are made now, with values
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for weight in (w13, w2):
        for name, values in list(weight.named_parameters()):
            fake = mode.from_tensor(values.detach())
            setattr(weight, name, torch.nn.Parameter(fake, requires_grad=False))
    with mode:
        routes = [mode.from_tensor(each) for each in (x, weights, experts)]
        for part in ({}, {"first": 4, "total": 8}):
            assert op(*routes, w13, w2, limit=LIMIT, **part).shape == x.shape


def code_of(word: int, pair: int, neighbour: int) -> int:
    """One of the eight codes of a word, bit by bit."""
    places = ((6, 7, 8, 15), (0, 1, 2, 9), (10, 11, 12, 19), (4, 5, 14, 13))[pair]
    return sum(
        (word >> (place + 16 * neighbour) % 32 & 1) << bit for bit, place in enumerate(places)
    )


@pytest.mark.parametrize("scale", [1.0, 0.375, 2.0**-40])
def test_assembly_makes_numbers_of_codes(scale):
    """What the interpreter leaves out: each code in each of the eight places of a word, among
    others, times a scale."""
    generator = np.random.default_rng(7)
    words = generator.integers(0, 2**32, 4096, dtype=np.uint32)
    scales = scale * np.array([[1.0], [0.5]])  # of the half tiles
    bits = (scales * 2.0**118).astype(np.float32).view(np.uint32) >> 16
    low, high = (np.full_like(words, each * 0x10001) for each in bits[:, 0])
    ours = assembly.assembly_of(_unpacked)
    pairs = assembly.run(ours, 4, [words, low, high])
    seen = set()
    for pair, numbers in enumerate(pairs):
        for neighbour in range(2):
            codes = [code_of(int(word), pair, neighbour) for word in words]
            seen |= {(pair, neighbour, code) for code in codes}
            half = (numbers >> np.uint32(16 * neighbour)) << np.uint32(16)
            values = [dequant.E2M1[code & 7] * (-1 if code & 8 else 1) for code in codes]
            expected = np.array(values) * scales[pair // 2] * 2.0**-8
            np.testing.assert_array_equal(half.view(np.float32), expected)
    assert len(seen) == 4 * 2 * 16


@pytest.mark.parametrize("group", [NVFP4, MXFP4])
@pytest.mark.parametrize("columns", [256, 64, 96])
def test_packed_once_in_the_order_of_fragments(group, columns):
    """Where each input's code and scale went, one by one."""
    rows, depth = 48, min(columns & -columns, 128)
    weight = matrices(1, rows, columns, group=group, parts=1)
    values = dense(weight)[0]
    kernels_triton_fp4.pack(weight)
    words_of_codes, scales = weight.codes.flatten().view(torch.int32), weight.scales.flatten()
    found = torch.empty(rows, columns)
    half, groups = depth // 2, depth // group
    for row in range(rows):
        for column in range(columns):
            tile = row // 16 * (columns // depth) + column // depth
            side, place = divmod(column % depth, half)
            block, place = divmod(place, 32)
            sixteen, two, c, neighbour = place // 16, place % 16 // 8, place % 8 // 2, place % 2
            thread, lower = row % 8 * 4 + c, row % 16 // 8
            words = min(depth, 64) // 16  # of a thread, for every block
            word = (tile * (depth // 16 // words) + block) * 32 * words + thread * words
            word = int(words_of_codes[word + sixteen * 2 + lower])
            code = code_of(word, 2 * side + two, neighbour)
            number = place // group if group < 32 else 0
            order = ((number * 2 + lower) * max(depth // 64, 1) + block) * min(groups, 2)
            scale = scales[(tile * 8 + row % 8) * 2 * groups + order + (side if groups > 1 else 0)]
            exponent, mantissa = (scale >> 3, scale & 7) if group == NVFP4 else (scale, 0)
            bias = 10 if group == NVFP4 else 127
            factor = 2.0 ** (int(exponent) - bias) * (1 + mantissa / 8)
            value = dequant.E2M1[int(code) & 7] * (-1 if code & 8 else 1)
            found[row, column] = value * factor * weight.factors[0, 0]
    torch.testing.assert_close(found.to(values.device), values, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="packed already"):
        kernels_triton_fp4.pack(weight)


def test_what_is_packed_is_left_alone():
    """A server may be told that weights were loaded although none were."""
    ops = SimpleNamespace(routed_experts_fp4=kernels_triton_fp4.routed_experts_fp4)
    model = torch.nn.ModuleList([matrices(2, 32, 64, group=NVFP4, parts=2)])
    backends.pack_weights(ops, model)
    codes = model[0].codes.clone()
    backends.pack_weights(ops, model)
    assert model[0].packed and torch.equal(model[0].codes, codes)


def test_what_cannot_be_multiplied_is_refused():
    arguments = inputs(1, 64, 32, 4, 2, group=NVFP4)
    with pytest.raises(ValueError, match="call pack"):
        kernels_triton_fp4.routed_experts_fp4(*arguments, limit=LIMIT)
    odd = matrices(1, 32, 48, group=NVFP4, parts=1)
    with pytest.raises(ValueError, match="multiple of 32 inputs, found 48"):
        kernels_triton_fp4.pack(odd)
    with pytest.raises(ValueError, match="multiple of 16 rows, found 40"):
        kernels_triton_fp4.pack(matrices(1, 40, 64, group=NVFP4, parts=1))
    damaged = matrices(1, 32, 64, group=NVFP4, parts=1)
    damaged.scales[0, 5, 2] = 0xFF
    with pytest.raises(ValueError, match="not a number"):
        kernels_triton_fp4.pack(damaged)
    large = matrices(1, 32, 64, group=MXFP4, parts=1)
    large.scales[0, 3, 1] = 137
    with pytest.raises(ValueError, match=r"largest is 2\^10: .*routed_experts=bf16"):
        kernels_triton_fp4.pack(large)


def test_marlin_holds_all_experts():
    arguments = inputs(2, 64, 32, 4, 2, group=NVFP4, dtype=torch.bfloat16)
    for weight in arguments[3:]:
        weight.packed = True
    with pytest.raises(ValueError, match="w2 holds 4 of 8 experts: take another provider"):
        kernels_marlin.routed_experts_fp4(*arguments, limit=LIMIT, first=4, total=8)


def test_marlin_refuses_negative_scales():
    weight = matrices(2, 64, 64, group=NVFP4, parts=2)
    weight.scales[1, 2, 3] = 0xB8  # -1
    with pytest.raises(ValueError, match="no negative scales: .*routed_experts_fp4=triton"):
        kernels_marlin.pack(weight)


# ---- on a GPU, at the model's shapes ----

SHAPES = {"flash": (4096, 2048, 256), "flash tp8": (4096, 256, 256), "pro tp8": (7168, 384, 384)}


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES)
def shape(request):
    yield request.param
    torch.cuda.empty_cache()


def real_inputs(tokens, shape, group):
    """x, weights, experts, w13 and w2 of such scales and factors that results are about 1."""
    hidden, width, experts = shape
    logits, bias = randn(tokens, experts), randn(experts, seed=9)
    factors, chosen = reference.route_scored(logits, bias, top_k=6, scale=1.5)
    pair = []
    for rows, columns, parts in ((2 * width, hidden, 2), (hidden, width, 1)):
        with torch.device("cuda"):
            weight = FP4Matrices(experts, rows, columns, group=group, parts=parts)
        weight.codes.random_(0, 256)
        if group == NVFP4:
            weight.scales.random_(0x30, 0x40)
            weight.factors.uniform_(0.2, 0.4).mul_(columns**-0.5)
        else:
            power = -(columns.bit_length() // 2 + 2)
            weight.scales.random_(126 + power, 129 + power)
            weight.factors.fill_(1.0)
        pair.append(weight)
    return randn(tokens, hidden, dtype=torch.bfloat16), factors, chosen, *pair


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("group", [NVFP4, MXFP4])
@pytest.mark.parametrize("tokens", [1, 8, 43, 300, 1025, 8192])
def test_at_real_shapes(any_op, shape, group, tokens):
    """The same codes in both orders: those of the reference are the checkpoint's."""
    x, weights, experts, w13, w2 = real_inputs(tokens, shape, group)
    expected = reference.routed_experts_fp4(x, weights, experts, w13, w2, limit=10.0)
    result = any_op(x, weights, experts, *prepared(any_op, w13, w2), limit=10.0)
    error = (result - expected).double().norm(dim=1) / expected.double().norm(dim=1)
    assert expected.abs().max() > 0.01 and error.max() <= 2**-8, f"relative error {error.max()}"


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_a_replay_equals_eager(any_op, shape, tokens):
    """On other tokens and other experts than were captured, bit for bit."""
    x, weights, experts, w13, w2 = real_inputs(tokens, shape, NVFP4)
    pair = prepared(any_op, w13, w2)
    static = [torch.zeros_like(each) for each in (x, weights, experts)]
    any_op(*static, *pair, limit=10.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = any_op(*static, *pair, limit=10.0)
    for each, value in zip(static, (x, weights, experts), strict=True):
        each.copy_(value)
    graph.replay()
    assert torch.equal(result, any_op(x, weights, experts, *pair, limit=10.0))
