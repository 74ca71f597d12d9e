"""Batches as a server would describe them, and the same in plain Python, for build_metadata."""

import random
from dataclasses import dataclass

import torch

from naive_attention import on_device
from sglang_dsv4.attention.cache import PAGE
from sglang_dsv4.attention.metadata import Batch

WINDOW = 128
POOL = 40  # pages, of tokens and of window rows
WINDOW_ROWS = POOL * PAGE
EDGES = [0, 1, 2, 3, 4, 5, 7, 8, 9, 126, 127, 128, 129, 130, 255, 256, 257, 384, 511, 512, 600]


@dataclass(frozen=True)
class Sequence:
    """One request of a batch, in plain Python."""

    slot: int
    prefix: int
    new: int
    pages: tuple[int, ...]  # token pages, in the order of the sequence
    window_pages: tuple[int, ...]  # their window pages, 0 where evicted

    def window_row(self, position: int) -> int:
        if position < 0 or not self.pages:
            return 0
        page = self.window_pages[position // PAGE]
        return page * PAGE + position % PAGE if page else 0

    def entry(self, number: int, ratio: int) -> int:
        if not self.pages:
            return 0
        per_page = PAGE // ratio
        return self.pages[number // per_page] * per_page + number % per_page


def random_batch(seed: int) -> tuple[list[Sequence], Batch]:
    """Several requests out of step, pages in any order, old window pages evicted, padding."""
    rng = random.Random(seed)
    pages, window_pages = list(range(1, POOL)), list(range(1, POOL))
    rng.shuffle(pages)
    rng.shuffle(window_pages)
    slots = rng.sample(range(1, 20), 6)
    decode = rng.random() < 0.3
    sequences = []
    for _ in range(rng.randint(1, 6)):
        if rng.random() < 0.2:
            sequences.append(Sequence(0, 0, 1, (), ()))
            continue
        prefix = rng.choice([rng.choice(EDGES), rng.randint(0, 700)])
        new = 1 if decode else rng.choice([rng.choice(EDGES), rng.randint(0, 300)])
        count = -(-(prefix + new) // PAGE)
        seen_from = max(prefix + 1 - WINDOW, 0) // PAGE
        windows = [window_pages.pop() for _ in range(count)]
        evicted = [0 if n < seen_from and rng.random() < 0.7 else w for n, w in enumerate(windows)]
        mine = tuple(pages.pop() for _ in range(count))
        sequences.append(Sequence(slots.pop(), prefix, new, mine, tuple(evicted)))
    longest = max(1, *(s.prefix + s.new for s in sequences))
    return sequences, batch_of(sequences, rng.choice([longest, longest + 1, 1536]))


def batch_of(sequences: list[Sequence], max_len: int) -> Batch:
    table = torch.zeros(len(sequences), -(-max_len // PAGE), dtype=torch.int64)
    window_map = torch.zeros(POOL * PAGE + 1, dtype=torch.int64)
    for number, sequence in enumerate(sequences):
        table[number, : len(sequence.pages)] = torch.tensor(sequence.pages, dtype=torch.int64)
        for position in range(len(sequence.pages) * PAGE):
            slot = sequence.pages[position // PAGE] * PAGE + position % PAGE
            window_map[slot] = sequence.window_row(position)
    spans = [(s.prefix, s.prefix + s.new) for s in sequences]
    new = torch.tensor([s.new for s in sequences])
    batch = Batch(
        positions=torch.cat([torch.arange(*span) for span in spans]),
        request=torch.arange(len(sequences)).repeat_interleave(new),
        request_slots=torch.tensor([s.slot for s in sequences]),
        prefix_lens=torch.tensor([s.prefix for s in sequences]),
        new_lens=new,
        page_table=table,
        window_map=window_map,
        max_len=max_len,
    )
    return on_device(batch)


def tokens_of(sequences: list[Sequence]) -> list[tuple[Sequence, int]]:
    """(request, position) of every new token."""
    return [(s, p) for s in sequences for p in range(s.prefix, s.prefix + s.new)]
