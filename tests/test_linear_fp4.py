"""linear_fp4 against products in float64."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from linear_checks import among_nan, assert_product, prepared, product
from op_checks import MACHINE, implementations, randn, thorough
from sglang_dsv4 import backends, dequant, fp4, kernels_triton_linear
from sglang_dsv4 import kernels_triton_linear_fp4 as kernels
from sglang_dsv4.fp4 import FP4Matrices, FP4Matrix
from sglang_dsv4.fp8 import FP8Matrix
from sglang_dsv4.kernels_triton_linear import slice_depth_for
from sglang_dsv4.moe import reference
from timings_linear import LINEARS

BF16, FP32 = torch.bfloat16, torch.float32
NVFP4, MXFP4 = dequant.NVFP4_GROUP, dequant.MXFP4_GROUP


@pytest.fixture(params=implementations("linear_fp4"))
def op(request):
    return request.param


def fp4_weight(outputs, inputs, seed=1):
    """Every code, scales of either sign and subnormal ones among them, and factors that differ from
    each 16 rows to the next."""
    weight = FP4Matrices(1, outputs, inputs, group=NVFP4, parts=outputs // 16).to(MACHINE.device)
    generator = torch.Generator().manual_seed(seed)
    weight.codes.copy_(torch.randint(256, weight.codes.shape, generator=generator))
    scales = torch.randint(0x48, weight.scales.shape, generator=generator)
    signs = torch.randint(2, weight.scales.shape, generator=generator) << 7
    weight.scales.copy_(scales | signs)
    weight.factors.copy_(torch.rand(weight.factors.shape, generator=generator) + 0.5)
    return weight


def dense(weight):
    """[N, K] fp32, each 16 rows by dequant."""
    parts = zip(
        weight.codes[0].split(16), weight.scales[0].split(16), weight.factors[0], strict=True
    )
    return torch.cat([dequant.nvfp4(*part) for part in parts])


def check(op, x, weight, *, dtype, groups=1):
    """Off by less than fp32 sums may be, and one rounding; beyond 128 tokens kernels multiply what
    is rounded to BF16."""
    values = dense(weight)
    result = op(x, prepared(op, weight), dtype=dtype, groups=groups)
    if x.shape[0] > 128 and op is kernels.linear_fp4:
        values = values.to(BF16)
    assert result.dtype is dtype
    assert_product(result, x, values, groups)


SHAPES = [  # tokens, outputs, inputs
    (1, 144, 1280),  # in slices, the last of them shorter
    (2, 48, 768),  # three slices
    (5, 64, 128),
    (9, 80, 192),  # tiles of 64 inputs
    (16, 112, 1024),
    (17, 208, 96),  # and of 32
    (33, 144, 256),
    thorough(64, 128, 2048),
    (65, 144, 320),
    thorough(128, 256, 512),
]


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), SHAPES)
def test_equals_float64(op, tokens, outputs, inputs, dtype):
    x = among_nan(randn(tokens, inputs, dtype=BF16))
    check(op, x, fp4_weight(outputs, inputs), dtype=dtype)


def test_many_tokens(op):
    """Where kernels leave the product to torch."""
    check(op, randn(130, 160, dtype=BF16), fp4_weight(96, 160), dtype=BF16)


@pytest.mark.parametrize("tokens", [0, 3, 129])
def test_groups_have_inputs_of_their_own(op, tokens):
    """Of 48 rows, where a tile has 64."""
    check(op, randn(tokens, 4 * 192, dtype=BF16), fp4_weight(4 * 48, 192), dtype=BF16, groups=4)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("tokens", [2, 12, 70])
def test_inputs_are_multiplied_in_either_order(op, capability, tokens, monkeypatch):
    """That of wgmma's operands, and that of mma.sync's, whatever this machine's own is."""
    monkeypatch.setattr(kernels, "compute_capability", lambda: capability)
    check(op, randn(tokens, 512, dtype=BF16), fp4_weight(144, 512), dtype=FP32)


PICKED = [34 * code + code % 2 for code in range(16)]  # an input for each code, below


