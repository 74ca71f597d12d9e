"""The compressors' kernels beyond their ops' own tests: the order of programs, and real shapes."""

import math
from dataclasses import replace

import pytest
import torch
from triton.runtime import interpreter

from inprocess import Host
from naive_attention import EPS, metadata, tensors_of
from op_checks import MACHINE, implementations, randn, thorough
from sglang_dsv4.attention import kernels_triton_compress as kernels
from sglang_dsv4.attention import reference
from sglang_dsv4.attention.cache import PAGE, RING
from tolerance import assert_close

FREQUENCIES = randn(32, seed=5).abs()
# ---- one forward, against the reference ----

Part = tuple[int, int]  # tokens of a request that were computed before, and new ones
# Around rings and pages: a ring has 8 rows, a page 256 tokens, and new tokens take old ones' rows.
CSA_BATCHES: dict[str, list[Part]] = {
    "decode": [(10, 1), (11, 1), (255, 1), (256, 1), (0, 1), (7, 1), (259, 1)],
    "rows taken by the next": [(11, 2)],
    "rows taken much later": [(11, 20)],
    "both windows old": [(4, 13), (7, 9)],
    "all rows taken at once": [(9, 30), (6, 3)],
    "into the next page": [(250, 21)],
    "old rows of two pages": [(255, 9), (253, 12)],
    "to the end of a page": [(236, 20), (5, 0)],
    "a page begins": [(256, 11), (0, 13)],
    "over a whole page": [(254, 275)],
    "equal positions side by side": [(12, 1), (13, 4), (256, 2), (258, 5)],
}
HCA_BATCHES: dict[str, list[Part]] = {
    "decode": [(10, 1), (127, 1), (128, 1), (0, 1), (255, 1)],
    "state goes on": [(100, 20), (30, 0), (64, 9)],
    "the window closes": [(100, 28), (127, 1)],
    "into the next window": [(100, 60), (127, 2)],
    "over whole windows": [(5, 300)],
    "nothing carried": [(128, 140), (0, 3)],
    "from a request without tokens on": [(128, 0), (100, 40), (77, 0), (255, 3)],
}


