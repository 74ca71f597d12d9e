#!/usr/bin/env python
"""How fast a checkpoint is loaded, and in how much memory, against the disk that it lies on.

Makes a checkpoint of random bytes of the size asked for, reads its files as a disk would be tested,
then loads it with `weights.load`, each time without the page cache.
"""

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from tqdm import tqdm

from sglang_dsv4 import (
    cli_make_tiny,
    expert_storage,
    parallel,
    tiny_formats,
    tiny_weights,
    weights,
)
from sglang_dsv4.checkpoint import BYTES, INDEX_FILE
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.formats import DTYPE_NAMES
from sglang_dsv4.fp4 import FP4Matrices
from sglang_dsv4.parallel import Parallel
from sglang_dsv4.tensor_table import Kept, Slot, expected_tensors

EXAMPLES = """\
examples:
  measure_loading.py --format vendor --gigabytes 2
  measure_loading.py --format vendor --four-bit-experts    experts as on a GPU
  measure_loading.py --gigabytes 20 --keep DIR --sink      parameters in one buffer, not in memory
  measure_loading.py --gigabytes 2 --ranks 2 --json        what rank 0 of two reads
  measure_loading.py --gigabytes 2 --reader sglang         through SGLang's own stream

Columns: GB/s are 10^9 bytes of the files per second; "anonymous" is memory that must be there,
"mapped" pages of the files that the system takes back when it needs them. Exit code: 0; 1 where
the disk or the page cache does not allow the measurement.
"""

BLOCK = 1 << 24
SAMPLE_SECONDS = 0.01


# ------------------------------------------------------------------------------ the checkpoint


