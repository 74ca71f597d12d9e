"""Loading: every dialect, every share, every fault, from checkpoints and models written by hand."""

import io
import itertools
import math
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from checkpoint_files import (
    IN_FP32,
    FakeModel,
    Tensors,
    assert_same,
    dense_headers,
    headers_of,
    share,
    write,
    write_holes,
    write_index,
)
from sglang_dsv4 import checkpoint
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.tensor_table import TABLE, expected_tensors, vendor_names
from sglang_dsv4.tiny_formats import RECIPES
from sglang_dsv4.weights import CheckpointError, LoadReport, check, load

FLASH: dict[str, Any] = dict(
    model_type="deepseek_v4",
    vocab_size=129280,
    hidden_size=4096,
    num_hidden_layers=43,
    compress_ratios=[0, 0] + [4, 128] * 20 + [4, 0],
    num_hash_layers=3,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_lora_rank=1024,
    o_groups=8,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    sliding_window=128,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=6,
    moe_intermediate_size=2048,
    scoring_func="sqrtsoftplus",
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    rms_norm_eps=1e-6,
    rope_theta=10000,
    compress_rope_theta=160000,
    rope_scaling=None,
    max_position_embeddings=1048576,
    num_nextn_predict_layers=1,
    bos_token_id=0,
    eos_token_id=1,
)
PRO = FLASH | dict(
    hidden_size=7168,
    num_hidden_layers=61,
    compress_ratios=[128, 128] + [4, 128] * 29 + [4, 0],
    num_attention_heads=128,
    q_lora_rank=1536,
    o_groups=16,
    n_routed_experts=384,
    moe_intermediate_size=3072,
)
TINY = FLASH | dict(
    vocab_size=48,
    hidden_size=32,
    num_hidden_layers=7,
    compress_ratios=[0, 0, 4, 128, 4, 128, 4, 0],
    num_attention_heads=16,
    q_lora_rank=24,
    o_lora_rank=4,
    index_n_heads=16,
    n_routed_experts=3,
    num_experts_per_tok=2,
    moe_intermediate_size=10,
)
LARGER = TINY | dict(  # 460 MB in fp32
    vocab_size=6000,
    hidden_size=2048,
    q_lora_rank=32,
    num_hidden_layers=4,
    compress_ratios=[0, 4, 128, 4],
    n_routed_experts=6,
    moe_intermediate_size=512,
)
CONFIG = DSV4Config.from_dict(TINY)

