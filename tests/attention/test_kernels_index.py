"""The indexer's kernels beyond their ops' own tests: grid bit by bit, search, real shapes."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from naive_attention import E2M1, sylvester
from op_checks import MACHINE, implementations, randn, thorough
from sglang_dsv4.attention import kernels_triton_index as kernels
from sglang_dsv4.attention import reference
from sglang_dsv4.attention.kernels_triton_index import LOWEST, WIDTH, score_splits
from sglang_dsv4.attention.metadata import EntryTable

FREQUENCIES = randn(32, seed=5).abs()
# ---- the grid ----


@triton.jit
def _grid_kernel(vectors, out, ROWS: tl.constexpr, TRANSFORM: tl.constexpr):
    place = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    values = tl.load(vectors + place)
    if TRANSFORM:
        values = kernels._transform(values, ROWS)
    else:
        values = kernels._round_to_grid(values, ROWS)
    tl.store(out + place, values)


def run_grid(vectors, transform):
    """[rows, 128] float32, rows a power of two, through one half of fp4_grid."""
    vectors = vectors.to(MACHINE.device).contiguous()
    out = torch.empty_like(vectors)
    _grid_kernel[(1,)](vectors, out, ROWS=len(vectors), TRANSFORM=transform, num_warps=1)
    return out.cpu()


class Identity:
    """A matrix that a product with leaves every bit alone."""

    @classmethod
    def __torch_function__(cls, function, types, args, kwargs=None):
        return args[0]


def blocks_of(values, scales):
    """Each scale times the values, beside a 6 that fixes the block's scale: [power of two, 128]."""
    blocks = [
        [6.0 * scale, *(value * scale for value in part), *[0.0] * (31 - len(part))]
        for scale in scales
        for part in (values[i : i + 31] for i in range(0, len(values), 31))
    ]
    numbers = torch.tensor(blocks, dtype=torch.float64).float().flatten()
    rows = triton.next_power_of_2(-(-len(numbers) // 128))
    return torch.nn.functional.pad(numbers, (0, rows * 128 - len(numbers))).view(rows, 128)


def grid_cases():
    middles = [(low + high) / 2 for low, high in itertools.pairwise(E2M1)]
    beside = [middle * (1 + side * 2**-23) for middle in middles for side in (1, -1)]
    codes = [*E2M1, *middles, *beside]
    yield blocks_of([*codes, *(-code for code in codes)], [2.0**e for e in (-126, -100, 0, 1, 125)])
    # Maxima on either side of 6 * 2^k, where the scale steps.
    edges = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
    tops = [6.0, 6.0 * (1 - 2**-24), 6.0 + 2.0**-21, 4.0, 3.0, 3.0 + 2.0**-22, 5.0, 1e-3]
    edges = edges.clamp(-2.9, 2.9)
    edges[:, ::32] = torch.tensor(tops)[:, None]
    yield edges
    tiny, huge = 2.0**-149, 3.4028234663852886e38
    extremes = torch.zeros(8, 128)
    for row, top in enumerate((tiny, 5 * tiny, 2.0**-127, 2.0**-126, huge / 8, 2.0**127, 2.9e38)):
        extremes[row, ::32], extremes[row, 1::32], extremes[row, 2::32] = top, -top / 3, -top / 90
    extremes[7, 1::2] = -0.0
    yield extremes
    scales = torch.tensor([1e-30, 1e-3, 1.0, 77.0])[:, None]
    yield torch.randn(4, 128, generator=torch.Generator().manual_seed(2)) * scales


@pytest.mark.kernels
@pytest.mark.parametrize("vectors", [*grid_cases()], ids=["codes", "edges", "extremes", "random"])
def test_rounding_equals_the_reference_bit_by_bit(monkeypatch, vectors):
    monkeypatch.setattr(reference, "_hadamard", lambda size, device: Identity())
    expected = reference.fp4_grid(vectors)
    assert torch.equal(run_grid(vectors, False).view(torch.int32), expected.view(torch.int32))


@pytest.mark.kernels
def test_the_transform_rounds_once_where_its_sums_are_exact():
    """Sums of integers are: what is left is the product with the factor, rounded to nearest."""
    values = torch.randint(-999, 1000, (8, 128), generator=torch.Generator().manual_seed(0))
    sums = (values.double() @ sylvester(128)).float()
    factor = torch.tensor(128**-0.5, dtype=torch.float32)
    assert torch.equal(run_grid(values.float(), True), sums * factor)


@pytest.mark.kernels
def test_the_transform_adds_neighbours_first():
    """The stated order: a tree of 7 stages. Another one rounds otherwise."""
    values = randn(16, 128, seed=7).cpu()
    expected = values
    for _ in range(7):
        left, right = expected[:, ::2], expected[:, 1::2]
        expected = torch.cat([left + right, left - right], dim=1)
    expected = expected * torch.tensor(128**-0.5, dtype=torch.float32)
    assert torch.equal(run_grid(values, True), expected)
    assert not torch.equal(values @ reference._hadamard(128, values.device), expected)


# ---- the search ----


def select(orders, counts, top_k, block):
    """`_select_kernel` on rows of orders; LOWEST past the counts up to a multiple of 64, as the
    scores are written, and further on something that must not be read."""
    width = -(-orders.shape[1] // 64) * 64
    written = torch.full((len(orders), width), torch.iinfo(torch.int32).max, dtype=torch.int32)
    for row, count in enumerate(counts):
        written[row, : -(-count // 64) * 64] = LOWEST.value
        written[row, :count] = orders[row, :count]
    chosen = torch.full((len(orders) + 1, top_k), 7, device=MACHINE.device)
    kernels._select_kernel[(len(orders),)](
        written.to(MACHINE.device),
        width,
        torch.tensor(counts, device=MACHINE.device),
        orders.shape[1],
        chosen,
        top_k,
        BLOCK=block,
        CHOSEN=max(triton.next_power_of_2(top_k), 2),
        num_warps=4,
    )
    assert (chosen[-1] == 7).all(), "the last token wrote past its row"
    return chosen[:-1].tolist()


def best(orders, counts, top_k):
    rows = [
        order[:count].sort(descending=True, stable=True)
        for order, count in zip(orders, counts, strict=True)
    ]
    lists = [row.indices[:top_k].tolist() for row in rows]
    return [chosen + [-1] * (top_k - len(chosen)) for chosen in lists]


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("low", "high", "top_k"),
    [
        (-(2**31) + 1, 2**31 - 1, 20),
        (-2, 2, 20),
        thorough(-2, 2, 1),
        thorough(-2, 2, 64),
        thorough(0, 0, 20),
        thorough(2**31 - 4, 2**31 - 1, 16),
        (-(2**31), -(2**31) + 3, 16),
        thorough(-(2**30) - 2, -(2**30) + 2, 16),
    ],
)
def test_selection_equals_a_stable_sort(low, high, top_k):
    """Several blocks of scores, with many ties or none; LOWEST, which is NaN, among them."""
    counts = [150, 64, 65, 1, 0, 149]
    generator = torch.Generator().manual_seed(3)
    orders = torch.randint(low, high + 1, (len(counts), 150), generator=generator)
    orders[5, ::3] = LOWEST.value
    orders = orders.to(torch.int32)
    assert select(orders, counts, top_k, block=64) == best(orders, counts, top_k)


@pytest.mark.kernels
@pytest.mark.parametrize("distinct", [thorough(1), 2, thorough(5)])
def test_the_last_place_among_equals_goes_to_the_lowest_number(distinct):
    """Ties in several blocks, of which some are chosen and some are not."""
    orders = (torch.arange(130, dtype=torch.int32) % distinct).expand(3, 130)
    counts = [130, 33, 29]
    for top_k in (28, 32):
        assert select(orders, counts, top_k, block=32) == best(orders, counts, top_k)


# ---- both kernels ----


def counter():
    return torch.zeros(1, dtype=torch.int64, device=MACHINE.device)


def selected(op, *given, top_k):
    """What `select_entries` chooses where no score is NaN."""
    found = counter()
    chosen = op(*given, top_k=top_k, nan_scores=found)
    assert found.item() == 0
    return chosen


def inputs(visible, heads, top, *, entries=None, dtype=torch.float32, seed=0):
    """Small integers, whose scores are exact, so that order and ties are; the keys that nobody
    sees are NaN. entries: the width of the table."""
    generator = torch.Generator().manual_seed(seed)

    def integers(*shape, low, high):
        return torch.randint(low, high + 1, shape, generator=generator)

    width = entries or max([*visible, 1])
    pages, tokens = -(-width // 64), len(visible)
    table = (torch.randperm(tokens * pages, generator=generator) + 1).view(tokens, pages)
    keys = integers((tokens * pages + 1) * 64, 128, low=-1, high=1).to(dtype)
    seen = torch.zeros(len(keys), dtype=torch.bool)
    for token, count in enumerate(visible):
        entry = torch.arange(count)
        seen[table[token][entry // 64] * 64 + entry % 64] = True
    keys[~seen] = math.nan
    where = EntryTable(
        request=torch.arange(tokens).to(MACHINE.device),
        page_table=table.to(MACHINE.device),
        visible=torch.tensor(visible, dtype=torch.int64, device=MACHINE.device),
        width=width,
        first_row=1000,
    )
    q = integers(tokens, heads, 128, low=-top, high=top).to(MACHINE.device, dtype)
    weights = integers(tokens, heads, low=-4, high=4).float().to(MACHINE.device) / 4
    return q, weights, keys.to(MACHINE.device), where


@pytest.mark.kernels
@pytest.mark.parametrize("programs", [thorough(1), 9, thorough(1000)])
def test_any_number_of_programs_gives_the_same(monkeypatch, programs):
    """The same count of NaN as well, of which a program may meet several, in pages of its own."""
    q, weights, keys, table = inputs((150, 0, 300), 5, 2)
    keys[table.page_table[2] * 64 + 3] = math.nan
    monkeypatch.setattr(kernels, "SCORE_PROGRAMS", programs)
    found, expected = counter(), counter()
    result = kernels.select_entries(q, weights, keys, table, top_k=12, nan_scores=found)
    wanted = reference.select_entries(q, weights, keys, table, top_k=12, nan_scores=expected)
    assert torch.equal(result, wanted)
    assert found.item() == expected.item() == 5


@pytest.mark.kernels
@pytest.mark.parametrize("buffer", [1, thorough(400)])
def test_any_size_of_the_buffer_gives_the_same(monkeypatch, buffer):
    arguments = inputs((150, 3, 0, 130), 3, 2)
    monkeypatch.setattr(kernels, "SCORE_BUFFER", buffer)
    result = selected(kernels.select_entries, *arguments, top_k=9)
    assert torch.equal(result, selected(reference.select_entries, *arguments, top_k=9))


@pytest.mark.kernels
def test_no_more_entries_count_than_the_table_has():
    """Whatever a padding request says: nothing is written past the scores of its token."""
    q, weights, keys, table = inputs((100, 150, 150), 3, 2, entries=150)
    expected = selected(reference.select_entries, q, weights, keys, table, top_k=9)
    more = replace(table, visible=torch.tensor([100, 10**9, 151], device=q.device))
    assert torch.equal(selected(kernels.select_entries, q, weights, keys, more, top_k=9), expected)


@pytest.mark.kernels
@pytest.mark.parametrize("value", [math.inf, thorough(-math.inf), thorough(3e38)])
def test_infinite_scores_compare_as_the_reference_has_them(value):
    """As the largest number does, so that both tie."""
    q, weights, keys, table = inputs((140,), 1, 2)
    q.zero_()
    q[0, 0, 0], weights[0, 0] = 1, 1
    keys[~keys.isnan().any(dim=1)] = 0
    rows = table.page_table[0].repeat_interleave(64) * 64 + torch.arange(192).to(q.device) % 64
    limit = torch.finfo(torch.float32).max
    for entry, key in ((7, limit), (3, math.inf), (100, value), (90, 1.0), (1, math.inf)):
        keys[rows[entry], 0] = key
    for signed in (weights, -weights):
        result = selected(kernels.select_entries, q, signed, keys, table, top_k=8)
        expected = selected(reference.select_entries, q, signed, keys, table, top_k=8)
        assert torch.equal(result, expected)


def test_programs_are_as_many_as_there_is_work_for():
    assert score_splits(1, 64) == 1
    assert score_splits(1, 65) == 2
    assert score_splits(1, 1 << 18) == kernels.SCORE_PROGRAMS
    assert score_splits(32, 32768) == kernels.SCORE_PROGRAMS // 32
    assert score_splits(8192, 32768) == 1


@pytest.mark.kernels
def test_what_a_kernel_is_not_made_for_is_an_error():
    q, weights, keys, table = inputs((10,), 2, 2)
    with pytest.raises(AssertionError, match="index keys in torch.bfloat16 for queries in"):
        selected(kernels.select_entries, q, weights, keys.bfloat16(), table, top_k=4)
    with pytest.raises(AssertionError, match="128 channels, not 64"):
        selected(kernels.select_entries, q[..., :64], weights, keys, table, top_k=4)
    with pytest.raises(AssertionError, match="128 channels, not 64"):
        kernels.index_query(q[..., :64], table.visible, FREQUENCIES, fp4=True)


# ---- on a GPU, at the model's shapes ----

QUERY = implementations("index_query")
SELECT = implementations("select_entries")


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", QUERY)
@pytest.mark.parametrize("tokens", [1, 33, 512])
def test_index_query_at_real_shapes(op, tokens):
    """Every value is one of its block's grid, and none of them is nearer, as far as fp32 tells."""
    q = randn(tokens, 64, 128, dtype=torch.bfloat16) * 3
    positions = torch.arange(tokens, device=q.device) * 1999
    turned = reference.index_query(q.float(), positions, FREQUENCIES, fp4=False).double()
    exact = (turned @ sylvester(128).to(q.device) / math.sqrt(128)).unflatten(-1, (4, 32))
    result = op(q, positions, FREQUENCIES, fp4=True)
    assert result.dtype is torch.bfloat16
    scale = torch.exp2(torch.ceil(torch.log2(exact.abs().amax(dim=-1, keepdim=True) / 6)))
    codes = result.double().unflatten(-1, (4, 32)) / scale
    assert torch.isin(codes.abs(), torch.tensor(E2M1, device=q.device).double()).all()
    magnitude = (exact / scale).abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    assert ((codes - exact / scale).abs() <= step / 2 + 1e-4).all()


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", SELECT)
@pytest.mark.parametrize("top_k", [512, 1024])
@pytest.mark.parametrize("tokens", [1, 3, 33])
def test_select_entries_at_real_shapes(op, tokens, top_k):
    """Scores are exact, and so is their order, with thousands of ties."""
    visible = [
        (511, 16384, 0, 1, 513, 2047, 2048, 2049, 8191, 1024, 1025)[i % 11] for i in range(tokens)
    ]
    arguments = inputs(visible, 64, 2, entries=16384, dtype=torch.bfloat16)
    result = selected(op, *arguments, top_k=top_k)
    assert torch.equal(result, selected(reference.select_entries, *arguments, top_k=top_k))


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", SELECT)
def test_the_longest_context(op):
    """65,536 entries: the scores of 262,144 tokens."""
    arguments = inputs((65536, 65535, 40000), 64, 2, entries=65536, dtype=torch.bfloat16)
    result = selected(op, *arguments, top_k=512)
    assert torch.equal(result, selected(reference.select_entries, *arguments, top_k=512))


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", SELECT)
def test_a_prefill_in_several_parts(op, monkeypatch):
    monkeypatch.setattr(kernels, "SCORE_BUFFER", 1 << 18)
    q, weights, keys, table = inputs(range(1, 1500, 3), 64, 2, dtype=torch.bfloat16)
    result = selected(op, q, weights, keys, table, top_k=512)
    expected = selected(reference.select_entries, q, weights, keys, table, top_k=512)
    assert torch.equal(result, expected)


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", SELECT)
def test_keys_beyond_two_gigabytes(op):
    q, weights, keys, table = inputs((700, 65), 64, 2, dtype=torch.bfloat16)
    pages = 1 << 18  # of 64 keys with 128 channels: 2^31 elements
    large = torch.zeros(pages * 64 + len(keys), 128, dtype=torch.bfloat16, device=q.device)
    large[pages * 64 :] = keys
    far = EntryTable(table.request, table.page_table + pages, table.visible, table.width, 0)
    result = selected(op, q, weights, large, far, top_k=512)
    assert torch.equal(result, selected(op, q, weights, keys, table, top_k=512))


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", SELECT)
@pytest.mark.parametrize("tokens", [1, 32])
def test_a_replayed_selection_equals_eager(op, tokens):
    """Captured where nothing is visible, replayed at other lengths, pages and keys; NaN among these
    is counted by each replay."""
    in_graph, eager, expected = counter(), counter(), counter()
    q, weights, keys, table = static = inputs([8192] * tokens, 64, 2, dtype=torch.bfloat16)
    table.visible.zero_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        op(*static, top_k=512, nan_scores=in_graph)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op(*static, top_k=512, nan_scores=in_graph)
    for seed in range(1, 5):
        generator = torch.Generator().manual_seed(seed)
        visible = torch.randint(0, 8193, (tokens,), generator=generator).tolist()
        fresh = inputs(visible, 64, 2, entries=8192, dtype=torch.bfloat16, seed=seed)
        fresh[2][fresh[3].page_table[:, 0] * 64 + seed] = math.nan
        for target, source in zip(static[:3], fresh[:3], strict=True):
            target.copy_(source)
        table.page_table.copy_(fresh[3].page_table)
        table.visible.copy_(fresh[3].visible)
        graph.replay()
        assert torch.equal(captured, op(*fresh, top_k=512, nan_scores=eager))
        wanted = reference.select_entries(*fresh, top_k=512, nan_scores=expected)
        assert torch.equal(captured, wanted)
        assert in_graph.item() == eager.item() == expected.item() > 0