def sized_config(format_name: str, target: int) -> DSV4Config:
    """The widths of V4-Flash, with as many experts (and layers) as give about `target` bytes."""
    small = cli_make_tiny.shipped_config("flash-2l", "bfloat16") | {"vocab_size": 4096}

    def made(layers: int, experts: int) -> DSV4Config:
        return DSV4Config.from_dict(
            small
            | {
                "num_hidden_layers": layers,
                "compress_ratios": [4, 128] * (layers // 2) + [4] * (layers % 2) + [0],
                "n_routed_experts": experts,
                "num_experts_per_tok": min(6, experts),
            }
        )

    recipe = tiny_formats.RECIPES[format_name]

    def size(config: DSV4Config) -> int:
        entries = tiny_weights.quantised_entries(config, recipe, "vendor")
        return sum(entry.bytes(2) for entry in entries)

    least = size(made(1, 1))
    expert = size(made(1, 2)) - least
    layers = max(1, math.ceil(target / (least + 255 * expert)))
    each = (target / layers - least) / expert
    return made(layers, min(256, max(1, round(1 + each))))


def write_checkpoint(folder: Path, format_name: str, config: DSV4Config, shards: int) -> int:
    """Writes shards and index of `config`'s model, random where a value may be any; its bytes."""
    recipe = tiny_formats.RECIPES[format_name]
    headers: dict[str, tuple[str, tuple[int, ...]]] = {}
    for entry in tiny_weights.quantised_entries(config, recipe, "vendor"):
        headers |= _headers(entry)
    total = sum(_size(*header) for header in headers.values())
    files: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    filled = 0
    for name, header in headers.items():
        if filled > total * len(files) // shards:
            files.append({})
        files[-1][name] = header
        filled += _size(*header)
    blocks = {dtype: _random_block(dtype) for dtype in {dtype for dtype, _ in headers.values()}}
    index: dict[str, str] = {}
    with tqdm(total=total, unit="B", unit_scale=True, desc="writing", disable=None) as progress:
        for number, held in enumerate(files, 1):
            file = f"model-{number:05}-of-{len(files):05}.safetensors"
            index |= dict.fromkeys(held, file)
            _write_file(folder / file, held, blocks, progress.update)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    return total


def _headers(entry: tiny_weights.Entry) -> dict[str, tuple[str, tuple[int, ...]]]:
    if entry.stored is None:
        dtype = {Kept.FP32: "F32", Kept.INT64: "I64"}.get(entry.pieces[0].kept, "BF16")
        return {entry.name: (dtype, entry.shape)}
    values = torch.empty(entry.shape, device="meta")
    tensors = tiny_formats.encode(entry.stored, entry.name, values)
    return {name: (DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}


def _size(dtype: str, shape: Sequence[int]) -> int:
    return BYTES[dtype] * math.prod(shape)


def _random_block(dtype: str) -> memoryview:
    """BLOCK bytes of sound values: small numbers, any codes, scales near 2^-9, expert 0."""
    draw = torch.Generator().manual_seed(0)
    if dtype in ("I8", "U8"):
        block = torch.randint(0, 256, (BLOCK,), generator=draw).to(torch.uint8)
    elif dtype == "F8_E4M3":  # without NaN
        block = torch.randint(0, 0x78, (BLOCK,), generator=draw).to(torch.uint8)
    elif dtype == "F8_E8M0":
        block = torch.randint(114, 122, (BLOCK,), generator=draw).to(torch.uint8)
    elif dtype == "I64":
        block = torch.zeros(BLOCK // 8, dtype=torch.int64)
    else:
        kept = torch.float32 if dtype == "F32" else torch.bfloat16
        block = torch.rand(BLOCK // kept.itemsize, generator=draw).add_(0.01).to(kept)
    return block.view(torch.uint8).numpy().data


def _write_file(
    path: Path,
    held: dict[str, tuple[str, tuple[int, ...]]],
    blocks: dict[str, memoryview],
    tell: Callable[[int], object],
) -> None:
    entries, end = {}, 0
    for name, (dtype, shape) in held.items():
        begin, end = end, end + _size(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for dtype, shape in held.values():
            left = _size(dtype, shape)
            while left:
                left -= stream.write(blocks[dtype][: min(left, BLOCK)])
            tell(_size(dtype, shape))
        stream.flush()
        os.fsync(stream.fileno())


# ------------------------------------------------------------------------------ the parameters


class Parameters(nn.Module):
    """What `weights.load` fills, without a model: this rank's parameters.

    sink: all are views of one buffer, as large as the largest matrix, so that checkpoints larger
    than the memory can be loaded; nothing else in loading differs. groups: see `Model`'s
    expert_groups; without sink.
    """

    def __init__(
        self, config: DSV4Config, held: Parallel, *, sink: bool, groups: Mapping[int, int]
    ) -> None:
        super().__init__()
        made = {slot.parameter: slot for slot in expected_tensors(config).values()}
        largest = max(math.prod(_share(slot, held)) for slot in made.values())
        experts = len(held.experts.of(config.n_routed_experts))
        buffer = torch.ones(largest * 4 if sink else 0, dtype=torch.uint8)
        for name, slot in made.items():
            kept = {Kept.FP32: torch.float32, Kept.INT64: torch.int64}
            dtype, shape = kept.get(slot.row.kept, torch.bfloat16), _share(slot, held)
            stack = () if slot.expert is None else (experts,)
            *path, leaf = name.split(".")
            owner: nn.Module = self
            for step in path:
                if not hasattr(owner, step):
                    owner.add_module(step, nn.Module())
                owner = getattr(owner, step)
            group = None if slot.expert is None else groups.get(int(path[2]))
            if group is not None:
                four_bits = FP4Matrices(experts, *shape, group=group, parts=slot.row.parts)
                four_bits.codes.fill_(0)  # written, as below
                owner.add_module(leaf, four_bits)
                continue
            if sink:
                size = math.prod(shape) * dtype.itemsize
                values = buffer[:size].view(dtype).view(shape).expand(*stack, *shape)
            else:
                values = torch.ones(*stack, *shape, dtype=dtype)  # written: it is in memory
            if slot.row.kept is Kept.INT64:
                owner.register_buffer(leaf, values)
            else:
                owner.register_parameter(leaf, nn.Parameter(values, requires_grad=False))


def _share(slot: Slot, held: Parallel) -> tuple[int, ...]:
    """The shape of one matrix of a parameter on one of the ranks."""
    shape = list(slot.shape)
    if slot.row.cut is not None:
        share = held.share if slot.expert is None else held.expert_width
        shape[slot.row.cut] //= share.parts
    return (shape[0] * slot.row.parts, *shape[1:])


# ------------------------------------------------------------------------------ the streams


Stream = Callable[[Sequence[Path]], Iterator[tuple[str, Tensor]]]


def mapped(files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """A file after the other, each tensor a view of the mapped file."""
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  not a dict
                yield name, opened.get_tensor(name)


def of_sglang() -> Stream:
    """What SGLang gives to a model by default; importing it takes seconds."""
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.model_loader.weight_utils import (
        buffered_multi_thread_safetensors_weights_iterator as iterator,
    )

    threads = DefaultModelLoader.DEFAULT_NUM_THREADS
    return lambda files: iterator([str(file) for file in files], threads)


READERS: dict[str, Callable[[], Stream]] = {"mapped": lambda: mapped, "sglang": of_sglang}


# ------------------------------------------------------------------------------ the measurement


def forget(files: Sequence[Path]) -> None:
    """Takes the files out of the page cache."""
    for file in files:
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_raw(files: Sequence[Path]) -> None:
    """Reads the files once, in large pieces, and nothing else."""
    piece = bytearray(BLOCK)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(piece):
                pass


def from_disk() -> int:
    """Bytes that this process has had the disk read so far, mapped pages among them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def resident() -> dict[str, int]:
    """Bytes of memory by kind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {key: value for key, _, value in (line.partition(":") for line in lines)}
    kinds = {"anonymous": "RssAnon", "mapped": "RssFile"}
    return {kind: int(found[key].split()[0]) * 1024 for kind, key in kinds.items()}


@contextmanager
def watched(result: dict[str, Any]) -> Iterator[None]:
    """Puts seconds, bytes from the disk and the rise of memory into `result`."""
    before, peak, done = resident(), resident(), threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLE_SECONDS):
            for kind, size in resident().items():
                peak[kind] = max(peak[kind], size)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start, cpu, read = time.perf_counter(), time.process_time(), from_disk()
    try:
        yield
    finally:
        result["seconds"] = time.perf_counter() - start
        result["cpu_seconds"] = time.process_time() - cpu
        result["disk_bytes"] = from_disk() - read
        done.set()
        watcher.join()
        result |= {f"{kind}_rise": peak[kind] - before[kind] for kind in peak}


def measure(folder: Path, arguments: argparse.Namespace, config: DSV4Config) -> dict[str, Any]:
    """One line of figures for each of: the disk alone, loading without and with the page cache."""
    files = sorted(folder.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    figures: dict[str, Any] = {
        "format": arguments.format,
        "bytes": size,
        "files": len(files),
        "largest_file": max(file.stat().st_size for file in files),
        "ranks": arguments.ranks,
        "expert_parallel": arguments.expert_parallel,
        "four_bit_experts": arguments.four_bit_experts,
        "reader": arguments.reader,
        "sink": arguments.sink,
    }
    ranks = {"rank": 0, "size": arguments.ranks, "expert_parallel": arguments.expert_parallel}
    parallel.check(config, arguments.ranks, arguments.expert_parallel)
    groups: Mapping[int, int] = {}
    if arguments.four_bit_experts:
        held = expert_storage.from_headers(folder)
        of_rank = {"device": "cpu", "ranks": arguments.ranks // arguments.expert_parallel}
        groups = expert_storage.decide(config, held, chosen="fp4", **of_rank).groups
    model = Parameters(config, Parallel(**ranks), sink=arguments.sink, groups=groups)

    stream = READERS[arguments.reader]()

    def load() -> None:
        weights.load(model, stream(files), config, **ranks, total_bytes=size)

    runs: dict[str, Callable[[], None]] = {
        "disk alone": lambda: read_raw(files),
        "load": load,
        "load, cached": load,
    }
    for name, run in runs.items():
        if name != "load, cached":
            forget(files)
        elif size > arguments.cache_gigabytes * 1e9:
            continue
        else:
            read_raw(files)
        figures[name] = {}
        with watched(figures[name]):
            run()
        figures[name]["gigabytes_per_second"] = size / figures[name]["seconds"] / 1e9
    return figures


def show(figures: dict[str, Any]) -> None:
    print(
        f"{figures['format']}: {figures['bytes'] / 1e9:.2f} GB in {figures['files']} files, the"
        f" largest {figures['largest_file'] / 1e9:.2f} GB; rank 0 of {figures['ranks']}"
    )
    print(f"{'':14}{'GB/s':>7}{'s':>8}{'CPU s':>8}{'GB of disk':>12}{'anonymous':>12}{'mapped':>9}")
    for name, run in figures.items():
        if isinstance(run, dict):
            print(
                f"{name:14}{run['gigabytes_per_second']:7.2f}{run['seconds']:8.2f}"
                f"{run['cpu_seconds']:8.2f}{run['disk_bytes'] / 1e9:12.2f}"
                f"{run['anonymous_rise'] / 1e6:9.0f} MB{run['mapped_rise'] / 1e6:6.0f} MB"
            )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--format", choices=tiny_formats.RECIPES, default="bf16", help="(default: bf16)")
    add("--gigabytes", type=float, default=1.0, help="size of the checkpoint (default: 1)")
    add("--shards", type=int, default=4, help="files that it is split into (default: 4)")
    add("--keep", type=Path, metavar="DIR", help="where to write it, or find it, and to leave it")
    add("--sink", action="store_true", help="one buffer for all parameters")
    add("--four-bit-experts", action="store_true", help="kept so; without --sink")
    add("--ranks", type=int, default=1, help="ranks that share the model (default: 1)")
    add("--expert-parallel", type=int, default=1, help="groups of ranks for experts (default: 1)")
    add("--reader", choices=READERS, default="mapped", help="the stream (default: mapped)")
    add("--threads", type=int, default=1, help="threads that compute (default: 1)")
    add("--cache-gigabytes", type=float, default=4.0, help="up to this, also from memory (4)")
    add("--json", action="store_true", help="print figures for a machine")
    arguments = parser.parse_args(argv)
    if arguments.sink and arguments.four_bit_experts:
        parser.error("--four-bit-experts needs the parameters in memory: leave out --sink")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    torch.set_num_threads(arguments.threads)
    target = int(arguments.gigabytes * 1e9)
    config = sized_config(arguments.format, target)
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="measure-loading-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / INDEX_FILE).exists():
            free = shutil.disk_usage(folder).free
            if free < 1.1 * target:
                print(f"{folder} has {free / 1e9:.1f} GB free: name another with --keep")
                return 1
            write_checkpoint(folder, arguments.format, config, arguments.shards)
        figures = measure(folder, arguments, config)
    finally:
        if arguments.keep is None:
            shutil.rmtree(folder)
    if arguments.json:
        print(json.dumps(figures))
    else:
        show(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
