"""An independent oracle: transformers' DeepseekV4ForCausalLM on a tiny random model.

Nothing here imports the package under test. transformers is right only within limits that every
caller must keep: float32, one sequence at a time (it counts left padding as tokens), positions
that start at 0, a cache that only grows, eager attention. `load` and `greedy` keep them.
"""

import functools
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    DynamicCache,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 384
# In the order of their ids, from 0: begin, end, padding, then what a chat is rendered with.
SPECIAL_TOKENS = tuple(
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜▁pad▁｜> <｜User｜> <｜Assistant｜> <think> "
    "</think> ｜DSML｜ <｜latest_reminder｜> <｜action｜> <｜query｜> <｜authority｜> <｜domain｜> "
    "<｜title｜> <｜read_url｜>".split()
)

# For the model of this seed and `tiny_config()`, `prompts()` and `story()` were searched.
CHECKPOINT_SEED = 0

# Every boundary twice, but for the two dearest: 90 and 350 instead close an HCA window while
# 64 tokens are decoded.
PROMPT_LENGTHS = (1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 300, 700) + (
    (1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 90, 350)
)
# Their seeds were searched: over prompt and generated tokens, with and without the FP4 grid, the
# two best logits, and the last chosen and first rejected index entry and expert, stay apart, and
# rounding noise of fp32 changes no FP4 code that decides a selection.
PROMPT_SEEDS = (0, 0, 0, 0, 1, 5, 0, 19, 2, 5, 4, 8) + (1, 1, 1, 2, 2, 6, 1, 20, 22, 9, 0, 11)
STORY_SEEDS = (0, 0, 0, 0, 0, 2, 0, 1, 4, 0, 0, 1, 0, 2, 1)  # likewise, of 100 tokens each

# First match wins: name pattern, standard deviation, mean, and whether the deviation is divided
# by sqrt(fan in). Chosen so that attention, sinks, clamp, position bias and stream mixing all move
# the logits, while rounding errors of 1e-7 grow to no more than about 1e-5.
RECIPE = (
    (r"embed_tokens", 2.0, 0.0, False),
    (r"lm_head", 4.0, 0.0, True),
    (r"self_attn\.(compressor\.)?kv_norm", 0.4, 2.0, False),  # sharp attention
    (r"norm\.weight", 0.2, 1.0, False),
    (r"sinks", 1.0, 5.0, False),  # about a tenth of the softmax over a full window
    (r"position_bias", 1.0, 0.0, False),
    (r"_hc\.scale|hc_scale", 0.2, 1.0, False),
    (r"_hc\.base|hc_base", 0.5, 0.0, False),
    (r"e_score_correction_bias", 0.3, 0.0, False),
    (r"o_a_proj", 0.7, 0.0, True),
    (r"o_b_proj", 1.4, 0.0, True),
    (r"down_proj", 1.5, 0.0, True),
    (r"", 1.0, 0.0, True),
)


def tiny_config(**overrides: Any) -> DeepseekV4Config:
    """A small model with every kind of layer, and the head, rope and index sizes of the real one.

    Layers: SWA, SWA, CSA, HCA, CSA, HCA, CSA, of which the first three route by hash. Heads and
    output groups divide by 2 and 4. `index_topk` bites from 36 tokens on, `swiglu_limit` on about
    half of the activations. `overrides` are arguments of `DeepseekV4Config`.
    """
    fields: dict[str, Any] = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        compress_ratios=[0, 0, 4, 128, 4, 128, 4],
        num_hidden_layers=7,
        num_attention_heads=8,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=64,
        o_groups=4,
        o_lora_rank=32,
        index_n_heads=16,
        index_head_dim=128,
        index_topk=8,
        num_hash_layers=3,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=64,
        swiglu_limit=0.7,
        max_position_embeddings=8192,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 65536,
        },
    )
    return DeepseekV4Config(**(fields | overrides))


def write_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Writes a byte-level tokenizer with DeepSeek's special tokens as ids 0 to 14.

    Ids after the 256 bytes decode to readable filler that no text encodes to, so that every id
    the model can generate has a text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet]
    tokens += [f"[{token_id}]" for token_id in range(len(tokens), vocab_size)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    bos, eos, pad = SPECIAL_TOKENS[:3]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad
    ).save_pretrained(folder)


def write_checkpoint(
    folder: Path,
    config: DeepseekV4Config,
    seed: int,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
) -> None:
    """Writes random weights (see RECIPE) with transformers' own `save_pretrained`, and a tokenizer.

    The head's rows of special tokens are shrunk: greedy generation never meets an end of sequence.
    With another dtype than float32, what transformers always keeps in float32 stays so.
    """
    model = DeepseekV4ForCausalLM(config)
    _fill(model, seed)
    if dtype != torch.float32:
        with tempfile.TemporaryDirectory() as full:
            model.save_pretrained(full)
            model = DeepseekV4ForCausalLM.from_pretrained(full, dtype=dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder, config.vocab_size)