@pytest.mark.parametrize("tokens", [len(PICKED), 140])
def test_every_code_and_scale_is_exact(op, tokens):
    """Every byte of codes in each row and one scale a row; each token has one input that is not
    zero, so its result is a column. Factors are powers of two: nothing is rounded."""
    scales = torch.tensor([*range(0x7F), *range(0x80, 0xFF), 0, 0])
    weight = FP4Matrices(1, 256, 512, group=NVFP4, parts=16).to(MACHINE.device)
    weight.codes.copy_(torch.arange(256))
    weight.scales[0].copy_(scales[:, None])
    weight.factors.copy_(torch.exp2(torch.arange(-8.0, 8.0)))
    x = torch.zeros(tokens, 512, dtype=BF16, device=MACHINE.device)
    x[range(len(PICKED)), PICKED] = 1
    expected = dense(weight).T[PICKED]
    assert expected.abs().max() > 6 * 384 and (expected != 0).float().mean() > 0.8
    result = op(x, prepared(op, weight), dtype=BF16)[: len(PICKED)]
    assert torch.equal(result.float(), expected)


def test_a_wider_input_is_rounded_at_most_to_bf16(op):
    """An activation in FP32."""
    x, weight = randn(4, 256), fp4_weight(80, 256)
    values = dense(weight)
    result = op(x, prepared(op, weight), dtype=FP32).double()
    exact, rounded = product(x, values, 1), product(x.to(BF16), values, 1)
    nearest = torch.minimum((result - exact).abs(), (result - rounded).abs())
    assert nearest.max() < 1e-5 * exact.abs().max() < (exact - rounded).abs().max()


@pytest.mark.parametrize("tokens", [3, 40])
def test_a_token_depends_on_no_other_bit_for_bit(op, tokens):
    """And two calls agree. In slices: their sums have one order."""
    x, weight = randn(tokens, 1024, dtype=BF16), prepared(op, fp4_weight(96, 1024))
    first = op(x, weight, dtype=FP32)
    assert torch.equal(first, op(x, weight, dtype=FP32))
    x[1:] = 7
    assert torch.equal(first[0], op(x, weight, dtype=FP32)[0])


def test_stays_on_device(op):
    x, weight = randn(3, 512, dtype=BF16), prepared(op, fp4_weight(96, 512))
    op(x, weight, dtype=BF16)  # its tables are made now, with values
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for name, values in list(weight.named_parameters()):
        fake = mode.from_tensor(values.detach())
        setattr(weight, name, torch.nn.Parameter(fake, requires_grad=False))
    for tokens in (3, 200):
        with mode:
            given = torch.empty(tokens, 512, dtype=BF16, device=x.device)
            result = op(given, weight, dtype=BF16)
        assert result.shape == (tokens, 96) and result.dtype is BF16


def test_what_cannot_be_multiplied_is_refused():
    weight = fp4_weight(192, 128)
    with pytest.raises(ValueError, match="call pack"):
        kernels.linear_fp4(randn(1, 128), weight, dtype=BF16)
    kernels.pack(weight)
    with pytest.raises(ValueError, match="192 rows in 8 groups: each needs a multiple of 16"):
        kernels.linear_fp4(randn(1, 8 * 128), weight, dtype=BF16, groups=8)


# ---- the holder ----


def test_matrices_that_are_multiplied_as_one_keep_their_factors():
    """Of different heights."""
    heights = {"a.weight": 48, "b.weight": 16}
    holder = FP4Matrix(heights, 64, lambda *args, **options: (args, options))
    a, b = (holder.matrices("attn.inputs")[f"attn.{name}.weight"] for name in "ab")
    assert (a.shape, b.shape) == ((48, 64), (16, 64)) and a.group == 16
    for rows, value in ((a, 2.0), (b, 3.0)):
        rows.factors.copy_(torch.tensor(value))
        rows.codes.fill_(0x22)  # 1.0, twice
    whole = fp4.dense_values(holder.codes, holder.scales, holder.factors, holder.group)[0]
    assert (whole[:48] == 2).all() and (whole[48:] == 3).all()
    upper = a.part(1, 3)
    upper.codes.zero_()
    assert (a.codes[16:32] == 0).all() and (a.codes[:16] == 0x22).all()
    assert [part.shape[1] for part in holder.apart(torch.zeros(2, 64))] == [48, 16]
    x = torch.zeros(1, 64, dtype=BF16)
    (_, weight), options = holder(x)
    assert weight is holder and options == {"dtype": BF16, "groups": 1}
    assert holder(x, FP32)[1]["dtype"] is FP32
    with pytest.raises(AssertionError, match=r"\(8, 24, 16\)"):
        a.rows(8, 24)


