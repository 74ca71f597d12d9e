"""Builds just-in-time caches before a server needs them, and remembers for what.

Which kernels a model launches, and in which variants, is found by running it on tensors without
values, where a launch is only noted: nothing is computed, and no weights are needed. Triton
compiles several at a time.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang_dsv4.attention.cache import PAGE, allocate
from sglang_dsv4.attention.metadata import Batch
from sglang_dsv4.backends import PROVIDERS, Machine, Ops, prepare_attention
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.fp4 import FP4Matrices
from sglang_dsv4.fp8 import FP8Matrix
from sglang_dsv4.linears import ALL_DENSE, KeptLinears
from sglang_dsv4.model import Model
from sglang_dsv4.parallel import Parallel
from sglang_dsv4.parameters import default_dtype
from sglang_dsv4.precision import Precision

# Tiles, and which launches are early, change between these: what a server captures, ...
DECODES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 96, 128, 160, 192, 216, 256)
# ... and a prefill's new tokens, some no multiples of 16.
PREFILLS = (3, 17, 100, 128, 257, 400, 512, 768, 1001, 2048, 3000, 4096, 8192)
MANIFEST = "sglang_dsv4_warm.json"
# Can be run on tensors without values before serving: others would keep some of these tensors.
LEAVE_NO_TRACE = frozenset({"triton", "cublas", "flashmla"})
Builder = tuple[str, Callable[[], Any]]  # what it builds, and the call that does


@dataclass(frozen=True)
class Target:
    """What is warmed up for: a model as it will be served on this machine.

    context: tokens that a request may have; dtype: that the model runs in. expert_groups: layer ->
    values that share a scale, of the layers whose routed experts stay in four bits. linears: what
    else stays so, `LinearStorage.anywhere`; all other matrices launch no kernel of ours.
    """

    config: DSV4Config
    ops: Ops
    precision: Precision
    parallel: Parallel
    context: int
    dtype: torch.dtype
    expert_groups: Mapping[int, int] = field(default_factory=dict)
    linears: tuple[KeptLinears, ...] = (ALL_DENSE,)

    @property
    def storages(self) -> list[int | None]:
        """How the routed experts of its layers lie in memory, each way once; None is dense."""
        layers = range(self.config.num_hidden_layers)
        return list(dict.fromkeys(self.expert_groups.get(layer) for layer in layers))

    def key(self) -> str:
        """Of all that decides about variants: sources, versions, the GPU, shapes, providers."""
        machine = self.ops.machine
        shown = (
            *(sources(), *versions(), machine.name, machine.capability),
            *(self.parallel.size, self.parallel.expert_parallel),
            *(self.context, str(self.dtype), sorted(self.ops.providers.items()), self.precision),
            *(repr(one_of_each(self.config)), self.storages),
            [sorted(kept.items()) for kept in self.linears],
        )
        return hashlib.sha256(repr(shown).encode()).hexdigest()[:16]


def sources() -> str:
    """A hash of all modules that hold kernels, also of those that other kernels share."""
    names = sorted({one.module for known in PROVIDERS.values() for one in known})
    specs = (importlib.util.find_spec(name) for name in names)
    folders = {Path(spec.origin).parent for spec in specs if spec and spec.origin}
    paths = (path for folder in sorted(folders) for path in sorted(folder.glob("*.py")))
    kinds = ("kernels_", "reference")
    content = b"".join(path.read_bytes() for path in paths if path.name.startswith(kinds))
    return hashlib.sha256(content).hexdigest()[:16]


def versions() -> tuple[str, ...]:
    """Of the packages that compile, "-" where one is not installed."""
    found = []
    for package in ("torch", "triton", "flashinfer-python", "sglang"):
        try:
            found.append(version(package))
        except PackageNotFoundError:
            found.append("-")
    return tuple(found)


# ---- which kernels ----


@dataclass(frozen=True)
class Launch:
    """A kernel as it is launched, with stand-ins for tensors."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]

    def key(self) -> tuple[Any, ...]:
        """Equal for launches that Triton compiles once, or nearly: an integer may be 1, a multiple
        of 16, or another one."""
        values = [*self.arguments, *self.options.items()]
        return (self.kernel.__name__, *(_class_of(value) for value in values))

    def compile(self) -> Any:
        """The compiled kernel, or what waits for it where others are compiled beside it."""
        return self.kernel.warmup(*self.arguments, grid=(1,), **self.options)

    def forget(self) -> None:
        """Drop variants that did not compile: Triton would raise the same error at each launch."""
        waiting = importlib.import_module("triton").FutureKernel
        for kernels, *_ in self.kernel.device_caches.values():
            for key, kernel in list(kernels.items()):
                if isinstance(kernel, waiting) and kernel.kernel is None:
                    del kernels[key]