@torch.no_grad()
def _fill(model: DeepseekV4ForCausalLM, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():  # shares memory with the model
        if name.endswith("tid2eid"):  # distinct experts per token id
            order = torch.rand(len(tensor), model.config.n_routed_experts, generator=generator)
            tensor.copy_(order.argsort(dim=1)[:, : tensor.shape[1]])
            continue
        _, std, mean, by_fan_in = next(row for row in RECIPE if re.search(row[0], name))
        std = std * tensor.shape[-1] ** -0.5 if by_fan_in else std
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * std + mean)
    model.lm_head.weight[: len(SPECIAL_TOKENS)] *= 0.05


def load(folder: Path, indexer_fp4: bool) -> DeepseekV4ForCausalLM:
    """The oracle in float32, ready for `greedy` and `record`.

    transformers scores index entries in full precision; `indexer_fp4` adds the transform and the
    grid the real model was trained with.
    """
    model = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    if indexer_fp4:
        for indexer in indexers(model).values():
            indexer.scorer.register_forward_pre_hook(_score_on_fp4_grid)
    return model


def indexers(model: DeepseekV4ForCausalLM) -> dict[int, torch.nn.Module]:
    """The indexer of every CSA layer, by layer number."""
    compressors = {i: layer.self_attn.compressor for i, layer in enumerate(model.model.layers)}
    return {i: c.indexer for i, c in compressors.items() if hasattr(c, "indexer")}


# The patch of the indexer starts here. ------------------------------------------------------------


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal Walsh-Hadamard transform of the last axis, in Sylvester's (natural) order."""
    size = x.shape[-1]
    matrix = torch.ones(1, 1, dtype=x.dtype)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=x.dtype), matrix)
    return x @ matrix * size**-0.5


def fp4_grid(x: torch.Tensor) -> torch.Tensor:
    """Rounds blocks of 32 channels to E2M1 with a power-of-two scale, ties to the even code."""
    blocks = x.unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(amax > 0, torch.exp2(torch.ceil(torch.log2(amax / 6))), 1.0)
    scaled = blocks / scale
    magnitude = scaled.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0)).to(x.dtype)
    return (torch.round(scaled / step) * step * scale).flatten(-2)


