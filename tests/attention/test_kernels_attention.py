"""The attention kernels beyond their ops' own tests: shapes, splits, and the libraries' seams.

FlashInfer and FlashMLA are replaced by plain arithmetic over the arrays that their kernels read, so
that everything of ours around them runs here; whether the real ones agree is for the GPU tests.
"""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from naive_attention import EPS
from op_checks import MACHINE, implementations, randn, thorough
from sglang_dsv4 import backends
from sglang_dsv4.attention import kernels_flashinfer, kernels_flashmla, kernels_triton, reference
from sglang_dsv4.attention.kernels_triton import Tiles, attention_tiles, split_count
from sglang_dsv4.attention.metadata import EntryTable, IndexList
from sglang_dsv4.backends import Machine
from tolerance import assert_close

FREQUENCIES = randn(32, seed=5).abs()
SCALE = 512**-0.5
def inputs(lengths, width, heads, dtype=torch.float32, rows=400, seed=0):
    """q, cache, lists, sinks, positions, frequencies; rows that nobody uses are NaN, and lists go
    on with them past their lengths."""
    generator = torch.Generator().manual_seed(seed)
    tokens = len(lengths)
    order = torch.randperm(rows - 1, generator=generator) + 1
    used, unused = order[: rows // 2], order[rows // 2 :]
    lists = used[torch.randint(len(used), (tokens, width), generator=generator)]
    for token, length in enumerate(lengths):
        lists[token, length:] = unused[token % len(unused)]
    cache = randn(rows, 512, seed=seed + 1, dtype=dtype)
    cache[0], cache[unused] = 0, math.nan
    q = randn(tokens, heads, 512, seed=seed + 2, dtype=dtype) * 2
    keys = IndexList(lists.to(q.device), torch.tensor(lengths, device=q.device))
    positions = torch.arange(tokens, device=q.device) * 37 % 5000
    return q, cache, keys, randn(heads, seed=seed + 3), positions, FREQUENCIES


def exact(q, cache, keys, sink, positions, frequencies, scale=SCALE):
    """The op in float64, and the sum of weight * |row| of each channel before the rotation."""
    beyond = torch.arange(keys.rows.shape[1], device=q.device) >= keys.lengths[:, None]
    rows = cache.double()[keys.rows].masked_fill(beyond[..., None], 0)
    logits = torch.einsum("thd,tkd->thk", q.double(), rows) * scale
    logits = logits.masked_fill(beyond[:, None], -math.inf)
    limit = torch.finfo(torch.float32).max
    sink = sink.clamp(-limit, limit).double()
    logits = torch.cat([logits, sink[None, :, None].expand(*q.shape[:2], 1)], dim=2)
    weights = logits.softmax(dim=2)[..., :-1]
    mixed, size = (torch.einsum("thk,tkd->thd", weights, x) for x in (rows, rows.abs()))
    angles = (positions[:, None].float() * frequencies).double()[:, None]
    even, odd = mixed[..., 448::2].clone(), mixed[..., 449::2].clone()
    mixed[..., 448::2] = even * angles.cos() + odd * angles.sin()
    mixed[..., 449::2] = odd * angles.cos() - even * angles.sin()
    return mixed, size


def assert_close_in_bfloat16(result, arguments, roundings):
    """Weights in BF16 are off by 2^-8 of themselves, and so is each further rounding of a sum;
    taken together, errors are far below that worst case."""
    expected, size = exact(*arguments)
    assert result.dtype is torch.bfloat16 and not result.isnan().any()
    size[..., 448:] = size[..., 448:].unflatten(-1, (-1, 2)).sum(-1).repeat_interleave(2, dim=-1)
    bound = roundings * 2**-8 * size + 2**-8 * expected.abs() + 1e-5
    error = (result.double() - expected).abs()
    excess = error - bound
    assert excess.max() <= 0, f"{int((excess > 0).sum())} elements are off, by {excess.max()}"
    assert error.norm() <= 2**-8 * expected.norm(), f"{error.norm() / expected.norm()}"


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("heads", "splits"), [(3, 1), (3, 3), (33, 1), thorough(33, 2), thorough(65, 2)]
)
def test_bfloat16(monkeypatch, heads, splits):
    monkeypatch.setattr(kernels_triton, "split_count", lambda *_: splits)
    arguments = inputs((130, 0, 1), 130, heads, torch.bfloat16)
    result = kernels_triton.sparse_attention(*arguments, scale=SCALE)
    assert_close_in_bfloat16(result, arguments, roundings=1)


