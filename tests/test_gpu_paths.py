"""The model's path on a GPU, in one process: captured selections, NaN, far addresses; and the
measure by which the acceptance run's `agreement` compares layers and answers.

What needs no GPU runs on a CPU as well, at a smaller size and with the reference ops.
"""

import functools
import importlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import oracle
import side_by_side
from inprocess import Host, Request, Runner
from naive_attention import EPS, metadata
from op_checks import MACHINE, implementations, randn
from sglang_dsv4.attention import reference
from sglang_dsv4.attention.cache import PAGE, RING, entries_per_page
from sglang_dsv4.attention.metadata import EntryTable, entry_rows
from sglang_dsv4.graph_safety_step import DecodeStep, SmallLM, capture
from side_by_side import Layer, Record, Ties

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
agreement = importlib.import_module("gpu_agreement")

BF16 = torch.bfloat16


def on_gpu(*values: Any) -> Any:
    """A parameter of pytest that needs a GPU; each names its device first."""
    return pytest.param("cuda", *values, marks=pytest.mark.gpu((8, 0)))


def draw(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(15, oracle.VOCAB_SIZE, (count,), generator=generator).tolist()


# ---- what the indexer chose ----


@dataclass(frozen=True)
class Selection:
    """Arguments and result of a layer's last select_entries; in a graph, what replays overwrite."""

    q: torch.Tensor
    head_weights: torch.Tensor
    keys: torch.Tensor
    table: EntryTable
    top_k: int
    chosen: torch.Tensor

    def of(self, row: int) -> list[int]:
        return self.chosen[row].tolist()

    def scores(self, row: int) -> torch.Tensor:
        """[visible] float64: of a token's entries, by definition."""
        count = int(self.table.visible[row])
        entries = torch.arange(count, device=self.q.device).unsqueeze(0)
        request = self.table.request[row : row + 1]
        keys = self.keys[entry_rows(self.table.page_table, request, entries, 4)[0]].double()
        products = (keys @ self.q[row].double().T).clamp(min=0)
        return (products @ self.head_weights[row].double()).cpu()


def watch(lm: SmallLM) -> dict[int, Selection]:
    """From now on, the last selection of every CSA layer, by its number."""
    found: dict[int, Selection] = {}

    def keep(
        layer: int, op: Callable[..., Any], *given: Any, top_k: int, nan_scores: torch.Tensor
    ) -> torch.Tensor:
        chosen: torch.Tensor = op(*given, top_k=top_k, nan_scores=nan_scores)
        found[layer] = Selection(*given, top_k, chosen)
        return chosen

    for number, layer in enumerate(lm.model.layers):
        indexer = layer.attn.indexer
        if indexer is not None:
            op = functools.partial(keep, number, indexer.ops.select_entries)
            indexer.ops = replace(indexer.ops, select_entries=op)
    return found


def nan_scores(lm: SmallLM) -> dict[int, int]:
    """What the indexer of each CSA layer has counted."""
    numbered = enumerate(layer.attn.indexer for layer in lm.model.layers)
    return {number: int(one.nan_scores) for number, one in numbered if one is not None}


def assert_in_range(chosen: Sequence[int], visible: int, top_k: int) -> list[int]:
    """Distinct visible entries, as many as there are up to top_k, then -1; returns them."""
    entries = [entry for entry in chosen if entry != -1]
    assert len(chosen) == top_k and chosen == entries + [-1] * (top_k - len(entries))
    assert len(entries) == len(set(entries)) == min(visible, top_k)
    assert all(0 <= entry < visible for entry in entries)
    return entries


def assert_best(selection: Selection, row: int) -> bool:
    """A token's entries are the best, best first, as far as float32 tells; returns whether they are
    but the first ones."""
    scores = selection.scores(row)
    entries = assert_in_range(selection.of(row), len(scores), selection.top_k)
    if not entries:
        return True
    best, tolerance = scores[entries], 1e-5 * float(scores.abs().max())
    assert (best[1:] - best[:-1] <= tolerance).all()
    left_out = scores.clone()
    left_out[entries] = -math.inf
    assert best.min() >= left_out.max() - tolerance, f"{entries}: {left_out.argmax()} is better"
    return sorted(entries) == list(range(len(entries)))


@pytest.mark.parametrize(
    ("device", "top_k", "length"), [("cpu", 8, 120), on_gpu(8, 600), on_gpu(512, 3000)]
)
def test_a_step_captured_with_padding_selects_by_score(
    device: str, top_k: int, length: int, tmp_path: Path
) -> None:
    """Captured where nobody sees an entry, replayed with more of them than are selected."""
    oracle.write_checkpoint(tmp_path, oracle.tiny_config(index_topk=top_k), oracle.CHECKPOINT_SEED)
    runner = Runner(tmp_path, dtype=BF16, device=device, pages=32, slots=6, context=4096)
    requests = [runner.open() for _ in range(3)]
    for number, prefix in enumerate((length, 4 * top_k + 3, 5)):
        runner.step((requests[number], draw(prefix, seed=number)))
    rows = len(requests) + 1
    found = watch(runner.lm)
    idle = runner.batch(padding=rows)
    step = DecodeStep(runner.lm, runner.config.sliding_window, runner.caches, idle, device)
    replay = capture(step)[0].replay if device == "cuda" else step.run

    simply_first = []
    for number in range(9):
        ids = draw(rows, seed=10 + number)
        parts = [(request, ids[i : i + 1]) for i, request in enumerate(requests)]
        step.fill(ids, runner.batch(*parts, padding=1))
        replay()
        assert found.keys() == {2, 4, 6}
        for selection in found.values():
            for row, request in enumerate(requests):
                assert int(selection.table.visible[row]) == (request.length + 1) // 4
                first = assert_best(selection, row)
                if request.length >= 4 * top_k + 4:
                    simply_first.append(first)
            assert selection.of(len(requests)) == [-1] * top_k
        for request, tokens in parts:
            request.tokens.extend(tokens)
    assert len(simply_first) > 40 and sum(simply_first) < len(simply_first) / 2


# ---- NaN among the indexer's scores ----


def index_rows(request: Request, entries: Sequence[int]) -> list[int]:
    per_page = PAGE // 4
    return [request.pages[entry // per_page] * per_page + entry % per_page for entry in entries]


@pytest.mark.parametrize("device", ["cpu", on_gpu()])
def test_nan_in_an_index_key_is_chosen_last(device: str, checkpoint: Path) -> None:
    """By a request that sees more entries than are selected, and by one that must take them all;
    both are counted."""
    runner = Runner(checkpoint, dtype=BF16, device=device)
    requests = [runner.open() for _ in range(2)]
    for request, length in zip(requests, (150, 22), strict=True):
        runner.step((request, draw(length, seed=length)))
    assert nan_scores(runner.lm) == {2: 0, 4: 0, 6: 0}  # though the caches were NaN to begin with
    poisoned = (0, 3, 4)
    for cache in runner.caches:
        if cache.index_keys is not None:
            for request in requests:
                cache.index_keys[index_rows(request, poisoned)] = math.nan
    found = watch(runner.lm)
    logits = torch.cat(runner.step(*((request, [20]) for request in requests)))
    assert logits.isfinite().all() and found.keys() == {2, 4, 6}
    assert nan_scores(runner.lm) == dict.fromkeys(found, 2 * len(poisoned))
    for selection in found.values():
        assert selection.scores(0)[list(poisoned)].isnan().all()
        assert not set(poisoned) & set(assert_in_range(selection.of(0), 37, 8))
        assert assert_in_range(selection.of(1), 5, 8)[2:] == list(poisoned)
        given = (selection.q, selection.head_weights, selection.keys, selection.table)
        count = torch.zeros(1, dtype=torch.int64, device=device)
        expected = reference.select_entries(*given, top_k=selection.top_k, nan_scores=count)
        assert int(count) == 2 * len(poisoned)
        assert torch.equal(selection.chosen.sort().values, expected.sort().values)


@pytest.mark.parametrize("device", ["cpu", on_gpu()])
def test_nan_in_an_index_query_stays_in_range_and_with_its_token(
    device: str, checkpoint: Path
) -> None:
    """Where no score is a number, the first entries are taken; the other request has its own."""
    runner = Runner(checkpoint, dtype=BF16, device=device)
    requests = [runner.open() for _ in range(2)]
    for request, length in zip(requests, (150, 100), strict=True):
        runner.step((request, draw(length, seed=length)))

    def poisoned(op: Callable[..., torch.Tensor], *given: Any, fp4: bool) -> torch.Tensor:
        q = op(*given, fp4=fp4)
        q[0, 1, 5] = math.nan
        return q

    for layer in runner.lm.model.layers:
        if (indexer := layer.attn.indexer) is not None:
            op = functools.partial(poisoned, indexer.ops.index_query)
            indexer.ops = replace(indexer.ops, index_query=op)
    found = watch(runner.lm)
    logits = torch.cat(runner.step(*((request, [20]) for request in requests)))
    assert logits.isfinite().all() and found.keys() == {2, 4, 6}
    assert nan_scores(runner.lm) == dict.fromkeys(found, 151 // 4)  # the token's visible entries
    for selection in found.values():
        assert selection.of(0) == list(range(8))
        assert not assert_best(selection, 1)


# ---- addresses beyond 2^31 elements ----

FAR = (1 << 31) // 512  # the first row of a cache that lies there


def held(runner: Runner, request: Request) -> list[tuple[str, list[int], torch.Tensor]]:
    """What the caches hold of a request: (what, rows, values) for each layer and kind of row."""
    end, found = request.length, []
    window = [
        request.window_pages[position // PAGE] * PAGE + position % PAGE
        for position in range(end - runner.config.sliding_window, end)
    ]
    for kind, cache in zip(runner.config.layer_kinds, runner.caches, strict=True):
        per_page = entries_per_page(kind)
        stored = [
            request.pages[entry // per_page] * per_page + entry % per_page
            for entry in range(end // kind.value if kind.value else 0)
        ]
        rows = {"window": window, "entries": [cache.window_rows + row for row in stored]}
        found += [(f"{kind.name} {name}", at, cache.kv[at]) for name, at in rows.items() if at]
        if cache.index_keys is not None:
            found.append((f"{kind.name} index keys", stored, cache.index_keys[stored]))
    return found


@pytest.mark.parametrize(
    ("device", "pages", "heads"), [("cpu", 30, 8), on_gpu(FAR // PAGE + 64, 64)]
)
def test_a_cache_beyond_two_gigabytes_gives_the_same(
    device: str, pages: int, heads: int, tmp_path: Path
) -> None:
    """Rows, entries and logits, bit for bit, of a prefill and decodes in a small cache and at the
    far end of a large one. FlashMLA takes 64 heads, and Triton's kernel any."""
    shape = {"compress_ratios": [0, 4, 128], "num_hidden_layers": 3, "num_hash_layers": 1}
    config = oracle.tiny_config(**shape, num_attention_heads=heads)
    oracle.write_checkpoint(tmp_path, config, oracle.CHECKPOINT_SEED)
    tokens = draw(300, seed=3)
    results = []
    for count in (6, pages):
        runner = Runner(tmp_path, dtype=BF16, device=device, pages=count, slots=3)
        runner.free_pages.sort()  # the last page is handed out first, as of the window's
        request = runner.open()
        logits = [runner.run(request, tokens[:270]), runner.run(request, tokens[270:], 10)]
        logits.append(runner.run(request, draw(8, seed=4), 1))
        results.append((torch.cat(logits), held(runner, request)))
    (near, near_held), (far, far_held) = results
    for (what, _, expected), (_, rows, values) in zip(near_held, far_held, strict=True):
        assert expected.isfinite().all() and torch.equal(values, expected), what
        assert device == "cpu" or "keys" in what or min(rows) >= FAR
    assert torch.equal(far, near)


@pytest.mark.parametrize("op", implementations("compress_csa"))
def test_index_keys_are_stored_beyond_two_gigabytes(op: Callable[..., None]) -> None:
    """Without a GPU a little further only: the same keys at another place."""
    shift = (1 << 31) // 128 if MACHINE.device == "cuda" else 1 << 10
    host = Host(pages=3, slots=3, context=2 * PAGE)
    request = host.open()
    request.tokens = [1] * 7
    plan = metadata(host, (request, [1] * 30), window_rows=3 * PAGE).csa
    kv, gate, ape = randn(30, 256, seed=1), randn(30, 256, seed=2), randn(4, 256, seed=3)
    given = (kv, gate, ape, randn(128, seed=4, dtype=BF16), randn(32, seed=5).abs(), plan)
    keys, state = randn(3 * 64, 128, seed=6, dtype=BF16), randn(3 * RING, 512, seed=7)
    keys[0] = 0
    large = torch.zeros(shift + len(keys), 128, dtype=BF16, device=keys.device)
    large[shift:] = keys
    far = (plan.entry + shift).masked_fill(plan.entry == 0, 0)
    op(*given, far, state.clone(), large, eps=EPS, fp4=True)
    before = keys.clone()
    op(*given, plan.entry, state, keys, eps=EPS, fp4=True)
    assert (before != keys).any(dim=1).sum() == int((plan.entry != 0).sum()) == 8
    assert torch.equal(large[shift:], keys) and not large[:shift].any()


# ---- how agreement is measured ----


def test_overlap_counts_sets() -> None:
    found = torch.tensor([[1, 2, 3], [5, -1, -1], [-1, -1, -1], [0, 1, -1], [7, 8, 9]])
    wanted = torch.tensor([[3, 1, 2], [5, -1, -1], [-1, -1, -1], [0, 1, 2], [9, 4, 3]])
    shares = side_by_side.overlap(found, wanted)
    assert shares.tolist() == pytest.approx([1, 1, 1, 2 / 3, 1 / 3])


def test_errors_are_of_whole_tokens() -> None:
    wanted = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]] * 3)
    found = wanted.clone()
    found[1, 0, 1], found[2, 1, 0] = 0.5, math.nan
    assert side_by_side.relative_error(found, wanted).tolist() == [0, 0.1, math.inf]
    cosine = side_by_side.cosine_error(found, wanted).tolist()
    assert cosine == pytest.approx([0, 1 - 25 / (5 * 25.25**0.5), 2])


def record(experts: list[list[int]], selected: list[list[int]], error: list[float]) -> Record:
    streams = torch.ones(len(error), 1, 4) * (1 + torch.tensor(error)[:, None, None])
    gaps = torch.tensor([0.1, 9.0, 9.0, 9.0])
    layer = Layer(streams, torch.tensor(experts), torch.tensor(selected), gaps, gaps)
    return Record((layer,), streams.flatten(1))


def test_other_choices_are_left_out_and_need_a_near_tie() -> None:
    experts, selected = [[0, 1]] * 4, [[4, 5]] * 4
    wanted = record(experts, selected, [0, 0, 0, 0])
    alike = record([[1, 0], *experts[1:]], [[5, 4], *selected[1:]], [0, 0.001, 0.002, 0.003])
    (layer, logits) = side_by_side.apart(alike, wanted, Ties(1, 1))
    figures = layer.figures()
    assert (figures["left_out"], figures["entries_alike"], figures["experts_alike"]) == (0, 1, 1)
    assert figures["relative_worst"] == pytest.approx(0.003, rel=1e-4)
    assert not agreement.faults(figures, agreement.BF16)
    assert "relative error 3.00e-03" in agreement.faults(figures, agreement.FP32)[0]
    assert logits.figures()["entries_alike"] is None

    other = record([[2, 1], *experts[1:]], [*selected[:3], [4, 6]], [5, 0.001, 0.002, 7])
    layer, logits = side_by_side.apart(other, wanted, Ties(1, 1))
    figures = layer.figures()
    assert (figures["left_out"], figures["unexplained"]) == (2, 1)
    assert figures["relative_worst"] == pytest.approx(0.002, rel=1e-4)
    assert (figures["entries_alike"], figures["experts_alike"]) == (0.875, 0.875)
    assert logits.figures()["left_out"] == 2
    assert agreement.faults(figures, agreement.BF16) == [
        "0.875 of entries alike, at least 0.9",
        "0.875 of experts alike, at least 0.95",
        "1 tokens chose otherwise without a near tie",
    ]
    (layer, _) = side_by_side.apart(other, wanted, Ties(10, 0.01))
    assert layer.figures()["unexplained"] == 1
    nothing = layer.figures() | {"relative_worst": None}
    assert "no token chose the same" in agreement.faults(nothing, agreement.BF16)
    assert agreement.faults(figures | {"relative_worst": math.inf}, agreement.BF16)


def test_a_fault_shows_in_the_layer_where_it_is(checkpoint: Path) -> None:
    """One weight of layer 3 is off by 5 %: every other layer agrees."""
    tokens = oracle.story()[:70]
    wanted = side_by_side.of_transformers(oracle.load(checkpoint, indexer_fp4=True), tokens)
    runner = Runner(checkpoint, dtype=BF16)
    runner.lm.model.layers[3].attn.wo_b.weight *= 1.05
    found = side_by_side.of_runner(runner, tokens, [66, 67, 70], wanted)
    results = list(agreement.layer_by_layer("", runner, found, wanted, BF16))
    assert [one["layer"] for one in results if one["faults"]] == ["3 HCA"]
    assert [one["tokens"] for one in results] == [70] * 8
    assert [one["entries_alike"] is not None for one in results] == [False, False] + [
        True, False, True, False, True, False
    ]  # fmt: skip


def answer(tokens: list[int], gap: float = 9.0, shift: float = 0.0) -> Any:
    """Each token's logit leads by the gap."""
    logits = torch.zeros(len(tokens), 20)
    logits[range(len(tokens)), tokens] = gap
    logits[:, 19] += shift
    return agreement.Answer(tokens, logits)


def test_answers_may_part_at_near_ties_alone() -> None:
    def told(*pair: Any) -> dict[str, Any]:
        found = agreement.parting(*pair) | {"right": True, "right_by_cpu": False}
        return dict(agreement.summed("facts", [found]))

    alike = told(answer([1, 2, 3]), answer([1, 2, 3], shift=-0.5))
    assert not alike["faults"] and alike["first_parting"] is None
    assert (alike["answers_alike"], alike["tokens_alike"], alike["logits_apart"]) == (1, 3, 0.5)
    assert (alike["right"], alike["right_by_cpu"]) == (1, 0)
    near = told(answer([1, 2, 3], gap=0.5), answer([1, 5, 6]))
    assert not near["faults"] and near["first_parting"] == {"after": 1, "gap": 0.5}
    assert near["tokens_alike"] == 1 and near["answers_alike"] == 0
    far = told(answer([1, 2, 3], gap=0.7), answer([1, 5, 6]))
    assert far["faults"] == ["parted after 1 tokens with a gap of 0.70"]
    assert told(answer([1, 2], shift=math.nan), answer([1, 2]))["faults"]


def test_greedy_answers_do_not_depend_on_the_batch() -> None:
    """Prompts of other lengths and counts beside each other, and each alone, in float32."""
    prompts, counts = [agreement.ids(text) for text in ("The capital of", "One", "In")], [3, 1, 4]
    runner = agreement.inprocess.Runner(agreement.FOLDER, pages=8, slots=6)
    together = agreement.greedy(runner, prompts, counts)
    assert [len(one.tokens) for one in together] == counts
    for one, prompt, count in zip(together, prompts, counts, strict=True):
        (alone,) = agreement.greedy(runner, [prompt], [count])
        assert alone.tokens == one.tokens == one.logits.argmax(dim=1).tolist()
        torch.testing.assert_close(alone.logits, one.logits, rtol=0, atol=1e-3)
