"""The MoE kernels beyond their ops' own tests: every tile and block search, bounds, real shapes."""

import math

import pytest
import torch

from op_checks import MACHINE, implementations, randn, thorough
from sglang_dsv4.moe import kernels_triton, reference
from sglang_dsv4.moe import kernels_triton_experts as grouped
from tolerance import assert_close, assert_close_by_norm

LIMIT = 1.0  # low enough that the clamp bites


def inputs(experts, hidden, width, expert_count, dtype=torch.float32):
    """x, weights, experts, w13, w2 for experts [T, k]."""
    tokens = experts.shape[0]
    shapes = (expert_count, 2 * width, hidden), (expert_count, hidden, width)
    w13, w2 = (
        randn(*shape, seed=seed, dtype=dtype) * shape[-1] ** -0.5
        for seed, shape in enumerate(shapes)
    )
    x, weights = randn(tokens, hidden, seed=2, dtype=dtype), randn(*experts.shape, seed=3).abs()
    return x, weights, experts.to(MACHINE.device), w13, w2


def amid_nan(weight):
    """The same values, in memory where whatever lies beyond a row or a matrix is NaN."""
    wide = weight.new_full((weight.shape[0], weight.shape[1] + 8, weight.shape[2] + 8), math.nan)
    return wide[:, : weight.shape[1], : weight.shape[2]].copy_(weight)


def random_experts(tokens, expert_count, top_k):
    """[T, k], distinct within a token; the first are chosen most often."""
    generator = torch.Generator().manual_seed(4)
    scores = torch.randn(tokens, expert_count, generator=generator)
    return (scores - 2 * torch.arange(expert_count) / expert_count).argsort(1)[:, :top_k]


def assert_close_but_for_the_activation(result, arguments, limit=LIMIT):
    """In BF16 the activation is off by 2^-9 of itself, once: the errors of an output's terms are
    independent, and taken together they stay below that."""
    x, weights, experts, w13, w2 = arguments
    expected = reference.routed_experts(x, weights, experts, w13, w2, limit=limit)
    assert result.dtype is torch.float32 and not result.isnan().any()
    error = (result - expected).double().norm(dim=1) / expected.double().norm(dim=1)
    assert error.max() <= 2**-8, f"relative error {error.max()}"


@pytest.mark.kernels
def test_choice_among_negative_infinite_and_nan_scores():
    """As a stable sort in descending order chooses: NaN first, then by value, then by id."""
    logits = torch.zeros(3, 6, device=MACHINE.device)
    logits[1, 4] = math.nan
    logits[2, :] = math.nan
    bias = torch.tensor([-3.0, -math.inf, -2.0, -1.0, -5.0, -2.0], device=MACHINE.device)
    weights, experts = kernels_triton.route_scored(logits, bias, top_k=4, scale=1.0)
    assert experts.tolist() == [[3, 2, 5, 0], [4, 3, 2, 5], [0, 1, 2, 3]]
    expected = reference.route_scored(logits, bias, top_k=4, scale=1.0)[0]
    assert_close(weights, expected)
    assert weights[1:].isnan().all()


# One of each kind of tile: tokens, choices, experts, rows of the tile, pairs that are scanned.
TILES = [(3, 2, 9, 16, 256), (3, 2, 9, 16, 0), (40, 2, 4, 32, 0), thorough(100, 2, 4, 64, 0),
         thorough(200, 2, 3, 128, 0)]  # fmt: skip


@pytest.mark.kernels
@pytest.mark.parametrize(("tokens", "top_k", "expert_count", "rows", "scanned"), TILES)
def test_every_tile(monkeypatch, tokens, top_k, expert_count, rows, scanned):
    """Neither width fills its tiles, and both take several."""
    assert grouped._Dense.tiles(tokens * top_k / expert_count, 2).rows == rows
    monkeypatch.setattr(grouped, "_MAX_SCANNED_PAIRS", scanned)
    experts = random_experts(tokens, expert_count, top_k)
    *arguments, w13, w2 = inputs(experts, 200, 136, expert_count, torch.bfloat16)
    result = grouped.routed_experts(*arguments, amid_nan(w13), amid_nan(w2), limit=LIMIT)
    arguments += w13, w2
    assert_close_but_for_the_activation(result, arguments)


@pytest.mark.kernels
@pytest.mark.parametrize("first", [*map(thorough, (0, 1, 15, 17, 31, 32, 40)), 16, 33])
def test_scanned_blocks_equal_sorted_blocks(monkeypatch, first):
    """Two experts of three, whose blocks begin and end anywhere; each must be found once."""
    experts = torch.full((40, 1), 2)
    experts[:first] = 0
    arguments = inputs(experts.roll(7, 0), 32, 16, 3)
    scanned = grouped.routed_experts(*arguments, limit=LIMIT)
    assert_close(scanned, reference.routed_experts(*arguments, limit=LIMIT))
    monkeypatch.setattr(grouped, "_MAX_SCANNED_PAIRS", 0)
    assert torch.equal(grouped.routed_experts(*arguments, limit=LIMIT), scanned)


