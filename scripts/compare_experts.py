#!/usr/bin/env python3
"""Compares all that can run the routed experts on a GPU: scripts/compare_experts.py --help"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from sglang_dsv4 import bench_bytes, bench_timer, dequant  # noqa: E402
from sglang_dsv4.backends import PROVIDERS, Machine, Op, Ops, choose, pack_weights  # noqa: E402
from sglang_dsv4.bench_step import preset_config  # noqa: E402
from sglang_dsv4.cli_bench import positive, versions  # noqa: E402
from sglang_dsv4.fp4 import SCALE_OF_ONE, FP4Matrices, dense_values  # noqa: E402
from timings_moe import Shape, chosen_experts  # noqa: E402

FAILED, USAGE = 1, 2
DESCRIPTION = """\
Runs one layer's routed experts by every provider of routed_experts_fp4 that this machine can run,
and by Triton in BF16 with the same values, each in a process of its own and with a time limit. All
get the same tokens and the same matrices; chosen experts are uniform.

  prepare   seconds of packing, with whatever is compiled for it
  first     seconds of the first call, with whatever is compiled for it
  off by    largest relative error of a token, against what Triton makes of the four-bit matrices
  replays   whether a captured graph, given other tokens, makes the bits of an eager call
  us        of a call, the median with a cold L2
  MB        what a call must move at least
  roof      what that makes of its time, as a share of a copy's bandwidth, measured beside it

A provider that this machine cannot run, that fails or runs out of time is a row with the reason.
"""
EPILOG = f"""\
examples:
  python scripts/compare_experts.py --json experts.json
  python scripts/compare_experts.py --shape pro-tp8 --format nvfp4 --tokens 1 64 4096
  python scripts/compare_experts.py --without marlin      its modules take minutes to build, once
  python scripts/compare_experts.py --limit 3000          seconds of each provider

exit codes: 0 all that this machine can run was right, 1 something failed, was off by more than
{2**-7:.4f}, replayed otherwise or was stopped, {USAGE} no GPU, or a wrong command line
"""
GROUPS = {"mxfp4": dequant.MXFP4_GROUP, "nvfp4": dequant.NVFP4_GROUP}
BF16 = "bf16"
LIMIT = 10.0  # of swiglu: that of the models
TOLERANCE = 2**-7  # four roundings to BF16, one after the other
COLUMNS = ("prepare", "first", "off by", "replays", "us", "MB", "roof")
Row = dict[str, Any]


def shape(text: str) -> Shape:
    """ "flash", "pro" or a rank's part of it, "flash-tp8"."""
    found = re.fullmatch(r"(flash|pro)(?:-tp([1-9][0-9]*))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is none of flash, pro, flash-tp8 and so on")
    config, ranks = preset_config(found[1]), int(found[2] or 1)
    width, rest = divmod(config.moe_intermediate_size, ranks)
    if rest or width % 32:
        raise argparse.ArgumentTypeError(
            f"{text}: {config.moe_intermediate_size} channels of an expert do not divide among"
            f" {ranks} ranks by multiples of 32"
        )
    experts, top_k = config.n_routed_experts, config.num_experts_per_tok
    return Shape(config.hidden_size, width, experts, top_k)


def candidates(without: Sequence[str]) -> list[str]:
    """Triton first: its results are what others are compared with."""
    names = [one.name for one in PROVIDERS["routed_experts_fp4"] if one.name != "reference"]
    return [name for name in (*names, BF16) if name not in without]


def refusal(name: str, machine: Machine) -> str | None:
    op, provider = ("routed_experts", "triton") if name == BF16 else ("routed_experts_fp4", name)
    return next(one for one in PROVIDERS[op] if one.name == provider).refuses(machine)


# ---- in a process of its own ----


