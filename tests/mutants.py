"""Faults that we plant in our own code, to see that a served test notices each of them.

A mutant reaches the server's processes as a second SGLang plugin: `mutant_plugin` on PYTHONPATH has
a .dist-info whose entry point is `plant` below. The product knows nothing of it.

    python tests/mutants.py            # plants each, runs its test, prints the table
    python tests/mutants.py NAME ...   # some of them
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CHOSEN = "DSV4_TEST_MUTANT"
REFERENCE = "tests/served/test_reference.py::test_a_few_prompts_equal_the_reference"
PATHS = "tests/served/test_paths.py::"


@dataclass(frozen=True)
class Mutant:
    """A planted fault: what is wrong, the served test that must notice, and how to plant it."""

    fault: str
    test: str
    plant: Callable[[], None]


def wrap(module: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace module.name by change(original, *arguments)."""
    original = getattr(module, name)
    setattr(module, name, lambda *args, **options: change(original, *args, **options))


def drop_sink() -> None:
    from sglang_dsv4.attention import reference

    def attend(original, q, cache, keys, sink, *rest, **options):
        return original(q, cache, keys, sink.new_full(sink.shape, float("-inf")), *rest, **options)

    wrap(reference, "sparse_attention", attend)


def change_window(by: int) -> Callable[[], None]:
    def plant() -> None:
        from sglang_dsv4.attention import reference_metadata

        def window_list(original, batch, window):
            return original(batch, window + by)

        wrap(reference_metadata, "_window_list", window_list)

    return plant


def yarn_everywhere() -> None:
    from sglang_dsv4.attention import layer
    from sglang_dsv4.config import LayerKind

    def frequencies(original, config, kind):
        if kind is LayerKind.SWA:
            return original(replace(config, compress_rope_theta=config.rope_theta), LayerKind.CSA)
        return original(config, kind)

    wrap(layer, "rope_frequencies", frequencies)


def lose_overlap() -> None:
    from sglang_dsv4.attention import metadata, reference_metadata

    def plan(original, *args):
        csa = original(*args)
        position = csa.position.clone()
        position[:, : metadata.CSA] = -1
        return replace(csa, position=position)

    wrap(reference_metadata, "_csa_plan", plan)


def drop_clamp() -> None:
    from sglang_dsv4.moe import reference

    wrap(reference, "swiglu", lambda original, x, *, limit: original(x, limit=float("inf")))


def keep_hca_state(where: Callable[[Any], Any]) -> Callable[[], None]:
    """The first window of the chosen requests goes on from what lies in the request's slot."""

    def plant() -> None:
        from sglang_dsv4.attention import metadata, reference_metadata

        def plan(original, batch, first_row):
            hca = original(batch, first_row)
            kept = where(batch) | (batch.prefix_lens % metadata.HCA != 0)
            last = (batch.prefix_lens + batch.new_lens - 1) // metadata.HCA
            first = hca.last_segment - (last - batch.prefix_lens // metadata.HCA)
            slots = batch.request_slots.masked_fill(~kept, 0)
            return replace(
                hca,
                carried=hca.carried.scatter(0, first, kept),
                carried_slot=hca.carried_slot.scatter(0, first, slots),
            )

        wrap(reference_metadata, "_hca_plan", plan)

    return plant


def shift_hash_table() -> None:
    from sglang_dsv4.moe import reference

    def route(original, logits, token_ids, table, **options):
        return original(logits, (token_ids + 1) % table.shape[0], table, **options)

    wrap(reference, "route_hashed", route)


MUTANTS = {
    "sink_dropped": Mutant("attention without its sink", REFERENCE, drop_sink),
    "window_short": Mutant("a window of 127 tokens", REFERENCE, change_window(-1)),
    "window_long": Mutant("a window of 129 tokens", REFERENCE, change_window(1)),
    "yarn_on_swa": Mutant("YaRN on window-only layers", REFERENCE, yarn_everywhere),
    "overlap_lost": Mutant("CSA entries without the window before", REFERENCE, lose_overlap),
    "clamp_off": Mutant("SwiGLU without its clamp", REFERENCE, drop_clamp),
    "hca_reset_forgotten": Mutant(
        "HCA windows that never start afresh",
        PATHS + "test_decode_runs_through_whole_hca_windows",
        keep_hca_state(lambda batch: batch.prefix_lens % 128 == 0),
    ),
    "slot_state_kept": Mutant(
        "a new request takes over the HCA state in its slot",
        PATHS + "test_a_reused_slot_starts_clean",
        keep_hca_state(lambda batch: batch.prefix_lens == 0),
    ),
    "hash_table_shifted": Mutant("hash table off by one", REFERENCE, shift_hash_table),
}


def mutant_environment(name: str | None) -> dict[str, str]:
    """Environment variables that plant a mutant in a server; none without a name."""
    if name is None:
        return {}
    if name not in MUTANTS:
        raise ValueError(f"unknown mutant {name!r}; known: {', '.join(MUTANTS)}")
    return {CHOSEN: name, "PYTHONPATH": f"{HERE / 'mutant_plugin'}:{HERE}"}


def plant() -> None:
    """Entry point of the mutant plugin; SGLang would go on after an exception, so stop instead."""
    try:
        MUTANTS[os.environ[CHOSEN]].plant()
    except BaseException as error:
        raise SystemExit(f"the mutant could not be planted: {error!r}") from error


def run(name: str) -> tuple[str, float]:
    """The outcome of a mutant's test, and how long it took."""
    started = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--mutant", name, MUTANTS[name].test]
    result = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True)
    # 1: a test failed. Anything else than a failed assertion proves nothing.
    noticed = result.returncode == 1 and "AssertionError" in result.stdout
    outcome = "noticed" if noticed else "NOT noticed" if result.returncode == 0 else "broken"
    if outcome == "broken":
        print(result.stdout[-3000:], result.stderr[-1000:])
    return outcome, time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Plant faults; a named served test must notice each."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MUTANTS)}")
    names = parser.parse_args().names or list(MUTANTS)
    for name in names:
        mutant_environment(name)
    row = "{:<22}{:<52}{:<13}{:>7}  {}".format
    print(row("mutant", "fault", "outcome", "seconds", "test"))
    bad = 0
    for name in names:
        outcome, seconds = run(name)
        bad += outcome != "noticed"
        mutant = MUTANTS[name]
        print(row(name, mutant.fault, outcome, round(seconds), mutant.test), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
