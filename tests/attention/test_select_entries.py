"""select_entries against a loop over visible entries.

Most inputs are small integers: scores are then exact in float32, and so are order and ties.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from naive_attention import assert_stays_on_device
from op_checks import MACHINE, implementations, randn
from sglang_dsv4.attention import reference
from sglang_dsv4.attention.metadata import EntryTable

PER_PAGE = 64  # entries in a page of tokens
PAGES = 16


@pytest.fixture
def counted():
    """Where `run` counts NaN."""
    return torch.zeros(1, dtype=torch.int64, device=MACHINE.device)


@pytest.fixture(params=implementations("select_entries"))
def run(request, counted):
    return partial(request.param, nan_scores=counted)


def integers(*shape, low, high, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator).to(MACHINE.device)


def table_of(visible, requests=3, width=None, seed=0):
    """Pages in random order, none twice and never page 0; tokens of the requests in turn."""
    width = width or max([*visible, 1])
    pages = -(-width // PER_PAGE)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(PAGES - 1, generator=generator) + 1
    tokens = torch.arange(len(visible))
    return EntryTable(
        request=(tokens % requests).to(MACHINE.device),
        page_table=order[: requests * pages].view(requests, pages).to(MACHINE.device),
        visible=torch.tensor(visible, dtype=torch.int64, device=MACHINE.device),
        width=width,
        first_row=1000,
    )


def row_of(table, token, entry):
    page = int(table.page_table[int(table.request[token]), entry // PER_PAGE])
    return page * PER_PAGE + entry % PER_PAGE


def keys_of(table, values):
    """The key cache: NaN wherever no token may look."""
    keys = torch.full_like(values, math.nan)
    for token, visible in enumerate(table.visible.tolist()):
        for entry in range(visible):
            keys[row_of(table, token, entry)] = values[row_of(table, token, entry)]
    return keys


def scores_of(q, head_weights, keys, table, token):
    scores = []
    for entry in range(int(table.visible[token])):
        key = keys[row_of(table, token, entry)].cpu().double()
        products = (q[token].cpu().double() @ key).clamp(min=0)
        scores.append(float(products @ head_weights[token].cpu().double()))
    return scores


def by_loop(q, head_weights, keys, table, top_k):
    chosen = []
    for token in range(len(q)):
        scores = scores_of(q, head_weights, keys, table, token)
        key = {e: (-score if score == score else math.inf) for e, score in enumerate(scores)}
        best = sorted(key, key=lambda entry: (key[entry], entry))[:top_k]
        chosen.append(best + [-1] * (top_k - len(best)))
    return chosen


def exact_inputs(tokens, heads, seed=0, dtype=torch.float32):
    q = integers(tokens, heads, 128, low=-2, high=2, seed=seed + 1).to(dtype)
    head_weights = integers(tokens, heads, low=-4, high=4, seed=seed + 2).float() / 4
    keys = integers(PAGES * PER_PAGE, 128, low=-1, high=1, seed=seed + 3).to(dtype)
    return q, head_weights, keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_rows", [1, 300, 1 << 18])
@pytest.mark.parametrize(
    ("visible", "top_k"),
    [
        ((0,), 8),
        ((1, 0, 7, 8, 9), 8),
        ((191, 64, 65, 63, 128, 190, 3), 16),
        ((100, 50, 2), 1),
        ((61, 17, 5), 200),
        ((), 4),
    ],
)
def test_equals_the_loop(run, counted, monkeypatch, dtype, visible, block_rows, top_k):
    monkeypatch.setattr(reference, "SCORE_BLOCK_ROWS", block_rows)
    table = table_of(visible)
    q, head_weights, keys = exact_inputs(len(visible), 5, dtype=dtype)
    keys = keys_of(table, keys)
    result = run(q, head_weights, keys, table, top_k=top_k)
    assert result.dtype is torch.int64 and result.shape == (len(visible), top_k)
    assert result.tolist() == by_loop(q, head_weights, keys, table, top_k)
    assert counted.item() == 0  # whatever the keys that no token sees are


@pytest.mark.parametrize("width", [191, 192, 256])
def test_the_width_may_exceed_what_is_visible(run, width):
    """Decode scores as many entries as the longest context has; missing pages are 0."""
    table = table_of((61, 5, 130), width=width)
    table = replace(table, page_table=table.page_table.masked_fill(
        torch.arange(table.page_table.shape[1], device=MACHINE.device) >= 3, 0
    ))
    q, head_weights, keys = exact_inputs(3, 4)
    keys = keys_of(table, keys)
    result = run(q, head_weights, keys, table, top_k=9)
    assert result.tolist() == by_loop(q, head_weights, keys, table, 9)


@pytest.mark.parametrize("signs", ["positive", "negative", "zero", "mixed"])
def test_signs_of_head_weights(run, signs):
    """Where all weights are negative the best score is that of no product at all: zero."""
    table = table_of((150, 90, 44))
    q, head_weights, keys = exact_inputs(3, 16)
    head_weights = {
        "positive": head_weights.abs() + 0.25,
        "negative": -head_weights.abs() - 0.25,
        "zero": head_weights * 0,
        "mixed": head_weights,
    }[signs]
    result = run(q, head_weights, keys, table, top_k=12)
    assert result.tolist() == by_loop(q, head_weights, keys, table, 12)
    if signs == "zero":
        assert result.tolist() == [list(range(12))] * 3


def test_ties_go_to_the_lower_entry(run):
    """One head, products 3, 1 and 0 only."""
    table = table_of((150,), requests=1)
    q = torch.zeros(1, 1, 128, device=MACHINE.device)
    q[0, 0, 0] = 1
    keys = torch.zeros(PAGES * PER_PAGE, 128, device=MACHINE.device)
    for entry, value in ((140, 3.0), (20, 3.0), (7, 1.0), (149, 1.0), (3, -5.0)):
        keys[row_of(table, 0, entry), 0] = value
    head_weights = torch.ones(1, 1, device=MACHINE.device)
    result = run(q, head_weights, keys, table, top_k=7)
    assert result.tolist() == [[20, 140, 7, 149, 0, 1, 2]]
    result = run(q, -head_weights, keys, table, top_k=147)
    assert result.tolist() == [[e for e in range(150) if e not in (7, 20, 140, 149)] + [7]]


def test_a_nan_score_is_the_lowest(run):
    table = table_of((40, 5, 40))
    q, head_weights, keys = exact_inputs(3, 4)
    for token, entry in ((0, 0), (0, 9), (1, 2), (1, 3)):
        keys[row_of(table, token, entry)] = math.nan
    q[2, 1, 5] = math.nan  # all of this token's scores
    result = run(q, head_weights, keys, table, top_k=6).tolist()
    assert result == by_loop(q, head_weights, keys, table, 6)
    assert not {0, 9}.intersection(result[0])
    assert result[1][3:] == [2, 3, -1]
    assert result[2] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("block_rows", [1, 1 << 18])
def test_visible_nan_scores_are_counted(run, counted, monkeypatch, block_rows):
    """Of keys, queries and head weights, each score once, on top of what was counted before."""
    monkeypatch.setattr(reference, "SCORE_BLOCK_ROWS", block_rows)
    table = table_of((140, 5, 70, 0, 3, 9))  # of three requests, in turn
    q, head_weights, keys = exact_inputs(6, 4)
    keys = keys_of(table, keys)
    for token, entry in ((0, 0), (0, 3), (0, 139), (1, 2), (2, 69)):
        keys[row_of(table, token, entry)] = math.nan
    before = q.clone(), head_weights.clone(), keys.clone()
    counted.fill_(1000)
    first = run(q, head_weights, keys, table, top_k=6)
    # Token 4 sees entry 2 of request 1 as well; token 5 does not see entry 69 of request 2.
    assert counted.item() == 1000 + 3 + 1 + 1 + 0 + 1 + 0
    assert torch.equal(run(q, head_weights, keys, table, top_k=6), first)
    assert counted.item() == 1000 + 2 * 6
    q[1, 2, 7], head_weights[3, 0], head_weights[5, 1] = math.nan, math.nan, math.nan
    run(q, head_weights, keys, table, top_k=6)
    assert counted.item() == 1000 + 2 * 6 + 3 + 5 + 1 + 0 + 1 + 9
    for now, then in zip((q, head_weights, keys), before, strict=True):
        assert (torch.isnan(now) | (now == then)).all()


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e15])
def test_real_scores(run, scale):
    """No chosen score may be worse than one left out, as far as float32 can tell."""
    table = table_of((180, 130, 77, 64, 9))
    q, head_weights = randn(5, 16, 128, seed=1) * scale, randn(5, 16, seed=2)
    keys = keys_of(table, randn(PAGES * PER_PAGE, 128, seed=3))
    result = run(q, head_weights, keys, table, top_k=20)
    for token, chosen in enumerate(result.tolist()):
        scores = scores_of(q, head_weights, keys, table, token)
        valid = [entry for entry in chosen if entry >= 0]
        assert len(set(valid)) == len(valid) == min(20, len(scores))
        left_out = [score for entry, score in enumerate(scores) if entry not in valid]
        tolerance = 1e-5 * max(map(abs, scores))
        assert min(scores[e] for e in valid) >= max(left_out, default=-math.inf) - tolerance


def test_tokens_do_not_mix(run):
    visible = (150, 90, 44, 150, 20, 3)
    table = table_of(visible)
    q, head_weights, keys = exact_inputs(6, 8)
    whole = run(q, head_weights, keys, table, top_k=10)
    order = torch.tensor([5, 2, 0, 1, 4, 3], device=MACHINE.device)
    shuffled = replace(table, request=table.request[order], visible=table.visible[order])
    result = run(q[order], head_weights[order], keys, shuffled, top_k=10)
    assert torch.equal(result, whole[order])
    one = replace(table, request=table.request[1:2], visible=table.visible[1:2])
    assert torch.equal(run(q[1:2], head_weights[1:2], keys, one, top_k=10), whole[1:2])


def test_stays_on_device(run):
    table = table_of((40, 5, 41))
    counter = torch.zeros(1, dtype=torch.int64, device=MACHINE.device)
    assert_stays_on_device(run.func, *exact_inputs(3, 4), table, top_k=6, nan_scores=counter)