# The tiny model by hand. Where, vendor's name, transformers' name, full shape; in a layer both
# names follow "layers.N.", and an expert's three stand for each of three experts.
BY_HAND = """
model   embed.weight                          model.embed_tokens.weight                   48 32
model   head.weight                           lm_head.weight                              48 32
model   norm.weight                           model.norm.weight                           32
model   hc_head_fn                            model.hc_head.hc_fn                         4 128
model   hc_head_base                          model.hc_head.hc_base                       4
model   hc_head_scale                         model.hc_head.hc_scale                      1
layer   attn_norm.weight                      input_layernorm.weight                      32
layer   ffn_norm.weight                       post_attention_layernorm.weight             32
layer   hc_attn_fn                            attn_hc.fn                                  24 128
layer   hc_attn_base                          attn_hc.base                                24
layer   hc_attn_scale                         attn_hc.scale                               3
layer   hc_ffn_fn                             ffn_hc.fn                                   24 128
layer   hc_ffn_base                           ffn_hc.base                                 24
layer   hc_ffn_scale                          ffn_hc.scale                                3
layer   attn.attn_sink                        self_attn.sinks                             16
layer   attn.wq_a.weight                      self_attn.q_a_proj.weight                   24 32
layer   attn.q_norm.weight                    self_attn.q_a_norm.weight                   24
layer   attn.wq_b.weight                      self_attn.q_b_proj.weight                   8192 24
layer   attn.wkv.weight                       self_attn.kv_proj.weight                    512 32
layer   attn.kv_norm.weight                   self_attn.kv_norm.weight                    512
layer   attn.wo_a.weight                      self_attn.o_a_proj.weight                   32 1024
layer   attn.wo_b.weight                      self_attn.o_b_proj.weight                   32 32
HCA     attn.compressor.wkv.weight            self_attn.compressor.kv_proj.weight         512 32
HCA     attn.compressor.wgate.weight          self_attn.compressor.gate_proj.weight       512 32
HCA     attn.compressor.ape                   self_attn.compressor.position_bias          128 512
HCA     attn.compressor.norm.weight           self_attn.compressor.kv_norm.weight         512
CSA     attn.compressor.wkv.weight            self_attn.compressor.kv_proj.weight         1024 32
CSA     attn.compressor.wgate.weight          self_attn.compressor.gate_proj.weight       1024 32
CSA     attn.compressor.ape                   self_attn.compressor.position_bias          4 1024
CSA     attn.compressor.norm.weight           self_attn.compressor.kv_norm.weight         512
CSA     attn.indexer.wq_b.weight              self_attn.compressor.indexer.q_b_proj.weight  2048 24
CSA     attn.indexer.weights_proj.weight      self_attn.compressor.indexer.scorer.weights_proj.weight  16 32
CSA     attn.indexer.compressor.wkv.weight    self_attn.compressor.indexer.kv_proj.weight   256 32
CSA     attn.indexer.compressor.wgate.weight  self_attn.compressor.indexer.gate_proj.weight  256 32
CSA     attn.indexer.compressor.ape           self_attn.compressor.indexer.position_bias    4 256
CSA     attn.indexer.compressor.norm.weight   self_attn.compressor.indexer.kv_norm.weight   128
layer   ffn.gate.weight                       mlp.gate.weight                             3 32
scored  ffn.gate.bias                         mlp.gate.e_score_correction_bias            3
hashed  ffn.gate.tid2eid                      mlp.gate.tid2eid                            48 2
layer   ffn.shared_experts.w1.weight          mlp.shared_experts.gate_proj.weight         10 32
layer   ffn.shared_experts.w2.weight          mlp.shared_experts.down_proj.weight         32 10
layer   ffn.shared_experts.w3.weight          mlp.shared_experts.up_proj.weight           10 32
layer   ffn.experts.E.w1.weight               mlp.experts.E.gate_proj.weight              10 32
layer   ffn.experts.E.w2.weight               mlp.experts.E.down_proj.weight              32 10
layer   ffn.experts.E.w3.weight               mlp.experts.E.up_proj.weight                10 32
"""  # noqa: E501
KINDS = ("SWA", "SWA", "CSA", "HCA", "CSA", "HCA", "CSA")
HASHED_LAYERS = 3


def read_by_hand() -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """(vendor name -> full shape, vendor name -> transformers' name) for the tiny model."""
    shapes, spelled = {}, {}
    for where, vendor, theirs, *shape in map(str.split, BY_HAND.strip().splitlines()):
        for layer, kind in enumerate(KINDS):
            routing = "hashed" if layer < HASHED_LAYERS else "scored"
            if where not in ("model", "layer", kind, routing):
                continue
            prefix = "" if where == "model" else f"layers.{layer}."
            for expert in "012":
                name = prefix + vendor.replace(".E.", f".{expert}.")
                shapes[name] = tuple(map(int, shape))
                spelled[name] = prefix and f"model.{prefix}"
                spelled[name] += theirs.replace(".E.", f".{expert}.")
    return shapes, spelled


SHAPES, SPELLED_BY_TRANSFORMERS = read_by_hand()


def vendor_checkpoint() -> Tensors:
    """Random tensors of the tiny model under the vendor's names; integers are exact in BF16."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randint(-99, 100, shape, generator=generator).float()
        for name, shape in SHAPES.items()
    }
    return {n: t.long() % 3 if n.endswith("tid2eid") else t for n, t in tensors.items()}


def renamed(tensors: Mapping[str, Tensor], rename: Callable[[str], str]) -> Tensors:
    return {rename(name): tensor for name, tensor in tensors.items()}


def hf_per_expert(tensors: Tensors) -> Tensors:
    return renamed(tensors, SPELLED_BY_TRANSFORMERS.__getitem__)


def hf_stacked(tensors: Tensors) -> Tensors:
    kept = {n: t for n, t in hf_per_expert(tensors).items() if ".mlp.experts." not in n}
    for layer in range(7):
        w1, w2, w3 = (
            torch.stack([tensors[f"layers.{layer}.ffn.experts.{e}.{w}.weight"] for e in range(3)])
            for w in ("w1", "w2", "w3")
        )
        kept[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat([w1, w3], dim=1)
        kept[f"model.layers.{layer}.mlp.experts.down_proj"] = w2
    return kept


def hf_older(tensors: Tensors) -> Tensors:
    return renamed(hf_stacked(tensors), lambda name: name.replace(".scorer.", "."))


def transformers_5_12(tensors: Tensors) -> Tensors:
    """Its mixture: the vendor's head and experts below "mlp", all else in its own names."""

    def rename(name: str) -> str:
        if name == "head.weight":
            return name
        if ".experts." in name:
            return "model." + name.replace(".ffn.", ".mlp.")
        return SPELLED_BY_TRANSFORMERS[name]

    return renamed(tensors, rename)


