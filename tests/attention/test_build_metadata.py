"""A forward's metadata against a description of it token by token, over random batches."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from metadata_batches import (
    POOL,
    WINDOW,
    WINDOW_ROWS,
    Sequence,
    batch_of,
    random_batch,
    tokens_of,
)
from naive_attention import assert_stays_on_device, tensors_of
from op_checks import implementations
from sglang_dsv4.attention.cache import PAGE, RING
from sglang_dsv4.attention.metadata import (
    Batch,
    HcaPlan,
    IndexList,
    Metadata,
    entry_rows,
    index_list,
)

Build = Callable[[Batch], Metadata]


@pytest.fixture(params=implementations("build_metadata"))
def op(request):
    return request.param


@pytest.fixture
def metadata_of(op) -> Build:
    return lambda batch: op(batch, window=WINDOW, window_rows=WINDOW_ROWS)


def padded(rows: list[int], width: int) -> list[int]:
    assert len(rows) <= width
    return rows + [0] * (width - len(rows))


SEEDS = range(40)


@pytest.mark.parametrize("seed", SEEDS)
def test_window_list(metadata_of, seed):
    sequences, batch = random_batch(seed)
    meta = metadata_of(batch)
    rows = [
        [s.window_row(p) for p in range(max(0, position - 127), position + 1)]
        for s, position in tokens_of(sequences)
    ]
    assert meta.window.lengths.tolist() == [len(row) for row in rows]
    assert meta.window.rows.tolist() == [padded(row, WINDOW) for row in rows]
    assert meta.window_store.tolist() == [row[-1] for row in rows]
    real = [(row, s) for row, (s, _) in zip(rows, tokens_of(sequences), strict=True) if s.pages]
    assert all(0 not in row for row, _ in real), "a window page was evicted too early"
    stored = [row[-1] for row, _ in real]
    assert len(set(stored)) == len(stored)


@pytest.mark.parametrize("seed", SEEDS)
def test_hca_list(metadata_of, seed):
    sequences, batch = random_batch(seed)
    meta = metadata_of(batch)
    width = WINDOW + batch.max_len // 128
    for index, (sequence, position) in enumerate(tokens_of(sequences)):
        row = [sequence.window_row(p) for p in range(max(0, position - 127), position + 1)]
        row += [WINDOW_ROWS + sequence.entry(e, 128) for e in range((position + 1) // 128)]
        assert int(meta.hca_list.lengths[index]) == len(row)
        assert meta.hca_list.rows[index].tolist() == padded(row, width)


@pytest.mark.parametrize("seed", SEEDS)
def test_csa_plan(metadata_of, seed):
    sequences, batch = random_batch(seed)
    plan = metadata_of(batch).csa
    tokens = tokens_of(sequences)
    number_of = {(id(s), p): index for index, (s, p) in enumerate(tokens)}
    for index, (sequence, position) in enumerate(tokens):
        back = range(position - 7, position + 1)
        assert plan.position[index].tolist() == list(back)
        for column, p in enumerate(back):
            new = p >= sequence.prefix
            assert bool(plan.is_new[index, column]) is (new and p >= 0)
            if new and p >= 0:
                assert int(plan.token[index, column]) == number_of[id(sequence), p]
            elif p >= 0:
                assert int(plan.ring[index, column]) == ring_row(sequence, p)
        closes = sequence.pages and (position + 1) % 4 == 0
        entry = sequence.entry(position // 4, 4) if closes else 0
        assert int(plan.entry[index]) == entry
        assert int(plan.row[index]) == (WINDOW_ROWS + entry if entry else 0)
    within = [(plan.token, len(tokens)), (plan.ring, POOL * RING), (plan.ring_store, POOL * RING)]
    for rows, size in within:  # gathered before they are masked
        assert ((rows >= 0) & (rows < max(size, 1))).all()


def ring_row(sequence: Sequence, position: int) -> int:
    row = sequence.window_row(position)
    return row // PAGE * RING + row % RING


@pytest.mark.parametrize("seed", SEEDS)
def test_rings_end_up_as_if_tokens_were_stored_one_by_one(metadata_of, seed):
    sequences, batch = random_batch(seed)
    stored = metadata_of(batch).csa.ring_store.tolist()
    one_by_one = {}
    for index, (sequence, position) in enumerate(tokens_of(sequences)):
        if sequence.pages:
            one_by_one[ring_row(sequence, position)] = index
    at_once = [(row, index) for index, row in enumerate(stored) if row]
    assert len(dict(at_once)) == len(at_once), "two tokens are stored in one row"
    assert dict(at_once) == one_by_one


@pytest.mark.parametrize("first", range(0, 400, 25))
def test_hca_plan(metadata_of, first):
    """The bound on segments holds, whatever the batch."""
    for seed in range(first, first + 25):
        sequences, batch = random_batch(seed)
        check_hca_plan(sequences, metadata_of(batch).hca, tokens=len(batch.positions))


def check_hca_plan(sequences: list[Sequence], plan: HcaPlan, tokens: int) -> None:
    assert plan.segments == tokens // 128 + 2 * len(sequences)
    assert len(plan.carried) == len(plan.carried_slot) == plan.segments
    segments: dict[tuple[int, int], set[int]] = {}
    for segment, (sequence, position), row in zip(
        plan.segment.tolist(), tokens_of(sequences), plan.row.tolist(), strict=True
    ):
        assert 0 <= segment < plan.segments
        segments.setdefault((id(sequence), position // 128), set()).add(segment)
        closes = sequence.pages and (position + 1) % 128 == 0
        entry = sequence.entry(position // 128, 128) if closes else 0
        assert row == (WINDOW_ROWS + entry if entry else 0)
    assert all(len(found) == 1 for found in segments.values())
    assert len(set.union(set(), *segments.values())) == len(segments), "requests share a segment"

    assert plan.request_slots.tolist() == [s.slot for s in sequences]
    last = plan.last_segment.tolist()
    carried_on = {}
    for sequence, segment in zip(sequences, last, strict=True):
        assert 0 <= segment < plan.segments
        end = sequence.prefix + sequence.new - 1
        if sequence.new:
            assert segments[id(sequence), end // 128] == {segment}
            segment = min(segments[id(sequence), sequence.prefix // 128])
        else:
            assert segment not in set.union(set(), *segments.values())
        if sequence.prefix % 128:
            carried_on[segment] = sequence.slot
    assert len(set(last)) == len(last)
    carried = dict(enumerate(plan.carried.tolist()))
    assert {segment for segment in carried if carried[segment]} == carried_on.keys()
    assert {s: int(plan.carried_slot[s]) for s in carried_on} == carried_on
    others = [slot for s, slot in enumerate(plan.carried_slot.tolist()) if s not in carried_on]
    assert not any(others)


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_on_segments_is_reached(metadata_of, seed):
    """Requests of 2 tokens across a boundary: two segments each, as many as there is room for."""
    rng = random.Random(seed)
    sequences = [
        Sequence(slot, 128 * rng.randint(1, 3) - 1, 2, (4 * slot, 4 * slot + 1), (slot, slot + 10))
        for slot in range(1, 7)
    ]
    plan = metadata_of(batch_of(sequences, 512)).hca
    assert sorted(set(plan.segment.tolist())) == list(range(plan.segments))


@pytest.mark.parametrize("seed", SEEDS)
def test_entry_table(metadata_of, seed):
    sequences, batch = random_batch(seed)
    table = metadata_of(batch).entries
    tokens = tokens_of(sequences)
    assert table.visible.tolist() == [(position + 1) // 4 for _, position in tokens]
    assert table.width == max(batch.max_len // 4, 1)
    assert table.first_row == WINDOW_ROWS
    assert torch.equal(table.request, batch.request)
    for index, (sequence, position) in enumerate(tokens):
        entries = torch.arange((position + 1) // 4, device=table.request.device).unsqueeze(0)
        rows = entry_rows(table.page_table, table.request[index : index + 1], entries, 4)
        assert rows[0].tolist() == [sequence.entry(e, 4) for e in range(entries.shape[1])]
    assert torch.equal(metadata_of(batch).positions, batch.positions)


def test_entries_of_missing_pages_are_the_null_entry():
    table = torch.tensor([[3, 0], [0, 5]])
    entries = torch.tensor([[0, 63, 64, 127], [0, 63, 64, 127]])
    rows = entry_rows(table, torch.tensor([0, 1]), entries, 4)
    assert rows.tolist() == [[192, 255, 0, 0], [0, 0, 320, 383]]


def test_index_list_leaves_no_gap():
    window = IndexList(torch.tensor([[7, 8, 0], [9, 0, 0], [1, 2, 3]]), torch.tensor([2, 1, 3]))
    entries = torch.tensor([[50, 51], [60, 99], [99, 99]])
    joined = index_list(window, entries, torch.tensor([2, 1, 0]))
    assert joined.rows.tolist() == [[7, 8, 50, 51, 0], [9, 60, 0, 0, 0], [1, 2, 3, 0, 0]]
    assert joined.lengths.tolist() == [4, 2, 3]


# ---- sizes and the device ----


def sizes(record: Any) -> dict[str, Any]:
    found: dict[str, Any] = {n: (tuple(t.shape), t.dtype) for n, t in tensors_of(record).items()}
    for name, value in vars(record).items():
        if isinstance(value, int):
            found[name] = value
        elif hasattr(value, "__dataclass_fields__"):
            found[name] = sizes(value)
    return found


def test_sizes_depend_on_counts_and_the_longest_length_only(metadata_of):
    """12 tokens of 3 requests, in every way that differs in content."""
    ways = [
        [(0, 4), (0, 4), (0, 4)],
        [(255, 1), (127, 1), (3, 10)],
        [(0, 12), (500, 0), (128, 0)],
        [(300, 2), (0, 9), (511, 1)],
    ]
    found = []
    for way in ways:
        sequences = []
        for slot, (prefix, new) in enumerate(way, 1):
            count = -(-(prefix + new) // PAGE)
            pages = tuple(range(10 * slot, 10 * slot + count))
            sequences.append(Sequence(slot, prefix, new, pages, pages))
        found.append(sizes(metadata_of(batch_of(sequences, 600))))
    assert all(other == found[0] for other in found)
    assert found[0]["window"]["rows"] == ((12, 128), torch.int64)
    assert found[0]["hca_list"]["rows"] == ((12, 128 + 4), torch.int64)
    assert found[0]["hca"]["segments"] == 6
    assert found[0]["entries"]["width"] == 150


@pytest.mark.parametrize("max_len", [1, 3, 127, 128, 600])
def test_stays_on_device(op, metadata_of, max_len):
    """Nothing in a batch is read on the host but the sizes: a captured graph builds it too."""
    new = min(max_len, 3)
    page = (2, 3, 4)[: -(-max_len // PAGE)]
    sequences = [Sequence(1, max_len - new, new, page, page), Sequence(0, 0, 1, (), ())]
    batch = batch_of(sequences, max_len)
    fake = assert_stays_on_device(op, batch, window=WINDOW, window_rows=WINDOW_ROWS)
    assert sizes(fake) == sizes(metadata_of(batch))


def test_every_integer_is_64_bits_wide(metadata_of):
    """What indexes a cache of many gigabytes must not wrap."""
    for record in vars(metadata_of(random_batch(36)[1])).values():
        tensors = tensors_of(record) if hasattr(record, "__dataclass_fields__") else {"": record}
        assert all(t.dtype in (torch.int64, torch.bool) for t in tensors.values())


def test_the_batch_is_not_written(metadata_of):
    _, batch = random_batch(36)
    before = {name: tensor.clone() for name, tensor in tensors_of(batch).items()}
    metadata_of(batch)
    for name, tensor in before.items():
        assert torch.equal(getattr(batch, name), tensor), name