@pytest.mark.kernels
@pytest.mark.parametrize("splits", [1, 2, 5, thorough(9)])
def test_any_number_of_splits_gives_the_same(monkeypatch, splits):
    """More than there are tiles, too: a split without rows adds nothing."""
    monkeypatch.setattr(kernels_triton, "split_count", lambda *_: splits)
    arguments = inputs((69, 0, 1, 16, 17, 33), 69, 3)
    result = kernels_triton.sparse_attention(*arguments, scale=SCALE)
    assert_close(result, exact(*arguments)[0])


@pytest.mark.kernels
@pytest.mark.parametrize("splits", [1, 4])
def test_nan_of_a_query_is_not_hidden(monkeypatch, splits):
    monkeypatch.setattr(kernels_triton, "split_count", lambda *_: splits)
    q, *rest = inputs((40, 33), 40, 2)
    q[1, 0, 3] = math.nan
    result = kernels_triton.sparse_attention(q, *rest, scale=SCALE)
    assert result[1, 0].isnan().all()
    assert not result[0].isnan().any() and not result[1, 1].isnan().any()


@pytest.mark.kernels
def test_an_entry_of_a_missing_page_is_the_first():
    """As the reference has it: a row that exists, whatever lies there."""

    def integers(values):
        return torch.tensor(values, device=MACHINE.device)

    window = IndexList(integers([[7, 8]]), integers([2]))
    table = EntryTable(integers([0]), integers([[3, 0]]), integers([99]), 128, 512)
    result = kernels_triton.csa_index_list(integers([[65, 5, -1]]), window, table)
    assert result.rows.tolist() == [[7, 8, 512, 512 + 3 * 64 + 5, 0]]
    assert result.lengths.tolist() == [4]


# ---- which machine gets which provider ----

H200 = Machine("cuda", "NVIDIA H200", (9, 0))
A100 = Machine("cuda", "NVIDIA A100", (8, 0))
T4 = Machine("cuda", "Tesla T4", (7, 5))
CPU = Machine("cpu", "CPU", None)


@pytest.mark.parametrize(
    ("machine", "installed", "chosen"),
    [
        (H200, {"triton", "flash_mla", "flashinfer"}, "flashmla"),
        (H200, {"triton", "flashinfer"}, "triton"),
        (A100, {"triton", "flash_mla", "flashinfer"}, "triton"),
        (CPU, {"triton", "flash_mla", "flashinfer"}, "reference"),
    ],
)
def test_the_provider_by_machine(monkeypatch, machine, installed, chosen):
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda n: n in installed or None)
    assert backends._pick("sparse_attention", machine, None).name == chosen


@pytest.mark.parametrize(
    ("machine", "provider", "reason"),
    [
        (A100, "flashmla", "needs a GPU of compute capability 9.0, this is .8, 0."),
        (T4, "triton", "needs a GPU of compute capability 8.0, this is .7, 5."),
        (T4, "flashinfer", "needs a GPU of compute capability 8.0"),
        (CPU, "flashinfer", "needs a GPU"),
        (CPU, "flashmla", "needs a GPU"),
    ],
)
def test_refusals_say_why(monkeypatch, machine, provider, reason):
    with monkeypatch.context() as patch:
        patch.setattr(backends.importlib.util, "find_spec", lambda name: True)
        with pytest.raises(RuntimeError, match=reason):
            backends._pick("sparse_attention", machine, provider)
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="is not installed"):
        backends._pick("sparse_attention", machine, provider)


def test_a_cpu_without_interpreter_refuses_triton():
    with pytest.raises(RuntimeError, match="needs a GPU .or TRITON_INTERPRET=1"):
        backends.choose(CPU, "sparse_attention=triton")


# ---- tiles and splits ----