def transformers_5_19(tensors: Tensors) -> Tensors:
    """Its mixture: own names outside the layers, the vendor's inside, but for the norm of kv."""

    def rename(name: str) -> str:
        if name.startswith("layers."):
            return "model." + name.replace("attn.kv_norm.", "attn.norm.")
        return name if name == "head.weight" else SPELLED_BY_TRANSFORMERS[name]

    return renamed(tensors, rename)


def transformers_5_19_again(tensors: Tensors) -> Tensors:
    """What it writes when it read its own stacked names: these, but for all norms of kv."""
    return renamed(hf_stacked(tensors), lambda name: name.replace(".kv_norm.", ".norm."))


DIALECTS: dict[str, Callable[[Tensors], Tensors]] = {
    "vendor": dict,
    "vendor, prefixed": lambda tensors: renamed(tensors, lambda name: "model." + name),
    "vendor, backwards": lambda tensors: dict(reversed(tensors.items())),
    "transformers, each expert": hf_per_expert,
    "transformers, stacked": hf_stacked,
    "transformers, older": hf_older,
    "saved by transformers 5.12": transformers_5_12,
    "saved by transformers 5.19": transformers_5_19,
    "saved again by transformers 5.19": transformers_5_19_again,
}


def parameters_of(tensors: Tensors) -> Tensors:
    """What the model must hold in the end on one rank: our parameter name -> values."""
    names = {n: n if n == "head.weight" else f"model.{n}" for n in tensors if "experts." not in n}
    found = {parameter: tensors[name] for name, parameter in names.items()}
    for layer in range(7):
        ffn = f"layers.{layer}.ffn"
        owners = [f"{ffn}.{owner}" for owner in ("experts.0", "experts.1", "experts.2")]
        owners.append(f"{ffn}.shared_experts")
        w1, w2, w3 = ([tensors[f"{o}.{w}.weight"] for o in owners] for w in ("w1", "w2", "w3"))
        w13 = [torch.cat(halves) for halves in zip(w1, w3, strict=True)]
        found[f"model.{ffn}.experts.w13"] = torch.stack(w13[:3])
        found[f"model.{ffn}.experts.w2"] = torch.stack(w2[:3])
        found[f"model.{ffn}.shared_experts.w13"] = w13[3]
        found[f"model.{ffn}.shared_experts.w2"] = w2[3]
    return found


CHECKPOINT = vendor_checkpoint()
PARAMETERS = parameters_of(CHECKPOINT)


def load_into(
    model: nn.Module, tensors: Mapping[str, Tensor], rank: int = 0, size: int = 1
) -> LoadReport:
    return load(model, tensors.items(), CONFIG, rank=rank, size=size)


def refusal(tensors: Mapping[str, Tensor]) -> str:
    """The message with which `load` refuses the tensors."""
    with pytest.raises(CheckpointError) as refused:
        load_into(FakeModel(PARAMETERS), tensors)
    return str(refused.value)


def check_refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        check(folder, CONFIG)
    return str(refused.value)


# ---- the table ----


def test_table_expects_the_tensors_written_by_hand() -> None:
    assert {name: slot.shape for name, slot in expected_tensors(CONFIG).items()} == SHAPES


@pytest.mark.parametrize(
    ("raw", "values", "tensors"),
    [
        pytest.param(FLASH, 284_332_240_471, 69_187 - 1_575, id="Flash"),
        pytest.param(PRO, 1_572_997_201_763, 145_116 - 2_343, id="Pro"),
    ],
)
def test_table_gives_the_published_totals(raw: dict[str, Any], values: int, tensors: int) -> None:
    """Parameters of the main model, and entries of the vendor's index but for those of MTP."""
    slots = expected_tensors(DSV4Config.from_dict(raw))
    floats = [slot.shape for name, slot in slots.items() if not name.endswith("tid2eid")]
    assert sum(math.prod(shape) for shape in floats) == values
    quantised = re.compile(r"(?<!compressor)\.(wq_a|wq_b|wkv|wo_a|wo_b|w1|w2|w3)\.weight$")
    assert len(slots) + sum(bool(quantised.search(name)) for name in slots) == tensors


