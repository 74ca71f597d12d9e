"""Every tensor of the model, once: its spellings, its full shape, its place in our parameters.

DeepSeek-V4 weights circulate under the vendor's own names, under those of transformers, and under
mixtures of both. A tensor is known here by its vendor name.
"""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from typing import NamedTuple

from sglang_dsv4.config import DSV4Config, LayerKind


class Where(Enum):
    """Which layers hold a tensor."""

    MODEL = "outside the layers"
    LAYER = "every layer"
    COMPRESSED = "CSA and HCA layers"
    CSA = "CSA layers"
    HASHED = "layers routed by token id"
    SCORED = "layers routed by score"


class Kept(Enum):
    """The dtype of a parameter."""

    MODEL_DTYPE = "the model's dtype"
    FP32 = "float32"
    INT64 = "int64"


@dataclass(frozen=True)
class Row:
    """One tensor of the model, or of each layer, or of each expert.

    names: accepted spellings, after an optional "model.". Braces hold alternatives, the vendor's
      first; a star is the number of a layer or of an expert.
    shape: full shape, in the words of `_dimensions`; linear weights are (out, in).
    cut: the dimension that tensor parallelism divides among ranks; None is replicated.
    parameter: name in our model, where it is not "model." + the vendor's.
    part, parts: which of how many equal blocks of the parameter's rows this tensor is.
    """

    names: str
    shape: str
    where: Where
    kept: Kept = Kept.MODEL_DTYPE
    cut: int | None = None
    parameter: str | None = None
    part: int = 0
    parts: int = 1

    @cached_property
    def vendor_name(self) -> str:
        return _spellings(self.names)[0]


def _spellings(names: str) -> list[str]:
    """Every expansion of the braces in `names`, the vendor's first."""
    choices = [piece.split(",") for piece in re.split(r"[{}]", names)]
    return ["".join(choice) for choice in itertools.product(*choices)]


_ATTN = "layers.*.{attn,self_attn}"
_COMPRESSOR = _ATTN + ".compressor"
# transformers puts the indexer inside the compressor and drops the compressor inside the indexer.
_INDEXER = "layers.*.{attn.indexer,self_attn.compressor.indexer}"
_INDEX_COMPRESSOR = "layers.*.{attn.indexer.compressor,self_attn.compressor.indexer}"
_FFN = "layers.*.{ffn,mlp}"
_EXPERT, _SHARED = _FFN + ".experts.*", _FFN + ".shared_experts"
_OURS, _OURS_SHARED = "model.layers.*.ffn.experts", "model.layers.*.ffn.shared_experts"

