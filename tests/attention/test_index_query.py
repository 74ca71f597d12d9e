"""index_query, and the indexer's grid: Hadamard transform and FP4 rounding, code by code."""

import math
import struct
from functools import partial

import pytest
import torch

from naive_attention import E2M1, e2m1_blocks, rope, sylvester
from op_checks import MACHINE, assert_stays_on_device, implementations, randn
from sglang_dsv4.attention import reference
from tolerance import assert_close

FREQUENCIES = randn(32, seed=5).abs()
LARGEST, SMALLEST, TINIEST = 3.4028234663852886e38, 2.0**-126, 2.0**-149


@pytest.fixture(params=implementations("index_query"))
def run(request):
    return request.param


class Identity:
    """A matrix that a product with leaves every bit alone: `x @ torch.eye(n)` loses -0.0."""

    @classmethod
    def __torch_function__(cls, function, types, args, kwargs=None):
        return args[0]


@pytest.fixture
def grid(monkeypatch):
    """The grid without its transform, on one vector of float32 numbers."""
    monkeypatch.setattr(reference, "_hadamard", lambda size, device: Identity())
    return lambda values: reference.fp4_grid(torch.tensor(values)).tolist()


def positions_of(*values):
    return torch.tensor(values, dtype=torch.int64, device=MACHINE.device)


def rotated(q, positions):
    result = torch.empty(q.shape, dtype=torch.float64)
    for token, position in enumerate(positions.tolist()):
        for head in range(q.shape[1]):
            result[token, head] = rope(q[token, head].cpu().double(), position, FREQUENCIES)
    return result


def bits(values):
    """Float32 bit patterns, so that -0.0 is not 0.0."""
    return [struct.pack("<f", value) for value in values]


def assert_on_grid(grid, values):
    values = torch.tensor(values).tolist()  # as float32
    assert bits(grid(values)) == bits(e2m1_blocks(values))


# ---- the op ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", [(0,), (5, 0, 127, 4095, 1048575), ()])
@pytest.mark.parametrize("heads", [1, 3, 16])
def test_without_the_grid_it_is_the_rotation(run, dtype, positions, heads):
    q, positions = randn(len(positions), heads, 128, dtype=dtype), positions_of(*positions)
    result = run(q, positions, FREQUENCIES, fp4=False)
    assert result.dtype is dtype
    assert_close(result, rotated(q, positions))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", [(0,), (5, 0, 127, 4095, 1048575), ()])
def test_on_the_grid_each_value_is_a_nearest_one(run, dtype, positions):
    q, positions = randn(len(positions), 3, 128, dtype=dtype) * 5, positions_of(*positions)
    result = run(q, positions, FREQUENCIES, fp4=True)
    assert result.dtype is dtype and result.shape == q.shape
    exact = rotated(q, positions) @ sylvester(128) / math.sqrt(128)
    for got, want in zip(result.flatten(0, 1).cpu(), exact.flatten(0, 1), strict=True):
        assert got.tolist() == e2m1_blocks(got.tolist()), "not on a grid"
        amax = want.unflatten(0, (4, 32)).abs().amax(dim=1, keepdim=True)
        scale = torch.exp2(torch.ceil(torch.log2(amax / 6))).expand(4, 32).flatten()
        magnitude = want.abs() / scale
        step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
        assert ((got.double() - want).abs() / scale <= step / 2 + 1e-5).all()


@pytest.mark.parametrize("fp4", [False, True])
def test_tokens_and_heads_do_not_mix(run, fp4):
    op = partial(run, fp4=fp4)
    q, positions = randn(5, 3, 128), positions_of(3, 1, 4, 1, 5)
    whole = op(q, positions, FREQUENCIES)
    order = torch.tensor([4, 0, 3, 2, 1], device=q.device)
    assert_close(op(q[order], positions[order], FREQUENCIES), whole[order])
    assert_close(op(q[2:3], positions[2:3], FREQUENCIES), whole[2:3])
    poisoned = q.clone()
    poisoned[2, 1] = math.nan
    result = op(poisoned, positions, FREQUENCIES)
    result[2, 1] = whole[2, 1]
    assert_close(result, whole)
    strided = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert_close(op(strided, positions, FREQUENCIES), whole)


@pytest.mark.parametrize("fp4", [False, True])
def test_stays_on_device(run, fp4):
    q, positions = randn(3, 2, 128), positions_of(1, 2, 3)
    assert_stays_on_device(run, q, positions, FREQUENCIES, fp4=fp4)


# ---- the transform ----


def test_golden_hadamard():
    matrix = reference._hadamard(4, torch.device("cpu"))
    assert (torch.tensor([1.0, 2.0, 3.0, 4.0]) @ matrix).tolist() == [5, -1, -2, 0]