def matrices(size: Shape, group: int, device: str) -> tuple[FP4Matrices, FP4Matrices]:
    """w13 and w2, the same for every provider. In BF16 their values are exact: factors are powers
    of two, and in MXFP4 one, as there are none."""
    generator, found = torch.Generator(device).manual_seed(0), []
    sizes = (2 * size.width, size.hidden, (1.0, 0.5)), (size.hidden, size.width, (1.0,))
    for rows, columns, factors in sizes:
        with torch.device(device):
            weight = FP4Matrices(size.experts, rows, columns, group=group, parts=len(factors))
        weight.codes.random_(0, 256, generator=generator)
        # Scales around the one that makes of a unit vector another.
        power = -(columns.bit_length() // 2 + 1)
        step = 8 if group == dequant.NVFP4_GROUP else 1
        one = SCALE_OF_ONE[group] if group == dequant.NVFP4_GROUP else SCALE_OF_ONE[group] + power
        weight.scales.random_(one - step, one + step + 1, generator=generator)
        if group == dequant.NVFP4_GROUP:
            weight.factors.copy_(torch.tensor(factors, device=device) * 2.0**power)
        else:
            weight.factors.fill_(1.0)
        found.append(weight)
    return found[0], found[1]


def dense(weight: FP4Matrices) -> torch.Tensor:
    """[E, N, K] BF16, one matrix after the other. Raises MemoryError where there is no room."""
    needed, device = 2 * weight.shape[0] * weight.shape[1] * weight.shape[2], weight.codes.device
    if device.type == "cuda" and (free := torch.cuda.mem_get_info()[0]) < needed:
        raise MemoryError(f"needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free")
    result = torch.empty(weight.shape, dtype=torch.bfloat16, device=device)
    parts = zip(weight.codes, weight.scales, weight.factors, strict=True)
    for out, part in zip(result, parts, strict=True):
        codes, scales, factors = (each.unsqueeze(0) for each in part)
        out.copy_(dense_values(codes, scales, factors, weight.group)[0])
    return result


def measure(
    name: str, ops: Ops, size: Shape, group: int, tokens: Sequence[int], folder: Path
) -> None:
    """Adds a line to the file `folder/name` for each number of tokens, as they come."""
    device = ops.machine.device
    with (folder / name).open("w") as file:
        fp4 = matrices(size, group, device)
        synchronise(device)
        begin = time.perf_counter()
        try:
            op, pair = prepared(name, ops, fp4)
        except MemoryError as error:
            row: Row = {"provider": name, "tokens": None, "refused": True, "why": str(error)}
            print(json.dumps(row), file=file)
            return
        synchronise(device)
        prepare = time.perf_counter() - begin
        copy = bench_timer.copy_bandwidth(device)
        for count in tokens:
            row = {"provider": name, "tokens": count, "prepare_s": prepare, "copy": copy}
            try:
                fill(row, op, inputs(count, size, device), pair, folder)
            except Exception as error:  # too large a size, say: others may still fit
                row["why"] = reason(error)
            print(json.dumps(row), file=file, flush=True)


def prepared(name: str, ops: Ops, fp4: tuple[FP4Matrices, FP4Matrices]) -> tuple[Op, Any]:
    """The op, and w13 and w2 as it wants them."""
    if name == BF16:
        return ops.routed_experts, tuple(map(dense, fp4))
    pack_weights(ops, nn.ModuleList(fp4))
    return ops.routed_experts_fp4, fp4


def fill(
    row: Row, op: Op, tokens: tuple[torch.Tensor, ...], pair: tuple[Any, Any], folder: Path
) -> None:
    """A row's figures, each as soon as it is known."""
    device = tokens[0].device.type
    synchronise(device)
    begin = time.perf_counter()
    result = op(*tokens, *pair, limit=LIMIT)
    synchronise(device)
    row["first_s"] = time.perf_counter() - begin
    expected = folder / f"expected-{row['tokens']}.pt"
    if row["provider"] == "triton":
        torch.save(result.cpu(), expected)
    if expected.exists():
        row["error"] = error_of(result, torch.load(expected).to(result.device))
    if device == "cuda":
        row["replays"] = replays(op, tokens, pair)
    given = dict(zip(("x", "weights", "experts", "w13", "w2"), (*tokens, *pair), strict=True))
    row["bytes"] = bench_bytes.moved(op.__name__, given, result)
    row["us"] = bench_timer.microseconds(lambda: op(*tokens, *pair, limit=LIMIT), device)


def inputs(count: int, size: Shape, device: str) -> tuple[torch.Tensor, ...]:
    """x, weights and experts."""
    generator = torch.Generator(device).manual_seed(count)
    x = torch.randn(count, size.hidden, generator=generator, device=device)
    weights = torch.rand(count, size.top_k, generator=generator, device=device)
    return x.bfloat16(), weights, chosen_experts(count, size).to(device)


def error_of(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest of a token; infinite where it is not a number."""
    error = (result - expected).double().norm(dim=1) / expected.double().norm(dim=1)
    return float(error.nan_to_num(nan=torch.inf).max())


def replays(op: Op, tokens: tuple[torch.Tensor, ...], pair: tuple[Any, Any]) -> bool:
    """On tokens and experts that were not there when it was captured."""
    static = [torch.zeros_like(each) for each in tokens]
    op(*static, *pair, limit=LIMIT)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op(*static, *pair, limit=LIMIT)
    for each, values in zip(static, tokens, strict=True):
        each.copy_(values)
    graph.replay()
    return torch.equal(result, op(*tokens, *pair, limit=LIMIT))


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]


# ---- around these processes ----


def command(name: str, arguments: argparse.Namespace, folder: Path) -> list[str]:
    own = ["--child", name, "--folder", str(folder), "--tokens", *map(str, arguments.tokens)]
    given = ["--shape", arguments.shape, "--format", arguments.format]
    return [sys.executable, str(Path(__file__).resolve()), *given, *own]


def supervised(command: Sequence[str], log: Path, seconds: float) -> str:
    """Runs it. Returns why it ended before it was done, or nothing; its processes are gone."""
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:g} s: --limit gives it more"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its compilers, too
                process.wait()
    if process.returncode == 0:
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else f"ended with {process.returncode}"


def rows_of(name: str, arguments: argparse.Namespace, machine: Machine, folder: Path) -> list[Row]:
    """One for each number of tokens, and one more for a process that failed behind the last."""
    refused = refusal(name, machine)
    if refused is not None:
        return [{"provider": name, "tokens": None, "refused": True, "why": refused}]
    why = supervised(command(name, arguments, folder), folder / "log", arguments.limit)
    text = (folder / name).read_text() if (folder / name).exists() else ""
    written = text[: text.rfind("\n") + 1].splitlines()  # it may have ended within a line
    found = {row["tokens"]: row for row in map(json.loads, written)}
    lost = why or "wrote no result"
    if None in found:
        return [found[None]]
    rows = [
        found.get(count, {"provider": name, "tokens": count, "why": lost})
        for count in arguments.tokens
    ]
    if why and found.keys() >= {*arguments.tokens}:
        rows.append({"provider": name, "tokens": None, "why": f"after its results: {why}"})
    return rows


def complete(row: Row) -> Row:
    """With its share of the bandwidth that was measured beside it."""
    if row.get("us"):
        row["roof"] = row["bytes"] / row["us"] * 1e6 / row["copy"]
    return row


def fault(row: Row) -> str:
    """What is wrong with a row, or nothing."""
    if row.get("refused"):
        return ""
    if "why" in row:
        return str(row["why"])
    if row.get("error", 0.0) > TOLERANCE:
        return f"off by {row['error']:.1e}"
    return "" if row.get("replays", True) else "a replay is not what an eager call is"


def table(rows: Sequence[Row]) -> Iterator[str]:
    yield f"{'provider':<10}{'tokens':>7}" + "".join(f"{name:>10}" for name in COLUMNS)
    for row in rows:
        head = f"{row['provider']:<10}{'all' if row['tokens'] is None else row['tokens']:>7}"
        yield head + (
            f"  {row['why']}" if "why" in row else "".join(map("{:>10}".format, cells(row)))
        )


def cells(row: Row) -> list[str]:
    """In the order of COLUMNS."""
    error, same = row.get("error"), row.get("replays")
    return [
        f"{row['prepare_s']:.1f} s",
        f"{row['first_s']:.2f} s",
        "-" if error is None else f"{error:.1e}",
        "-" if same is None else "yes" if same else "NO",
        f"{row['us']:.1f}",
        f"{row['bytes'] / 1e6:.1f}",
        f"{row['roof']:.0%}" if "roof" in row else "-",
    ]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--shape", default="flash", metavar="MODEL[-tpN]",
        help="flash, pro, or what a rank of N has of it (default: flash)")  # fmt: skip
    add("--format", choices=tuple(GROUPS), default="mxfp4", help="(default: mxfp4)")
    add("--tokens", type=positive, nargs="+", default=[1, 8, 64, 512, 4096], metavar="N",
        help="(default: 1 8 64 512 4096)")  # fmt: skip
    add("--without", nargs="+", default=[], choices=candidates(()), metavar="PROVIDER",
        help=f"leave out some of {', '.join(candidates(()))}")  # fmt: skip
    add("--limit", type=positive, default=1200, metavar="SECONDS",
        help="for each provider (default: 1200)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="all rows, as they come")
    add("--child", help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    made = parser()
    arguments = made.parse_args(argv)
    try:
        size = shape(arguments.shape)
    except argparse.ArgumentTypeError as error:
        made.error(f"--shape: {error}")
    machine = Machine.probe()
    if machine.device != "cuda":
        print("compare_experts: needs an NVIDIA GPU", file=sys.stderr)
        return USAGE
    name = arguments.child
    if name is not None:
        named = "" if name == BF16 else f"routed_experts_fp4={name}"
        group = GROUPS[arguments.format]
        measure(name, choose(machine, named), size, group, arguments.tokens, arguments.folder)
        return 0
    return compare(arguments, machine)


def compare(arguments: argparse.Namespace, machine: Machine) -> int:
    """Every provider after the other; a line as soon as it is known."""
    told: Row = {"device": machine.name, "versions": versions(), "limit_s": arguments.limit}
    told |= {"shape": arguments.shape, "format": arguments.format, "rows": []}
    print(f"{machine.name}, {arguments.shape}, {arguments.format}")
    head, *_ = table([])
    print(head, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in candidates(arguments.without):
            rows = [complete(row) for row in rows_of(name, arguments, machine, Path(folder))]
            _, *lines = table(rows)
            print("\n".join(lines), flush=True)
            told["rows"] += rows
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(told, indent=1) + "\n")
    wrong = [(row, fault(row)) for row in told["rows"] if fault(row)]
    for row, why in wrong:
        print(f"WRONG: {row['provider']}, {row['tokens']} tokens: {why}")
    return FAILED if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