# Not the formatter's business: a row is one line where it fits.
# fmt: off
TABLE = (
    Row("{embed,embed_tokens}.weight", "vocab hidden", Where.MODEL, cut=0),
    Row("{head,lm_head}.weight", "vocab hidden", Where.MODEL, cut=0, parameter="head.weight"),
    Row("norm.weight", "hidden", Where.MODEL),
    Row("{hc_head_fn,hc_head.hc_fn}", "hc hc*hidden", Where.MODEL, Kept.FP32),
    Row("{hc_head_base,hc_head.hc_base}", "hc", Where.MODEL, Kept.FP32),
    Row("{hc_head_scale,hc_head.hc_scale}", "1", Where.MODEL, Kept.FP32),

    Row("layers.*.{attn_norm,input_layernorm}.weight", "hidden", Where.LAYER),
    Row("layers.*.{ffn_norm,post_attention_layernorm}.weight", "hidden", Where.LAYER),
    Row("layers.*.{hc_attn_fn,attn_hc.fn}", "mix hc*hidden", Where.LAYER, Kept.FP32),
    Row("layers.*.{hc_attn_base,attn_hc.base}", "mix", Where.LAYER, Kept.FP32),
    Row("layers.*.{hc_attn_scale,attn_hc.scale}", "3", Where.LAYER, Kept.FP32),
    Row("layers.*.{hc_ffn_fn,ffn_hc.fn}", "mix hc*hidden", Where.LAYER, Kept.FP32),
    Row("layers.*.{hc_ffn_base,ffn_hc.base}", "mix", Where.LAYER, Kept.FP32),
    Row("layers.*.{hc_ffn_scale,ffn_hc.scale}", "3", Where.LAYER, Kept.FP32),

    Row(_ATTN + ".{attn_sink,sinks}", "heads", Where.LAYER, Kept.FP32, cut=0),
    Row(_ATTN + ".{wq_a,q_a_proj}.weight", "q_lora hidden", Where.LAYER),
    Row(_ATTN + ".{q_norm,q_a_norm}.weight", "q_lora", Where.LAYER),
    Row(_ATTN + ".{wq_b,q_b_proj}.weight", "heads*head_dim q_lora", Where.LAYER, cut=0),
    Row(_ATTN + ".{wkv,kv_proj}.weight", "head_dim hidden", Where.LAYER),
    # "norm": when transformers 5.19 saves, it undoes its renaming of norms of compressors here too.
    Row(_ATTN + ".{kv_norm,norm}.weight", "head_dim", Where.LAYER),
    Row(_ATTN + ".{wo_a,o_a_proj}.weight", "groups*o_lora group_heads*head_dim", Where.LAYER,
        cut=0),
    Row(_ATTN + ".{wo_b,o_b_proj}.weight", "hidden groups*o_lora", Where.LAYER, cut=1),

    Row(_COMPRESSOR + ".{wkv,kv_proj}.weight", "series*head_dim hidden", Where.COMPRESSED),
    Row(_COMPRESSOR + ".{wgate,gate_proj}.weight", "series*head_dim hidden", Where.COMPRESSED),
    Row(_COMPRESSOR + ".{ape,position_bias}", "ratio series*head_dim", Where.COMPRESSED,
        Kept.FP32),
    Row(_COMPRESSOR + ".{norm,kv_norm}.weight", "head_dim", Where.COMPRESSED),

    Row(_INDEXER + ".{wq_b,q_b_proj}.weight", "index_heads*index_dim q_lora", Where.CSA),
    Row(_INDEXER + ".{weights_proj,scorer.weights_proj}.weight", "index_heads hidden", Where.CSA),
    Row(_INDEX_COMPRESSOR + ".{wkv,kv_proj}.weight", "series*index_dim hidden", Where.CSA),
    Row(_INDEX_COMPRESSOR + ".{wgate,gate_proj}.weight", "series*index_dim hidden", Where.CSA),
    Row(_INDEX_COMPRESSOR + ".{ape,position_bias}", "ratio series*index_dim", Where.CSA,
        Kept.FP32),
    Row(_INDEX_COMPRESSOR + ".{norm,kv_norm}.weight", "index_dim", Where.CSA),

    Row(_FFN + ".gate.weight", "experts hidden", Where.LAYER),
    Row(_FFN + ".gate.{bias,e_score_correction_bias}", "experts", Where.SCORED, Kept.FP32),
    Row(_FFN + ".gate.tid2eid", "vocab experts_per_token", Where.HASHED, Kept.INT64),

    Row(_EXPERT + ".{w1,gate_proj}.weight", "width hidden", Where.LAYER, cut=0,
        parameter=_OURS + ".w13", part=0, parts=2),
    Row(_EXPERT + ".{w3,up_proj}.weight", "width hidden", Where.LAYER, cut=0,
        parameter=_OURS + ".w13", part=1, parts=2),
    Row(_EXPERT + ".{w2,down_proj}.weight", "hidden width", Where.LAYER, cut=1,
        parameter=_OURS + ".w2"),
    Row(_SHARED + ".{w1,gate_proj}.weight", "width hidden", Where.LAYER, cut=0,
        parameter=_OURS_SHARED + ".w13", part=0, parts=2),
    Row(_SHARED + ".{w3,up_proj}.weight", "width hidden", Where.LAYER, cut=0,
        parameter=_OURS_SHARED + ".w13", part=1, parts=2),
    Row(_SHARED + ".{w2,down_proj}.weight", "hidden width", Where.LAYER, cut=1,
        parameter=_OURS_SHARED + ".w2"),
)

# One tensor for all experts of a layer, (experts, rows of all parts, columns): its parts in order.
STACKED = (
    (_FFN + ".experts.gate_up_proj", ("w1", "w3")),
    (_FFN + ".experts.down_proj", ("w2",)),
)

# What nobody reads: draft blocks serve speculation only, rotary tables follow from the config.
SKIPPED = (
    ("MTP", r"mtp\."),
    ("DSpark head", r"(.+\.)?(markov_head|confidence_head)\."),
    ("rotary table", r"(.+\.)?rotary_emb\.\w*inv_freq$"),
)
# fmt: on

# Spelling with stars -> vendor's name with fields to fill in.
_VENDOR_NAMES = {
    spelling: row.vendor_name.replace("*", "{}")
    for row in TABLE
    for spelling in _spellings(row.names)
}
_STACKED_PARTS = {
    spelling: [f"layers.{{}}.ffn.experts.{{}}.{part}.weight" for part in parts]
    for names, parts in STACKED
    for spelling in _spellings(names)
}


def _dimensions(config: DSV4Config, kind: LayerKind) -> Mapping[str, int]:
    """The words of `Row.shape`, for one kind of layer."""
    return {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "hc": config.hc_mult,
        "mix": (2 + config.hc_mult) * config.hc_mult,  # pre, post and comb
        "heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "q_lora": config.q_lora_rank,
        "o_lora": config.o_lora_rank,
        "groups": config.o_groups,
        "group_heads": config.num_attention_heads // config.o_groups,
        "index_heads": config.index_n_heads,
        "index_dim": config.index_head_dim,
        "ratio": kind.value,
        # In a CSA layer windows overlap: a token feeds two entries, by a projection for each.
        "series": 2 if kind is LayerKind.CSA else 1,
        "experts": config.n_routed_experts,
        "experts_per_token": config.num_experts_per_tok,
        "width": config.moe_intermediate_size,
    }


