"""The part of gpu_acceptance.py that compares the GPU's path with others, layer by layer, in one
process: with transformers, with dequantised twins of every format, with the CPU's own path."""

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_acceptance import Run, write_json
from gpu_serving import TIE as NEAR_TIE

from nano import FOLDER, ids, nano_text
from sglang_dsv4.attention.cache import PAGE
from sglang_dsv4.cli_make_tiny import write_checkpoint
from sglang_dsv4.tiny_formats import RECIPES

# The tests' own; they are only there in a process of this part.
import checkpoint_files  # isort: skip
import guided  # isort: skip
import inprocess  # isort: skip
import oracle  # isort: skip
import side_by_side  # isort: skip

THREADS = 8  # of the reference on a CPU: more of them wait for each other in such small products
HEADINGS = [
    *("compared", "layer", "relative, median", "relative, worst", "1 - cosine, worst"),
    *("entries alike", "experts alike", "left out", "verdict"),
]


@dataclass(frozen=True)
class Bounds:
    """What is demanded of every layer, over tokens with the same choices.

    relative: largest |a - b| / |b|. entries, experts: least share of choices that are the same.
    ties: gaps below which a choice may differ.
    """

    relative: float
    entries: float
    experts: float
    ties: Any


# In BF16 a stream meets about ten roundings in a layer,
# weights included, each of 2^-9 / sqrt(3) at random: 2^-8 together, and four times that at worst.
# The reference in BF16 on a CPU gave 0.011 at worst (and 0.006 in the median), and 95 % of entries
# alike; index scores that fell the other way were up to 0.13 apart (a rounding moves some values of
# query and key to the next FP4 code), and experts' scores, where entries were alike, up to 0.005.
BF16 = Bounds(2**-6, 0.9, 0.95, side_by_side.Ties(index=0.25, router=2**-6))
# Ten ops in a layer, each within 1e-5 (tests/tolerance.py); the CPU's reference: 7e-7 at worst.
FP32 = Bounds(1e-4, 0.99, 0.99, side_by_side.Ties(index=guided.FP4_TIE, router=guided.TIE))
BOUNDS = {torch.bfloat16: BF16, torch.float32: FP32}


def agreement(run: Run) -> dict[str, Any]:
    """Layers against transformers, formats against their twins, nano against the CPU."""
    torch.set_num_threads(THREADS if run.on_gpu else 1)
    layers = with_transformers(run)
    write_json(run.out / "agreement_layers.json", layers)  # survives the limit
    formats = with_twins(run)
    answers = with_cpu(run)
    table = [HEADINGS, *map(row, layers), *map(row, formats)]
    table += [NANO_HEADINGS, *map(nano_row, answers)]
    everything = [*layers, *formats, *answers]
    return {
        "ok": all(not one["faults"] for one in everything),
        "table": table,
        "layers": layers,
        "formats": formats,
        "nano": answers,
    }


def faults(figures: Mapping[str, Any], bounds: Bounds) -> list[str]:
    """What a layer's figures (side_by_side.Apart.figures) miss; empty if nothing."""
    found = []
    worst = figures["relative_worst"]
    if worst is None:
        found.append("no token chose the same")
    elif not worst <= bounds.relative:
        found.append(f"relative error {worst:.2e}, at most {bounds.relative:.2e}")
    for name, least in (("entries", bounds.entries), ("experts", bounds.experts)):
        share = figures[f"{name}_alike"]
        if share is not None and not share >= least:
            found.append(f"{share:.3f} of {name} alike, at least {least}")
    if figures["unexplained"]:
        found.append(f"{figures['unexplained']} tokens chose otherwise without a near tie")
    return found


def row(result: Mapping[str, Any]) -> list[Any]:
    """A line of the table."""

    def number(name: str, digits: str) -> str:
        value = result[name]
        return "" if value is None else format(value, digits)

    left_out = f"{result['left_out']} of {result['tokens']}"
    return [
        result["case"],
        result["layer"],
        number("relative_median", ".1e"),
        number("relative_worst", ".1e"),
        number("cosine_worst", ".1e"),
        number("entries_alike", ".4f"),
        number("experts_alike", ".4f"),
        left_out,
        "; ".join(result["faults"]) or "ok",
    ]