@pytest.mark.kernels
@pytest.mark.parametrize("counts", [(1, 1, 17, 0, 33), (16, 0, 0, 32, 4), (52, 0, 0, 0, 0)])
def test_the_grid_holds_every_block(monkeypatch, counts):
    """One row more than full blocks is the worst case."""
    monkeypatch.setattr(grouped, "_MAX_SCANNED_PAIRS", 0)
    experts = torch.arange(5).repeat_interleave(torch.tensor(counts)).to(MACHINE.device)
    tiles = grouped._Dense.tiles(len(experts) / 5, 4)
    blocks = grouped._find_blocks(grouped.Choices(experts[:, None], 5), tiles)
    assert blocks.starts.tolist() == [sum(counts[:expert]) for expert in range(5)]
    assert blocks.order.tolist() == list(range(len(experts)))
    assert sum(math.ceil(count / tiles.rows) for count in counts) <= blocks.count


@pytest.mark.kernels
@pytest.mark.parametrize("scanned", [256, 0])
@pytest.mark.parametrize("dtype", [torch.float32, thorough(torch.bfloat16)])
def test_no_output_of_other_experts_is_read(monkeypatch, scanned, dtype):
    """Outputs are poisoned, and so are the tokens that have no expert here: nobody reads them."""
    monkeypatch.setattr(grouped, "_MAX_SCANNED_PAIRS", scanned)
    experts = torch.tensor([[0, 5], [1, 4], [3, 2], [5, 4], [2, 2], [4, 3], [0, 1]])
    x, weights, experts, w13, w2 = inputs(experts, 136, 24, 6, dtype)
    expected = reference.routed_experts(x, weights, experts, w13, w2, limit=LIMIT)
    base, mine = randn(7, 136, seed=7), torch.tensor([2, 4])  # all of their experts are 2 and 3
    lonely = [0, 1, 3, 6]
    x[lonely], weights[lonely] = math.nan, math.nan
    routes = x, weights, experts
    part = {"limit": LIMIT, "first": 2, "total": 6}
    result = grouped.routed_experts(*routes, w13[2:4], w2[2:4], base=base, **part)
    assert torch.equal(result[lonely], base[lonely])
    assert not result.isnan().any()
    assert_close_by_norm(result[mine] - base[mine], expected[mine])
    sums = grouped.routed_experts(*routes, w13[2:4], w2[2:4], **part)
    assert not sums[lonely].any() and torch.equal(sums + base, result)


@pytest.mark.kernels
@pytest.mark.parametrize("counts", [(1, 1, 17, 0, 33), (0, 20, 3, 0, 4), (9, 0, 0, 0, 9)])
def test_the_held_experts_are_sorted_alone(monkeypatch, counts):
    monkeypatch.setattr(grouped, "_MAX_SCANNED_PAIRS", 0)
    experts = torch.arange(5).repeat_interleave(torch.tensor(counts)).to(MACHINE.device)
    blocks = grouped._find_blocks(
        grouped.Choices(experts[:, None], 3, 1), grouped._Dense.tiles(1, 4)
    )
    assert blocks.starts.tolist() == [sum(counts[:expert]) for expert in range(1, 5)]
    held = slice(counts[0], sum(counts[:4]))
    assert blocks.order.tolist()[held] == list(range(len(experts)))[held]


@pytest.mark.kernels
def test_outputs_may_be_computed_in_slabs(monkeypatch):
    arguments = inputs(random_experts(3, 4, 2), 136, 24, 4)
    whole = grouped.routed_experts(*arguments, limit=LIMIT)
    monkeypatch.setattr(grouped, "_OUTPUT_ELEMENTS", 6 * 130)  # 128 columns, and the rest
    assert torch.equal(grouped.routed_experts(*arguments, limit=LIMIT), whole)
    base = randn(3, 150, seed=7)[:, 5:141]
    added = grouped.routed_experts(*arguments, limit=LIMIT, base=base)
    assert torch.equal(added, base + whole)
    with pytest.raises(AssertionError):
        grouped.routed_experts(*arguments, limit=LIMIT, base=randn(136, 3).T)


@pytest.mark.kernels
def test_nan_stays_with_its_token_in_sorted_blocks(monkeypatch):
    """Token 0 also stands in for the rows that a block leaves empty."""
    monkeypatch.setattr(grouped, "_MAX_SCANNED_PAIRS", 0)
    x, *rest = inputs(random_experts(9, 4, 2), 32, 16, 4)
    whole = grouped.routed_experts(x, *rest, limit=LIMIT)
    x[0], x[4] = math.nan, math.nan
    result = grouped.routed_experts(x, *rest, limit=LIMIT)
    assert result[[0, 4]].isnan().all()
    kept = [1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(result[kept], whole[kept])


def test_dtypes_that_differ_are_an_error():
    x, weights, experts, w13, w2 = inputs(random_experts(2, 3, 1), 16, 8, 3)
    with pytest.raises(ValueError, match="bfloat16.*float32"):
        grouped.routed_experts(x.bfloat16(), weights, experts, w13, w2, limit=LIMIT)


# ---- on a GPU, at the model's shapes ----

SHAPES = {"flash": (4096, 2048, 256), "flash tp8": (4096, 256, 256), "pro tp8": (7168, 384, 384)}
TOKENS = (1, 2, 8, 42, 43, 128, 512, 1025, 2048, 8192)


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES)
def weights(request):
    """w13 and w2; Flash's hold more than 2^31 numbers."""
    hidden, width, expert_count = request.param
    shapes = (expert_count, 2 * width, hidden), (expert_count, hidden, width)
    yield [
        torch.randn(*shape, dtype=torch.bfloat16, device="cuda") * shape[-1] ** -0.5
        for shape in shapes
    ]
    torch.cuda.empty_cache()


