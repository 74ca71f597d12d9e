#!/usr/bin/env python3
"""Times tiles of the routed experts in four bits on a GPU: python scripts/tune_experts.py --help"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

import torch  # noqa: E402
import triton  # noqa: E402

from sglang_dsv4.bench_timer import microseconds  # noqa: E402
from sglang_dsv4.dequant import MXFP4_GROUP, NVFP4_GROUP  # noqa: E402
from sglang_dsv4.moe import kernels_triton_fp4 as kernels  # noqa: E402
from sglang_dsv4.moe.kernels_triton_experts import Tiles  # noqa: E402
from sglang_dsv4.warmup import build_all, recorded  # noqa: E402
from timings_moe import SHAPES, fp4_inputs  # noqa: E402

FAILED, USAGE = 1, 2
DESCRIPTION = """\
Both products of routed_experts_fp4, with each candidate tile, at each number of tokens: median
microseconds with a cold L2, the fastest first; `now` is what `_FP4.tiles` chooses. Every result is
compared with that one's: another tile adds in another order, so it may differ by 1e-5 of the
largest number.
"""
EPILOG = """\
  python scripts/tune_experts.py --tokens 1 8 64
  python scripts/tune_experts.py --shape "pro, a rank of 8" --tokens 512 4096 --json tiles.json
  python scripts/tune_experts.py --list            # the candidates, on any machine

exit codes: 0 all candidates that fit were right, 1 one was not, 2 no GPU, or a wrong command line
"""
GROUPS = {"mxfp4": MXFP4_GROUP, "nvfp4": NVFP4_GROUP}
TOLERANCE = 1e-5
# Columns, warps, registers; stages. Which, by rows, and those by the average of an expert's pairs.
SMALL = [(32, 2, None), (64, 4, None), (128, 4, None)], (3, 4, 5)
LARGE = [(64, 4, None), (128, 4, None), (128, 8, None), (128, 8, 128)], (2, 3, 4)


def candidates(average: float) -> Iterator[Tiles]:
    """Those with neither far more rows than an expert has pairs, nor far fewer."""
    for rows in (8, 16, 32, 64, 128):
        if not (rows <= 16 if average <= 2 else average / 4 <= rows <= 2 * average + 8):
            continue
        for (columns, warps, registers), stages in product(*SMALL if rows <= 16 else LARGE):
            if registers is None or rows >= 64:
                yield Tiles(rows, columns, warps, stages, registers=registers)


def chosen(tiles: Tiles) -> Any:
    """Within it the op uses these tiles."""
    return mock.patch.object(kernels._FP4, "tiles", staticmethod(lambda *_: tiles))


def compile_all(inputs: tuple[Any, ...], tiles: Sequence[Tiles]) -> None:
    """All candidates beside each other; what does not fit fails again where it is launched."""
    with recorded() as found:
        for one in tiles:
            with chosen(one):
                kernels.routed_experts_fp4(*inputs, limit=10.0)
    build_all([(each.kernel.__name__, each.compile) for each in found.values()], lambda _: None)
    for each in found.values():
        each.forget()


def tuned(shape: str, group: int, tokens: int) -> list[dict[str, Any]]:
    """Rows: tiles, microseconds or the reason why there are none, and the error; fastest first."""
    size = SHAPES[shape]
    inputs = fp4_inputs(tokens, size, group)
    average = tokens * size.top_k / size.experts
    now = kernels._FP4.tiles(average, 2)
    every = list(dict.fromkeys([now, *candidates(average)]))
    compile_all(inputs, every)
    expected = kernels.routed_experts_fp4(*inputs, limit=10.0)
    rows: list[dict[str, Any]] = []
    for tiles in every:
        row: dict[str, Any] = {"tokens": tokens, "tiles": vars(tiles), "now": tiles == now}
        try:
            with chosen(tiles):
                result = kernels.routed_experts_fp4(*inputs, limit=10.0)
                row["error"] = float((result - expected).abs().max() / expected.abs().max())
                row["us"] = round(
                    microseconds(lambda: kernels.routed_experts_fp4(*inputs, limit=10.0), "cuda"), 1
                )
        except Exception as error:  # too much shared memory, say
            row["why"] = f"{type(error).__name__}: {error}"[:100]
        rows.append(row)
    return sorted(rows, key=lambda row: row.get("us", float("inf")))


def line(row: dict[str, Any]) -> str:
    tiles = row["tiles"]
    shown = (
        f"{row['tokens']:>6} tokens  {tiles['rows']:>3} x {tiles['columns']:>3},"
        f" {tiles['warps']} warps, {tiles['stages']} stages"
    )
    if tiles["registers"]:
        shown += f", {tiles['registers']} registers"
    found = f"{row['us']:>9} us  off by {row['error']:.0e}" if "us" in row else f"  {row['why']}"
    return f"{shown} {found}{'  now' if row['now'] else ''}"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--shape", choices=tuple(SHAPES), default="flash", help="(default: flash)")
    made.add_argument("--format", choices=tuple(GROUPS), default="mxfp4", help="(default: mxfp4)")
    made.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 64, 128, 512, 4096],
                      metavar="N", help="(default: 1 8 16 64 128 512 4096)")  # fmt: skip
    made.add_argument("--best", type=int, default=6, metavar="N", help="rows shown (default: 6)")
    made.add_argument("--json", type=Path, metavar="FILE", help="all rows, as they come")
    made.add_argument("--list", action="store_true", help="only name the candidates")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    size = SHAPES[arguments.shape]
    if arguments.list:
        for tokens in arguments.tokens:
            for tiles in candidates(tokens * size.top_k / size.experts):
                print(tokens, tiles)
        return 0
    if not torch.cuda.is_available():
        print("tune_experts: needs an NVIDIA GPU, but for --list", file=sys.stderr)
        return USAGE
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    found: list[dict[str, Any]] = []
    for tokens in arguments.tokens:
        rows = tuned(arguments.shape, GROUPS[arguments.format], tokens)
        shown = [row for place, row in enumerate(rows) if place < arguments.best or row["now"]]
        print("\n".join(map(line, shown)), flush=True)
        found += rows
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
        torch.cuda.empty_cache()
    wrong = [row for row in found if row.get("error", 0) > TOLERANCE]
    for row in wrong:
        print(f"WRONG: {line(row)}")
    return FAILED if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
