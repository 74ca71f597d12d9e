"""What bench_vs_builtin.py compares: presets, variants, what is measured, and who fits beside whom.

A variant is SGLang with one model: ours or its built-in one, and one format of the routed experts.
Weights are dummies (see bench_server.py), so a preset is a config.json.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglang_dsv4.cli_make_tiny import shipped_config, write_config
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.json_files import write_json
from sglang_dsv4.tiny_formats import RECIPES

NO_PLUGIN = "__none__"  # of SGLANG_PLUGINS: SGLang's built-in model
OVERHEAD = 9e9  # bytes of a server beside weights and cache: graphs, activations, libraries
LEAST_POOL = 3 << 19  # tokens: its tenth, the window rows of this model, is pages for 128 requests
CONTEXT = 133_120  # --context-length of every server: 128k and an answer, in whole pages


@dataclass(frozen=True)
class Variant:
    """ours: whether the plugin is on. recipe: key of tiny_formats.RECIPES, whose claims config.json
    makes. expert_bytes: of a value of a routed expert in memory, scales included. environment: what
    the server is started with."""

    ours: bool
    recipe: str
    expert_bytes: float
    environment: Mapping[str, str] = field(default_factory=dict)


# Or an error, never BF16 unseen.
_FOUR_BITS = {"SGLANG_DSV4_PRECISION": "routed_experts=fp4"}
_ALL_ELSE_BF16 = {"SGLANG_DSV4_PRECISION": "routed_experts=fp4,linears=bf16"}
_ALL_FOUR = {"SGLANG_DSV4_PRECISION": "routed_experts=fp4,linears=fp4"}
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        # What SGLang takes for the release: FP8 and MXFP4 experts.
        "builtin-fp4": Variant(False, "vendor", 17 / 32),
        # SGLang tells FP8 experts by the files, which dummies have none of: so by its own switch.
        "builtin-fp8": Variant(False, "fp8-base", 1, {"SGLANG_DSV4_FP4_EXPERTS": "0"}),
        # Our defaults; `weights_as_planned` tells experts in BF16.
        "ours-mxfp4": Variant(True, "vendor", 17 / 32),
        "ours-mxfp4-bf16": Variant(True, "vendor", 17 / 32, _ALL_ELSE_BF16),
        "ours-nvfp4": Variant(True, "nvfp4-experts", 9 / 16, _FOUR_BITS),
        "ours-nvfp4-all": Variant(True, "nvfp4-all", 9 / 16, _ALL_FOUR),
        "ours-bf16": Variant(True, "bf16", 2),
    }
)
BASELINES = tuple(name for name, variant in VARIANTS.items() if not variant.ours)


@dataclass(frozen=True)
class Preset:
    """base: preset of make-tiny. changes: to its config. ratios: of each layer, 0 SWA, 4 CSA, 128
    HCA, of which --layers takes the first."""

    base: str
    changes: Mapping[str, Any]
    ratios: tuple[int, ...]


PRESETS = {
    "flash": Preset(
        "flash-2l",
        {"n_routed_experts": 256},
        (0, 0, 4, 128, 4, 128, 4, 128),
    ),
    "pro": Preset("pro-2l", {"n_routed_experts": 384}, (128, 128, 4, 128)),
    "tiny": Preset("tiny", {"vocab_size": 1024}, (0, 0, 4, 128, 4, 128, 4)),
}


def raw_config(preset: str, layers: int | None = None) -> dict[str, Any]:
    """config.json of the preset's first layers, in BF16. Raises ValueError for a wrong number."""
    chosen = PRESETS[preset]
    count = len(chosen.ratios) if layers is None else layers
    if not 1 <= count <= len(chosen.ratios):
        raise ValueError(f"--layers {layers}: {preset} has 1 to {len(chosen.ratios)} layers here")
    return shipped_config(chosen.base, "bfloat16") | {
        **chosen.changes,
        "num_hidden_layers": count,
        "num_hash_layers": min(count, 3),
        "compress_ratios": [*chosen.ratios[:count], 0],  # the last is the draft layer's
    }


def write_folder(folder: Path, raw: Mapping[str, Any], variant: Variant) -> None:
    """The checkpoint without weights: config.json with the variant's claims, and a tokenizer."""
    recipe = RECIPES[variant.recipe]
    write_config(folder, dict(raw))
    write_json(folder / "config.json", {**raw, **recipe.config})
    if recipe.modelopt is not None:
        write_json(folder / "hf_quant_config.json", dict(recipe.modelopt))


def environment(variant: Variant) -> dict[str, str]:
    """What the server's environment has beside the caller's."""
    plugins = "" if variant.ours else NO_PLUGIN
    return {"SGLANG_PLUGINS": plugins, "SGLANG_DSV4_PRECISION": "", **variant.environment}


