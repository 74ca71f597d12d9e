"""Memory told in advance: against the parameters of the model, the real cache, SGLang's sizing."""

from types import SimpleNamespace

import pytest
import torch

from checkpoint_files import dense_headers
from sglang_dsv4 import cli_make_tiny, memory_plan
from sglang_dsv4.attention.cache import PAGE, LayerCache, allocate
from sglang_dsv4.backends import Machine, choose
from sglang_dsv4.components import NAMES, component_of
from sglang_dsv4.config import DSV4Config, LayerKind
from sglang_dsv4.graph_safety_step import SmallLM
from sglang_dsv4.memory_plan import GIB, CacheSizes, Plan, parameter_counts, weight_bytes
from sglang_dsv4.parallel import Parallel
from sglang_dsv4.parameters import default_dtype
from sglang_dsv4.precision import Precision
from sglang_dsv4.tensor_table import expected_tensors

TINY = DSV4Config.from_dict(cli_make_tiny.shipped_config("tiny", "bfloat16"))


def released(preset: str, layers: int, experts: int, ratios: list[int]) -> DSV4Config:
    raw = cli_make_tiny.shipped_config(preset, "bfloat16")
    sizes = {"num_hidden_layers": layers, "n_routed_experts": experts, "compress_ratios": ratios}
    return DSV4Config.from_dict(raw | sizes | {"num_hash_layers": 3})


FLASH = released("flash-2l", 43, 256, [0, 0] + [4, 128] * 20 + [4, 0])
PRO = released("pro-2l", 61, 384, [128, 128] + [4, 128] * 29 + [4, 0])


# ---- weights ----


@pytest.mark.parametrize(
    ("config", "total", "active", "gigabytes"),
    [
        (FLASH, 284_332_240_471, 13.27, 568.75),
        (PRO, 1_572_997_201_763, 48.85, 3146.19),
    ],
    ids=["flash", "pro"],
)
def test_published_parameters(
    config: DSV4Config, total: int, active: float, gigabytes: float
) -> None:
    slots = expected_tensors(config)
    found, used = parameter_counts(slots, config)
    assert found == total
    assert used / 1e9 == pytest.approx(active, abs=0.005)
    in_memory = weight_bytes(slots, torch.bfloat16, 1)
    assert in_memory / 1e9 == pytest.approx(gigabytes, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("size", "experts", "groups"),
    [
        *((size, 1, {}) for size in (1, 2, 8)),
        *((1, 1, {0: 32, 3: 16, 6: 32}), (2, 1, {4: 16, 5: 32})),
        *((2, 2, {}), (8, 2, {}), (4, 4, {0: 32, 3: 16, 6: 32}), (4, 2, {4: 16, 5: 32})),
    ],
)
def test_weights_of_a_rank_are_the_parameters_of_the_model(
    size: int, experts: int, groups: dict[int, int], dtype: torch.dtype
) -> None:
    """experts: groups of ranks for them. groups: of the layers whose experts lie in four bits."""
    ops = choose(Machine.probe("cpu"))
    parallel = Parallel(size - 1, size, lambda x: x, experts)
    with default_dtype(dtype):
        model = SmallLM(TINY, ops, Precision(), parallel, groups)
    held = sum(parameter.nbytes for parameter in model.parameters())
    held += sum(table.nbytes for name, table in model.named_buffers() if "tid2eid" in name)
    slots = expected_tensors(TINY)
    assert weight_bytes(slots, dtype, size, groups, expert_parallel=experts) == held


def test_published_weights_in_four_bits() -> None:
    """By spec 4.2: an expert's values at half a byte, and a scale for 32 of them; the rest BF16."""
    slots = expected_tensors(FLASH)
    values = 43 * 256 * 3 * 4096 * 2048
    dense = weight_bytes(slots, torch.bfloat16, 8)
    factors = 43 * 256 * 3 * 4  # of every matrix, on every rank
    kept = weight_bytes(slots, torch.bfloat16, 8, dict.fromkeys(range(43), 32))
    assert dense - kept == values // 8 * (2 - 0.5 - 1 / 32) - factors
    assert kept / 1e9 == pytest.approx(20.9, abs=1)
    whole = weight_bytes(slots, torch.bfloat16, 8, dict.fromkeys(range(43), 32), expert_parallel=8)
    assert kept - whole == factors // 8 * 7  # an expert's lie on one rank


def test_every_tensor_has_a_component() -> None:
    found = {name: component_of(name) for name in dense_headers(expected_tensors(TINY), "BF16")}
    assert set(found.values()) == set(NAMES)
    assert found["layers.2.attn.indexer.compressor.wkv.weight"] == "indexer"
    assert found["layers.2.attn.compressor.wkv.weight"] == "compressor"
    assert found["layers.2.ffn_norm.weight"] == found["norm.weight"] == "norms"
    assert found["layers.2.hc_attn_fn"] == found["hc_head_fn"] == "mHC"
    assert found["head.weight"] == "head" and found["embed.weight"] == "embedding"


# ---- the cache ----


