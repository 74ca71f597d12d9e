"""linear_fp8 against products in float64."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import assembly
from linear_checks import among_nan, assert_product, prepared, product
from op_checks import MACHINE, implementations, randn, thorough
from sglang_dsv4 import dequant, reference
from sglang_dsv4 import kernels_triton_linear as kernels
from sglang_dsv4.fp8 import FP8Matrix
from timings_linear import LINEARS

BF16, FP32 = torch.bfloat16, torch.float32
CODES = [code for code in range(256) if code & 0x7F != 0x7F]  # those are NaN, which no weight has


@pytest.fixture(params=implementations("linear_fp8"))
def op(request):
    return request.param


def fp8_weight(outputs, inputs, seed=1):
    """Every code, subnormals among them, and scales that differ by 2^6."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.tensor(CODES, dtype=torch.uint8)
    weight = FP8Matrix(outputs, inputs, reference.linear_fp8).to(MACHINE.device)
    weight.codes.copy_(codes[torch.randint(len(CODES), (outputs, inputs), generator=generator)])
    weight.scales.copy_(
        torch.exp2(torch.randint(-12, -6, weight.scales.shape, generator=generator).float())
    )
    return weight


def dense(weight):
    """[N, K] fp32."""
    return dequant.fp8(weight.codes.view(torch.float8_e4m3fn), weight.scales)


SHAPES = [  # tokens, outputs, inputs
    (1, 144, 640),  # in slices, the last of them shorter
    (2, 48, 768),  # three slices
    (5, 64, 128),
    (16, 80, 1024),
    (17, 208, 224),
    (33, 144, 320),
    thorough(64, 128, 2048),
    (65, 144, 352),
    thorough(128, 256, 512),
]


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), SHAPES)
def test_equals_float64(op, tokens, outputs, inputs, dtype):
    x, weight = among_nan(randn(tokens, inputs, dtype=BF16)), fp8_weight(outputs, inputs)
    values = dense(weight)
    result = op(x, prepared(op, weight), dtype=dtype)
    assert result.dtype is dtype
    assert_product(result, x, values)


def test_many_tokens(op):
    """Where kernels leave the product to torch."""
    x, weight = randn(130, 160, dtype=BF16), fp8_weight(96, 160)
    values = dense(weight)
    assert_product(op(x, prepared(op, weight), dtype=BF16), x, values)


@pytest.mark.parametrize("tokens", [0, 3, 129])
def test_groups_have_inputs_of_their_own(op, tokens):
    x, weight = randn(tokens, 4 * 192, dtype=BF16), fp8_weight(4 * 128, 192)
    values = dense(weight)
    result = op(x, prepared(op, weight), dtype=BF16, groups=4)
    assert result.shape == (tokens, 4 * 128)
    assert_product(result, x, values, groups=4)


PICKED = (0, 1, 2, 3, 62, 127, 128, 201, 255)


@pytest.mark.parametrize("tokens", [len(PICKED), 140])
def test_every_code_and_scale_is_exact(op, tokens):
    """A code in each row; each token has one input that is not zero, so its result is a column."""
    device, rows = MACHINE.device, 256
    weight = FP8Matrix(rows, 256, op).to(device)
    weight.codes.copy_(torch.tensor((CODES + CODES)[:rows], device=device)[:, None])
    weight.scales.copy_(torch.tensor([[2.0**-110, 1.0], [2.0**90, 2.0**-9]], device=device))
    x = torch.zeros(tokens, 256, dtype=BF16, device=device)
    x[range(len(PICKED)), list(PICKED)] = 1
    expected = dense(weight).T[list(PICKED)]
    assert expected.abs().max() == 448 * 2.0**90
    result = op(x, prepared(op, weight), dtype=BF16)[: len(PICKED)]
    assert torch.equal(result.float(), expected)


def test_assembly_makes_numbers_of_codes():
    """What the interpreter leaves out: each code in each place of a word."""
    codes = np.random.default_rng(7).choice(np.array(CODES, dtype=np.uint8), (8192, 4))
    assert all(len(np.unique(column)) == len(CODES) for column in codes.T)
    weight = FP8Matrix(1024, 32, reference.linear_fp8)
    weight.codes.copy_(torch.from_numpy(codes).view(1024, 32))
    kernels.pack(weight)
    words = weight.codes.flatten().view(torch.int32)
    source = assembly.assembly_of(kernels._unpacked)
    pairs = assembly.run(source, 2, [words.numpy().view(np.uint32)])
    numbers = torch.from_numpy(np.stack(pairs, 1).view(np.int16)).view(BF16).float()
    # Back from the order of fragments: tile, tile, g, c, sixteen, r8, two, neighbour.
    numbers = numbers.view(64, 1, 8, 4, 2, 2, 2, 2).permute(0, 5, 2, 1, 4, 6, 3, 7)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    assert torch.equal(numbers.reshape(1024, 32), expected.view(1024, 32))


def test_a_wider_input_is_rounded_at_most_to_bf16(op):
    """An activation in FP32."""
    x, weight = randn(4, 256), fp8_weight(80, 256)
    values = dense(weight).double()
    result = op(x, prepared(op, weight), dtype=FP32).double()
    exact, rounded = x.double() @ values.T, x.to(BF16).double() @ values.T
    nearest = torch.minimum((result - exact).abs(), (result - rounded).abs())
    assert nearest.max() < 1e-5 * exact.abs().max() < (exact - rounded).abs().max()


@pytest.mark.parametrize("tokens", [3, 40])
def test_a_token_depends_on_no_other_bit_for_bit(op, tokens):
    """And two calls agree. In slices: their sums have one order."""
    x, weight = randn(tokens, 1024, dtype=BF16), prepared(op, fp8_weight(96, 1024))
    first = op(x, weight, dtype=FP32)
    assert torch.equal(first, op(x, weight, dtype=FP32))
    x[1:] = 7
    assert torch.equal(first[0], op(x, weight, dtype=FP32)[0])


