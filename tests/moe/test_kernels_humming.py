"""routed_experts_fp4 by humming, whose package and kernels are stood in for: what our side gives
them, and what it makes of their results. The kernels themselves need a GPU."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from op_checks import MACHINE, randn
from sglang_dsv4 import dequant
from sglang_dsv4.fp4 import FP4Matrices
from sglang_dsv4.moe import kernels_humming, reference

LIMIT = 1.0  # low enough that the clamp bites
NVFP4, MXFP4 = dequant.NVFP4_GROUP, dequant.MXFP4_GROUP
HIDDEN, WIDTH, EXPERTS, TOP_K = 256, 128, 5, 3
FORMATS = pytest.mark.parametrize("group", [NVFP4, MXFP4])


@dataclass(frozen=True)
class LayerConfig:
    """humming's, as far as it is used."""

    shape_n: int
    shape_k: int
    num_experts: int
    a_dtype: str
    b_dtype: str
    c_dtype: str
    bs_dtype: str
    weight_scale_group_size: int

    def to_str(self):
        return json.dumps(vars(self))


class StandIn:
    """The parts of humming, and SGLang's list of blocks; `rows2`: rows of tiles of w2's product."""

    def __init__(self):
        self.prepared, self.aligned, self.rows2 = [], [], None
        self.modules = {
            "config": SimpleNamespace(LayerConfig=LayerConfig),
            "tune": SimpleNamespace(get_heuristics_config=self.policy),
            "transform": SimpleNamespace(transform_humming_tensors=self.transform),
            "kernel.humming": SimpleNamespace(
                HummingKernel=SimpleNamespace(prepare_kernels=self.prepare)
            ),
            "ops": SimpleNamespace(humming_gemm=self.gemm),
        }

    def policy(self, layer, *, gemm_type):
        assert gemm_type == "indexed"
        own = self.rows2 if layer.shape_k == WIDTH and self.rows2 else 8
        tiles = [{"block_shape": (rows, 128, 64), "use_stream_k": True} for rows in (own, 24)]
        return [[0, 16, tiles[0]], [16, 1 << 30, tiles[1]]]

    def prepare(self, layer, compute, tuning):
        self.prepared.append((layer, compute, tuning))

    def transform(self, layer, tensors, *, already_padded):
        """As its layouts are, but for the order of codes within 16 inputs of a row."""
        codes, scales = tensors["weight"], tensors["weight_scale"]
        rows, words = codes.shape
        assert already_padded and codes.dtype == torch.int32 and codes.is_contiguous()
        assert (rows, 8 * words) == (layer.shape_n, layer.shape_k)
        order = scales.T.reshape(-1, rows // 64, 8, 8).transpose(2, 3)
        return {
            "weight": codes.view(rows, words // 2, 2).transpose(0, 1).reshape(words // 2, -1),
            "weight_scale": order.reshape(-1, rows),
        }

    def gemm(self, **given):
        """Row by row, after the launcher's own checks."""
        layer = LayerConfig(**json.loads(given["layer_config"]))
        rows, inputs, group = layer.shape_n, layer.shape_k, layer.weight_scale_group_size
        assert json.loads(given["compute_config"]) == {"gemm_type": "indexed"}
        tiles = json.loads(given["tuning_config"])
        assert [tile["use_stream_k"] for _, _, tile in tiles] == [False, False]
        x, out, top_k = given["inputs"], given["outputs"], given["top_k"]
        pairs = x.shape[0] * top_k
        block = next(t["block_shape"][0] for _, most, t in tiles if given["valid_shape_m"] <= most)
        scale = {"float8e4m3": torch.float8_e4m3fn, "float8e8m0": torch.float8_e8m0fnu}
        expected = {
            "inputs": ((x.shape[0], inputs), torch.bfloat16),
            "weight": ((layer.num_experts, inputs // 16, 2 * rows), torch.int32),
            "weight_scale": ((layer.num_experts, inputs // group, rows), scale[layer.bs_dtype]),
            "outputs": ((pairs, rows), torch.bfloat16),
            "sorted_ids": (given["sorted_ids"].shape, torch.int32),
            "expert_ids": (given["expert_ids"].shape, torch.int32),
            "num_tokens_padded": ((1,), torch.int32),
        }
        for name, (shape, dtype) in expected.items():
            found = given[name]
            assert (tuple(found.shape), found.dtype) == (tuple(shape), dtype), name
            assert found.is_contiguous(), name
        for place in range(int(given["num_tokens_padded"]) // block):
            pair = given["sorted_ids"][place * block : (place + 1) * block]
            pair = pair[pair < pairs].long()
            expert = int(given["expert_ids"][place])
            matrix = self.values(given["weight"][expert], given["weight_scale"][expert], group)
            out[pair] = (x[pair // top_k].float() @ matrix.T).to(out.dtype)

    @staticmethod
    def values(words, scales, group):
        """[N, K] fp32 of one matrix, without factors."""
        rows = scales.shape[1]
        codes = words.view(-1, rows, 2).transpose(0, 1).contiguous().view(torch.uint8)
        order = scales.view(torch.uint8).view(-1, rows // 64, 8, 8).transpose(2, 3)
        plain = order.reshape(-1, rows).T.contiguous()
        codes = codes.view(rows, -1)
        if group == MXFP4:
            return dequant.mxfp4(codes, plain)
        return dequant.nvfp4(codes, plain, torch.ones(1, device=codes.device))

    def align(self, chosen, rows, experts):
        """What SGLang's promises: blocks of one expert each, filled up with the number of pairs."""
        assert chosen.dtype == torch.int32
        self.aligned.append(rows)
        flat, ids, blocks = chosen.flatten(), [], []
        for expert in range(experts):
            mine = (flat == expert).nonzero().flatten().tolist()
            filled = [*mine, *[len(flat)] * (-len(mine) % rows)]
            ids += filled
            blocks += [expert] * (len(filled) // rows)
        junk = [1 << 30] * rows  # nobody may look beyond what is padded
        lists = ids + junk, [*blocks, experts + 7], [len(ids)]
        first, second, third = (chosen.new_tensor(each) for each in lists)
        return first, second, third


@pytest.fixture
def humming(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setattr(kernels_humming, "_humming", stand_in.modules.__getitem__)
    monkeypatch.setattr(kernels_humming, "_align", lambda: stand_in.align)
    kernels_humming._kernels.cache_clear()
    yield stand_in
    kernels_humming._kernels.cache_clear()


def matrices(rows, columns, *, group, parts, seed=0):
    weight = FP4Matrices(EXPERTS, rows, columns, group=group, parts=parts).to(MACHINE.device)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, weight.codes.shape, generator=generator)
    low, high = (1, 0x48) if group == NVFP4 else (118, 128)
    scales = torch.randint(low, high, weight.scales.shape, generator=generator)
    weight.codes.copy_(codes)
    weight.scales.copy_(scales)
    weight.factors.fill_(1.0)
    if group == NVFP4:
        weight.factors.copy_(torch.rand(weight.factors.shape, generator=generator) + 0.5)
        weight.factors.mul_(columns**-0.5)
    return weight


def inputs(tokens, group):
    """x, weights, experts, w13, w2."""
    return (
        randn(tokens, HIDDEN, dtype=torch.bfloat16),
        randn(tokens, TOP_K, seed=2).abs(),
        randn(tokens, EXPERTS, seed=1).argsort(dim=1)[:, :TOP_K],  # not contiguous
        matrices(2 * WIDTH, HIDDEN, group=group, parts=2, seed=3),
        matrices(HIDDEN, WIDTH, group=group, parts=1, seed=4),
    )


def packed(*weights):
    for weight in weights:
        kernels_humming.pack(weight)
    return weights


@pytest.mark.kernels
@FORMATS
@pytest.mark.parametrize("rows2", [None, 16], ids=["equal tiles", "other tiles"])
@pytest.mark.parametrize("tokens", [1, 5, 30])
def test_equals_the_reference(humming, tokens, rows2, group):
    """In BF16 products and activation are off by 2^-9 of themselves, three times."""
    humming.rows2 = rows2
    arguments, base = inputs(tokens, group), randn(tokens, HIDDEN, seed=5)
    expected = reference.routed_experts_fp4(*arguments, limit=LIMIT)
    weights = packed(*arguments[3:])
    op = kernels_humming.routed_experts_fp4
    result = op(*arguments[:3], *weights, limit=LIMIT)
    error = (result - expected).double().norm(dim=1) / expected.double().norm(dim=1)
    assert result.dtype is torch.float32
    assert error.max() <= 2**-7, f"relative error {error.max()}"
    assert torch.equal(op(*arguments[:3], *weights, limit=LIMIT, base=base), base + result)
    rows = [8, *([16] if rows2 else [])] if TOP_K * tokens <= 16 else [24]
    assert humming.aligned == 2 * rows


@FORMATS
def test_packs_in_place_and_compiles_once(humming, group):
    weight = matrices(256, 384, group=group, parts=1)
    codes, scales = weight.codes.clone(), weight.scales.clone()
    places = weight.codes.data_ptr(), weight.scales.data_ptr()
    kernels_humming.pack(weight)
    assert weight.packed and places == (weight.codes.data_ptr(), weight.scales.data_ptr())
    for expert in range(EXPERTS):
        words = weight.codes[expert].view(torch.int32).view(384 // 16, 512)
        found = StandIn.values(words, weight.scales[expert].view(-1, 256), group)
        plain = codes[expert], scales[expert]
        if group == MXFP4:
            assert torch.equal(found, dequant.mxfp4(*plain))
        else:
            assert torch.equal(found, dequant.nvfp4(*plain, torch.ones(1, device=MACHINE.device)))
    ((layer, _, tuning),) = humming.prepared
    kernels = kernels_humming._kernels_of(weight)
    assert (layer, tuning) == (kernels.layer.to_str(), kernels.tuning)
    assert json.loads(layer)["bs_dtype"] == ("float8e8m0" if group == MXFP4 else "float8e4m3")
    assert [kernels.block_rows(pairs) for pairs in (1, 16, 17, 1 << 20)] == [8, 8, 24, 24]
    with pytest.raises(ValueError, match="packed already"):
        kernels_humming.pack(weight)


def test_no_tokens(humming):
    arguments = inputs(0, NVFP4)
    base = randn(0, HIDDEN)
    weights = packed(*arguments[3:])
    for each in (None, base):
        result = kernels_humming.routed_experts_fp4(
            *arguments[:3], *weights, limit=LIMIT, base=each
        )
        assert result.shape == (0, HIDDEN) and result.dtype is torch.float32


def test_what_cannot_be_multiplied_is_refused(humming):
    arguments = inputs(2, NVFP4)
    with pytest.raises(ValueError, match="call pack"):
        kernels_humming.routed_experts_fp4(*arguments, limit=LIMIT)
    weights = packed(*arguments[3:])
    with pytest.raises(ValueError, match=r"multiplies BF16 here, found torch.float32"):
        kernels_humming.routed_experts_fp4(
            arguments[0].float(), *arguments[1:3], *weights, limit=LIMIT
        )
    with pytest.raises(ValueError, match="w2 holds 5 of 10 experts: take another provider"):
        kernels_humming.routed_experts_fp4(
            *arguments[:3], *weights, limit=LIMIT, first=EXPERTS, total=2 * EXPERTS
        )
    for rows, columns in ((128, 256), (256, 192)):
        odd = matrices(rows, columns, group=NVFP4, parts=1)
        kept = odd.codes.clone()
        message = f"multiples of 256 rows and 128 inputs, found {rows} x {columns}: .*=triton"
        with pytest.raises(ValueError, match=message):
            kernels_humming.pack(odd)
        assert torch.equal(odd.codes, kept) and not odd.packed


@pytest.mark.parametrize(("group", "scale"), [(NVFP4, 0x7F), (NVFP4, 0xFF), (MXFP4, 0xFF)])
def test_scales_that_are_not_numbers_are_refused(humming, group, scale):
    weight = matrices(256, 128, group=group, parts=1)
    kept = weight.codes.clone()
    weight.scales[EXPERTS - 1, 5, 2] = scale
    with pytest.raises(ValueError, match="not a number: the checkpoint is damaged"):
        kernels_humming.pack(weight)
    assert torch.equal(weight.codes, kept) and not weight.packed