def nbytes(caches: tuple[LayerCache, ...]) -> int:
    found = (value for cache in caches for value in vars(cache).values())
    return sum(value.nbytes for value in found if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sizes_are_those_of_the_cache(dtype: torch.dtype) -> None:
    def allocated(pages: int, window_pages: int, requests: int) -> int:
        counts = {"pages": pages, "window_pages": window_pages, "requests": requests}
        return nbytes(allocate(TINY, dtype=dtype, **counts))

    sizes = CacheSizes(TINY, dtype.itemsize)
    assert sizes.token * PAGE == allocated(4, 2, 3) - allocated(3, 2, 3)
    assert sizes.window_page == allocated(3, 3, 3) - allocated(3, 2, 3)
    assert sizes.slot == allocated(3, 2, 4) - allocated(3, 2, 3)
    # A request of 256 tokens that began in another page: two window pages, one slot.
    assert sizes.request == allocated(1, 3, 2) - allocated(1, 1, 1)


def test_published_sizes_of_the_cache() -> None:
    flash, pro = CacheSizes(FLASH, 2), CacheSizes(PRO, 2)
    assert (flash.token, pro.token) == (6880, 9848)
    assert (flash.slot, pro.slot) == (20 * 6144, 31 * 6144)
    rings = flash.window_page - PAGE * 43 * 1024
    assert rings / 1e6 == pytest.approx(1.72, abs=0.005)
    assert str(flash) == "6880 bytes per context token, 26.11 MB fixed per request"


@pytest.mark.parametrize("spare", [25, 60, 100])
@pytest.mark.parametrize("context", [200, 1024, 4096])
def test_what_fits_is_allocated_and_a_little_more_is_too_much(spare: int, context: int) -> None:
    weights = 7_000_000
    device = int((weights + spare * 1_000_000) / 0.9)
    plan = Plan(weights, CacheSizes(TINY, 2), context, device)

    def allocated(pages: int) -> int:
        window = max(int(pages * plan.window_ratio), -(-context // PAGE) + 4)
        counts = {"pages": pages + 1, "window_pages": window + 1, "requests": 256 + 3}
        return nbytes(allocate(TINY, dtype=torch.bfloat16, **counts))

    if plan.pages == 0:
        assert allocated(1) > plan.room
        return
    # Ten pages, with the window page that is due to them: shares are reckoned, not counted.
    assert plan.cache_bytes == allocated(plan.pages) <= plan.room < allocated(plan.pages + 10)
    fit = plan.requests
    assert fit * -(-context // PAGE) <= plan.pages and 2 * fit <= plan.window_pages
    assert plan.pool_tokens == plan.pages * PAGE


def test_too_small_a_device_holds_nothing() -> None:
    plan = Plan(10 * GIB, CacheSizes(TINY, 2), 1024, 10 * GIB)
    assert plan.room < 0 and plan.pages == plan.requests == 0
    unknown = Plan(10 * GIB, CacheSizes(TINY, 2), 1024)
    assert unknown.usable == unknown.pages == 0


def test_a_model_without_compressed_layers_is_bound_by_its_windows() -> None:
    raw = cli_make_tiny.shipped_config("tiny", "bfloat16") | {"compress_ratios": [0] * 8}
    sizes = CacheSizes(DSV4Config.from_dict(raw), 2)
    assert sizes.token == sizes.slot == 0
    plan = Plan(0, sizes, 1024, 100_000_000)
    assert plan.cache_bytes <= plan.room and 0 < plan.requests <= plan.window_pages // 2


def test_the_server_sizes_its_pools_by_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own sums over our sizes, without a server."""
    from sglang_dsv4 import host

    schedule = SimpleNamespace(chunked_prefill_size=memory_plan.CHUNK)
    monkeypatch.setattr(host, "get_schedule", lambda: schedule)
    sizing = object.__new__(host.PoolSizing)
    sizing.cache = CacheSizes(FLASH, 2)
    kinds = {4: LayerKind.CSA, 128: LayerKind.HCA}
    layers = {
        ratio: [i for i, found in enumerate(FLASH.layer_kinds) if found is kind]
        for ratio, kind in kinds.items()
    }
    given = dict(attn_head_dim=512, indexer_head_dim=128, num_layers_total=43, page_size=PAGE)
    given |= dict(stage_owner_layers=layers, ring_sizes={4: 8, 128: 1}, encoder_replay=False)
    given |= dict(_unified=False, swa_cap_tokens=None, swa_ratio=0.1, operator_swa_ratio=0.1)
    given |= dict(requested_max_running_requests_per_worker=256, disaggregation_mode="null")
    given |= dict(online_c128_mtp_max_draft_tokens=0, context_len=1 << 20, sliding_window_size=128)
    given |= dict(request_window_bytes=0, c4_shrink_factor=1, _unified_fp8=False)
    vars(sizing).update(given)
    sizing.bytes_per_swa_token = sizing._get_bytes_per_swa_token()
    sizing.bytes_per_full_token = sizing._get_bytes_per_full_token()
    assert sizing.bytes_per_swa_token * PAGE == sizing.cache.window_page
    assert sizing.bytes_per_full_token == pytest.approx(
        sizing.cache.token + 0.1 * sizing.cache.window_page / PAGE
    )
    plan = Plan(0, sizing.cache, 1 << 20, 100 * GIB, fraction=1.0)
    monkeypatch.setenv("SGLANG_OPT_USE_ONLINE_COMPRESS", "1")  # as the plugin does
    states = sizing._get_c128_state_fixed_bytes(memory_plan.RUNNING_REQUESTS)
    assert states == (memory_plan.RUNNING_REQUESTS + memory_plan.OTHER_SLOTS) * plan.cache.slot
    monkeypatch.setattr(sizing, "_get_low_ratio_kv_padding_bytes", lambda _: 0)  # V4 has no such
    found = sizing.calculate_pool_sizes(plan.room, PAGE)
    # The server forgets the null pages, of which there is one of each kind.
    assert 0 <= found.max_total_num_tokens // PAGE - plan.pages <= 8
    assert 0 <= found.swa_max_total_num_tokens // PAGE - plan.window_pages <= 1