def _score_on_fp4_grid(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    query, keys, hidden = inputs  # query and keys after their rope
    return fp4_grid(hadamard(query)), fp4_grid(hadamard(keys)), hidden


# The patch of the indexer ends here. --------------------------------------------------------------


def prompts(seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    """Random prompts without special tokens, of PROMPT_LENGTHS; only seed 0 is free of ties."""
    return [
        _random_ids(1_000_000 * seed + 1_000 * length + own_seed, length, vocab_size)
        for length, own_seed in zip(PROMPT_LENGTHS, PROMPT_SEEDS, strict=True)
    ]


def story() -> list[int]:
    """1500 ids free of ties, as is any beginning of them: for long, chunked and shared prompts."""
    parts = [
        _random_ids(10_000_000 + 1_000 * number + own_seed, 100, VOCAB_SIZE)
        for number, own_seed in enumerate(STORY_SEEDS)
    ]
    return sum(parts, [])


def _random_ids(seed: int, length: int, vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(SPECIAL_TOKENS), vocab_size, (length,), generator=generator).tolist()


class Gaps:
    """While open, collects how close each discrete choice of the model was.

    index[layer]: [calls] of [tokens] float32, the best index score left out subtracted from the
    worst one chosen (infinite where all visible entries are chosen). selected[layer]: [calls] of
    [tokens, k] int64, the chosen entries, -1 for none. router[layer]: the same gap for the experts
    of scored layers.
    """

    def __init__(self, model: DeepseekV4ForCausalLM) -> None:
        self.index: dict[int, list[torch.Tensor]] = {}
        self.selected: dict[int, list[torch.Tensor]] = {}
        self.router: dict[int, list[torch.Tensor]] = {}
        self._model = model
        self._handles: list[Any] = []
        self._scores: torch.Tensor = torch.empty(0)

    def __enter__(self) -> "Gaps":
        for i, indexer in indexers(self._model).items():
            self._handles += [
                indexer.scorer.register_forward_hook(self._keep_scores),
                indexer.register_forward_hook(functools.partial(self._index_gap, i)),
            ]
        for i, layer in enumerate(self._model.model.layers):
            if not layer.mlp.is_hash:
                hook = functools.partial(self._router_gap, i)
                self._handles.append(layer.mlp.gate.register_forward_hook(hook))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _keep_scores(self, _: torch.nn.Module, __: Any, scores: torch.Tensor) -> None:
        self._scores = scores[0]  # [tokens, entries]

    def _index_gap(self, i: int, module: Any, inputs: Any, selected: torch.Tensor) -> None:
        positions = inputs[2][0]
        visible = (positions + 1) // module.compress_rate
        entries = torch.arange(self._scores.shape[-1])
        scores = self._scores.masked_fill(entries >= visible[:, None], float("-inf"))
        gap = torch.full(positions.shape, float("inf"))
        if scores.shape[-1] > module.index_topk:
            top = scores.topk(module.index_topk + 1, dim=-1).values
            gap = torch.where(visible > module.index_topk, top[:, -2] - top[:, -1], gap)
        self.index.setdefault(i, []).append(gap)
        self.selected.setdefault(i, []).append(selected[0])

    def _router_gap(self, i: int, module: Any, _: Any, output: tuple[torch.Tensor, ...]) -> None:
        scores = module.score_fn(output[0]) + module.e_score_correction_bias
        top = scores.topk(module.top_k + 1, dim=-1).values
        self.router.setdefault(i, []).append(top[:, -2] - top[:, -1])


@dataclass(frozen=True)
class Generation:
    """One greedy generation. The gaps of step 0 are the smallest over the whole prompt.

    A step with a small index or router gap may change everything after it too.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # natural logarithm, of the chosen token
    logit_gaps: tuple[float, ...]  # best logit minus second best
    index_gaps: tuple[float, ...]  # smallest over CSA layers
    router_gaps: tuple[float, ...]  # smallest over scored layers


@torch.no_grad()
def greedy(model: DeepseekV4ForCausalLM, prompt: list[int], count: int = 64) -> Generation:
    """Generates `count` tokens after `prompt` through the cache, whatever they are."""
    cache = DynamicCache(config=model.config)
    tokens, logprobs, logit_gaps = [], [], []
    step = prompt
    with Gaps(model) as gaps:
        for _ in range(count):
            output = model(
                input_ids=torch.tensor([step]),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logits = output.logits[0, -1].double()
            best, second = logits.topk(2).values.tolist()
            tokens.append(int(logits.argmax()))
            logprobs.append(best - float(logits.logsumexp(dim=0)))
            logit_gaps.append(best - second)
            step = tokens[-1:]
    return Generation(
        prompt=tuple(prompt),
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        logit_gaps=tuple(logit_gaps),
        index_gaps=_smallest(gaps.index, count),
        router_gaps=_smallest(gaps.router, count),
    )


def _smallest(gaps: dict[int, list[torch.Tensor]], count: int) -> tuple[float, ...]:
    calls = [
        min((float(layer[i].min()) for layer in gaps.values()), default=float("inf"))
        for i in range(count)
    ]
    return tuple(calls)


@dataclass(frozen=True)
class LayerTrace:
    """What one layer did with a whole sequence."""

    streams: torch.Tensor  # [tokens, hc_mult, hidden] float32: the layer's output
    attention: torch.Tensor  # [tokens, hidden] float32: output of attention, before the streams
    moe: torch.Tensor  # [tokens, hidden] float32: output of the experts, before the streams
    selected: torch.Tensor | None  # CSA: [tokens, k] int64, chosen entries in no order, -1 for none
    index_gap: torch.Tensor | None  # CSA: [tokens] float32, see Gaps
    router_gap: torch.Tensor | None  # scored layers: [tokens] float32, see Gaps


@dataclass(frozen=True)
class Trace:
    """One forward pass over a whole sequence without a cache."""

    layers: tuple[LayerTrace, ...]
    hidden: torch.Tensor  # [tokens, hidden] float32: after the final norm
    logits: torch.Tensor  # [tokens, vocab] float32


@torch.no_grad()
def record(model: DeepseekV4ForCausalLM, ids: list[int]) -> Trace:
    """Runs `ids` at once and keeps what every layer gave, for a comparison layer by layer."""
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str, _: torch.nn.Module, __: Any, output: Any) -> None:
        seen[name] = (output[0] if isinstance(output, tuple) else output)[0]

    watched = {"hidden": model.model.norm}
    for i, layer in enumerate(model.model.layers):
        watched |= {f"{i} streams": layer, f"{i} attention": layer.self_attn, f"{i} moe": layer.mlp}
    handles = [
        module.register_forward_hook(functools.partial(keep, name))
        for name, module in watched.items()
    ]
    with Gaps(model) as gaps:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    layers = tuple(
        LayerTrace(
            streams=seen[f"{i} streams"],
            attention=seen[f"{i} attention"],
            moe=seen[f"{i} moe"],
            selected=gaps.selected[i][0] if i in gaps.selected else None,
            index_gap=gaps.index[i][0] if i in gaps.index else None,
            router_gap=gaps.router[i][0] if i in gaps.router else None,
        )
        for i in range(len(model.model.layers))
    )
    return Trace(layers=layers, hidden=seen["hidden"], logits=logits)


def expected(folder: Path, indexer_fp4: bool, count: int = 64) -> tuple[Generation, ...]:
    """Greedy generations for all `prompts()`: half a minute, so tests ask for the fixture."""
    model = load(folder, indexer_fp4)
    return tuple(greedy(model, prompt, count) for prompt in prompts())
