"""build_metadata's kernels beyond the op's own tests: all integers of the reference, real sizes."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_checks import is_interpreting
from naive_attention import on_device, tensors_of
from op_checks import MACHINE, implementations, thorough
from sglang_dsv4 import warmup
from sglang_dsv4.attention import kernels_triton_metadata as kernels
from sglang_dsv4.attention import reference_metadata as reference
from sglang_dsv4.attention.cache import PAGE
from sglang_dsv4.attention.metadata import Batch

WINDOW = 128
Part = tuple[int, int]  # tokens of a request that were computed before, and new ones


def forward(parts: list[Part], *, max_len: int = 1, padding: int = 0, seed: int = 0) -> Batch:
    """One forward of these requests, whose pages lie anywhere; some window pages are evicted.

    max_len: a bound beyond the longest request; padding: requests to add that are nobody's.
    """
    generator = torch.Generator().manual_seed(seed)
    prefix, new = torch.tensor([*parts, *[(0, 1)] * padding]).long().view(-1, 2).unbind(1)
    end, requests = prefix + new, len(parts) + padding
    max_len = max([max_len, *end.tolist()])
    used = -(-end // PAGE)
    used[len(parts) :] = 0
    has_page = torch.arange(-(-max_len // PAGE)) < used.unsqueeze(1)
    count = int(used.sum())
    table = torch.zeros(has_page.shape, dtype=torch.int64)
    table[has_page] = torch.randperm(count, generator=generator) + 1
    # Window pages that no new token sees are gone, but for some.
    window_pages = torch.zeros(count + 1, dtype=torch.int64)
    window_pages[1:] = torch.randperm(count, generator=generator) + 1
    unseen = torch.arange(table.shape[1]) < ((prefix + 1 - WINDOW) // PAGE).unsqueeze(1)
    unseen &= torch.rand(table.shape, generator=generator) < 0.7
    window_pages[table[unseen]] = 0
    rows = window_pages.unsqueeze(1) * PAGE + torch.arange(PAGE)
    spans = zip(prefix.tolist(), end.tolist(), strict=True)
    return on_device(
        Batch(
            positions=torch.cat([torch.zeros(0).long(), *(torch.arange(*span) for span in spans)]),
            request=torch.arange(requests).repeat_interleave(new),
            request_slots=torch.randperm(requests, generator=generator) * (used > 0),
            prefix_lens=prefix.contiguous(),
            new_lens=new.contiguous(),
            page_table=table,
            window_map=rows.masked_fill(window_pages.unsqueeze(1) == 0, 0).flatten(),
            max_len=max_len,
        )
    )


def assert_equal(found: Any, expected: Any, name: str = "metadata") -> None:
    """Dataclasses of tensors and integers, element by element."""
    assert type(found) is type(expected), name
    if is_dataclass(expected):
        for field in fields(expected):
            values = (getattr(one, field.name) for one in (found, expected))
            assert_equal(*values, f"{name}.{field.name}")
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
        assert found.stride() == expected.stride() or found.numel() <= 1, name
        assert torch.equal(found, expected), f"{name}: {(found != expected).nonzero()[:5]}"
    else:
        assert found == expected, name


def check(batch: Batch, *, window: int = WINDOW, op: Any = kernels.build_metadata) -> None:
    options = {"window": window, "window_rows": 1 << 20}
    assert_equal(op(batch, **options), reference.build_metadata(batch, **options))


@pytest.fixture
def set_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags that nobody wrote are true; integers are poison already (conftest.py)."""
    make = torch.empty

    def empty(*args: Any, **options: Any) -> torch.Tensor:
        made = make(*args, **options)
        return made.fill_(True) if made.dtype is torch.bool else made

    monkeypatch.setattr(torch, "empty", empty)


