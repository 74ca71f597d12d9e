"""The tensors of a random checkpoint: names and values; which there are is `tensor_table`'s.

A tensor depends on the seed and on its vendor name alone: both spellings of the names hold the
same model, and all dtypes and formats the same model up to rounding. Values are normal, scaled so
that activations stay around 1.
"""

import hashlib
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sglang_dsv4.config import DSV4Config
from sglang_dsv4.tensor_table import Kept, expected_tensors
from sglang_dsv4.tiny_formats import Recipe, encode, size

if TYPE_CHECKING:
    import torch

# Vendor name -> Hugging Face name, outside the layers and inside one; longer names come first.
_HF_GLOBALS = {
    "embed.": "model.embed_tokens.",
    "head.": "lm_head.",
    "norm.": "model.norm.",
    "hc_head_": "model.hc_head.hc_",
}
_HF_IN_LAYER = {
    "attn_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
    "hc_attn_": "attn_hc.",
    "hc_ffn_": "ffn_hc.",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "attn.indexer.compressor.wkv.": "self_attn.compressor.indexer.kv_proj.",
    "attn.indexer.compressor.wgate.": "self_attn.compressor.indexer.gate_proj.",
    "attn.indexer.compressor.norm.": "self_attn.compressor.indexer.kv_norm.",
    "attn.indexer.wq_b.": "self_attn.compressor.indexer.q_b_proj.",
    "attn.indexer.weights_proj.": "self_attn.compressor.indexer.scorer.weights_proj.",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.compressor.wkv.": "self_attn.compressor.kv_proj.",
    "attn.compressor.wgate.": "self_attn.compressor.gate_proj.",
    "attn.compressor.norm.": "self_attn.compressor.kv_norm.",
    "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a.": "self_attn.q_a_proj.",
    "attn.q_norm.": "self_attn.q_a_norm.",
    "attn.wq_b.": "self_attn.q_b_proj.",
    "attn.wkv.": "self_attn.kv_proj.",
    "attn.kv_norm.": "self_attn.kv_norm.",
    "attn.wo_a.": "self_attn.o_a_proj.",
    "attn.wo_b.": "self_attn.o_b_proj.",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.": "mlp.gate.",
    "ffn.shared_experts.w1.": "mlp.shared_experts.gate_proj.",
    "ffn.shared_experts.w2.": "mlp.shared_experts.down_proj.",
    "ffn.shared_experts.w3.": "mlp.shared_experts.up_proj.",
}
_HF_EXPERT = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
# End of a name -> (mean, standard deviation).
_SPREADS = {
    "norm.weight": (1.0, 0.1),
    "_scale": (1.0, 0.1),
    "_base": (0.0, 0.5),
    ".ape": (0.0, 0.5),
    ".attn_sink": (0.0, 1.0),
    ".gate.bias": (0.0, 0.2),
    "embed.weight": (0.0, 1.0),
}
# The other tensors are linear: end of a name -> gain over 1/sqrt(inputs), 1 where none is named.
_GAINS = {
    # Gate and up products reach swiglu_limit = 10 now and then; w2 brings their product back to 1.
    ".w1.weight": 4.0,
    ".w3.weight": 4.0,
    ".w2.weight": 1 / 11,
    # Attention averages over many rows, which makes them small.
    ".wo_b.weight": 3.0,
}
_BLOCK = 1 << 24  # elements drawn at once: bounds the memory beside the tensor itself


@dataclass(frozen=True)
class Piece:
    """One tensor under its vendor name; `experts` is the range of the ids in a table of them."""

    name: str
    shape: tuple[int, ...]
    kept: Kept
    experts: int

    def spread(self) -> tuple[float, float]:
        """Mean and standard deviation of the values."""
        for end, spread in _SPREADS.items():
            if self.name.endswith(end):
                return spread
        gain = next((gain for end, gain in _GAINS.items() if self.name.endswith(end)), 1.0)
        return 0.0, gain / math.sqrt(self.shape[-1])


@dataclass(frozen=True)
class Entry:
    """One weight of the file: its pieces, equal in size, one after the other, seen as `shape`.

    stored: how it is quantised, a key of `tiny_formats.ENCODERS`; None if it is dense.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = field(repr=False)
    stored: str | None = None

    def bytes(self, element_size: int) -> int:
        """Size in the file, with `element_size` bytes for an element of the model's dtype."""
        if self.stored is not None:
            return size(self.stored, self.shape)
        sizes = {Kept.MODEL_DTYPE: element_size, Kept.FP32: 4, Kept.INT64: 8}
        return math.prod(self.shape) * sizes[self.pieces[0].kept]