def real_inputs(tokens, weights, seed=0):
    expert_count, hidden, _ = weights[1].shape
    logits, bias = randn(tokens, expert_count, seed=seed), randn(expert_count, seed=9)
    factors, experts = reference.route_scored(logits, bias, top_k=6, scale=1.5)
    x = randn(tokens, hidden, seed=seed + 1, dtype=torch.bfloat16)
    return x, factors, experts, *weights


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", implementations("routed_experts"))
@pytest.mark.parametrize("tokens", TOKENS)
def test_routed_experts_at_real_shapes(op, weights, tokens):
    arguments = real_inputs(tokens, weights)
    assert_close_but_for_the_activation(op(*arguments, limit=10.0), arguments, limit=10.0)


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", implementations("routed_experts"))
@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_all_tokens_may_choose_the_last_experts(op, weights, tokens):
    """Offsets beyond 2^31, one long block list, and every other expert empty and NaN."""
    x, factors, experts, w13, w2 = real_inputs(tokens, weights)
    last = w2.shape[0] - 6
    experts.copy_(torch.arange(last, last + 6, device=experts.device).expand_as(experts))
    expected = reference.routed_experts(
        x, factors, experts - last, w13[last:], w2[last:], limit=10.0
    )
    kept = w13[:last].clone()
    w13[:last] = math.nan
    result = op(x, factors, experts, w13, w2, limit=10.0)
    w13[:last] = kept
    error = (result - expected).double().norm(dim=1) / expected.double().norm(dim=1)
    assert error.max() <= 2**-8


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("tokens", [1, 8, 64, 600])
def test_half_of_the_experts_replayed(weights, tokens):
    """Those of one rank of two, by a graph that was captured with other choices, and eagerly."""
    half = weights[1].shape[0] // 2
    part = {"limit": 10.0, "first": half, "total": 2 * half}
    held = [each[half:] for each in weights]
    static = [each.clone() for each in real_inputs(tokens, weights, seed=5)[:3]]
    grouped.routed_experts(*static, *held, **part)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = grouped.routed_experts(*static, *held, **part)
    routes = real_inputs(tokens, weights)[:3]
    for target, source in zip(static, routes, strict=True):
        target.copy_(source)
    graph.replay()
    assert torch.equal(result, grouped.routed_experts(*routes, *held, **part))
    expected = reference.routed_experts(*routes, *held, **part).double()
    error = (result - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)
    assert error.max() <= 2**-8


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("tokens", [1, 40, 64, 600])
def test_a_replayed_layer_equals_eager(weights, tokens):
    """Router and experts in one graph, replayed on other values, bit for bit."""
    expert_count, hidden, _ = weights[1].shape
    bias = randn(expert_count, seed=9)
    table = random_experts(1000, expert_count, 6).to(MACHINE.device)

    def run(x, logits, token_ids):
        scored = kernels_triton.route_scored(logits, bias, top_k=6, scale=1.5)
        hashed = kernels_triton.route_hashed(logits, token_ids, table, scale=1.5)
        outputs = [
            grouped.routed_experts(x, *routes, *weights, limit=10.0) for routes in (scored, hashed)
        ]
        return *scored, *hashed, *outputs

    def fresh(seed):
        ids = torch.randint(0, 1000, (tokens,), generator=torch.Generator().manual_seed(seed))
        x = randn(tokens, hidden, seed=seed, dtype=torch.bfloat16)
        return x, randn(tokens, expert_count, seed=seed + 1), ids.to(MACHINE.device)

    static = fresh(20)
    run(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*static)
    for seed in range(3):
        for target, source in zip(static, fresh(30 + seed), strict=True):
            target.copy_(source)
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(captured, run(*static), strict=True))


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", implementations("route_scored"))
@pytest.mark.parametrize("expert_count", [256, 384])
@pytest.mark.parametrize("tokens", [1, 33, 8192])
def test_route_scored_at_real_shapes(op, tokens, expert_count):
    """Where two biased scores are nearly equal, rounding decides: compare their sums then."""
    logits, bias = randn(tokens, expert_count), randn(expert_count, seed=1) * 0.1
    weights, experts = op(logits, bias, top_k=6, scale=1.5)
    expected_weights, expected = reference.route_scored(logits, bias, top_k=6, scale=1.5)
    same = (experts == expected).all(1)
    assert same.double().mean() > 0.99
    assert_close(weights[same], expected_weights[same])
    scores = torch.nn.functional.softplus(logits.double()).sqrt() + bias
    assert_close(scores.gather(1, experts).float(), scores.gather(1, expected))