class Slot(NamedTuple):
    """A tensor that must come, in full: its row, its parameter, the index there, its shape."""

    row: Row
    parameter: str
    expert: int | None
    shape: tuple[int, ...]


def _present(where: Where, config: DSV4Config, layer: int) -> bool:
    kind, hashed = config.layer_kinds[layer], layer < config.num_hash_layers
    present = {
        Where.MODEL: False,
        Where.LAYER: True,
        Where.COMPRESSED: kind is not LayerKind.SWA,
        Where.CSA: kind is LayerKind.CSA,
        Where.HASHED: hashed,
        Where.SCORED: not hashed,
    }
    return present[where]


def _slots(row: Row, config: DSV4Config, layer: int | None) -> dict[str, Slot]:
    """Vendor name -> slot, for the one tensor of `row`, or one for each expert."""
    words = _dimensions(config, LayerKind.SWA if layer is None else config.layer_kinds[layer])
    shape = tuple(
        math.prod(int(word) if word.isdigit() else words[word] for word in axis.split("*"))
        for axis in row.shape.split()
    )
    # The first star is the layer; another one, which only the name has, is the expert.
    name, parameter = row.vendor_name, row.parameter or "model." + row.vendor_name
    if layer is not None:
        name, parameter = (text.replace("*", str(layer), 1) for text in (name, parameter))
    experts = range(config.n_routed_experts) if "*" in name else (None,)
    return {name.replace("*", str(e)): Slot(row, parameter, e, shape) for e in experts}


def expected_tensors(config: DSV4Config) -> dict[str, Slot]:
    """Vendor name -> slot, for every tensor that the model of `config` is made of."""
    slots: dict[str, Slot] = {}
    for layer in range(config.num_hidden_layers):
        for row in TABLE:
            if _present(row.where, config, layer):
                slots |= _slots(row, config, layer)
    for row in TABLE:
        if row.where is Where.MODEL:
            slots |= _slots(row, config, None)
    return slots


# ------------------------------------------------------------------------------ reading a name

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@lru_cache(maxsize=16)  # one name is asked several things about, one after the other
def _parse(name: str) -> tuple[str, tuple[int, ...]]:
    """model.layers.3.mlp.experts.7.w1.weight -> (layers.*.mlp.experts.*.w1.weight, (3, 7))."""
    bare = name.removeprefix("model.").replace("*", "?")  # a star of its own is no number
    return _NUMBER.sub("*", bare), tuple(map(int, _NUMBER.findall(bare)))


def layer_of(vendor_name: str) -> int | None:
    """The layer that a tensor belongs to, None outside them."""
    return int(vendor_name.split(".")[1]) if vendor_name.startswith("layers.") else None


def is_stacked(name: str) -> bool:
    """Whether tensor `name` holds all experts of a layer."""
    return _parse(name)[0] in _STACKED_PARTS


def vendor_names(name: str, experts: int) -> list[str]:
    """What tensor `name`, in any spelling, holds: vendor names in the order of its memory.

    One name, or those of all `experts` where they are stacked, or none for an unknown name. The
    model need not have them: see `expected_tensors`.
    """
    template, numbers = _parse(name)
    if template in _VENDOR_NAMES:
        return [_VENDOR_NAMES[template].format(*numbers)]
    if template not in _STACKED_PARTS:
        return []
    parts = _STACKED_PARTS[template]
    return [part.format(numbers[0], expert) for expert in range(experts) for part in parts]


def skip_reason(name: str, config: DSV4Config) -> str | None:
    """Why tensor `name` is left out on purpose, or None if it is not."""
    bare = name.removeprefix("model.")
    for reason, pattern in SKIPPED:
        if re.match(pattern, bare):
            return reason
    template, numbers = _parse(name)
    main = config.num_hidden_layers
    # Exports for speculation append the draft blocks as further layers.
    drafts = range(main, main + config.num_nextn_predict_layers)
    return "NextN layer" if template.startswith("layers.*.") and numbers[0] in drafts else None


def why_unknown(name: str, config: DSV4Config) -> str:
    """A hint for a name that the table knows but that the model of `config` has not, else ""."""
    template, numbers = _parse(name)
    if template not in _VENDOR_NAMES.keys() | _STACKED_PARTS.keys():
        return ""
    layer, *expert = numbers
    if layer >= config.num_hidden_layers:
        return f" (the config has {config.num_hidden_layers} layers)"
    if expert and expert[0] >= config.n_routed_experts:
        return f" (the config has {config.n_routed_experts} experts)"
    routing = "hashed" if layer < config.num_hash_layers else "scored"
    return f" (layer {layer} is {config.layer_kinds[layer].name}, {routing})"