def test_stays_on_device(op):
    x, weight = randn(3, 512, dtype=BF16), prepared(op, fp8_weight(96, 512))
    op(x, weight, dtype=BF16)  # its tables are made now, with values
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for name, values in list(weight.named_parameters()):
        fake = mode.from_tensor(values.detach())
        setattr(weight, name, torch.nn.Parameter(fake, requires_grad=False))
    with mode:
        result = op(mode.from_tensor(x), weight, dtype=BF16)
    assert result.shape == (3, 96) and result.dtype is BF16


@pytest.mark.parametrize("groups", [2, 3])
def test_groups_that_cut_blocks_are_refused(groups):
    weight = fp8_weight(192, 128)
    kernels.pack(weight)
    with pytest.raises(ValueError, match=f"192 rows in {groups} groups: each needs a multiple"):
        kernels.linear_fp8(randn(1, groups * 128), weight, dtype=BF16, groups=groups)


# ---- what the reference has not ----


@pytest.mark.parametrize(("rows", "columns"), [(48, 256), (16, 64), (32, 96)])
def test_packed_once_in_the_order_of_fragments(rows, columns):
    """Where each input's code went, bit by bit."""
    weight = fp8_weight(rows, columns)
    before = weight.codes.clone()
    kernels.pack(weight)
    words, found = weight.codes.flatten().view(torch.int32), torch.empty_like(before)
    for row in range(rows):
        for column in range(columns):
            tile = row // 16 * (columns // 32) + column // 32
            place = column % 32
            sixteen, two, c, neighbour = place // 16, place % 16 // 8, place % 8 // 2, place % 2
            word = int(words[tile * 128 + (row % 8 * 4 + c) * 4 + sixteen * 2 + row % 16 // 8])
            places = ((4, 5, 6, 7, 8, 9, 10, 15), (0, 1, 2, 3, 12, 13, 14, 11))[two]
            turned = [(each + 16 * neighbour) % 32 for each in places]
            found[row, column] = sum((word >> each & 1) << bit for bit, each in enumerate(turned))
    assert torch.equal(found, before)
    with pytest.raises(ValueError, match="packed already"):
        kernels.pack(weight)


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match="call pack"):
        kernels.linear_fp8(randn(1, 128), fp8_weight(64, 128), dtype=BF16)
    with pytest.raises(ValueError, match="multiple of 16 rows, found 40"):
        kernels.pack(fp8_weight(40, 128))
    with pytest.raises(ValueError, match="multiple of 32 inputs, found 48"):
        kernels.pack(fp8_weight(32, 48))


@pytest.mark.kernels
@pytest.mark.parametrize(("rows", "columns"), [(128, 256), (304, 224), (16, 160)])
def test_dequantised(rows, columns):
    weight = fp8_weight(rows, columns)
    expected = dense(weight)
    kernels.pack(weight)
    values = kernels.dequantised(weight)
    assert values.dtype is BF16 and torch.equal(values.float(), expected)


@pytest.mark.parametrize("tokens", [1, 8, 16, 17, 64, 65, 128])
@pytest.mark.parametrize("name", LINEARS)
def test_slices_cover_the_inputs_and_fill_a_gpu(name, tokens):
    width, depth, _ = LINEARS[name]
    tiles = kernels.tiles_for(tokens, 128)
    assert tokens <= tiles.tokens and 128 % tiles.rows == 128 % tiles.depth == 0
    slice_depth = kernels.slice_depth_for(tokens, width, depth, tiles)
    slices, programs = -(-depth // slice_depth), -(-width // tiles.rows)
    assert slice_depth % 128 == 0 and (slices - 1) * slice_depth < depth <= slices * slice_depth
    if slices > 1:
        assert slice_depth >= 256 and slices * programs <= 512
        assert 8 * slices * tokens * width <= width * depth / 2
    if tokens <= 8:
        assert slices * programs >= 96


# ---- on a GPU, at the model's shapes ----


def real_inputs(name, tokens):
    """x, a packed weight, its values and groups, so that results are about 1."""
    width, depth, groups = LINEARS[name]
    weight = fp8_weight(width, depth)
    weight.scales.mul_(2.0**-4)
    values = dense(weight)
    kernels.pack(weight)
    return randn(tokens, groups * depth, dtype=BF16), weight, values, groups


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("tokens", [1, 8, 16, 17, 43, 64, 100, 128, 129, 1000])
@pytest.mark.parametrize("name", LINEARS)
def test_at_real_shapes(name, tokens, dtype):
    x, weight, values, groups = real_inputs(name, tokens)
    result = kernels.linear_fp8(x, weight, dtype=dtype, groups=groups)
    expected = product(x, values, groups)
    error = (result.double() - expected).norm(dim=1) / expected.norm(dim=1)
    limit = 2**-8 if dtype is BF16 else 2e-5  # of 8,192 terms, whose sums tensor cores cut off
    assert expected.abs().max() > 0.01 and error.max() <= limit, f"relative error {error.max()}"


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("tokens", [1, 8, 64, 256])
@pytest.mark.parametrize("name", LINEARS)
def test_a_replay_equals_eager(name, tokens):
    """On other tokens than were captured, bit for bit."""
    x, weight, _, groups = real_inputs(name, tokens)
    static = torch.zeros_like(x)

    def call(inputs):
        return kernels.linear_fp8(inputs, weight, dtype=BF16, groups=groups)

    call(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = call(static)
    static.copy_(x)
    graph.replay()
    assert replayed.abs().max() > 0 and torch.equal(replayed, call(x))