def _class_of(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return ("int", value == 1, value % 16 == 0, abs(value) >= 1 << 31)
    if isinstance(value, float):
        return "float"
    dtype = getattr(value, "dtype", None)
    return repr(value) if dtype is None else str(dtype)


def launches(
    target: Target, decodes: Sequence[int] = DECODES, prefills: Sequence[int] = PREFILLS
) -> list[Launch]:
    """Every variant of every kernel that these batches launch, once."""
    device = target.ops.machine.device
    config = one_of_each(target.config, at_least=len(target.storages))
    with FakeTensorMode(allow_non_fake_inputs=True), recorded() as found, torch.no_grad():
        with default_dtype(target.dtype), torch.device(device):
            models = [_model(target, config, kept) for kept in target.linears]
        caches = allocate(
            config,
            pages=1024,
            window_pages=1024,
            requests=max(decodes, default=1) + 1,
            dtype=target.dtype,
            device=device,
        )
        for requests, new in [*((size, 1) for size in decodes), *((1, size) for size in prefills)]:
            longest = target.context if new == 1 else new
            batch = _batch(requests, new, longest, device)
            if new == 1:
                table, any_ = batch.page_table.int(), batch.request_slots
                target.ops.decode_slots(table, batch.window_map, any_, any_, any_, any_, page=PAGE)
            meta = target.ops.build_metadata(
                batch, window=config.sliding_window, window_rows=caches[0].window_rows
            )
            ids = torch.zeros(requests * new, dtype=torch.int64, device=device)
            for model in models:
                model(ids, meta, caches)
    return list(found.values())


def _model(target: Target, config: DSV4Config, kept: KeptLinears) -> Model:
    """Layers hold their experts in each of the ways in turn, and count as packed."""
    in_turns = zip(range(config.num_hidden_layers), cycle(target.storages), strict=False)
    groups = {layer: group for layer, group in in_turns if group is not None}
    linears = dict.fromkeys(range(config.num_hidden_layers), kept)
    given = target.parallel  # but no other rank is waited for
    alone = Parallel(given.rank, given.size, expert_parallel=given.expert_parallel)
    model = Model(config, target.precision, target.ops, alone, groups, linears)
    for part in model.modules():
        if isinstance(part, FP4Matrices | FP8Matrix):
            part.packed = True  # what `pack` reads has no values here
    return model


def one_of_each(config: DSV4Config, at_least: int = 1) -> DSV4Config:
    """The model with one layer of each kind, the first of them routed by token id if any is, and
    with `at_least` layers."""
    kinds = tuple(dict.fromkeys(config.layer_kinds))
    hashed = min(config.num_hash_layers, 1)
    if hashed:  # and one of the same kind that is not
        kinds = (kinds[0], *kinds)
    kinds += kinds[-1:] * (at_least - len(kinds))
    return replace(config, num_hidden_layers=len(kinds), layer_kinds=kinds, num_hash_layers=hashed)


def _batch(requests: int, new: int, longest: int, device: str) -> Batch:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int64, device=device)

    return Batch(
        positions=zeros(requests * new),
        request=zeros(requests * new),
        request_slots=zeros(requests),
        prefix_lens=zeros(requests),
        new_lens=zeros(requests),
        page_table=zeros(requests, -(-longest // PAGE)),
        window_map=zeros(1024 * PAGE),
        max_len=longest,
    )


@contextlib.contextmanager
def recorded() -> Iterator[dict[tuple[Any, ...], Launch]]:
    """Within it a launch of a Triton kernel is only noted, and FlashMLA, which is built already,
    computes nothing."""
    jit = importlib.import_module("triton.runtime.jit")
    found: dict[tuple[Any, ...], Launch] = {}

    def stand_in(value: Any) -> Any:
        return jit.MockTensor(value.dtype) if isinstance(value, torch.Tensor) else value

    def note(kernel: Any, grid: Any) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            named = {name: stand_in(value) for name, value in options.items()}
            if hasattr(kernel, "launch_options"):  # which decide about the variant, too
                named |= kernel.launch_options(grid)
            launch = Launch(kernel, tuple(map(stand_in, arguments)), named)
            found.setdefault(launch.key(), launch)

        return call

    flash_mla = ModuleType("flash_mla")
    vars(flash_mla)["flash_mla_sparse_fwd"] = lambda q, *_, **__: (torch.empty_like(q), None, None)
    launch, installed = jit.KernelInterface.__getitem__, sys.modules.get("flash_mla")
    jit.KernelInterface.__getitem__, sys.modules["flash_mla"] = note, flash_mla
    try:
        yield found
    finally:
        jit.KernelInterface.__getitem__ = launch
        if installed is None:
            del sys.modules["flash_mla"]
        else:
            sys.modules["flash_mla"] = installed


# ---- building ----


def builders(target: Target) -> list[Builder]:
    """All that is built for the target, with names for a progress bar."""
    found = builders_of(launches(target))
    if target.ops.providers["sparse_attention"] == "flashinfer":
        found.append(("FlashInfer MLA", lambda: _plan(target)))
    return [*found, *host_builders()]


def builders_of(found: Sequence[Launch]) -> list[Builder]:
    """Each only begins, where Triton compiles in the background."""
    return [(launch.kernel.__name__.strip("_"), launch.compile) for launch in found]


def host_builders() -> list[Builder]:
    """What SGLang compiles, or has FlashInfer compile, at the first use on our path."""
    from sglang_dsv4 import host

    found: list[Builder] = host.just_in_time()
    if importlib.util.find_spec("flashinfer") is not None:
        found.append(("FlashInfer sampling", _sampling))
    return found


def _plan(target: Target) -> None:
    heads = target.config.num_attention_heads // target.parallel.size
    scale = target.config.head_dim**-0.5
    width = target.config.sliding_window + target.config.index_topk
    prepare_attention(target.ops, tokens=1, heads=heads, width=width, scale=scale, device="cuda")


def _sampling() -> None:
    """SGLang samples with it on a GPU, unless told otherwise."""
    importlib.import_module("flashinfer.sampling").get_sampling_module()


@dataclass(frozen=True)
class Warmed:
    """What a run of `warm` did: how much was built, what failed (name and reason), in how many
    seconds."""

    key: str
    built: int
    failed: Sequence[tuple[str, str]]
    seconds: float


def warm(target: Target, builders: Sequence[Builder], step: Callable[[str], None]) -> Warmed:
    """Build everything, and note it in the manifest. step: see `build_all`."""
    start = time.monotonic()
    failed = build_all(builders, step)
    done = Warmed(
        target.key(), len(builders) - len(failed), failed, round(time.monotonic() - start, 1)
    )
    remember(done)
    return done


def build_all(
    builders: Sequence[Builder], step: Callable[[str], None]
) -> Sequence[tuple[str, str]]:
    """Builds everything, kernels beside each other: name and reason of what failed.

    step: called with each name before it is built or waited for.
    """
    triton = importlib.import_module("triton")
    failed: list[tuple[str, str]] = []
    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        begun = [  # kernels, with which Triton goes on
            begin(build) if isinstance(getattr(build, "__self__", None), Launch) else None
            for _, build in builders
        ]
        for (name, build), finish in zip(builders, begun, strict=True):
            step(name)
            failed += failures([(name, finish or begin(build))])
    return failed


def failures(waits: Iterable[tuple[str, Callable[[], Any]]]) -> list[tuple[str, str]]:
    """Waits for each of these (name, what waits for its end): name and reason of what failed."""
    failed = []
    for name, wait in waits:
        try:
            wait()
        except Exception as error:
            failed.append((name, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))
    return failed


def begin(build: Callable[[], Any]) -> Callable[[], Any]:
    """Starts to build: what waits for the end, and raises what went wrong."""

    def fail(error: Exception) -> None:
        raise error

    try:
        begun = build()
    except Exception as error:
        return functools.partial(fail, error)
    return getattr(begun, "result", lambda: None)


# ---- what is warm ----


def manifest() -> Path:
    """The file beside Triton's cache that names what was built there."""
    return Path(importlib.import_module("triton").knobs.cache.dir) / MANIFEST


def remembered() -> dict[str, Any]:
    """The manifest: target key -> {"sources": ..., "machine": ..., "built": ...}; may be empty."""
    try:
        content = json.loads(manifest().read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def remember(done: Warmed) -> None:
    """Note it in the manifest, unless something failed."""
    if done.failed:
        return
    path = manifest()
    entry = {"sources": sources(), "versions": versions(), "built": done.built}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({**remembered(), done.key: entry}, indent=1))
    new.replace(path)


def caches_row() -> tuple[str, ...]:
    """The row of `doctor`: name, status, what was found, what was expected, and what to do.

    Warm counts only what was built with the kernels and packages that are installed now.
    """
    if Machine.probe().device == "cpu":
        return ("kernel caches", "ok", "not needed on a CPU")
    now = [sources(), list(versions())]
    count = sum([one["sources"], one["versions"]] == now for one in remembered().values())
    if count:
        return ("kernel caches", "ok", f"warm for {count} model(s)")
    remedy = "sglang-dsv4 warm CKPT; without it, the first start compiles"
    return ("kernel caches", "warn", "cold", "warm", remedy)
