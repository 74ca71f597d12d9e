"""Every code times every scale against bit fields read by hand, and against makers' packages."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_dsv4 import dequant, quantise

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
BYTES = np.arange(256, dtype=np.uint8)
# Powers of two, factors as ModelOpt computes them, and the ends of the range.
GLOBAL_SCALES = (1.0, 0.25, 0.013 / 2688, 3.7 / 2688, 1.1754944e-38, 1e30)


# ---- the formats by their bits, in double precision, where every product here is exact ----


def e2m1(code: int) -> float:
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return -size if sign else size


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return np.nan
    size = mantissa * 2**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def e8m0(byte: int) -> float:
    return np.nan if byte == 255 else 2.0 ** (byte - 127)


EVEN = np.array([e2m1(byte & 15) for byte in range(256)])
ODD = np.array([e2m1(byte >> 4) for byte in range(256)])
OF_E4M3 = np.array([e4m3(byte) for byte in range(256)])
OF_E8M0 = np.array([e8m0(byte) for byte in range(256)])


def fp4_by_hand(weight: np.ndarray, factors: np.ndarray, group: int) -> np.ndarray:
    """weight [N, K/2] bytes, factors [N, K/group] -> [N, K] in double precision."""
    values = np.empty((weight.shape[0], 2 * weight.shape[1]))
    values[:, 0::2], values[:, 1::2] = EVEN[weight], ODD[weight]
    return values * np.repeat(factors, group, axis=1)


def same(found: Tensor, expected: np.ndarray) -> bool:
    """Bit for bit, but for what NaN is made of."""
    with np.errstate(over="ignore"):
        single = expected.astype(np.float32)
    assert found.dtype is torch.float32 and tuple(found.shape) == single.shape
    bits = found.numpy().view(np.uint32) == single.view(np.uint32)
    return bool((bits | (np.isnan(found.numpy()) & np.isnan(single))).all())


def tensor(values: np.ndarray, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).view(dtype)


# Every byte in every row, so that each meets the scale of its row.
EVERY_BYTE = np.tile(BYTES, (256, 1))

Fp4 = Callable[[Tensor, Tensor], Tensor]


def mxfp4_agrees(function: Fp4) -> bool:
    """Whether `function` gives every byte times every scale."""
    scale = np.repeat(BYTES[:, None], 16, axis=1)
    expected = fp4_by_hand(EVERY_BYTE, OF_E8M0[scale], 32)
    return same(function(tensor(EVERY_BYTE), tensor(scale)), expected)


def nvfp4_agrees(function: Callable[[Tensor, Tensor, Tensor], Tensor], global_scale: float) -> bool:
    """Likewise, with a factor for all."""
    scale = np.repeat(BYTES[:, None], 32, axis=1)
    factor = np.float32(global_scale)
    expected = fp4_by_hand(EVERY_BYTE, OF_E4M3[scale], 16) * np.float64(factor)
    return same(function(tensor(EVERY_BYTE), tensor(scale), torch.tensor(factor)), expected)


# ---- every code, every scale ----


def test_fp8_of_every_code_and_scale() -> None:
    codes = np.tile(BYTES.reshape(2, 128), (64, 256))  # each block of 128x128 has every code
    scale = BYTES[None]
    found = dequant.fp8(tensor(codes, E4M3), tensor(scale, E8M0))
    assert same(found, OF_E4M3[codes] * np.repeat(OF_E8M0[scale], 128, axis=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (127, 129), (300, 260)])
def test_fp8_with_float_scales_and_blocks_that_are_not_full(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    draw = np.random.default_rng(0)
    codes = draw.integers(0, 256, shape, dtype=np.uint8)
    blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
    scale = torch.from_numpy(draw.normal(size=blocks)).to(dtype)
    factors = np.kron(scale.double().numpy(), np.ones((128, 128)))[: shape[0], : shape[1]]
    assert same(dequant.fp8(tensor(codes, E4M3), scale), OF_E4M3[codes] * factors)


def test_mxfp4_of_every_byte_and_scale() -> None:
    assert mxfp4_agrees(dequant.mxfp4)


@pytest.mark.parametrize("global_scale", GLOBAL_SCALES)
def test_nvfp4_of_every_byte_and_scale(global_scale: float) -> None:
    assert nvfp4_agrees(dequant.nvfp4, global_scale)


@pytest.mark.parametrize("reciprocal", GLOBAL_SCALES)
def test_nvfp4_with_a_reciprocal_of_every_byte_and_scale(reciprocal: float) -> None:
    scale = np.repeat(BYTES[:, None], 32, axis=1)
    factor = np.float32(reciprocal)
    # Rounding a quotient of two fp32 numbers to double and then to fp32 rounds it but once.
    expected = fp4_by_hand(EVERY_BYTE, OF_E4M3[scale], 16) / np.float64(factor)
    found = dequant.nvfp4_reciprocal(tensor(EVERY_BYTE), tensor(scale), torch.tensor([factor]))
    assert same(found, expected)


def test_a_quotient_is_rounded_once() -> None:
    """Against rational arithmetic, for a reciprocal that is no power of two."""
    reciprocal = torch.tensor([2688 / 0.37])
    code, scale = torch.tensor([[0x65] * 8], dtype=torch.uint8), torch.tensor([[0.8125]]).to(E4M3)
    found = dequant.nvfp4_reciprocal(code, scale, reciprocal)[0, :2].double()
    for value, number in zip(found.tolist(), (3, 4), strict=True):
        exact = Fraction(number) * Fraction(0.8125) / Fraction(reciprocal.item())
        steps = [np.nextafter(np.float32(value), np.float32(to)) for to in (0, 1)]
        assert all(abs(Fraction(value) - exact) < abs(Fraction(float(s)) - exact) for s in steps)


@pytest.mark.parametrize("container", [torch.uint8, torch.int8])
def test_containers_do_not_matter(container: torch.dtype) -> None:
    draw = np.random.default_rng(1)
    weight = tensor(draw.integers(0, 256, (6, 64), dtype=np.uint8))
    for function, scale, *more in (
        (dequant.mxfp4, tensor(draw.integers(0, 256, (6, 4), dtype=np.uint8), E8M0)),
        (dequant.nvfp4, tensor(draw.integers(0, 127, (6, 8), dtype=np.uint8), E4M3), torch.ones(1)),
    ):
        expected = function(weight, scale, *more)
        found = function(weight.view(container), scale.view(container), *more)
        assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    codes = torch.ones(3, 3).to(E4M3)
    scale = torch.full((1, 1), 126, dtype=torch.uint8)
    assert (dequant.fp8(codes, scale.view(container)) == 0.5).all()


# ---- golden values ----


def test_byte_a3() -> None:
    """Even input 1.5, odd input -1; scale 0.5; global scale 0.25, which divides as 4."""
    byte, scale = torch.full((1, 8), 0xA3, dtype=torch.uint8), torch.tensor([[0.5]]).to(E4M3)
    expected = torch.tensor([[0.1875, -0.125] * 8])
    assert torch.equal(dequant.nvfp4(byte, scale, torch.tensor(0.25)), expected)
    assert torch.equal(dequant.nvfp4_reciprocal(byte, scale, torch.tensor([4.0])), expected)


# What ModelOpt 0.47.0 makes of values ((i * 37) % 85 - 42) / 64 for i in 0..95, in 3 rows of 32, by
# NVFP4QTensor.quantize(values, 16), and what its dequantize makes of that, times 4096.
MODELOPT_BYTES = (
    "9fc6e5f3786b4d1ea7d6e5f2695c3e0fb7d6e4716a5d2e9fc6e5f3706b4d1ea7"
    "d6e5f3796c4e1fb7d6e4f2695c3e8fb7"
)
MODELOPT_SCALES, MODELOPT_GLOBAL_SCALE = "7e7e7e7e7d7e", 2.0**-12
# fmt: off
MODELOPT_VALUES = [
    *(-2688, -224, 1792, -896, 1344, -1792, 672, -2688, 0, 2688, -672, 1792, -1344, 896, -1792),
    *(224, 2688, -448, 1792, -1344, 1344, -1792, 448, -2688, -224, 1792, -896, 1344, -1792, 672),
    *(-2688, 0, 2688, -672, 1792, -1344, 896, -1792, 224, 2688, -448, 1792, -1344, 1344, -1792),
    *(448, -2688, -224, 1792, -896, 1344, -1792, 672, -2688, 0, 2688, -672, 1792, -1344, 896),
    *(-1792, 224, 2688, -448, 1664, -1248, 1248, -1664, 624, -2496, -208, 2496, -832, 1664),
    *(-1664, 832, -2496, 208, 2496, -624, 1792, -1344, 896, -1792, 448, -2688, -224, 1792, -896),
    *(1344, -1792, 672, -2688, 0, 2688, -672),
]
# fmt: on


def test_what_modelopt_writes() -> None:
    codes = torch.tensor(list(bytes.fromhex(MODELOPT_BYTES)), dtype=torch.uint8).view(3, 16)
    scale = torch.tensor(list(bytes.fromhex(MODELOPT_SCALES)), dtype=torch.uint8).view(3, 2)
    global_scale = torch.tensor(MODELOPT_GLOBAL_SCALE)
    expected = torch.tensor(MODELOPT_VALUES).view(3, 32) / 4096
    assert torch.equal(dequant.nvfp4(codes, scale, global_scale), expected)
    values = ((torch.arange(96) * 37 % 85 - 42) / 64).view(3, 32)
    ours = quantise.nvfp4(values)
    assert torch.equal(ours[0], codes) and torch.equal(ours[1].view(torch.uint8), scale)
    assert torch.equal(ours[2], global_scale)


# ---- compressed-tensors, by its own package ----


def scheme(size: int) -> object:
    from compressed_tensors.quantization import QuantizationScheme

    return QuantizationScheme(
        targets=["Linear"],
        weights={
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group" if size == 16 else "group",
            "group_size": size,
            "symmetric": True,
        },
    )


def test_what_compressed_tensors_reads_as_nvfp4() -> None:
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor

    draw = np.random.default_rng(2)
    state = {
        "weight_packed": tensor(draw.integers(0, 256, (48, 64), dtype=np.uint8)),
        "weight_scale": tensor(draw.integers(1, 127, (48, 8), dtype=np.uint8), E4M3),
        "weight_global_scale": torch.tensor([2.0**9]),  # other factors it rounds more than once
    }
    ours = dequant.nvfp4_reciprocal(*state.values())
    theirs = NVFP4PackedCompressor.decompress(state, scheme(16))["weight"]
    assert torch.equal(ours, theirs.float())
    state["weight_global_scale"] = torch.tensor([2688 / 0.41])
    ours = dequant.nvfp4_reciprocal(*state.values())
    theirs = NVFP4PackedCompressor.decompress(state, scheme(16))["weight"]
    assert (ours - theirs.float()).abs().max() < 0.01 * ours.abs().max()


def test_what_compressed_tensors_writes_as_nvfp4() -> None:
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor

    draw = torch.Generator().manual_seed(3)
    values = torch.randn(16, 64, generator=draw)
    _, scale, global_scale = quantise.nvfp4(values)
    reciprocal = 1 / global_scale.reshape(1)
    state = {"weight": values, "weight_scale": scale.float(), "weight_global_scale": reciprocal}
    theirs = NVFP4PackedCompressor.compress(state, scheme(16))
    found = dequant.nvfp4_reciprocal(theirs["weight_packed"], theirs["weight_scale"], reciprocal)
    step = scale.float().repeat_interleave(16, dim=1) * global_scale
    assert ((found - values).abs() <= 1.001 * step).all()  # codes are at most 2 apart
    assert ((found - values).abs() > 0.3 * step).float().mean() < 0.3


def test_what_compressed_tensors_reads_as_mxfp4() -> None:
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor

    draw = np.random.default_rng(4)
    state = {
        "weight_packed": tensor(draw.integers(0, 256, (8, 64), dtype=np.uint8)),
        "weight_scale": tensor(draw.integers(100, 150, (8, 4), dtype=np.uint8)),
    }
    ours = dequant.mxfp4(state["weight_packed"], state["weight_scale"])
    theirs = MXFP4PackedCompressor.decompress(state, scheme(32))["weight"]
    assert torch.equal(ours, theirs.float())


# ---- what does not fit ----


def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(dtype)


ONE = torch.ones(1)
FAULTS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], str]] = {
    "FP8 in bytes": (
        *(dequant.fp8, (zeros(8, 8), zeros(1, 1))),
        "FP8 weight: needs float8_e4m3fn [8, 8], contiguous; has uint8 [8, 8]",
    ),
    "FP8, one scale": (
        *(dequant.fp8, (zeros(129, 8, dtype=E4M3), zeros(1, 1))),
        "FP8 scale of 128x128 blocks: needs float8_e8m0fnu or uint8 or int8 or float32 or bfloat16"
        " or float16 [2, 1], contiguous; has uint8 [1, 1]",
    ),
    "FP8, integer scale": (
        *(dequant.fp8, (zeros(8, 8, dtype=E4M3), torch.ones(1, 1, dtype=torch.int32))),
        "has int32 [1, 1]",
    ),
    "FP8, no matrix": (
        *(dequant.fp8, (zeros(8, dtype=E4M3), zeros(1, 1))),
        "FP8 weight: needs 2 dimensions, or 3 in a stack; has float8_e4m3fn [8]",
    ),
    "FP8, transposed": (
        *(dequant.fp8, (zeros(8, 9, dtype=E4M3).T, zeros(1, 1))),
        "contiguous; has float8_e4m3fn [9, 8], not contiguous",
    ),
    "MXFP4, groups of 16": (
        *(dequant.mxfp4, (zeros(4, 32), zeros(4, 4))),
        "MXFP4 scale of groups of 32: needs float8_e8m0fnu or uint8 or int8 [4, 2], contiguous;"
        " has uint8 [4, 4]",
    ),
    "MXFP4, rows missing": (
        *(dequant.mxfp4, (zeros(4, 32), zeros(3, 2))),
        "[4, 2], contiguous; has uint8 [3, 2]",
    ),
    "MXFP4, half a group": (
        *(dequant.mxfp4, (zeros(4, 24), zeros(4, 1))),
        "MXFP4 weight: needs a multiple of 32 inputs, two in a byte; has 48 in 24 bytes a row",
    ),
    "MXFP4, E4M3 scales": (
        *(dequant.mxfp4, (zeros(4, 32), zeros(4, 2, dtype=E4M3))),
        "has float8_e4m3fn [4, 2]",
    ),
    "NVFP4, groups of 32": (
        *(dequant.nvfp4, (zeros(4, 32), zeros(4, 2), ONE)),
        "NVFP4 scale of groups of 16: needs float8_e4m3fn or uint8 or int8 [4, 4], contiguous;"
        " has uint8 [4, 2]",
    ),
    "NVFP4, FP32 scales": (
        *(dequant.nvfp4, (zeros(4, 32), torch.ones(4, 4), ONE)),
        "has float32 [4, 4]",
    ),
    "NVFP4, a global scale a row": (
        *(dequant.nvfp4, (zeros(4, 32), zeros(4, 4), torch.ones(4))),
        "NVFP4 global scale: needs float32, 1 number; has float32 [4]",
    ),
    "NVFP4, BF16 global scale": (
        *(dequant.nvfp4_reciprocal, (zeros(4, 32), zeros(4, 4), ONE.bfloat16())),
        "NVFP4 global scale: needs float32, 1 number; has bfloat16 [1]",
    ),
    "NVFP4, FP8 weight": (
        *(dequant.nvfp4, (zeros(4, 32, dtype=E4M3), zeros(4, 4), ONE)),
        "NVFP4 weight: needs uint8 or int8 [4, 32], contiguous; has float8_e4m3fn [4, 32]",
    ),
    "nothing": (
        *(dequant.nvfp4, (zeros(0, 32), zeros(0, 4), ONE)),
        "NVFP4 weight: needs 2 dimensions, or 3 in a stack; has uint8 [0, 32]",
    ),
}


@pytest.mark.parametrize(("function", "parts", "told"), FAULTS.values(), ids=FAULTS)
def test_what_does_not_fit_is_refused(
    function: Callable[..., Tensor], parts: tuple[Tensor, ...], told: str
) -> None:
    with pytest.raises(ValueError) as refusal:
        function(*parts)
    assert told in str(refusal.value)


# ---- faults that the tests above notice ----


def swapped(weight: Tensor) -> Tensor:
    return weight << 4 | weight >> 4


def test_swapped_halves_of_bytes_are_noticed() -> None:
    assert not mxfp4_agrees(lambda w, s: dequant.mxfp4(swapped(w), s))
    assert not nvfp4_agrees(lambda w, s, g: dequant.nvfp4(swapped(w), s, g), 0.25)


def test_a_global_scale_that_divides_is_noticed() -> None:
    assert not nvfp4_agrees(dequant.nvfp4_reciprocal, 0.25)


def test_scales_of_the_next_row_are_noticed() -> None:
    assert not mxfp4_agrees(lambda w, s: dequant.mxfp4(w, s.roll(1, 0)))
    assert not nvfp4_agrees(lambda w, s, g: dequant.nvfp4(w, s.roll(1, 0), g), 0.25)


# ---- there and back ----


def test_codes_are_the_nearest_and_ties_are_even() -> None:
    grid = torch.tensor([e2m1(code) for code in range(8)])
    ties = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5.0: 4, 6.5: 6, 1e9: 6}
    values = torch.cat([torch.tensor(list(ties)), torch.linspace(0, 6, 4001)[:-1]])
    packed = quantise.pack_e2m1(torch.stack([values, -values], dim=1))
    found = EVEN[packed[:, 0].numpy()]
    assert (ODD[packed[:, 0].numpy()] == -found).all()
    assert found[: len(ties)].tolist() == list(ties.values())
    distance = (values[len(ties) :, None] - grid).abs()
    assert torch.equal((values - torch.tensor(found)).abs()[len(ties) :].float(), distance.amin(1))


@pytest.mark.parametrize("shape", [(4, 64), (130, 128), (200, 320)])
def test_what_is_exact_comes_back(shape: tuple[int, int]) -> None:
    draw = np.random.default_rng(5)
    codes = tensor(draw.integers(0, 256, (shape[0], shape[1] // 2), dtype=np.uint8))
    exponents = tensor(draw.integers(110, 140, (shape[0], shape[1] // 32), dtype=np.uint8))
    values = dequant.mxfp4(codes, exponents)
    assert torch.equal(dequant.mxfp4(*quantise.mxfp4(values)), values)
    bytes_8 = draw.integers(0, 127, shape, dtype=np.uint8)
    bytes_8[::128, ::128] = 126  # 448, the largest, in each block
    scale = torch.full((-(-shape[0] // 128), -(-shape[1] // 128)), 2.0**-7).to(E8M0)
    values = dequant.fp8(tensor(bytes_8, E4M3), scale)
    again, found = quantise.fp8(values)
    assert torch.equal(found.float(), scale.float())
    assert torch.equal(dequant.fp8(again, found), values)


def test_rounding_stays_within_half_a_step() -> None:
    values = torch.randn(256, 256, generator=torch.Generator().manual_seed(6))
    error = (dequant.nvfp4(*quantise.nvfp4(values)) - values).abs()
    largest = values.unflatten(1, (-1, 16)).abs().amax(2).repeat_interleave(16, dim=1)
    assert (error <= largest / 6 * 1.07).all()  # half of the step from 4 to 6, and E4M3's own
    assert error.mean() < 0.1 * values.abs().mean()
    for function, back, bound in (
        (quantise.mxfp4, dequant.mxfp4, 0.17),
        (quantise.fp8, dequant.fp8, 0.035),
    ):
        error = (back(*function(values)) - values).abs()
        assert 0 < error.mean() < bound * values.abs().mean()


def test_zeros_are_stored() -> None:
    assert (dequant.fp8(*quantise.fp8(torch.zeros(64, 64))) == 0).all()
    assert (dequant.mxfp4(*quantise.mxfp4(torch.zeros(4, 64))) == 0).all()
    codes, scale, global_scale = quantise.nvfp4(torch.zeros(4, 64))
    assert (scale.float() == 1).all() and global_scale == 1
    assert (dequant.nvfp4(codes, scale, global_scale) == 0).all()