@pytest.mark.parametrize(
    ("tokens", "heads", "width", "splits"),
    [
        (1, 64, 640, 10),
        (8, 64, 640, 5),
        (32, 64, 640, 4),
        (128, 64, 640, 1),
        (8, 64, 1152, 6),
        (32, 128, 1152, 2),
        (32, 64, 192, 3),
        (128, 16, 640, 2),
        (4096, 64, 640, 1),
    ],
)
def test_splits_that_were_about_the_fastest_on_an_h200(tokens, heads, width, splits):
    tiles = attention_tiles(tokens, heads, 2, 90)
    programs = tokens * -(-heads // tiles.heads)
    assert split_count(programs, -(-width // tiles.rows), tiles) == splits


@pytest.mark.parametrize("programs", [1, 3, 40, 131, 132, 133, 100_000])
@pytest.mark.parametrize("row_tiles", [1, 2, 3, 10, 130])
def test_no_split_is_empty_and_the_machine_is_not_overfilled(programs, row_tiles):
    splits = split_count(programs, row_tiles, Tiles(64, 64, 8, 2))
    per_split = -(-row_tiles // splits)
    assert 1 <= splits <= kernels_triton.MAX_SPLITS
    assert (splits - 1) * per_split < row_tiles <= splits * per_split
    assert splits == 1 or programs * splits <= kernels_triton.PROGRAMS


def test_a_list_without_columns_has_one_split():
    assert split_count(4, 0, Tiles(64, 64, 8, 2)) == 1
    assert split_count(0, 10, Tiles(64, 64, 8, 2)) >= 1


# ---- FlashInfer ----


class PlannedByFlashInfer:
    """What the wrapper keeps: its plan in arrays, their byte offsets in MLAPlanInfo's order.

    Works of different tokens are interleaved, as FlashInfer's balancing leaves them.
    """

    ARRAYS = {"request": 2, "row_start": 3, "length": 11, "first": 13, "last": 14, "ends": 15}

    def __init__(self, lengths, row_starts, indices, multiprocessors):
        size = 4 * kernels_flashinfer.WORKS
        self._plan_info = [0] * 18
        for number, place in enumerate(self.ARRAYS.values()):
            self._plan_info[place] = number * size
        self._int_workspace_buffer = torch.zeros(8 << 20, dtype=torch.uint8, device=indices.device)
        self._kv_indices_buf = indices
        average = -(-sum(lengths) // multiprocessors)
        limits = {8: 32, 16: 64, 32: 128, 64: 192}
        limit = next(
            (limit for most, limit in limits.items() if average <= most), -(-average // 256) * 256
        )
        works = [
            (first, token, row_starts[token], length, min(first + limit, length))
            for token, length in enumerate(lengths)
            for first in range(0, length, limit)
        ]
        self.count = len(works)
        for number, (first, token, row_start, length, last) in enumerate(sorted(works)):
            for name, value in (
                ("request", token), ("row_start", row_start), ("length", length),
                ("first", first), ("last", last),
            ):  # fmt: skip
                self.array(name)[number] = value

    def array(self, name):
        at = self._plan_info[self.ARRAYS[name]]
        return self._int_workspace_buffer[at : at + 4 * kernels_flashinfer.WORKS].view(torch.int32)


class Wrapper:
    """Stands in for BatchMLAPagedAttentionWrapper: the same arrays, plain arithmetic."""

    def __init__(self, workspace, *, kv_indices, **reserved):
        self.indices = kv_indices

    def plan(self, *, metadata, num_heads, sm_scale, **options):
        assert options["head_dim_kpe"] == 0 and options["page_size"] == 1
        self.scale = sm_scale
        clusters = MULTIPROCESSORS // (2 if num_heads > 64 else 1)
        self._planned_backend = PlannedByFlashInfer(
            metadata[3].tolist(), metadata[1].tolist(), self.indices, clusters
        )

    def run(self, *, query, kv_cache, return_lse):
        assert return_lse and kv_cache.shape[1:] == (1, 512)
        planned = self._planned_backend
        logits = [[] for _ in query]
        values = [[] for _ in query]
        for work in range(planned.count):
            names = ("request", "row_start", "first", "last")
            token, row_start, first, last = (int(planned.array(name)[work]) for name in names)
            rows = kv_cache[self.indices[row_start + first : row_start + last].long(), 0].double()
            logits[token].append(query[token].double() @ rows.T * self.scale)
            values[token].append(rows)
        out = torch.empty_like(query)
        statistics = torch.empty(query.shape[:2], device=query.device)
        for token in range(len(query)):
            joined = torch.cat(logits[token], dim=1)
            out[token] = (joined.softmax(dim=1) @ torch.cat(values[token])).to(query.dtype)
            statistics[token] = joined.logsumexp(dim=1) / math.log(2)
        return out, statistics


MULTIPROCESSORS = 132


@pytest.fixture
def flashinfer(monkeypatch):
    csr = SimpleNamespace(csr=lambda *arrays: arrays)
    mla = SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper, MLAPlanMetadata=csr)
    utils = SimpleNamespace(get_device_sm_count=lambda device: MULTIPROCESSORS)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(mla=mla, utils=utils))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)
    monkeypatch.setitem(sys.modules, "flashinfer.utils", utils)
    monkeypatch.setattr(kernels_flashinfer, "_PLANS", {})


@pytest.mark.parametrize(
    ("tokens", "width", "clusters", "chunks"),
    [
        (1, 640, 132, 10),
        (8, 640, 132, 10),
        (32, 640, 132, 4),
        (128, 640, 132, 1),
        (1, 1152, 132, 18),
        (8, 1152, 132, 9),
        (32, 1152, 132, 4),
        (32, 1152, 66, 2),
        (200, 8320, 132, 1),
    ],
)
def test_chunks_that_were_the_fastest_on_an_h200(tokens, width, clusters, chunks):
    assert kernels_flashinfer.chunk_count(tokens, width, clusters) == chunks


@pytest.mark.parametrize("clusters", [132, 66, 108, 54])
@pytest.mark.parametrize("width", [128, 640, 1152, 8320])
def test_every_chunk_count_has_a_planned_length(clusters, width):
    for tokens in (1, 2, 3, 7, 8, 24, 31, 32, 64, 100, 128, 200, 256):
        chunks = kernels_flashinfer.chunk_count(tokens, width, clusters)
        length = kernels_flashinfer.planned_length(tokens, chunks, clusters)
        planned = PlannedByFlashInfer([length] * tokens, [0] * tokens, torch.empty(0), clusters)
        assert planned.count == tokens * chunks, (tokens, chunks, length)


@pytest.mark.kernels
@pytest.mark.parametrize("lengths", [(640, 1, 63), (64, 65, 0), (128, 129, 640)])
def test_recut_spreads_each_token_evenly(flashinfer, lengths):
    width = 640
    kernels_flashinfer.prepare(3, 8, width, scale=SCALE, device=MACHINE.device)
    (plan,) = kernels_flashinfer._PLANS.values()
    rows = torch.randint(1, 99, (3, width), device=MACHINE.device)
    given = IndexList(rows, torch.tensor(lengths, device=MACHINE.device))
    kernels_flashinfer.recut(given, plan)
    for token, length in enumerate(max(length, 1) for length in lengths):
        tiles = -(-length // 64)
        chunk = -(-tiles // plan.chunks) * 64
        for number, work in enumerate(plan.order[token].tolist()):
            first, last = number * chunk, min((number + 1) * chunk, length)
            expected = (first, last) if first < length else (0, 0)
            assert (int(plan.works.first[work]), int(plan.works.last[work])) == expected
            assert int(plan.works.length[work]) == length
            assert int(plan.works.row_start[work]) == token * width
        valid = lengths[token]
        kept = plan.rows[token * width : token * width + length].tolist()
        assert kept == (rows[token, :valid].tolist() or [0])


@pytest.mark.kernels
@pytest.mark.parametrize("heads", [3, thorough(66)])
def test_flashinfer_seam(flashinfer, heads):
    """From plan to folded sink, twice with one plan, as a graph would replay it."""
    kernels_flashinfer.prepare(4, heads, 130, scale=SCALE, device=MACHINE.device)
    for seed, lengths in enumerate([(130, 0, 64, 1), (3, 130, 65, 129)]):
        arguments = inputs(lengths, 130, heads, torch.bfloat16, seed=seed)
        arguments[3][:3] = torch.tensor([math.inf, -math.inf, 1e30])
        result = kernels_flashinfer.sparse_attention(*arguments, scale=SCALE)
        assert_close_in_bfloat16(result, arguments, roundings=3)


@pytest.mark.kernels
def test_shapes_that_nobody_prepared_take_the_triton_kernels(flashinfer):
    kernels_flashinfer.prepare(2, 3, 40, scale=SCALE, device=MACHINE.device)
    for lengths, width, dtype in (((40, 3, 1), 40, torch.bfloat16), ((40, 3), 40, torch.float32)):
        arguments = inputs(lengths, width, 3, dtype)
        expected = kernels_triton.sparse_attention(*arguments, scale=SCALE)
        result = kernels_flashinfer.sparse_attention(*arguments, scale=SCALE)
        assert torch.equal(result, expected)


def test_a_shape_is_planned_once(flashinfer):
    ops = SimpleNamespace(sparse_attention=kernels_flashinfer.sparse_attention)
    for tokens in (2, 2, 3):
        backends.prepare_attention(
            ops, tokens=tokens, heads=3, width=40, scale=SCALE, device="cpu"
        )
    assert [shape.tokens for shape, _ in kernels_flashinfer._PLANS] == [2, 3]


def test_the_reference_needs_no_preparation():
    assert not hasattr(reference, "prepare")
    ops = SimpleNamespace(sparse_attention=reference.sparse_attention)
    backends.prepare_attention(ops, tokens=2, heads=3, width=40, scale=SCALE, device="cpu")


@pytest.mark.parametrize(("one", "other"), [("first", "last"), ("request", "row_start"),
                                            ("length", "first")])  # fmt: skip
def test_another_layout_of_the_plan_is_an_error(flashinfer, monkeypatch, one, other):
    """A FlashInfer that orders MLAPlanInfo otherwise must be noticed before it computes."""
    arrays = dict(PlannedByFlashInfer.ARRAYS)
    arrays[one], arrays[other] = arrays[other], arrays[one]
    monkeypatch.setattr(PlannedByFlashInfer, "ARRAYS", arrays)
    with pytest.raises(RuntimeError, match="SGLANG_DSV4_OPS=sparse_attention=triton"):
        kernels_flashinfer.prepare(3, 8, 640, scale=SCALE, device="cpu")


def test_a_wrapper_that_copies_the_row_indices_is_an_error(flashinfer, monkeypatch):
    plan = Wrapper.plan

    def copying(self, **options):
        self.indices = self.indices.clone()
        plan(self, **options)

    monkeypatch.setattr(Wrapper, "plan", copying)
    with pytest.raises(RuntimeError, match="row indices"):
        kernels_flashinfer.prepare(3, 8, 640, scale=SCALE, device="cpu")


# ---- FlashMLA ----


@pytest.fixture
def flash_mla(monkeypatch):
    calls = []

    def sparse(q, kv, indices, scale, width, sink, lengths, **options):
        calls.append(q.shape)
        assert indices.dtype is lengths.dtype is torch.int32 and indices.shape[2] % 128 == 0
        assert kv.shape[1:] == (1, 512) and width == 512
        keys = IndexList(indices[:, 0].clamp(min=0).long(), lengths.long())
        for row, length in zip(indices[:, 0], lengths, strict=True):
            assert (row[:length] >= 0).all() and (row[length:] == -1).all()
        positions = torch.zeros(len(q), dtype=torch.int64, device=q.device)
        out = exact(q, kv[:, 0], keys, sink, positions, FREQUENCIES, scale)[0].to(q.dtype)
        out[lengths == 0] = math.nan
        return out, None, None

    monkeypatch.setitem(sys.modules, "flash_mla", SimpleNamespace(flash_mla_sparse_fwd=sparse))
    return calls


@pytest.mark.kernels
def test_flashmla_seam(flash_mla):
    lengths = [(8 * token) % 41 for token in range(kernels_flashmla.FEWEST_TOKENS)]
    assert {0, 40} <= set(lengths)
    arguments = inputs(lengths, 40, 64, torch.bfloat16)
    result = kernels_flashmla.sparse_attention(*arguments, scale=SCALE)
    assert flash_mla == [(24, 64, 512)]
    assert_close_in_bfloat16(result, arguments, roundings=2)
    assert (result[lengths.index(0)] == 0).all()


@pytest.mark.kernels
@pytest.mark.parametrize(("tokens", "heads", "dtype"), [
    (23, 64, torch.bfloat16), (24, 32, torch.bfloat16), (24, 64, torch.float32),
])  # fmt: skip
def test_flashmla_leaves_other_shapes_to_triton(flash_mla, monkeypatch, tokens, heads, dtype):
    seen = []
    monkeypatch.setattr(
        kernels_triton, "sparse_attention", lambda q, *_, **options: seen.append(options) or q
    )
    q, *rest = inputs([1] * tokens, 1, heads, dtype)
    assert kernels_flashmla.sparse_attention(q, *rest, scale=SCALE) is q
    assert seen == [{"scale": SCALE}] and not flash_mla


# ---- on a GPU, at the model's shapes ----

SHAPES = {"flash csa": (64, 640), "pro csa": (128, 1152), "tp8": (8, 640), "tp4": (16, 1152),
          "long hca": (64, 8320)}  # fmt: skip


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", implementations("sparse_attention"))
@pytest.mark.parametrize("tokens", [1, 3, 8, 32, 129])
@pytest.mark.parametrize(("heads", "width"), SHAPES.values(), ids=SHAPES)
def test_sparse_attention_at_real_shapes(op, tokens, heads, width):
    choices = (width, 0, 1, 63, 64, 65, width - 1, 128, 129)
    arguments = inputs([choices[i % 9] for i in range(tokens)], width, heads, torch.bfloat16, 5000)
    prepare = getattr(sys.modules[op.__module__], "prepare", None)
    if prepare is not None:
        prepare(tokens, heads, width, scale=SCALE, device=MACHINE.device)
    assert_close_in_bfloat16(op(*arguments, scale=SCALE), arguments, roundings=3)


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", implementations("sparse_attention"))
def test_rows_beyond_two_gigabytes(op):
    arguments = inputs((640, 5), 640, 64, torch.bfloat16)
    q, cache, keys, *rest = arguments
    large = torch.zeros((1 << 22) + 400, 512, dtype=torch.bfloat16, device=q.device)
    large[1 << 22 :] = cache
    result = op(q, large, IndexList(keys.rows + (1 << 22), keys.lengths), *rest, scale=SCALE)
    assert torch.equal(result, op(*arguments, scale=SCALE))


def replayed(run, refill):
    """Captures run() on its inputs as they are, refills these, and returns replay and eager."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    refill()
    graph.replay()
    return captured, run()


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", implementations("sparse_attention"))
@pytest.mark.parametrize("tokens", [1, 32, 129])
def test_a_replayed_sparse_attention_equals_eager(op, tokens):
    prepare = getattr(sys.modules[op.__module__], "prepare", None)
    if prepare is not None:
        prepare(tokens, 64, 640, scale=SCALE, device=MACHINE.device)
    static = inputs([1] * tokens, 640, 64, torch.bfloat16)
    for seed in range(4):
        lengths = torch.randint(0, 641, (tokens,), generator=torch.Generator().manual_seed(seed))
        fresh = inputs(lengths.tolist(), 640, 64, torch.bfloat16, seed=seed + 9)

        def refill(fresh=fresh):
            for target, source in zip(static, fresh, strict=True):
                if isinstance(target, IndexList):
                    target.rows.copy_(source.rows)
                    target.lengths.copy_(source.lengths)
                else:
                    target.copy_(source)

        captured, eager = replayed(lambda: op(*static, scale=SCALE), refill)
        assert torch.equal(captured, eager)
        assert_close_in_bfloat16(captured, fresh, roundings=3)


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", implementations("query_norm_rope"))
@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize("tokens", [1, 33, 4096])
def test_query_norm_rope_at_real_shapes(op, tokens, heads):
    q = randn(tokens, heads, 512, dtype=torch.bfloat16)
    positions = torch.arange(tokens, device=q.device) * 257
    expected = reference.query_norm_rope(q.double(), positions, FREQUENCIES, eps=EPS)
    assert_close(op(q, positions, FREQUENCIES, eps=EPS), expected)


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", implementations("csa_index_list"))
@pytest.mark.parametrize("top_k", [512, 1024])
@pytest.mark.parametrize("tokens", [1, 33, 2048])
def test_csa_index_list_at_real_shapes(op, tokens, top_k):
    generator = torch.Generator().manual_seed(tokens)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator).to(MACHINE.device)

    column = torch.arange(top_k, device=MACHINE.device)
    selected = integers(0, 4096, tokens, top_k)
    selected = selected.masked_fill(column >= integers(0, top_k + 1, tokens, 1), -1)
    window = IndexList(integers(1, 4096, tokens, 128), integers(1, 129, tokens))
    table = EntryTable(
        request=integers(0, 5, tokens), page_table=integers(0, 9, 5, 64),
        visible=integers(0, 4096, tokens), width=4096, first_row=4096,
    )  # fmt: skip
    result, expected = (f(selected, window, table) for f in (op, reference.csa_index_list))
    assert torch.equal(result.rows, expected.rows)
    assert torch.equal(result.lengths, expected.lengths)
