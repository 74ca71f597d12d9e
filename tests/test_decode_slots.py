"""decode_slots against a description of it request by request."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from op_checks import MACHINE, assert_stays_on_device, implementations
from sglang_dsv4 import warmup

PAGE = 256
Op = Callable[..., torch.Tensor]


@pytest.fixture(params=implementations("decode_slots"))
def op(request: pytest.FixtureRequest) -> Op:
    return request.param


@dataclass(frozen=True)
class Step:
    """The arguments of a call, on the machine."""

    req_to_token: torch.Tensor
    window_map: torch.Tensor
    request_slots: torch.Tensor
    seq_lens: torch.Tensor
    pages: torch.Tensor
    window_pages: torch.Tensor

    def run(self, op: Op) -> torch.Tensor:
        return op(*vars(self).values(), page=PAGE)

    def copy(self) -> "Step":
        return replace(self, **{name: tensor.clone() for name, tensor in vars(self).items()})


def step(
    lengths: list[int], *, context: int = 1024, free: int | None = None, seed: int = 0
) -> Step:
    """Requests of these lengths, whose pages lie anywhere. free: pages that nobody holds; as many
    as are needed where None."""
    rng = random.Random(seed)
    begun = sum(length % PAGE == 0 for length in lengths)
    free = begun if free is None else free
    held = sum(-(-length // PAGE) for length in lengths)
    pages, windows = (rng.sample(range(1, held + free + 9), held + free) for _ in range(2))
    table = torch.zeros(len(lengths) + 3, context, dtype=torch.int32)
    window_map = torch.zeros((held + free + 9) * PAGE + 1, dtype=torch.int64)
    rows = rng.sample(range(1, len(table)), len(lengths))
    within = torch.arange(PAGE)
    for row, length in zip(rows, lengths, strict=True):
        for start in range(0, length, PAGE):
            count = min(PAGE, length - start)
            slots = pages.pop() * PAGE + within[:count]
            table[row, start : start + count] = slots
            window_map[slots] = windows.pop() * PAGE + within[:count]
    lists = (torch.tensor(each, dtype=torch.int64) for each in (rows, lengths, pages, windows))
    return Step(*(each.to(MACHINE.device) for each in (table, window_map, *lists)))


def by_hand(given: Step) -> Step:
    """Step by step in plain Python, with the returned slots in the place of pages."""
    after, slots = given.copy(), []
    pages, windows = given.pages.tolist(), given.window_pages.tolist()
    for row, length in zip(given.request_slots.tolist(), given.seq_lens.tolist(), strict=True):
        if length % PAGE == 0:
            slot, window = pages.pop(0) * PAGE, windows.pop(0) * PAGE
        else:
            last = int(given.req_to_token[row, length - 1])
            slot, window = last + 1, int(given.window_map[last]) + 1
        slots.append(slot)
        after.req_to_token[row, length] = slot
        after.window_map[slot] = window
    return replace(after, pages=torch.tensor(slots, dtype=torch.int64))


def check(op: Op, given: Step) -> None:
    wanted, before = by_hand(given), given.copy()
    slots = given.run(op)
    assert slots.dtype == torch.int64 and slots.tolist() == wanted.pages.tolist()
    assert torch.equal(given.req_to_token, wanted.req_to_token)
    assert torch.equal(given.window_map, wanted.window_map)
    for name in ("request_slots", "seq_lens", "pages", "window_pages"):
        assert torch.equal(getattr(given, name), getattr(before, name)), name


LENGTHS = {
    "one goes on": [700],
    "one begins": [512],
    "first of all": [0, 1, 255, 256, 257],
    "all begin": [256] * 9,
    "none begins": [3, 259, 1023, 511],
    "none": [],
}


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("free", [None, 40])
def test_equals_the_loop(op: Op, name: str, free: int | None) -> None:
    check(op, step(LENGTHS[name], free=free))


@pytest.mark.parametrize("requests", [2, 64, 255, 256, 257, 600])
def test_equals_the_loop_of_many(op: Op, requests: int) -> None:
    """More than one program's block, too; a third of them begin a page."""
    rng = random.Random(requests)
    lengths = [rng.choice([256, 512, rng.randint(1, 767)]) for _ in range(requests)]
    check(op, step(lengths, free=requests + 5, seed=requests))


def test_tables_of_any_width_and_lists_from_any_place(op: Op) -> None:
    """Free lists are cut at any element, so addresses are no multiples of 16 bytes."""
    given = step([256, 5, 512], context=1029, free=9)
    for cut in range(3):
        cuts = {name: getattr(given, name)[cut:] for name in ("pages", "window_pages")}
        check(op, replace(given.copy(), **cuts))


def test_stays_on_device(op: Op) -> None:
    """Nothing is read on the host."""
    assert_stays_on_device(op, *vars(step([256, 3])).values(), page=PAGE)


def test_one_launch_of_one_variant() -> None:
    """Whatever the batch and the free lists, so that it is compiled once, ahead."""
    from sglang_dsv4 import kernels_triton_slots

    with warmup.recorded() as found:
        for lengths in ([256], [1, 2], [256] * 16, [3] * 300):
            step(lengths, free=len(lengths)).run(kernels_triton_slots.decode_slots)
    assert {launch.kernel.__name__ for launch in found.values()} == {"_decode_slots_kernel"}
    options = {tuple(launch.options.items()) for launch in found.values()}
    assert len(options) == 1
    for parameter in getattr(next(iter(found.values())).kernel, "params", ()):
        assert (
            parameter.is_constexpr
            or parameter.do_not_specialize
            or parameter.do_not_specialize_on_alignment
        ), parameter.name


# ---- on a GPU ----


@pytest.mark.gpu((8, 0))
def test_token_slots_beyond_two_gigabytes(op: Op) -> None:
    """A table of more than 2^31 tokens, and window rows at the end of a map as long."""
    given = step([700, 512, 300], free=4)
    shift = (1 << 31) // PAGE - len(given.window_map) // PAGE - 1
    large = torch.zeros(shift * PAGE + len(given.window_map), dtype=torch.int64, device="cuda")
    large[shift * PAGE :] = given.window_map
    context = 1 << 20
    table = torch.zeros(2100, context, dtype=torch.int32, device="cuda")
    rows = torch.tensor([2099, 2050, 2060], device="cuda")
    for row, old, length in zip(rows, given.request_slots, given.seq_lens, strict=True):
        table[row, :length] = given.req_to_token[old, :length] + shift * PAGE
    moved = replace(given, window_map=large, req_to_token=table, request_slots=rows)
    moved = replace(moved, pages=given.pages + shift)
    slots = moved.run(op)
    again = given.copy().run(op)
    assert slots.tolist() == (again + shift * PAGE).tolist()
    for row, length, slot in zip(rows, given.seq_lens, slots, strict=True):
        assert table[row, length] == slot