# ---- every layer, against transformers in float32 ----


@dataclass(frozen=True)
class Model:
    """A checkpoint of the oracle: what its config changes, and the dtypes in which it is run."""

    name: str
    changes: Mapping[str, int]
    dtypes: tuple[torch.dtype, ...]


TINY = Model("tiny", {}, (torch.bfloat16, torch.float32))
# With as many heads FlashMLA takes forwards of 24 tokens and more.
WIDE = Model("64 heads", {"num_attention_heads": 64}, (torch.bfloat16,))


def with_transformers(run: Run) -> list[dict[str, Any]]:
    """Figures of every layer by model, dtype and the way in which its tokens came."""
    results: list[dict[str, Any]] = []
    for model in (TINY, WIDE) if run.on_gpu else (TINY,):
        with tempfile.TemporaryDirectory() as name:
            results += of_model(run, model, Path(name))
    return results


def of_model(run: Run, model: Model, folder: Path) -> Iterator[dict[str, Any]]:
    """The same of one model, which is written into `folder`."""
    prompt, decoded = (600, 40) if run.on_gpu else (150, 4)
    end = prompt + decoded
    tokens = oracle.story()[:end]
    config = oracle.tiny_config(**model.changes)
    oracle.write_checkpoint(folder, config, oracle.CHECKPOINT_SEED)
    wanted = side_by_side.of_transformers(oracle.load(folder, indexer_fp4=True), tokens)
    steps = [prompt, *range(prompt + 1, end + 1)]
    chunks = [*(cut for cut in (128, 135, 300, 513) if cut < end), end]
    for dtype in model.dtypes:
        runner = inprocess.Runner(folder, dtype=dtype, device=run.device)
        found = side_by_side.of_runner(runner, tokens, steps, wanted)
        ways = {
            "prefill": (found, slice(0, prompt)),
            "decode": (found, slice(prompt, end)),
            "chunks": (side_by_side.of_runner(runner, tokens, chunks, wanted), slice(0, end)),
        }
        for way, (one, span) in ways.items():
            case = f"{model.name}, {str(dtype).removeprefix('torch.')}, {way}"
            yield from layer_by_layer(case, runner, one[span], wanted[span], dtype)