def test_it_is_packed_by_the_provider_of_its_op():
    """Linear layers in both formats and experts, each by its own, once."""
    ops = SimpleNamespace(
        linear_fp4=kernels.linear_fp4,
        linear_fp8=kernels_triton_linear.linear_fp8,
        routed_experts_fp4=reference.routed_experts_fp4,
    )
    linears = [FP4Matrix(32, 64, ops.linear_fp4), FP8Matrix(32, 64, ops.linear_fp8)]
    experts = FP4Matrices(2, 32, 64, group=MXFP4, parts=2)
    for linear in linears:
        linear.codes.random_(0, 127)
    before = [linear.codes.clone() for linear in linears]
    model = torch.nn.ModuleList([*linears, experts])
    backends.pack_weights(ops, model)
    packed = [linear.codes.clone() for linear in linears]
    assert not any(map(torch.equal, before, packed))
    backends.pack_weights(ops, model)
    for linear, codes in zip(linears, packed, strict=True):
        assert linear.packed and torch.equal(linear.codes, codes)
    assert not experts.packed  # the reference reads codes as they are


# ---- what the reference has not ----


@pytest.mark.kernels
@pytest.mark.parametrize(("rows", "columns"), [(128, 256), (80, 192), (16, 32)])
def test_dequantised(rows, columns):
    weight = fp4_weight(rows, columns)
    expected = dense(weight).to(BF16)
    kernels.pack(weight)
    values = kernels.dequantised(weight)
    assert values.dtype is BF16 and torch.equal(values, expected)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("tokens", [1, 8, 16, 17, 64, 65, 128])
@pytest.mark.parametrize("name", LINEARS)
def test_slices_cover_the_inputs_and_fill_a_gpu(name, tokens, capability, monkeypatch):
    monkeypatch.setattr(kernels, "compute_capability", lambda: capability)
    width, depth, _ = LINEARS[name]
    tiles = kernels.tiles_for(tokens, 128)
    token_tiles = -(-tokens // tiles.tokens)
    assert token_tiles <= 2 and tiles.rows % 64 == 0
    per_token = kernels._DEPTH_PER_TOKEN
    slice_depth = slice_depth_for(tokens, width, depth, tiles, per_token=per_token)
    slices, programs = -(-depth // slice_depth), -(-width // tiles.rows) * token_tiles
    assert slice_depth % 128 == 0 and (slices - 1) * slice_depth < depth <= slices * slice_depth
    if slices > 1:
        assert slice_depth >= 256 and slices * programs <= 512
        assert 8 * slices * tokens * width <= 9 / 16 * width * depth / 2
    if tokens <= 8:
        assert slices * programs >= 96


# ---- on a GPU, at the model's shapes ----


def real_inputs(name, tokens):
    """x, a weight that is not packed and groups, so that results are about 1."""
    width, depth, groups = LINEARS[name]
    weight = fp4_weight(width, depth)
    weight.factors.mul_(depth**-0.5)
    return randn(tokens, groups * depth, dtype=BF16), weight, groups


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("tokens", [1, 8, 16, 17, 43, 64, 100, 128, 129, 1000])
@pytest.mark.parametrize("name", LINEARS)
def test_at_real_shapes(name, tokens, dtype):
    x, weight, groups = real_inputs(name, tokens)
    values = dense(weight) if tokens <= 128 else dense(weight).to(BF16)
    kernels.pack(weight)
    result = kernels.linear_fp4(x, weight, dtype=dtype, groups=groups)
    expected = product(x, values, groups)
    error = (result.double() - expected).norm(dim=1) / expected.norm(dim=1)
    limit = 2**-8 if dtype is BF16 else 2e-5  # of 8,192 terms, whose sums tensor cores cut off
    assert expected.abs().max() > 0.01 and error.max() <= limit, f"relative error {error.max()}"


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("tokens", [1, 8, 64, 256])
@pytest.mark.parametrize("name", LINEARS)
def test_a_replay_equals_eager(name, tokens):
    """On other tokens than were captured, bit for bit."""
    x, weight, groups = real_inputs(name, tokens)
    kernels.pack(weight)
    static = torch.zeros_like(x)

    def call(inputs):
        return kernels.linear_fp4(inputs, weight, dtype=BF16, groups=groups)

    call(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = call(static)
    static.copy_(x)
    graph.replay()
    assert replayed.abs().max() > 0 and torch.equal(replayed, call(x))
