"""DecodeSlots against SGLang's own function: all that a step leaves behind, bit for bit."""

import random
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import allocation

from allocation_world import PAGE, World, change, use_own_page_size
from op_checks import MACHINE, implementations
from sglang_dsv4 import host_slots, plugin
from sglang_dsv4.backends import Machine, choose
from sglang_dsv4.host_slots import DecodeSlots
from sglang_dsv4.served.deepseek_v4 import DeepseekV4ForCausalLM

native = allocation.alloc_for_decode_default


@pytest.fixture(params=implementations("decode_slots"))
def ours(request: pytest.FixtureRequest) -> DecodeSlots:
    return DecodeSlots(request.param)


@pytest.fixture(autouse=True)
def page_size(monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_page_size(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def functions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's table, as it was before and is afterwards."""
    table = allocation.ALLOC_FOR_DECODE_FUNCS.copy()
    monkeypatch.setattr(allocation, "ALLOC_FOR_DECODE_FUNCS", table)
    table.clear()
    yield table


def pair(**sizes: Any) -> list[World]:
    return [World(MACHINE.device, **sizes) for _ in range(2)]


def assert_alike(worlds: list[World]) -> None:
    wanted, found = (world.state() for world in worlds)
    for name, value in wanted.items():
        same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
        assert same(found[name], value), name


def step(worlds: list[World], ours: DecodeSlots) -> str | None:
    """One step of each world: by SGLang's function, by ours. The error, where memory is out."""
    said: list[str] = []
    slots = []
    for world, allocate in zip(worlds, (native, ours), strict=True):
        try:
            slots.append(world.step(allocate))
        except RuntimeError as error:
            assert type(error) is RuntimeError
            said.append(str(error))
    assert_alike(worlds)
    if said:
        assert len(said) == 2 and said[0] == said[1] and "Decode out of memory" in said[0]
        return said[0]
    assert slots[0].dtype == slots[1].dtype and torch.equal(*slots)
    return None


SIZES = {"ample": (300, 280), "few windows": (240, 70), "few": (75, 72), "hardly any": (26, 24)}


@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_random_batches(ours: DecodeSlots, size: str, need_sort: bool) -> None:
    """Up to 64 requests that join, cross pages and leave, until memory is out at the latest."""
    pages, window_pages = SIZES[size]
    ends, steps = [], 0
    for seed in range(4):
        worlds = pair(pages=pages, window_pages=window_pages, need_sort=need_sort)
        for number in range(60):
            for world in worlds:
                change(world, random.Random(100 * seed + number), most=(1, 5, 64, 64)[seed])
            if worlds[0].requests:
                steps += 1
                if (end := step(worlds, ours)) is not None:
                    ends.append(end)
                    break
    assert steps > 30
    assert not ours.told, "some went to SGLang's own function"
    logs = [entry for world in worlds for entry in world.tree.log]
    assert ("evict" in str(logs)) == (size != "ample")


# ---- memory is short, or out ----


def full_of(lengths: list[int], free: tuple[int, int], need_sort: bool = False) -> list[World]:
    """Requests of these lengths, with so many pages of both kinds left."""
    used = sum(-(-length // PAGE) for length in lengths)
    pages, window_pages = (used + each for each in free)
    worlds = pair(pages=pages, window_pages=window_pages, need_sort=need_sort)
    for world in worlds:
        assert all(world.open(length) for length in lengths)
    return worlds


@pytest.mark.parametrize("free", [(2, 2), (1, 2), (2, 1), (1, 1), (0, 0), (5, 0), (0, 5)])
def test_out_of_memory(ours: DecodeSlots, free: tuple[int, int]) -> None:
    """Of pages, of window pages, of both: the same words, the same pages left."""
    worlds = full_of([256, 3, 256], free)
    assert (step(worlds, ours) is None) == (free == (2, 2))
    said = worlds[1].tree.log
    assert said[1] == ("evict", *(768 - PAGE * each if each < 3 else 0 for each in free))
    assert ("printed" in said) == (free != (2, 2))


@pytest.mark.parametrize("pages", [3, 12])
def test_freed_pages_are_sorted_in_where_requests_outnumber_the_others(
    ours: DecodeSlots, pages: int
) -> None:
    """Also in a step in which none begins a page."""
    worlds = full_of([10, 20, 30, 512, 512], (pages - 2, pages - 2), need_sort=True)
    for world in worlds:
        world.close(4, keep=False)
        world.close(3, keep=False)
        assert len(world.allocator.full_attn_allocator.free_pages) == pages - 2
    assert step(worlds, ours) is None
    staged = worlds[1].allocator.full_attn_allocator.num_staged_pages
    assert staged == (0 if pages == 3 else 4)


def test_free_pages_are_not_touched_where_none_is_begun(ours: DecodeSlots) -> None:
    (world, _) = full_of([255, 257, 300], (4, 4))
    pools = (world.allocator.full_attn_allocator, world.allocator.swa_attn_allocator)
    before = [pool.free_pages for pool in pools]
    world.step(ours)
    assert all(pool.free_pages is one for pool, one in zip(pools, before, strict=True))
    world.step(ours)
    assert [len(pool.free_pages) for pool in pools] == [3, 3]


def test_what_the_table_keeps_beside_grows_or_all_is_undone(ours: DecodeSlots) -> None:
    worlds = full_of([256, 300], (3, 3))
    given: list[list[int]] = []
    for world in worlds:
        world.table._aux_cache = SimpleNamespace(
            alloc_to_lengths=lambda req_pool_indices_cpu, target_seq_lens_cpu: given.append(
                req_pool_indices_cpu.tolist() + target_seq_lens_cpu.tolist()
            )
        )
    step(worlds, ours)
    assert len(given) == 2 and given[0] == given[1] and given[0][2:] == [257, 301]

    def full(**_: Any) -> None:
        raise MemoryError("no room")

    for world, allocate in zip(worlds, (native, ours), strict=True):
        world.table._aux_cache = SimpleNamespace(alloc_to_lengths=full)
        with pytest.raises(MemoryError, match="no room"):
            world.step(allocate)
    assert_alike(worlds)


# ---- what is left to SGLang ----


def ring(world: World, batch: Any) -> None:
    world.allocator._swa_req_ring = True


def debugged(world: World, batch: Any) -> None:
    world.allocator.swa_attn_allocator.debug_mode = True


def of_another_class(world: World, batch: Any) -> None:
    world.allocator.__class__ = type("Other", (type(world.allocator),), {})


def pool_of_another_class(world: World, batch: Any) -> None:
    pool = world.allocator.full_attn_allocator
    pool.__class__ = type("Other", (type(pool),), {})


def table_of_another_class(world: World, batch: Any) -> None:
    world.table.__class__ = type("Other", (type(world.table),), {})


def encoder_decoder(world: World, batch: Any) -> None:
    batch.model_config.is_encoder_decoder = True


def pages_of_one_token(world: World, batch: Any) -> None:
    world.allocator.page_size = world.tree.page_size = 1


def pages_of_two_sizes(world: World, batch: Any) -> None:
    world.tree.page_size = 64


CASES = (
    *(ring, debugged, of_another_class, pool_of_another_class, table_of_another_class),
    *(encoder_decoder, pages_of_one_token, pages_of_two_sizes),
)


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("case", [None, *CASES])
def test_other_cases_are_left_to_sglang(
    case: Any, tokens: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(allocation, "alloc_for_decode_default", lambda *given: given)
    (world, _) = full_of([256, 3], (3, 3))
    batch, ours = world.batch(), DecodeSlots(lambda *_, **__: "placed")
    if case is not None:
        case(world, batch)
    plain = case is None and tokens == 1
    for _ in range(2):
        assert ours(batch, tokens) == ("placed" if plain else (batch, tokens))
    assert ("windows" in world.tree.log) == plain  # once, by whoever places
    assert sum("no plain case" in line for line in caplog.messages) == (not plain)


# ---- where it is put ----

CPU = choose(Machine("cpu", "CPU", None))


def test_it_serves_the_device_of_the_model(functions: dict[str, Any]) -> None:
    assert host_slots.register(CPU) is None
    assert list(functions) == ["cpu"] and functions["cpu"].op is CPU.decode_slots
    first = functions["cpu"]
    assert host_slots.register(CPU) is None and functions["cpu"] is not first


def test_another_s_function_stays(functions: dict[str, Any]) -> None:
    functions["cpu"] = print
    told = host_slots.register(CPU)
    assert told is not None and "is there already" in told and functions["cpu"] is print


def test_another_source_is_left_in_place(
    functions: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other(self: Any, indices: Any, values: Any) -> None:
        self.req_to_token[indices] = values + 1

    monkeypatch.setattr(host_slots, "REPLACED", (*host_slots.REPLACED[:-1], other))
    plugin._place_new_tokens(CPU)
    (line,) = caplog.messages
    assert line.startswith("sglang-dsv4: SGLang's own function places new tokens: its source is")
    assert not functions


def test_what_is_gone_is_told(
    functions: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in an SGLang that lacks a name."""
    monkeypatch.setattr(host_slots, "REPLACED", None)
    plugin._place_new_tokens(CPU)
    monkeypatch.delattr("sglang_dsv4.host_slots")
    monkeypatch.setitem(sys.modules, "sglang_dsv4.host_slots", None)
    plugin._place_new_tokens(CPU)
    assert len(caplog.messages) == 2 and not functions
    assert all("SGLang's own function places" in line for line in caplog.messages)


def test_other_models_keep_sglang_s(
    functions: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the hooks nor a runner of another model put it there, only one of ours does."""
    plugin.self_check()
    with pytest.raises(SystemExit):
        plugin._create_backend(SimpleNamespace(model=object()))
    assert not functions
    model = DeepseekV4ForCausalLM.__new__(DeepseekV4ForCausalLM)
    torch.nn.Module.__init__(model)
    model.ops = CPU
    monkeypatch.setattr("sglang_dsv4.attention.backend.DSV4Backend", lambda runner: runner)
    runner = SimpleNamespace(model=model)
    assert plugin._create_backend(runner) is runner
    assert isinstance(functions["cpu"], DecodeSlots)