def test_no_spelling_means_two_tensors() -> None:
    for row in TABLE:
        choices = [piece.split(",") for piece in re.split(r"[{}]", row.names.replace("*", "1"))]
        for spelling in map("".join, itertools.product(*choices)):
            for name in (spelling, "model." + spelling):
                assert vendor_names(name, 3) == [row.vendor_name.replace("*", "1")]


# ---- load ----


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_every_dialect_gives_the_same_parameters(
    dialect: Callable[[Tensors], Tensors], tmp_path: Path
) -> None:
    tensors = dialect(CHECKPOINT)
    model = FakeModel(PARAMETERS)
    report = load_into(model, tensors)
    assert_same(model.values(), PARAMETERS)
    assert (report.tensors, report.converted, report.skipped) == (len(tensors), {}, {})
    write(tmp_path, tensors, shards=3)
    summary = check(tmp_path, CONFIG)
    assert summary.tensors == len(tensors) and summary.shards == 3
    assert summary.values == sum(tensor.numel() for tensor in CHECKPOINT.values())
    assert summary.formats == {"F32": len(tensors) - 3, "I64": 3}


@pytest.mark.parametrize("dialect", [dict, hf_stacked], ids=["vendor", "stacked"])
@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_hold_the_halves(dialect: Callable[[Tensors], Tensors], rank: int) -> None:
    halves = {name: share(name, values, rank) for name, values in PARAMETERS.items()}
    assert halves["model.layers.0.ffn.experts.w13"].shape == (3, 10, 32)
    model = FakeModel(halves)
    load_into(model, dialect(CHECKPOINT), rank, size=2)
    assert_same(model.values(), halves)


def test_dtypes_are_converted_and_counted() -> None:
    tensors = {n: t if t.dtype == torch.int64 else t.half() for n, t in CHECKPOINT.items()}
    tensors |= {n: t.int() for n, t in tensors.items() if n.endswith("tid2eid")}
    tensors["norm.weight"] = tensors["norm.weight"].bfloat16()
    model = FakeModel(PARAMETERS, torch.bfloat16)
    report = load_into(model, tensors)
    assert_same({n: t.to(PARAMETERS[n].dtype) for n, t in model.values().items()}, PARAMETERS)
    assert model.get_parameter("model.norm.weight").dtype == torch.bfloat16
    in_fp32 = sum(bool(IN_FP32.search(name)) for name in CHECKPOINT)
    rest = len(CHECKPOINT) - in_fp32 - 3 - 1
    assert report.converted == {"F16 to F32": in_fp32, "F16 to BF16": rest, "I32 to I64": 3}
    assert f"{rest} F16 to BF16" in str(report)


def test_draft_tensors_are_skipped_and_counted(tmp_path: Path) -> None:
    drafts = {
        "MTP": ["mtp.0.e_proj.weight", "mtp.2.markov_head.w1.weight", "mtp.2.attn.wq_a.weight"],
        "NextN layer": ["model.layers.7.eh_proj.weight", "model.layers.7.mlp.gate.weight"],
        "DSpark head": ["model.markov_head.w1.weight", "confidence_head.proj.weight"],
        "rotary table": [
            "model.rotary_emb.compress_inv_freq",
            "model.layers.2.self_attn.compressor.rotary_emb.main_original_inv_freq",
        ],
    }
    counts = {reason: len(names) for reason, names in drafts.items()}
    foreign = {name: torch.full((2,), torch.nan) for names in drafts.values() for name in names}
    # A draft block may even be quantised where the model is not.
    foreign |= {"mtp.0.ffn.experts.0.w1.weight": torch.ones(2, 2, dtype=torch.int8)}
    foreign |= {"mtp.0.ffn.experts.0.w1.scale": torch.ones(2, 1)}
    counts["MTP"] += 2
    model = FakeModel(PARAMETERS)
    report = load_into(model, foreign | CHECKPOINT)
    assert_same(model.values(), PARAMETERS)
    assert report.skipped == counts and "5 MTP" in str(report)
    write(tmp_path, foreign | CHECKPOINT)
    summary = check(tmp_path, CONFIG)
    assert summary.skipped == counts and summary.tensors == len(CHECKPOINT)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("head.weight", "head.weight: 1 of 1536 values"),
        ("layers.3.ffn.gate.bias", "model.layers.3.mlp.gate.e_score_correction_bias: 1 of 3"),
        ("layers.4.ffn.experts.2.w3.weight", "layers.4.mlp.experts.gate_up_proj (expert 2): 1 of"),
    ],
)
def test_values_that_are_not_finite_are_refused(
    name: str, told: str, value: float, size: int
) -> None:
    tensors = {n: t.clone() for n, t in CHECKPOINT.items()}
    tensors[name].view(-1)[-1] = value  # in the last rank's share
    halves = {n: share(n, values, 1) for n, values in PARAMETERS.items()}
    model = FakeModel(halves if size == 2 else PARAMETERS)
    with pytest.raises(CheckpointError) as refused:
        load_into(model, hf_stacked(tensors), size - 1, size)
    assert told in str(refused.value) and "NaN or infinite" in str(refused.value)