@pytest.mark.parametrize("size", [32, 64, 128])
def test_hadamard_is_sylvesters(size):
    matrix = reference._hadamard(size, torch.device("cpu")).double()
    assert_close(matrix.float(), sylvester(size) / math.sqrt(size))
    torch.testing.assert_close(matrix @ matrix, torch.eye(size).double(), rtol=0, atol=1e-6)


def test_transform_and_grid_together_are_exact_for_64_channels():
    """The factor is 1/8 there: integers transform without rounding, ties and all."""
    values = torch.randint(-9, 10, (50, 64), generator=torch.Generator().manual_seed(0)).float()
    exact = values.double() @ sylvester(64) / 8
    for got, want in zip(reference.fp4_grid(values), exact, strict=True):
        assert bits(got.tolist()) == bits(e2m1_blocks((want + 0.0).tolist()))


# ---- the grid ----


def test_golden_grid(grid):
    values = [0.3, -1.1, 2.2, 5.9, -11.0, 0.05] + [0.0] * 26
    assert grid(values) == [0, -1, 2, 6, -12, 0] + [0] * 26


@pytest.mark.parametrize("exponent", [-126, -100, -1, 0, 1, 60, 125])
def test_every_code_and_every_tie(grid, exponent):
    """All codes, all midpoints between them and the numbers beside these, of both signs."""
    middles = [(low + high) / 2 for low, high in zip(E2M1, E2M1[1:], strict=False)]
    beside = [m * (1 + sign * 2**-23) for m in middles for sign in (1, -1)]
    numbers = [*E2M1, *middles, *beside]
    numbers += [-number for number in numbers]
    for first in range(0, len(numbers), 31):
        block = [6.0, *numbers[first : first + 31]]
        block += [0.0] * (32 - len(block))
        assert_on_grid(grid, [number * 2.0**exponent for number in block])


def test_ties_go_to_the_even_code(grid):
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    block = [6.0, *ties, *(-tie for tie in ties)]
    expected = [6.0, *ties.values(), *(-value for value in ties.values())]
    rest = [0.0] * (32 - len(block))
    assert bits(grid(block + rest)) == bits(expected + rest)


@pytest.mark.parametrize("exponent", [-120, -30, -3, 0, 5, 30, 125])
def test_the_scale_steps_just_above_6(grid, exponent):
    """amax exactly 6 * 2^k, and the float32 numbers on either side of it."""
    unit = 2.0**exponent
    for amax in (6.0, 6.0 * (1 - 2**-24), 6.0 + 2.0**-21, 4.0, 3.0, 3.0 + 2.0**-22):
        others = [0.24, 0.25, 0.26, 0.74, 1.2, 1.3, 2.4, 2.6, 2.9]
        assert_on_grid(grid, [sign * amax * unit for sign in (1, -1)] + [o * unit for o in others]
                       + [0.0] * 21)


def test_blocks_have_scales_of_their_own(grid):
    blocks = [[0.3 * factor] * 31 + [factor] for factor in (1.0, 7.0, 500.0, 0.0)]
    assert_on_grid(grid, sum(blocks, []))


def test_zeros_keep_their_signs(grid):
    """Also in a block of zeros, which has no amax to scale by, and where a value rounds to zero."""
    for block in ([0.0] * 32, [-0.0] * 32, [-0.2, 0.2, -1e-30, -0.0] + [0.0] * 27 + [6.0]):
        assert_on_grid(grid, block)
    assert bits(grid([-0.2, 0.2, -0.0] + [6.0] * 29)) == bits([-0.0, 0.0, -0.0] + [6.0] * 29)


@pytest.mark.parametrize("amax", [TINIEST, 5 * TINIEST, SMALLEST / 2, SMALLEST, 5.9 * SMALLEST])
def test_tiny_values(grid, amax):
    """Down to the smallest numbers that float32 knows; the scale stops at 2^-126."""
    assert_on_grid(grid, [amax, -amax, amax / 2, amax / 3] + [0.0] * 28)


@pytest.mark.parametrize("amax", [LARGEST / 8, 2.0**127, 6 * 2.0**124, 2.9e38])
def test_huge_values(grid, amax):
    """As long as the code they round to is a float32: 4 * 2^126 is none."""
    assert_on_grid(grid, [amax, -amax, amax / 2, amax / 50, amax / 90] + [0.0] * 27)


def test_random_vectors(grid):
    generator = torch.Generator().manual_seed(3)
    for scale in (1e-30, 1e-3, 1.0, 77.0, 1e20):
        values = torch.randn(128, generator=generator) * scale
        assert_on_grid(grid, values.tolist())