def case(parts, *, csa, width, padding=2, seed=0, dtype=torch.float32):
    """Arguments of the op for one forward; whatever was stored before is random, and what padding
    carries is NaN."""
    longest = max(prefix + new for prefix, new in parts) + 1
    pages = sum(-(-(prefix + new) // PAGE) for prefix, new in parts) + 1
    host = Host(pages=pages, slots=len(parts) + 1, context=-(-longest // PAGE) * PAGE)
    requests = []
    for prefix, new in parts:
        requests.append((host.open(), [1] * new))
        requests[-1][0].tokens = [1] * prefix
    meta = metadata(host, *requests, window_rows=pages * PAGE, padding=padding)
    tokens, series = len(meta.positions), 2 if csa else 1
    kv, gate = (randn(tokens, series * width, seed=seed + i) for i in (1, 2))
    if padding:
        kv[-padding:], gate[-padding:] = math.nan, math.nan
    ape = randn(4 if csa else 128, series * width, seed=3)
    cache = randn(pages * (PAGE + 64), width, seed=seed + 4, dtype=dtype)
    state = randn(*((pages * RING, 4 * width) if csa else (len(parts) + 1, 3 * width)), seed=seed)
    if not csa:
        state[:, width : 2 * width] = state[:, width : 2 * width].abs() + 1
    cache[0], state[0] = 0, 0
    where = (meta.csa, meta.csa.row) if csa else (meta.hca, meta.positions)
    weight = randn(width, seed=seed + 6, dtype=dtype)
    return kv, gate * 2, ape, weight, FREQUENCIES, *where, state, cache


def check(op, name, arguments, **options):
    """The op against the reference: every entry and all state, but for the slot of padding.

    Where a request has neither new tokens nor an open window, the reference stores an empty
    softmax that nobody reads; kernels store nothing.
    """
    *given, state, cache = arguments
    before, expected_state, expected = state.clone(), state.clone(), cache.clone().float()
    op(*given, state, cache, eps=EPS, **options)
    getattr(reference, name)(*given, expected_state, expected, eps=EPS, **options)
    is_empty = (expected_state == -math.inf).any(dim=1)
    expected_state[is_empty] = before[is_empty]
    assert_close(cache, expected, "cache")
    assert_close(state[1:], expected_state[1:], "state")
    assert (cache[0] == 0).all()


@pytest.fixture(params=["first to last", "last to first"])
def order(request, monkeypatch):
    """The order of programs, which on a GPU is any. Whatever one reads and another overwrites is
    overwritten first in one of these two orders."""
    builder = interpreter.InterpreterBuilder
    set_index = builder.set_grid_idx

    def backwards(self, x, y, z):
        set_index(self, self.grid_dim[0] - 1 - x, y, z)

    if request.param == "last to first":
        monkeypatch.setattr(builder, "set_grid_idx", backwards)
    return request.param


# Left to --thorough: what takes the interpreter longest, and says little that others do not.
LONG = {"over a whole page", "over whole windows", "rows taken much later",
        "all rows taken at once", "equal positions side by side", "both windows old"}  # fmt: skip


def batches(names):
    return [thorough(name) if name in LONG else name for name in names]


@pytest.mark.kernels
@pytest.mark.parametrize("name", batches(CSA_BATCHES))
def test_compress_csa_in_any_order(order, name):
    arguments = case(CSA_BATCHES[name], csa=True, width=128)
    check(kernels.compress_csa, "compress_csa", arguments)
    assert (arguments[-2][0] == 0).all()


@pytest.mark.kernels
@pytest.mark.parametrize("name", batches(HCA_BATCHES))
def test_compress_hca_in_any_order(order, name):
    arguments = case(HCA_BATCHES[name], csa=False, width=128)
    check(kernels.compress_hca, "compress_hca", arguments)
    assert (arguments[-2][0] == 0).all()


@pytest.mark.kernels
@pytest.mark.parametrize("requests", [thorough(256), 257, thorough(300)])
def test_more_requests_than_are_looked_through_at_a_time(requests):
    parts = [(128 + number % 3, 0) for number in range(requests - 2)] + [(5, 1), (100, 30)]
    check(kernels.compress_hca, "compress_hca", case(parts, csa=False, width=64))


@pytest.mark.kernels
def test_projections_may_be_columns_of_one_matrix():
    for op, csa in (("compress_csa", True), ("compress_hca", False)):
        kv, gate, *rest = case([(10, 9), (126, 3)], csa=csa, width=128, padding=0)
        joined = torch.cat([kv, gate], dim=1)
        kv, gate = joined.split(kv.shape[1], dim=1)
        assert not kv.is_contiguous()
        check(getattr(kernels, op), op, (kv, gate, *rest))


@pytest.mark.kernels
def test_what_a_kernel_is_not_made_for_is_an_error():
    kv, gate, ape, weight, *rest = case([(0, 4)], csa=True, width=64, padding=0)
    with pytest.raises(AssertionError, match="the grid is not for 64 channels"):
        kernels.compress_csa(kv, gate, ape, weight, *rest, eps=EPS, fp4=True)
    with pytest.raises(AssertionError, match="48 channels are no power of two"):
        kernels.compress_csa(kv, gate, ape, weight[:48], *rest, eps=EPS)


# ---- on a GPU, at the model's shapes ----

DECODE = [(97 * number % 4001, 1) for number in range(125)]
PREFILL = [(1021, 2048), (0, 130), (255, 9), (300, 1), (4001, 700), (128, 127)]
BATCHES = {"one": [(1023, 1)], "decode": DECODE, "prefill": PREFILL}
CSA = implementations("compress_csa")
HCA = implementations("compress_hca")


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", CSA)
@pytest.mark.parametrize("width", [512, 128])
@pytest.mark.parametrize("name", BATCHES)
def test_compress_csa_at_real_shapes(op, name, width):
    parts = BATCHES[name]
    check(op, "compress_csa", case(parts, csa=True, width=width, padding=3, dtype=torch.bfloat16))


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", CSA)
@pytest.mark.parametrize("name", BATCHES)
def test_index_keys_at_real_shapes(op, name):
    """The sums of the transform round in another order: a value next to a middle of the grid may
    fall to the other side."""
    *given, state, cache = case(BATCHES[name], csa=True, width=128, dtype=torch.bfloat16)
    whole, expected = cache.clone().float(), cache.clone()
    op(*given, state.clone(), cache, eps=EPS, fp4=True)
    op(*given, state.clone(), whole, eps=EPS)
    stored = given[6][given[6] > 0]
    expected[stored] = reference.fp4_grid(whole[stored]).bfloat16()
    assert (cache != expected).float().sum() <= 1e-4 * stored.numel() * 128


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", HCA)
@pytest.mark.parametrize("name", BATCHES)
def test_compress_hca_at_real_shapes(op, name):
    parts = BATCHES[name]
    check(op, "compress_hca", case(parts, csa=False, width=512, padding=3, dtype=torch.bfloat16))


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize(("op", "csa"), [("compress_csa", True), ("compress_hca", False)])
def test_every_run_gives_the_same(op, csa):
    """Programs that race would not agree 50 times."""
    *given, state, cache = case(PREFILL * 3, csa=csa, width=512, padding=0)
    results = set()
    for _ in range(50):
        new_state, new_cache = state.clone(), cache.clone()
        getattr(kernels, op)(*given, new_state, new_cache, eps=EPS)
        bits = (new_state.view(torch.int32).sum(), new_cache.view(torch.int32).sum())
        results.add(tuple(int(value) for value in bits))
    assert len(results) == 1


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize(("op", "csa"), [("compress_csa", True), ("compress_hca", False)])
def test_a_replayed_decode_equals_eager(op, csa):
    """Captured at one set of positions, replayed at others."""
    run = getattr(kernels, op)
    fills = [
        case([((97 * n + 31 * seed) % 4001, 1) for n in range(60)], csa=csa, width=512, seed=seed)
        for seed in range(4)
    ]
    # Every fill has pages of its own: memory for the largest.
    rows = max(len(fill[-1]) for fill in fills), max(len(fill[-2]) for fill in fills)
    static = fills[0]
    state = torch.zeros(rows[1], static[-2].shape[1], device=MACHINE.device)
    cache = torch.zeros(rows[0], 512, dtype=torch.bfloat16, device=MACHINE.device)
    given = static[:-2]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(*given, state, cache, eps=EPS)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(*given, state, cache, eps=EPS)
    for *fresh, fresh_state, fresh_cache in fills[1:]:
        for target, source in zip(given, fresh, strict=True):
            refill(target, source)
        state[: len(fresh_state)], cache[: len(fresh_cache)] = fresh_state, fresh_cache.bfloat16()
        eager_state, eager_cache = state.clone(), cache.clone()
        graph.replay()
        run(*fresh, eager_state, eager_cache, eps=EPS)
        assert torch.equal(state[1:], eager_state[1:]) and torch.equal(cache, eager_cache)


def refill(target, source):
    """Copies a tensor, or the tensors of a plan."""
    if isinstance(target, torch.Tensor):
        target.copy_(source)
        return
    for name, tensor in tensors_of(target).items():
        tensor.copy_(getattr(source, name))


@pytest.mark.gpu((8, 0))
def test_rows_beyond_two_gigabytes():
    """The same entries at the end of a large cache and a large state."""
    kv, gate, ape, weight, frequencies, plan, rows, state, cache = case(
        DECODE, csa=True, width=512, dtype=torch.bfloat16
    )
    shift, ring_shift = 1 << 22, 1 << 20  # elements past 2^31
    large = torch.zeros(shift + len(cache), 512, dtype=torch.bfloat16, device=MACHINE.device)
    large_state = torch.zeros(ring_shift + len(state), 2048, device=MACHINE.device)
    large[shift:], large_state[ring_shift:] = cache, state
    moved = replace(
        plan,
        ring=plan.ring + ring_shift,
        ring_store=(plan.ring_store + ring_shift).masked_fill(plan.ring_store == 0, 0),
    )
    given = (kv, gate, ape, weight, frequencies)
    far = (rows + shift).masked_fill(rows == 0, 0)
    kernels.compress_csa(*given, moved, far, large_state, large, eps=EPS)
    kernels.compress_csa(*given, plan, rows, state, cache, eps=EPS)
    assert torch.equal(large[shift:], cache) and torch.equal(large_state[ring_shift:], state)