def test_values_beyond_the_model_dtype_are_refused() -> None:
    tensors = CHECKPOINT | {"norm.weight": torch.full((32,), 3.4e38)}
    load_into(FakeModel(PARAMETERS), tensors)
    with pytest.raises(CheckpointError, match=r"norm\.weight: values too large.*bfloat16"):
        load_into(FakeModel(PARAMETERS, torch.bfloat16), tensors)


@pytest.mark.parametrize("expert", [-1, 3])
def test_hash_tables_name_existing_experts(expert: int) -> None:
    table = CHECKPOINT["layers.1.ffn.gate.tid2eid"].clone()
    table[47, 1] = expert
    told = refusal(CHECKPOINT | {"layers.1.ffn.gate.tid2eid": table})
    assert re.search(rf"layers\.1\.ffn\.gate\.tid2eid: expected experts 0 to 2, .*{expert}", told)


def test_model_must_be_the_one_that_the_table_tells_of() -> None:
    other = {n: v for n, v in PARAMETERS.items() if n != "model.norm.weight"}
    with pytest.raises(AssertionError, match=r"model\.norm\.weight"):
        load_into(FakeModel(other), CHECKPOINT)
    with pytest.raises(AssertionError, match=r"model\.norm\.weight .*expected \(32,\)"):
        load_into(FakeModel(PARAMETERS | {"model.norm.weight": torch.zeros(31)}), CHECKPOINT)
    rounded = FakeModel(PARAMETERS)
    sink = nn.Parameter(torch.zeros(16, dtype=torch.bfloat16), requires_grad=False)
    rounded.get_submodule("model.layers.0.attn").attn_sink = sink
    with pytest.raises(AssertionError, match=r"attn_sink is torch\.bfloat16"):
        load_into(rounded, CHECKPOINT)


# ---- faults in names, shapes and formats: `check` and `load` tell the same ----


def without(*ends: str) -> Tensors:
    return {name: tensor for name, tensor in CHECKPOINT.items() if not name.endswith(ends)}