def pieces(config: DSV4Config) -> list[Piece]:
    """Every tensor of the main model, one for each expert."""
    slots = expected_tensors(config)
    experts = config.n_routed_experts
    return [Piece(name, slot.shape, slot.row.kept, experts) for name, slot in slots.items()]


def vendor_entries(config: DSV4Config) -> list[Entry]:
    """The tensors under the names of the release."""
    return [Entry(piece.name, piece.shape, (piece,)) for piece in pieces(config)]


def hf_entries(config: DSV4Config, *, stacked: bool = True) -> list[Entry]:
    """The tensors under transformers' names, the routed experts of a layer stacked in two.

    stacked: False leaves each expert's three matrices to themselves.
    """
    entries: list[Entry] = []
    stacks: dict[str, list[Piece]] = {}
    for piece in pieces(config):
        layer, routed, _ = piece.name.partition(".ffn.experts.")
        if not routed or not stacked:
            entries.append(Entry(_hf_name(piece.name), piece.shape, (piece,)))
            continue
        stack = "down_proj" if piece.name.endswith(".w2.weight") else "gate_up_proj"
        stacks.setdefault(f"model.{layer}.mlp.experts.{stack}", []).append(piece)
    for name, parts in stacks.items():
        # By expert, then w1 before w3: the order of the stack's rows.
        parts.sort(key=lambda piece: (int(piece.name.split(".")[4]), piece.name))
        rows, inputs = parts[0].shape
        shape = (config.n_routed_experts, len(parts) // config.n_routed_experts * rows, inputs)
        entries.append(Entry(name, shape, tuple(parts)))
    return entries


def quantised_entries(config: DSV4Config, recipe: Recipe, names: str) -> list[Entry]:
    """The tensors in the format of `recipe`, under the names of the release ("vendor") or "hf"."""
    if names == "hf":
        # No release stacks quantised experts.
        entries = hf_entries(config, stacked=not recipe.stored)
    else:
        entries = vendor_entries(config)
    return [replace(entry, stored=recipe.of(entry.pieces[0].name)) for entry in entries]


def _hf_name(name: str) -> str:
    if name.startswith("layers."):
        _, layer, rest = name.split(".", 2)
        if rest.startswith("ffn.experts."):
            *_, expert, matrix, _ = rest.split(".")
            return f"model.layers.{layer}.mlp.experts.{expert}.{_HF_EXPERT[matrix]}.weight"
        return f"model.layers.{layer}.{_renamed(rest, _HF_IN_LAYER)}"
    return _renamed(name, _HF_GLOBALS)


def _renamed(name: str, table: dict[str, str]) -> str:
    old = next(old for old in table if name.startswith(old))
    return table[old] + name.removeprefix(old)


def values(entry: Entry, dtype: "torch.dtype", seed: int) -> "torch.Tensor":
    """Draws a tensor [entry.shape] on the CPU; MODEL_DTYPE means `dtype`."""
    import torch

    kept = {Kept.MODEL_DTYPE: dtype, Kept.FP32: torch.float32, Kept.INT64: torch.int64}
    out = torch.empty(entry.shape, dtype=kept[entry.pieces[0].kept])
    parts = out.view(-1).chunk(len(entry.pieces))
    for piece, part in zip(entry.pieces, parts, strict=True):
        digest = hashlib.sha256(f"{seed}/{piece.name}".encode()).digest()
        _draw(piece, part, torch.Generator().manual_seed(int.from_bytes(digest[:7])))
    return out


def tensors(entry: Entry, dtype: "torch.dtype", seed: int) -> "dict[str, torch.Tensor]":
    """What the file holds of an entry: one dense tensor, or codes and scales by their names."""
    import torch

    if entry.stored is None:
        return {entry.name: values(entry, dtype, seed)}
    return encode(entry.stored, entry.name, values(entry, torch.float32, seed))


def _draw(piece: Piece, out: "torch.Tensor", generator: "torch.Generator") -> None:
    import torch

    if piece.kept is Kept.INT64:  # [tokens, experts per token]: distinct experts for a token
        tokens, chosen = piece.shape
        order = torch.rand(tokens, piece.experts, generator=generator).argsort(dim=-1)
        out.copy_(order[:, :chosen].reshape(-1))
        return
    mean, std = piece.spread()
    for block in out.split(_BLOCK):
        block.copy_(torch.randn(block.shape, generator=generator).mul_(std).add_(mean))