# name -> requests, and what `forward` is told beside them
FORWARDS: dict[str, tuple[list[Part], dict[str, int]]] = {
    "decode, padded": (
        [(10, 1), (127, 1), (128, 1), (255, 1), (256, 1), (0, 1), (899, 1)],
        {"padding": 3, "max_len": 1024},
    ),
    "padding alone": ([], {"padding": 3, "max_len": 1024}),
    "a short prompt": ([(0, 3)], {}),
    "chunks": ([(250, 12), (127, 2), (380, 9)], {"max_len": 401}),
    "a cached prefix": ([(256, 7), (512, 11)], {}),
    "mixed": ([(700, 1), (0, 17), (254, 3), (128, 1)], {}),
    "requests without tokens": ([(128, 0), (100, 3), (0, 0), (77, 0), (255, 1), (384, 0)], {}),
    "no tokens at all": ([(5, 0), (128, 0)], {}),
    "no requests": ([], {}),
    "a long context": ([((1 << 20) - 2, 2), (300, 1)], {}),
}
LONG: dict[str, tuple[list[Part], dict[str, int]]] = {
    "over windows and pages": ([(127, 400), (0, 261)], {}),
}


@pytest.mark.kernels
@pytest.mark.parametrize("name", [*FORWARDS, *map(thorough, LONG)])
def test_every_element_is_that_of_the_reference(name: str, set_flags: None) -> None:
    parts, options = (FORWARDS | LONG)[name]
    check(forward(parts, **options))


@pytest.mark.kernels
@pytest.mark.parametrize("seed", [0, 1, 2, *(thorough(seed) for seed in range(3, 20))])
def test_random_batches(seed: int, set_flags: None) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    parts = [(draw(0, 900), draw(0, 2 + 15 * draw(0, 2))) for _ in range(draw(1, 7))]
    check(forward(parts, padding=draw(0, 3), max_len=draw(1, 2000), seed=seed))


@pytest.mark.kernels
@pytest.mark.parametrize("window", [16, 300])
def test_windows_of_other_sizes(window: int, set_flags: None) -> None:
    """Shorter than a program's columns, and longer."""
    check(forward([(0, 2), (14, 3), (298, 3), (700, 1)]), window=window)


