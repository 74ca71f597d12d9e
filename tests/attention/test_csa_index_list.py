"""csa_index_list against lists written out token by token."""

import pytest
import torch

from naive_attention import assert_stays_on_device
from op_checks import MACHINE, implementations
from sglang_dsv4.attention.metadata import EntryTable, IndexList

PER_PAGE = 64  # entries in a page of tokens
FIRST_ROW = 512


@pytest.fixture(params=implementations("csa_index_list"))
def run(request):
    return request.param


def integers(values):
    return torch.tensor(values, dtype=torch.int64, device=MACHINE.device)


def window_of(lengths, width=8):
    rows = [[10 * token + i + 1 for i in range(length)] + [0] * (width - length)
            for token, length in enumerate(lengths)]
    return IndexList(integers(rows).reshape(-1, width), integers(lengths))


def table_of(tokens):
    """Two requests of three pages each; request 1 misses its last."""
    return EntryTable(
        request=integers([token % 2 for token in range(tokens)]),
        page_table=integers([[7, 2, 5], [3, 9, 0]]),
        visible=integers([150] * tokens),
        width=190,
        first_row=FIRST_ROW,
    )


def by_loop(selected, window, table):
    rows, lengths = [], []
    for token, entries in enumerate(selected.tolist()):
        pages = table.page_table[int(table.request[token])].tolist()
        row = window.rows[token, : int(window.lengths[token])].tolist()
        row += [FIRST_ROW + pages[e // PER_PAGE] * PER_PAGE + e % PER_PAGE
                for e in entries if e >= 0]
        lengths.append(len(row))
        rows.append(row + [0] * (window.rows.shape[1] + len(entries) - len(row)))
    return rows, lengths


@pytest.mark.parametrize(
    ("lengths", "selected"),
    [
        ([8, 8], [[0, 127, 64, 63], [1, 64, 2, 65]]),
        ([1, 8, 5], [[-1, -1, -1, -1], [3, -1, -1, -1], [130, 129, 128, -1]]),
        ([0, 0], [[-1, -1], [5, 4]]),
        ([3], [[61]]),
        ([3, 4, 8], [[], [], []]),
        ([], []),
    ],
)
def test_equals_the_loop(run, lengths, selected):
    window, table = window_of(lengths), table_of(len(lengths))
    selected = integers(selected).reshape(len(lengths), -1 if lengths and selected[0] else 0)
    result = run(selected, window, table)
    rows, expected = by_loop(selected, window, table)
    assert result.lengths.tolist() == expected
    assert result.rows.tolist() == rows
    assert result.rows.dtype is result.lengths.dtype is torch.int64
    assert result.rows.shape == (len(lengths), 8 + selected.shape[1])


def test_the_order_of_the_selection_is_kept(run):
    result = run(integers([[9, 3, 70, -1]]), window_of([2]), table_of(1))
    first, second = FIRST_ROW + 7 * PER_PAGE, FIRST_ROW + 2 * PER_PAGE
    assert result.rows[0, :5].tolist() == [1, 2, first + 9, first + 3, second + 6]


def test_stays_on_device(run):
    assert_stays_on_device(run, integers([[1, -1], [2, 0]]), window_of([3, 8]), table_of(2))
