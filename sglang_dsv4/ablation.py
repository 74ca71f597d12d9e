"""What each component's precision costs: the model as it is, and with one component flipped.

Every configuration reads the same held-out texts, questions and generations in one process, in the
forward that servers run; a transformers model in fp32 is the reference. `run` gives plain data.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from sglang_dsv4 import precision, weights
from sglang_dsv4.ablation_metrics import Trace, compare, equal_tokens
from sglang_dsv4.ablation_summary import Tally, summary
from sglang_dsv4.ablation_texts import Material, Question
from sglang_dsv4.attention.cache import PAGE, allocate
from sglang_dsv4.attention.metadata import Batch
from sglang_dsv4.backends import Machine, Ops, choose
from sglang_dsv4.census import QUANTISED
from sglang_dsv4.checkpoint import read_index, read_shards
from sglang_dsv4.config import DSV4Config, LayerKind
from sglang_dsv4.graph_safety_step import SmallLM
from sglang_dsv4.parallel import Parallel
from sglang_dsv4.parameters import default_dtype, named_weights
from sglang_dsv4.precision import COMPONENTS, FLIPPED, FLOOR
from sglang_dsv4.tensor_table import expected_tensors

AS_IT_IS = "all floor"
PROMPT, GENERATED = 128, 64  # tokens: of a text, and what is generated after them
TOGETHER = 1024  # tokens of several short prompts that are read in one forward


# ------------------------------------------------------------------------------- configurations


def configurations(only: Sequence[str] = ()) -> dict[str, str]:
    """Name -> SGLANG_DSV4_PRECISION: the floor, each flip alone, all of them, the indexer whole.

    only: components that are flipped alone, joint names allowed; then nothing else is changed.
    Raises SettingsError for unknown names.
    """
    flips = [name for name, row in COMPONENTS.items() if FLIPPED in row.values]
    alone = {name: f"{name}={FLIPPED}" for name in flips} | {"indexer_qk": "indexer_qk=full"}
    if not only:
        together = ",".join(alone[name] for name in flips)
        changes = {name: alone[name] for name in flips} | {"all flipped": together}
        return {AS_IT_IS: ""} | changes | {"indexer_qk=full": alone["indexer_qk"]}
    named = [part for name in only for part in precision.JOINT.get(name, (name,))]
    for name in named:
        precision.parse(alone.get(name, f"{name}={FLIPPED}"))  # refuses what it does not know
    return {AS_IT_IS: ""} | {
        name if name in flips else alone[name]: alone[name] for name in dict.fromkeys(named)
    }


# --------------------------------------------------------------------------------------- models


class Session:
    """Requests of at most `capacity` tokens each over caches of their own, from empty on."""

    def __init__(self, config: DSV4Config, capacity: Sequence[int], dtype: torch.dtype) -> None:
        pages = [-(-tokens // PAGE) for tokens in capacity]
        self.window, self.length = config.sliding_window, [0] * len(pages)
        self.table = torch.zeros(len(pages), max(pages), dtype=torch.int64)
        for row, count in enumerate(pages):
            first = 1 + sum(pages[:row])
            self.table[row, :count] = torch.arange(first, first + count)
        total = 1 + sum(pages)
        self.window_map = torch.arange(total * PAGE)
        self.caches = allocate(
            config, pages=total, window_pages=total, requests=len(pages) + 1, dtype=dtype
        )

    @torch.no_grad()
    def step(self, lm: SmallLM, new: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """New tokens of every request, at least one: logits [new, V] fp32 for each."""
        counts = [len(tokens) for tokens in new]
        ends = [start + count for start, count in zip(self.length, counts, strict=True)]
        spans = zip(self.length, ends, strict=True)
        batch = Batch(
            positions=torch.cat([torch.arange(*span) for span in spans]),
            request=torch.arange(len(new)).repeat_interleave(torch.tensor(counts)),
            request_slots=torch.arange(1, len(new) + 1),
            prefix_lens=torch.tensor(self.length),
            new_lens=torch.tensor(counts),
            page_table=self.table,
            window_map=self.window_map,
            max_len=max(ends),
        )
        build, rows = lm.ops.build_metadata, self.caches[0].window_rows
        meta = build(batch, window=self.window, window_rows=rows)
        ids = torch.tensor([token for tokens in new for token in tokens])
        logits: torch.Tensor = lm(ids, meta, self.caches)
        self.length = ends
        return list(logits.split(counts))


class Subject:
    """A configuration's model, and what its layers, its indexers and its routers gave last."""

    def __init__(self, folder: Path, config: DSV4Config, chosen: str, dtype: torch.dtype) -> None:
        self.config, self.dtype = config, dtype
        self._selected: list[torch.Tensor] = []
        self._experts: list[torch.Tensor] = []
        self._layers: list[torch.Tensor] = []
        table = precision.parse(chosen)
        with default_dtype(dtype):
            self.lm = SmallLM(config, self._recording(), table, Parallel())
        self.report = weights.load(self.lm, tensors(folder), config, rank=0, size=1, chosen=table)
        for layer in self.lm.model.layers:
            layer.register_forward_hook(
                lambda _, __, residual: self._layers.append(self.lm.ops.mhc_post(*residual))
            )

    def _recording(self) -> Ops:
        ops = choose(Machine.probe("cpu"))

        def select_entries(*args: Any, **options: Any) -> torch.Tensor:
            self._selected.append(ops.select_entries(*args, **options))
            return self._selected[-1]

        def route_scored(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
            chosen_weights, experts = ops.route_scored(*args, **options)
            self._experts.append(experts)
            return chosen_weights, experts

        return replace(ops, select_entries=select_entries, route_scored=route_scored)

    def share(self, other: "Subject") -> None:
        """Use the other's parameters wherever they are equal: a flip then costs what it flips."""
        theirs = dict(other.lm.named_parameters())
        for name, module in self.lm.named_modules():
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                twin = theirs[f"{name}.{leaf}".lstrip(".")]
                if torch.equal(parameter, twin):
                    setattr(module, leaf, twin)

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """[T, V] fp32 of each sequence, all in one forward."""
        for seen in (self._selected, self._experts, self._layers):
            seen.clear()
        session = Session(self.config, [len(ids) for ids in sequences], self.dtype)
        return session.step(self.lm, sequences)

    def trace(self, ids: Sequence[int]) -> Trace:
        """All that is compared of one text."""
        (logits,) = self.logits([ids])
        return Trace(tuple(self._layers), logits, tuple(self._selected), tuple(self._experts))

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Greedy tokens after each prompt, through the cache, whatever they are."""
        session = Session(self.config, [len(ids) + count for ids in prompts], self.dtype)
        said: list[list[int]] = [[] for _ in prompts]
        new = prompts
        for _ in range(count):
            new = [[int(logits[-1].argmax())] for logits in session.step(self.lm, new)]
            for tokens, token in zip(said, new, strict=True):
                tokens += token
        return said


def tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint, by file; raises CheckpointError for files that are damaged."""
    for file in read_shards(folder, read_index(folder)):
        with safe_open(folder / file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118  not a dict
                yield name, shard.get_tensor(name)


def write_dense(lm: SmallLM, config: DSV4Config, folder: Path, out: Path) -> None:
    """Writes the checkpoint in `folder` anew, as the dense values that `lm` loaded of it."""
    held = named_weights(lm) | dict(lm.named_buffers())
    dense = {
        name: weights.slot_view(held[slot.parameter], slot).clone().contiguous()
        for name, slot in expected_tensors(config).items()
    }
    save_file(dense, out / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("quantization_config", None)
    (out / "config.json").write_text(json.dumps(raw))


# ------------------------------------------------------------------------------------------ run


class Reader(Protocol):
    """What reads texts: a configuration of ours, or transformers."""

    def trace(self, ids: Sequence[int]) -> Trace: ...

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]: ...


def reference_of(folder: Path, config: DSV4Config, whole: Subject) -> tuple[str, Reader]:
    """What configurations are compared with, and its name: transformers, else our own fp32 run.

    A quantised checkpoint reaches transformers as the dense values that we made of it.
    """
    from sglang_dsv4.ablation_oracle import CannotLoad, Oracle  # imports transformers

    quantised = any(kind.partition(" to ")[0] in QUANTISED for kind in whole.report.converted)

    def exact() -> Subject:
        return whole if whole.dtype is torch.float32 else Subject(folder, config, "", torch.float32)

    try:
        if not quantised:
            return "transformers in float32", Oracle(folder)
        with TemporaryDirectory() as copy:
            write_dense(exact().lm, config, folder, Path(copy))
            return "transformers in float32, of our dequantised weights", Oracle(Path(copy))
    except CannotLoad as error:
        return f"all floor in float32, by our own ops (transformers: {error})", exact()


def run(
    folder: Path,
    material: Material,
    *,
    dtype: torch.dtype = torch.float32,
    only: Sequence[str] = (),
    progress: bool = True,
) -> dict[str, Any]:
    """All configurations over all of `material`: plain data, as `ablation_summary` describes it.

    folder: a checkpoint that fits in this machine's memory. dtype: in which our model computes.
    progress: show a bar where stderr is a terminal.
    Raises ConfigError, CheckpointError or SettingsError for what cannot be run.
    """
    config = DSV4Config.from_checkpoint(folder)
    chosen = configurations(only)
    whole = Subject(folder, config, "", dtype)
    refused = {name: why for name in chosen if (why := _refusal(chosen[name], whole))}
    subjects = {AS_IT_IS: whole}
    for name in chosen:
        if name not in refused and name not in subjects:
            subjects[name] = Subject(folder, config, chosen[name], dtype)
            subjects[name].share(whole)
    named, reference = reference_of(folder, config, whole)
    tallies = {name: Tally() for name in (*subjects, "reference")}
    longest = max(map(len, material.texts))
    steps = len(material.texts) + 1 + len(material.questions)
    with tqdm(total=steps, desc="precision", disable=None if progress else True) as bar:
        for ids in material.texts:
            _read_text(ids, reference, subjects, tallies)
            bar.update()
        for packed in packs(material.questions):
            _ask(packed, reference, subjects, tallies)
            bar.update(len(packed))
        _generate(material, reference, subjects, tallies)
        bar.update()
    about = {
        "reference": named,
        "dtype": str(dtype).removeprefix("torch."),
        "material": material.source,
        "texts": len(material.texts),
        "tokens": sum(map(len, material.texts)),
        "longest_text": longest,
        "generated": GENERATED,
        "refused": refused,
    }
    return about | summary(tallies, chosen | {"reference": ""}, AS_IT_IS)


def _refusal(chosen: str, whole: Subject) -> str | None:
    """Why a flip would show nothing: what it rounds is quantised in the checkpoint already."""
    table = precision.parse(chosen)
    for component, held in whole.report.quantised_floor.items():
        if getattr(table, component) == FLIPPED:
            return f"{component} is {held} in the checkpoint: there is no {FLOOR} master to flip"
    return None


def _read_text(
    ids: list[int],
    reference: Reader,
    subjects: dict[str, Subject],
    tallies: dict[str, Tally],
) -> None:
    expected = reference.trace(ids)
    for name, tally in tallies.items():
        found = subjects[name].trace(ids) if name in subjects else expected
        tally.texts.append(compare(found, expected, ids, ratio=LayerKind.CSA.value))


def packs(questions: Sequence[Question]) -> list[list[Question]]:
    """Questions of similar lengths together, TOGETHER tokens at most, or one alone."""
    packed: list[list[Question]] = []
    room = 0
    for question in sorted(questions, key=lambda item: len(item.prompt + item.answer)):
        tokens = len(question.prompt + question.answer)
        if not packed or tokens > room:
            packed.append([])
            room = TOGETHER
        packed[-1].append(question)
        room -= tokens
    return packed


def _ask(
    questions: Sequence[Question],
    reference: Reader,
    subjects: dict[str, Subject],
    tallies: dict[str, Tally],
) -> None:
    """Whether greedy generation gives the whole answer, told from one forward over both."""
    sequences = [item.prompt + item.answer for item in questions]
    models: dict[str, Reader] = {**subjects, "reference": reference}
    for name, model in models.items():
        for item, logits in zip(questions, model.logits(sequences), strict=True):
            right = equal_tokens(logits, len(item.prompt), item.answer) == len(item.answer)
            tallies[name].answers.setdefault(item.kind, []).append(right)


def _generate(
    material: Material,
    reference: Reader,
    subjects: dict[str, Subject],
    tallies: dict[str, Tally],
) -> None:
    """How far each model says what the whole floor says after the texts' beginnings."""
    prompts = [ids[: min(PROMPT, len(ids) // 2)] for ids in material.texts]
    models: dict[str, Reader] = {**subjects, "reference": reference}
    at_once = max(1, TOGETHER // PROMPT)
    for first in range(0, len(prompts), at_once):
        part = prompts[first : first + at_once]
        said = subjects[AS_IT_IS].generate(part, GENERATED)
        sequences = [prompt + tokens for prompt, tokens in zip(part, said, strict=True)]
        for name, model in models.items():
            found = zip(part, said, model.logits(sequences), strict=True)
            tallies[name].equal += [equal_tokens(o, len(p), tokens) for p, tokens, o in found]