def layer_by_layer(
    case: str, runner: Any, found: Any, wanted: Any, dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """Figures and faults of each layer and of the logits."""
    bounds = BOUNDS[dtype]
    kinds = [f"{number} {kind.name}" for number, kind in enumerate(runner.config.layer_kinds)]
    compared = side_by_side.apart(found, wanted, bounds.ties)
    for name, one in zip([*kinds, "logits"], compared, strict=True):
        figures = one.figures()
        yield {"case": case, "layer": name, **figures, "faults": faults(figures, bounds)}


# ---- every format, against its dequantised twin in float32 on a CPU ----


def with_twins(run: Run) -> list[dict[str, Any]]:
    """Each format's figures over all layers, and those of its logits."""
    results: list[dict[str, Any]] = []
    for name in RECIPES if run.on_gpu else ("vendor", "nvfp4-all"):
        with tempfile.TemporaryDirectory() as folder:
            results += of_format(run, name, Path(folder))
    return results


def of_format(run: Run, name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The same of one format; its checkpoint and its twin are written into `folder`."""
    count = 300 if run.on_gpu else 60
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(16, 384, (count,), generator=draw).tolist()
    checkpoint, twin = folder / "checkpoint", folder / "twin"
    write_checkpoint(checkpoint, preset="tiny", format=name)
    twin.mkdir()
    values = checkpoint_files.dense_twin(checkpoint_files.read(checkpoint), torch.bfloat16)
    checkpoint_files.write(twin, values)
    shutil.copy(checkpoint / "config.json", twin)
    reference = inprocess.Runner(twin, dtype=torch.float32)
    wanted = side_by_side.of_runner(reference, tokens, [count])
    runner = inprocess.Runner(
        checkpoint,
        dtype=torch.bfloat16,
        device=run.device,
        routed_experts="fp4" if in_four_bits(name, "ffn.experts.0.w1") else "auto",
        linears="fp4" if in_four_bits(name, "attn.wq_b") else "auto",
    )
    cuts = [count - 8, *range(count - 7, count + 1)]
    found = side_by_side.of_runner(runner, tokens, cuts, wanted)
    layers = runner.config.num_hidden_layers
    kept = f"{len(runner.storage.groups)} of {layers} layers"
    case = f"{name}, experts of {kept} in four bits"
    if runner.linears.layers:
        case += f", other matrices of {len(runner.linears.layers)}"
    every = [one.figures() for one in side_by_side.apart(found, wanted)]
    for layer, figures in (("all", over_layers(every[:-1])), ("logits", every[-1])):
        yield {"case": case, "layer": layer, **figures, "faults": faults(figures, BF16)}


def in_four_bits(name: str, matrix: str) -> bool:
    """Whether a format has such matrices in four bits, so that they must be kept."""
    stored = RECIPES[name].of(f"layers.0.{matrix}.weight")
    return stored is not None and not stored.startswith("fp8")


def over_layers(every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The worst layer's of each figure, tokens counted once for each layer."""

    def of(name: str) -> list[Any]:
        return [one[name] for one in every if one[name] is not None]

    largest = ("relative_median", "relative_worst", "cosine_median", "cosine_worst")
    smallest, sums = ("entries_alike", "experts_alike"), ("tokens", "left_out", "unexplained")
    return {
        **{name: max(of(name), default=None) for name in largest},
        **{name: min(of(name), default=None) for name in smallest},
        **{name: sum(of(name)) for name in sums},
    }


# ---- the trained model's greedy tokens, against the reference ops on a CPU ----

LIMIT = 48  # tokens of an answer
NANO_HEADINGS = [
    *("nano, bfloat16", "answers alike", "tokens alike", "logits apart", "log-probabilities apart"),
    *("right, and by CPU", "first parting", "its gap", "verdict"),
]


@dataclass(frozen=True)
class Answer:
    """tokens: greedy ones; logits [tokens, V] float32, of which each is the best."""

    tokens: list[int]
    logits: torch.Tensor


def questions(run: Run) -> dict[str, list[Any]]:
    """24 of them by kind; fewer and short ones without a GPU."""
    if not run.on_gpu:
        return {"facts": nano_text.fact_questions("seen", 3)}
    return {
        "facts": nano_text.fact_questions("seen", 10),
        "chats": nano_text.chat_questions(5, thinking=False),
        "chats that think": nano_text.chat_questions(3, thinking=True),
        "tool calls": nano_text.tool_questions(2),
        "recitation": nano_text.recitation_questions()[:1],
        "needles 1,024 tokens back": nano_text.needle_questions(1024, 3),
    }


def with_cpu(run: Run) -> list[dict[str, Any]]:
    """By kind of question: how far greedy answers of the run's device are those of the CPU."""
    asked = questions(run)
    every = [question for kind in asked.values() for question in kind]
    prompts, wanted = ([ids(text) for text in texts] for texts in zip(
        *((question.prompt, question.answer) for question in every), strict=True
    ))  # fmt: skip
    counts = [min(len(answer), LIMIT) for answer in wanted]
    lengths = [len(prompt) + count for prompt, count in zip(prompts, counts, strict=True)]
    size: dict[str, int] = {
        "pages": 1 + sum(-(-length // PAGE) for length in lengths),
        "slots": 1 + len(prompts),
        "context": -(-max(lengths) // PAGE) * PAGE,
    }
    sides = [
        greedy(inprocess.Runner(FOLDER, dtype=torch.bfloat16, **chosen, **size), prompts, counts)
        for chosen in ({"routed_experts": "fp4", "device": run.device}, {})
    ]
    told = [parting(*pair) for pair in zip(*sides, strict=True)]
    for one, sides_of_it, answer in zip(told, zip(*sides, strict=True), wanted, strict=True):
        right = [side.tokens == answer[: len(side.tokens)] for side in sides_of_it]
        one["right"], one["right_by_cpu"] = right
    results, start = [], 0
    for kind, some in asked.items():
        results.append(summed(kind, told[start : start + len(some)]))
        start += len(some)
    return results


@torch.no_grad()
def greedy(runner: Any, prompts: Sequence[list[int]], counts: Sequence[int]) -> list[Answer]:
    """All prompts in one prefill, then decoded together, each for its count of tokens."""
    requests = [runner.open() for _ in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    feed = dict(enumerate(prompts))
    while feed:
        found = runner.step(*((requests[number], new) for number, new in feed.items()))
        for number, one in zip(feed, found, strict=True):
            logits[number].append(one[-1].float().cpu())
            tokens[number].append(int(logits[number][-1].argmax()))
        feed = {
            number: said[-1:] for number, said in enumerate(tokens) if len(said) < counts[number]
        }
    for request in requests:
        runner.close(request)
    return [Answer(said, torch.stack(all_of)) for said, all_of in zip(tokens, logits, strict=True)]


def parting(found: Answer, wanted: Answer) -> dict[str, Any]:
    """Where two greedy answers part, if they do, and how close the two best were there.

    logits_apart: the largest difference of any logit up to there, after the same tokens.
    logprobs_apart: that of the log-probability of the other side's choice.
    """
    pairs = zip(found.tokens, wanted.tokens, strict=True)
    alike = next((step for step, (a, b) in enumerate(pairs) if a != b), len(wanted.tokens))
    seen = slice(0, alike + 1)
    gap = None
    if alike < len(wanted.tokens):
        best = [side.logits[alike].topk(2).values for side in (found, wanted)]
        gap = min(float(top[0] - top[1]) for top in best)
    logits = [side.logits[seen] for side in (found, wanted)]
    choice = torch.tensor(wanted.tokens[seen]).unsqueeze(1)
    logprobs = [one.log_softmax(dim=1).gather(1, choice) for one in logits]
    return {
        "alike": alike,
        "tokens": len(wanted.tokens),
        "gap": gap,
        "logits_apart": float((logits[0] - logits[1]).abs().max()),
        "logprobs_apart": float((logprobs[0] - logprobs[1]).abs().max()),
    }


def summed(kind: str, told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One kind of question: its answers, and what is wrong with them."""
    parted = [one for one in told if one["gap"] is not None]
    wrong = [
        f"parted after {one['alike']} tokens with a gap of {one['gap']:.2f}"
        for one in parted
        if not one["gap"] < NEAR_TIE
    ]
    if not all(math.isfinite(one["logits_apart"]) for one in told):
        wrong.append("logits are not finite")
    first = min(parted, key=lambda one: one["alike"], default=None)
    return {
        "kind": kind,
        "answers": len(told),
        "answers_alike": len(told) - len(parted),
        "tokens": sum(one["tokens"] for one in told),
        "tokens_alike": sum(one["alike"] for one in told),
        "right": sum(one["right"] for one in told),
        "right_by_cpu": sum(one["right_by_cpu"] for one in told),
        "logits_apart": max(one["logits_apart"] for one in told),
        "logprobs_apart": max(one["logprobs_apart"] for one in told),
        "first_parting": first and {"after": first["alike"], "gap": first["gap"]},
        "every": list(told),
        "faults": wrong,
    }


def nano_row(one: Mapping[str, Any]) -> list[Any]:
    """A line of the table."""
    first = one["first_parting"]
    return [
        one["kind"],
        f"{one['answers_alike']} of {one['answers']}",
        f"{one['tokens_alike']} of {one['tokens']}",
        f"{one['logits_apart']:.2f}",
        f"{one['logprobs_apart']:.3f}",
        f"{one['right']}, {one['right_by_cpu']}",
        f"token {first['after']}" if first else "none",
        f"{first['gap']:.3f}" if first else "",
        "; ".join(one["faults"]) or "ok",
    ]