def weight_bytes(raw: Mapping[str, Any], variant: Variant) -> float:
    """About what the weights take in memory: experts as the variant holds them, the rest in BF16,
    which is too much where attention and the shared expert are in FP8 or NVFP4."""
    import torch

    from sglang_dsv4.memory_plan import weight_bytes as planned
    from sglang_dsv4.tensor_table import expected_tensors

    config = DSV4Config.from_dict(dict(raw))
    all_dense = planned(expected_tensors(config), torch.bfloat16, 1)
    matrix = config.moe_intermediate_size * config.hidden_size
    values = 3 * matrix * config.n_routed_experts * config.num_hidden_layers
    return all_dense - 2 * values + variant.expert_bytes * values


def cache_bytes(raw: Mapping[str, Any], tokens: int) -> float:
    """About what a cache of so many tokens takes, in our BF16 rows: the built-in's are smaller."""
    from sglang_dsv4.attention.cache import PAGE
    from sglang_dsv4.memory_plan import WINDOW_RATIO, CacheSizes

    sizes = CacheSizes(DSV4Config.from_dict(dict(raw)), item_bytes=2)
    return tokens * (sizes.token + WINDOW_RATIO * sizes.window_page / PAGE)


def waves(needed: Mapping[str, float], memory: float) -> tuple[list[list[str]], dict[str, str]]:
    """Which variants run beside each other, so that they can be measured in turn.

    needed: bytes of weights and cache of each. memory: of the GPU. Returns groups in the order
    given, each as large as fits, and what fits nowhere, with the reason.
    """
    groups: list[list[str]] = []
    refused: dict[str, str] = {}
    room = 0.0
    for name, own in needed.items():
        wanted = own + OVERHEAD
        if wanted > memory:
            refused[name] = (
                f"needs {wanted / 1e9:.0f} GB (weights and cache {own / 1e9:.0f}), the GPU has"
                f" {memory / 1e9:.0f}: take fewer layers with --layers"
            )
            continue
        if not groups or wanted > room:
            groups.append([])
            room = memory
        groups[-1].append(name)
        room -= wanted
    return groups, refused


@dataclass(frozen=True)
class Point:
    """One thing that is measured. kind: one of the measures. what: of serving, the data set.
    batch: requests at once. context: tokens of each prompt."""

    kind: str
    batch: int
    context: int
    what: str = ""

    @property
    def key(self) -> dict[str, Any]:
        return {"kind": self.kind, "batch": self.batch, "context": self.context, "what": self.what}


DATASETS = ("random-ids", "generated-shared-prefix")
# Of the data sets: tokens of a question, of what a group of prompts shares, and of an answer.
QUESTION, SHARED, ANSWER = 1024, 2048, 128


def points(
    measures: Sequence[str],
    batches: Sequence[int],
    contexts: Sequence[int],
    prefills: Sequence[int],
    concurrencies: Sequence[int],
) -> list[Point]:
    """Everything in the order in which it is measured. A context of more than 32k tokens is decoded
    at the smallest batch alone: more would not fit ten minutes."""

    def fitting(context: int) -> Sequence[int]:
        return batches if context <= 32768 else batches[:1]

    found = []
    if "prefill" in measures:
        found += [Point("prefill", 1, length) for length in prefills]
    if "decode" in measures:
        found += [
            Point("decode", batch, context) for context in contexts for batch in fitting(context)
        ]
    if "serving" in measures:
        found += [
            Point("serving", concurrency, _prompt(what), what)
            for what in DATASETS
            for concurrency in concurrencies
        ]
    if "prefill-kernels" in measures:
        found += [Point("prefill-kernels", 1, length) for length in prefills]
    if "kernels" in measures:
        found += [Point("kernels", batch, contexts[0]) for batch in fitting(contexts[0])]
    return found


def _prompt(what: str) -> int:
    return QUESTION if what == "random-ids" else SHARED + QUESTION // 8


def pool_tokens(chosen: Sequence[Point], steps: int, least: int) -> int:
    """--max-total-tokens that keeps every prompt of every point in the cache, with a fifth spare:
    a repetition then decodes from a prefix hit. least: never fewer."""
    largest: dict[tuple[str, int, str], int] = {}
    for point in chosen:
        batch = point.batch if point.kind != "serving" else 4 * point.batch
        tokens = batch * (point.context + max(steps, ANSWER) + 256)
        kind = "decode" if point.kind == "kernels" else point.kind  # of the same prompts
        kept = (kind, point.context, point.what)
        largest[kept] = max(largest.get(kept, 0), tokens)
    return max(least, int(1.2 * sum(largest.values()))) // 256 * 256