@pytest.mark.kernels
def test_more_requests_than_are_looked_through_at_a_time(
    set_flags: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_interpreting():  # for which 256 requests are many
        monkeypatch.setattr(kernels, "REQUEST_BLOCK", tl.constexpr(4))
    block = kernels.REQUEST_BLOCK.value
    without = [(127 + number % 3, 0) for number in range(2 * block - 1)]
    check(forward([*without, (126, 3), (255, 2), (3, 1)]))


@pytest.mark.kernels
def test_more_segments_than_are_written_at_a_time(set_flags: None) -> None:
    """A request whose chunk spans many, without its tokens: only their lengths are read."""
    batch = forward([(130, 1), (77, 1)])
    plan = kernels._hca_plan(batch)
    count = 2 * kernels.SEGMENT_BLOCK.value + 5
    plan = replace(
        plan,
        segments=count + 9,
        carried=torch.ones(count + 9, dtype=torch.bool, device=MACHINE.device),
        carried_slot=kernels._integers(batch, count + 9),
    )
    batch.new_lens[0] = count * 128 - 130 % 128
    kernels._fill_segments(batch, plan)
    assert plan.last_segment.tolist() == [count - 1, count]
    carried = [0, count]
    assert plan.carried.nonzero().flatten().tolist() == carried
    slots = torch.zeros_like(plan.carried_slot)
    slots[carried] = batch.request_slots
    assert torch.equal(plan.carried_slot, slots)


@pytest.mark.kernels
def test_the_page_table_may_be_part_of_another(set_flags: None) -> None:
    batch = forward([(600, 2), (255, 3)], max_len=900)
    rows, pages = batch.page_table.shape
    wide = torch.full((pages, rows + 3), 99, device=MACHINE.device).long()
    wide[:, 1 : rows + 1] = batch.page_table.t()
    part = wide[:, 1 : rows + 1].t()
    assert part.stride() == (1, rows + 3)
    check(replace(batch, page_table=part))


@pytest.mark.kernels
def test_pages_may_be_missing(set_flags: None) -> None:
    """Entries that would lie in them are the null entry, and their tokens have no window rows."""
    batch = forward([(386, 3), (510, 3), (767, 1)])
    table = batch.page_table.clone()
    table[0, 1], table[1, 0], table[2, 2] = 0, 0, 0
    check(replace(batch, page_table=table))


@pytest.mark.kernels
def test_rows_below_zero_are_none(set_flags: None) -> None:
    batch = forward([(40, 1), (300, 2)])
    gone = torch.arange(batch.window_map.shape[0], device=MACHINE.device) % 3 == 0
    check(replace(batch, window_map=batch.window_map.masked_fill(gone, -1)))


class Operators(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.names.add(str(function.overloadpacket))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("name", FORWARDS)
def test_two_launches_and_nothing_else(name: str) -> None:
    """Whatever the batch: beside them memory is taken, and poisoned by the tests."""
    parts, options = FORWARDS[name]
    batch = forward(parts, **options)
    with warmup.recorded() as launched, Operators() as operators:
        kernels.build_metadata(batch, window=WINDOW, window_rows=1 << 20)
    assert sorted(launch.kernel.__name__ for launch in launched.values()) == [
        "_segment_metadata_kernel",
        "_token_metadata_kernel",
    ]
    assert operators.names <= {"aten.empty", "aten.fill_"}


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["positions", "request_slots", "prefix_lens", "window_map"])
def test_what_is_not_contiguous_is_an_error(name: str) -> None:
    batch = forward([(600, 2), (255, 3)])
    spread = getattr(batch, name).repeat_interleave(2)[::2]
    batch = replace(batch, **{name: spread})
    with pytest.raises(AssertionError):
        kernels.build_metadata(batch, window=WINDOW, window_rows=1 << 20)


# ---- on a GPU, at the model's sizes ----

CONTEXT = 1 << 17
DECODE = [(CONTEXT - 1 - 977 * number, 1) for number in range(64)]
REAL: dict[str, tuple[list[Part], dict[str, int]]] = {
    "decode 1": ([(CONTEXT - 1, 1)], {}),
    "decode 64": (DECODE, {"padding": 8}),
    "decode 512": ([(131 * number, 1) for number in range(512)], {"max_len": CONTEXT}),
    "prefill 8192": ([(0, 8192)], {}),
    "a last chunk": ([(CONTEXT - 8192, 8192)], {}),
    "prefill of many": ([(256 * (n % 5), 1 + 61 * n % 127) for n in range(130)], {}),
    "mixed": ([*DECODE[:20], (1021, 2048), (0, 4096), (300, 0), *DECODE[20:40]], {}),
}


@pytest.mark.gpu((8, 0))
@pytest.mark.parametrize("op", implementations("build_metadata"))
@pytest.mark.parametrize("name", REAL)
def test_real_sizes(op: Any, name: str, set_flags: None) -> None:
    parts, options = REAL[name]
    check(forward(parts, **options), op=op)


@pytest.mark.gpu((8, 0))
def test_a_replay_equals_the_reference() -> None:
    """Captured with padding alone, as a server does, and replayed at other lengths."""
    options: dict[str, int] = {"window": WINDOW, "window_rows": 1 << 20}
    batches = [
        forward([((331 * n + 977 * seed) % 9000, 1) for n in range(60)], padding=4, max_len=9216,
                seed=seed)
        for seed in range(4)
    ]  # fmt: skip
    slots = max(len(batch.window_map) for batch in batches)
    static = forward([], padding=64, max_len=9216)
    static = replace(static, window_map=torch.zeros(slots, dtype=torch.int64, device="cuda"))
    kernels.build_metadata(static, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = kernels.build_metadata(static, **options)
    for batch in batches:
        for name, tensor in tensors_of(batch).items():
            getattr(static, name)[: len(tensor)] = tensor
        graph.replay()
        assert_equal(made, reference.build_metadata(batch, **options))


@pytest.mark.gpu((8, 0))
def test_token_slots_beyond_two_gigabytes() -> None:
    """The same pages at the end of a map of more than 2^31 slots."""
    batch = forward(DECODE[:3])
    shift = (1 << 31) // PAGE
    large = torch.zeros((shift * PAGE) + len(batch.window_map), dtype=torch.int64, device="cuda")
    large[shift * PAGE :] = batch.window_map
    pages = (batch.page_table + shift).masked_fill(batch.page_table == 0, 0)
    check(replace(batch, page_table=pages, window_map=large))