FIVE = {f"model.layers.0.self_attn.k{i}_proj.weight": torch.zeros(4, 4) for i in range(5)}
FAULTS: dict[str, tuple[Tensors, list[str]]] = {
    "five unknown": (CHECKPOINT | FIVE, ["5 unknown tensors:", *FIVE]),
    "25 unknown": (
        CHECKPOINT | {f"w.{i}.x": torch.zeros(1) for i in range(25)},
        ["25 unknown tensors:", "and 5 more"],
    ),
    "missing": (without("norm.weight"), ["missing tensors", "layers.3.ffn_norm.weight", "more"]),
    "both lists": (
        without("2.attn.wq_a.weight") | {"foo.weight": torch.zeros(1)},
        ["1 unknown tensors:\n  foo.weight", "1 missing tensors", "layers.2.attn.wq_a.weight"],
    ),
    "one part of w13": (without("5.ffn.experts.1.w3.weight"), ["1 missing", "experts.1.w3.weight"]),
    "indexer in an HCA layer": (
        CHECKPOINT | {"layers.3.attn.indexer.wq_b.weight": torch.zeros(2048, 24)},
        ["layers.3.attn.indexer.wq_b.weight (layer 3 is HCA, scored)"],
    ),
    "bias in a hashed layer": (
        CHECKPOINT | {"layers.0.ffn.gate.bias": torch.zeros(3)},
        ["layers.0.ffn.gate.bias (layer 0 is SWA, hashed)"],
    ),
    "a layer too many": (
        CHECKPOINT | {"layers.8.attn.wkv.weight": torch.zeros(512, 32)},
        ["layers.8.attn.wkv.weight (the config has 7 layers)"],
    ),
    "an expert too many": (
        CHECKPOINT | {"model.layers.4.mlp.experts.3.up_proj.weight": torch.zeros(10, 32)},
        ["model.layers.4.mlp.experts.3.up_proj.weight (the config has 3 experts)"],
    ),
    "a star in a name": (CHECKPOINT | {"layers.*.attn.x": torch.zeros(1)}, ["layers.*.attn.x"]),
    "twice": (
        CHECKPOINT | {"lm_head.weight": torch.zeros(48, 32)},
        ["1 tensors that come twice", "head.weight as head.weight and as lm_head.weight"],
    ),
    "stacked and not": (
        CHECKPOINT | {"model.layers.1.mlp.experts.down_proj": torch.zeros(3, 32, 10)},
        ["3 tensors that come twice", "layers.1.ffn.experts.2.w2.weight as", "down_proj"],
    ),
    "wrong shape": (
        CHECKPOINT | {"layers.6.attn.compressor.ape": torch.zeros(128, 512)},
        ["1 wrong shapes:", "layers.6.attn.compressor.ape: expected [4, 1024], found [128, 512]"],
    ),
    "wrong shape of a stack": (
        hf_stacked(CHECKPOINT)
        | {"model.layers.1.mlp.experts.gate_up_proj": torch.zeros(3, 10, 32)},
        ["gate_up_proj: expected [3, 20, 32], found [3, 10, 32]"],
    ),
    "float64": (
        CHECKPOINT | {"norm.weight": torch.zeros(32, dtype=torch.float64)},
        ["1 unsupported formats", "norm.weight: format not known (F64)"],
    ),
    "table of floats": (
        CHECKPOINT | {"layers.2.ffn.gate.tid2eid": torch.zeros(48, 2)},
        ["tables that are not I64 or I32", "layers.2.ffn.gate.tid2eid: BF16, FP16 or FP32 (F32)"],
    ),
    "scale of a dense weight": (
        CHECKPOINT | {"layers.0.attn.wq_a.scale": torch.zeros(1, 1)},
        ["1 unknown tensors:\n  layers.0.attn.wq_a.scale (layers.0.attn.wq_a.weight is"],
    ),
}


@pytest.mark.parametrize(("tensors", "told"), FAULTS.values(), ids=FAULTS)
def test_faulty_tensors_are_refused(tensors: Tensors, told: list[str], tmp_path: Path) -> None:
    write(tmp_path, tensors)
    for message in (refusal(tensors), check_refusal(tmp_path)):
        missing = [text for text in told if text not in message]
        assert not missing, message


# ---- faults in files ----


def test_missing_shards_are_named(tmp_path: Path) -> None:
    write(tmp_path, CHECKPOINT, shards=4)
    (tmp_path / "model-00002.safetensors").unlink()
    (tmp_path / "model-00004.safetensors").unlink()
    message = check_refusal(tmp_path)
    assert f"2 of 4 files in {tmp_path} cannot be used" in message
    assert "model-00002.safetensors: No such file" in message and "00004" in message


def test_shards_cut_short_are_named_with_their_sizes(tmp_path: Path) -> None:
    write(tmp_path, CHECKPOINT, shards=2)
    file = tmp_path / "model-00002.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    sizes = f"expected {len(whole)} bytes by its header, found {len(whole) - 100}"
    assert f"{file.name}: {sizes}" in check_refusal(tmp_path)
    file.write_bytes(whole + b"x")
    assert f"expected {len(whole)} bytes by its header" in check_refusal(tmp_path)
    file.write_bytes(whole[:50])
    assert re.search(
        r"expected at least \d{4,} bytes by its header, found 50", check_refusal(tmp_path)
    )
    file.write_bytes(b"")
    assert "expected at least 8 bytes by its header, found 0" in check_refusal(tmp_path)


def with_header(places: str, size: int = 4, length: int = 1) -> bytes:
    """A file of `size` bytes of tensors, "name": [begin, end], each FP32 of shape [length]."""
    entry = rf'{{"dtype": "F32", "shape": [{length}], "data_offsets": \1}}'
    header = ("{" + re.sub(r"(\[.*?\])", entry, places) + "}").encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "only a Git LFS pointer"),
        (b"<html>not found</html>", "not a safetensors file (header of"),
        (b"\x04\0\0\0\0\0\0\0nope", "not a safetensors file (JSONDecodeError"),
        (b"\x02\0\0\0\0\0\0\0[]", "not a safetensors file (TypeError"),
        (b'\x09\0\0\0\0\0\0\0{"a": {}}', "not a safetensors file (KeyError"),
        (with_header('"a": [0, 4], "a": [0, 4]'), "its header repeats a"),
        (with_header('"a": [1, 5]', 5), "a begins at 1, the tensor before it ends at 0"),
        (
            with_header('"a": [0, 4], "b": [3, 7]', 7),
            "b begins at 3, the tensor before it ends at 4",
        ),
        (with_header('"a": [0, 3]', 3), "a, F32 [1], has 3 bytes"),
        (with_header('"a": [0, 0]', 0, -1), "a has shape [-1] at 0 to 0"),
        (with_header('"a": [0, "4"]'), "not a safetensors file"),
    ],
)
def test_other_files_are_refused(content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert told in check_refusal(tmp_path)


def test_index_must_match_the_shards(tmp_path: Path) -> None:
    index = write(tmp_path, CHECKPOINT, shards=2)
    write_index(tmp_path, index | {"extra.weight": "model-00001.safetensors"})
    told = "names but their file lacks:\n  extra.weight in model-00001.safetensors"
    assert told in check_refusal(tmp_path)
    for damaged in ("{", "[]", '{"weight_map": 3}', "{}"):
        (tmp_path / "model.safetensors.index.json").write_text(damaged)
        assert "is no index of shards" in check_refusal(tmp_path)


def test_only_files_of_the_index_count(tmp_path: Path) -> None:
    write(tmp_path, CHECKPOINT, shards=2)
    save_file({"foo": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert check(tmp_path, CONFIG).shards == 2
    (tmp_path / "model.safetensors.index.json").unlink()
    assert "unknown tensors:\n  foo" in check_refusal(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write(tmp_path, CHECKPOINT)
    save_file({"norm.weight": CHECKPOINT["norm.weight"]}, tmp_path / "more.safetensors")
    message = check_refusal(tmp_path)
    assert "1 tensors that come twice:\n  norm.weight, again in more.safetensors" in message


def test_folders_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    assert "no *.safetensors file" in check_refusal(tmp_path)
    assert "is not a folder" in check_refusal(tmp_path / "deepseek-ai/DeepSeek-V4-Flash")
    (tmp_path / "config.json").write_text("{}")
    assert "is not a folder" in check_refusal(tmp_path / "config.json")


def test_check_reads_headers_only(tmp_path: Path) -> None:
    """A BF16 checkpoint of Flash's full size, 569 GB of zeros: reading it would take minutes."""
    config = DSV4Config.from_dict(FLASH)
    write_holes(
        tmp_path,
        dense_headers(expected_tensors(config), "BF16"),
        lambda name: (name + ".").split(".")[1],
    )
    assert check(tmp_path, config).values == 284_332_240_471 + 3 * 129_280 * 6


# ---- what transformers really writes ----


@pytest.mark.parametrize("original", [True, False], ids=["as shipped", "own names"])
def test_checkpoint_saved_by_transformers(original: bool, tmp_path: Path) -> None:
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    sizes = {name: TINY[name] for name in TINY if name not in ("model_type", "rope_scaling")}
    sizes["compress_ratios"] = TINY["compress_ratios"][:7]
    theirs = DeepseekV4ForCausalLM(DeepseekV4Config(**sizes)).float()
    state = theirs.state_dict()
    for name, values in state.items():
        values.copy_(torch.randint(0, 3, values.shape)) if "tid2eid" in name else values.normal_()
    theirs.save_pretrained(tmp_path, save_original_format=original)
    assert check(tmp_path, CONFIG).skipped == {}
    ours = FakeModel(PARAMETERS)
    load_into(ours, load_file(tmp_path / "model.safetensors"))
    found = ours.values()
    for name in CHECKPOINT:
        if ".experts." not in name and "shared" not in name:
            parameter = name if name == "head.weight" else f"model.{name}"
            assert torch.equal(found[parameter], state[SPELLED_BY_TRANSFORMERS[name]]), name
    for layer in range(7):
        mlp, ffn = f"model.layers.{layer}.mlp", f"model.layers.{layer}.ffn"
        assert torch.equal(found[f"{ffn}.experts.w13"], state[f"{mlp}.experts.gate_up_proj"])
        assert torch.equal(found[f"{ffn}.experts.w2"], state[f"{mlp}.experts.down_proj"])
        gate, up, down = (
            state[f"{mlp}.shared_experts.{kind}_proj.weight"] for kind in ("gate", "up", "down")
        )
        assert torch.equal(found[f"{ffn}.shared_experts.w13"], torch.cat([gate, up]))
        assert torch.equal(found[f"{ffn}.shared_experts.w2"], down)


# ---- progress ----


def test_progress_counts_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, CHECKPOINT, shards=3)
    total = checkpoint.total_bytes(tmp_path)
    size = sum(tensor.nbytes for tensor in CHECKPOINT.values())
    assert total is not None and size < total < size + 100_000  # the headers
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    load_with(total, FakeModel(PARAMETERS))
    shown = terminal.getvalue()
    assert re.search(r"weights: .*\d+(\.\d+)?M/\d+(\.\d+)?M \[\d\d:\d\d<\d\d:\d\d, .*B/s\]", shown)
    terminal.truncate(0)
    load_with(None, FakeModel(PARAMETERS))
    assert not terminal.getvalue()
    assert checkpoint.total_bytes(tmp_path / "somewhere/else") is None


def load_with(total: int | None, model: FakeModel) -> None:
    load(model, CHECKPOINT.items(), CONFIG, rank=0, size=1, total_bytes=total)


# ---- memory ----

# Prints by how many MB the peak of resident memory rises while the checkpoint is loaded.
MEASURE = """
import sys
from pathlib import Path

import torch
from checkpoint_files import FakeModel, read, shapes_of
from test_weights import DSV4Config, LARGER, load

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024

config = DSV4Config.from_dict(LARGER)
model = FakeModel(shapes_of(config), getattr(torch, sys.argv[3]))
before = peak()
hoard = sys.argv[2] == "hoard"
stream = read(Path(sys.argv[1]))
tensors = [(name, tensor.clone()) for name, tensor in stream] if hoard else stream
load(model, tensors, config, rank=0, size=1)
print(peak() - before, sum(p.nbytes for p in model.parameters()) / 2**20)
"""


def rises(folder: Path, dtype: str) -> dict[str, float]:
    """By how many MB memory rises, and how large the model is."""
    rise = {}
    for mode in ("stream", "hoard"):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(folder), mode, dtype],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        rise[mode], rise["model"] = map(float, done.stdout.split())
    return rise


def test_no_second_copy_of_the_model_in_memory(tmp_path: Path) -> None:
    numbers = itertools.count()
    headers = dense_headers(expected_tensors(DSV4Config.from_dict(LARGER)), "F32")
    write_holes(tmp_path, headers, lambda name: str(next(numbers) % 8))
    rise = rises(tmp_path, "float32")
    assert rise["model"] > 400
    assert rise["stream"] < 150, rise  # one of the eight files is mapped at a time
    assert rise["hoard"] > 350, rise  # the measure does show a second copy


def test_dequantising_needs_the_shards_that_are_open_and_no_more(tmp_path: Path) -> None:
    """Every weight lies in another file than its scale, so two files are open at a time."""
    numbers = itertools.count()
    headers = headers_of(DSV4Config.from_dict(LARGER), RECIPES["fp8-base"])
    write_holes(tmp_path, headers, lambda name: str(next(numbers) % 8))
    rise = rises(tmp_path, "bfloat16")
    shards = sorted(file.stat().st_size / 2**20 for file in tmp_path.glob("*.safetensors"))
    assert rise["model"] > 240 and sum(shards) > 160
    assert rise["stream"] < sum(shards[-2:]) + 40, (rise, shards)
    assert rise["hoard"] > sum(shards) - 20, (rise, shards)
