"""The one place that asks about hardware and chooses a provider for every op."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from sglang_dsv4.fp4 import FP4Matrices
from sglang_dsv4.fp8 import FP8Matrix
from sglang_dsv4.parameters import KeptMatrix
from sglang_dsv4.settings import SettingsError, parse_assignments

VARIABLE = "SGLANG_DSV4_OPS"


@dataclass(frozen=True)
class Machine:
    """What this process runs on: device type, its name, and CUDA compute capability (or None)."""

    device: str
    name: str
    capability: tuple[int, int] | None

    @classmethod
    def probe(cls, device: str | None = None) -> "Machine":
        """Look once; `device` ("cpu" or "cuda") overrides what torch would use."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device == "cuda":
            return cls(device, torch.cuda.get_device_name(), torch.cuda.get_device_capability())
        return cls(device, "CPU", None)


@cache
def compute_capability() -> int:
    """Of this process's GPU, as 90 for 9.0; 0 without one. Kernels choose their tiles by it."""
    major, minor = Machine.probe().capability or (0, 0)
    return 10 * major + minor


@cache
def multiprocessors() -> int:
    """Of this process's GPU."""
    return int(torch.cuda.get_device_properties().multi_processor_count)


@dataclass(frozen=True)
class Provider:
    """An implementation of ops: a module, and a test that says why a machine cannot run it."""

    name: str
    module: str
    refuses: Callable[[Machine], str | None]


def _runs_anywhere(machine: Machine) -> str | None:
    return None


def _needs_triton(machine: Machine) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if machine.capability is None:
        interpreting = importlib.import_module("triton").knobs.runtime.interpret
        return None if interpreting else "needs a GPU (or TRITON_INTERPRET=1, for tests)"
    return _below(machine, (8, 0))


def _below(machine: Machine, needed: tuple[int, int]) -> str | None:
    """Why the capability is not enough, or None."""
    found = machine.capability
    if found is not None and found >= needed:
        return None
    least = ".".join(map(str, needed))
    return f"needs a GPU of compute capability {least}, this is {found}"


def _needs_gpu(machine: Machine) -> str | None:
    return _below(machine, (8, 0))


def _needs_flashmla(machine: Machine) -> str | None:
    if importlib.util.find_spec("flash_mla") is None:
        return "sgl-flash-mla is not installed"
    if machine.capability is None or machine.capability[0] != 9:
        return f"needs a GPU of compute capability 9.0, this is {machine.capability}"
    return _needs_triton(machine)


def _needs_marlin(machine: Machine) -> str | None:
    if importlib.util.find_spec("sgl_kernel") is None:
        return "sglang-kernel is not installed"
    return _below(machine, (8, 0)) or _needs_triton(machine)


def _needs_humming(machine: Machine) -> str | None:
    if importlib.util.find_spec("humming") is None:
        return "humming-kernels is not installed"
    return _needs_marlin(machine)  # SGLang's kernels find its blocks, too


def _needs_flashinfer(machine: Machine) -> str | None:
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python is not installed"
    return _below(machine, (8, 0)) or _needs_triton(machine)


def _reference(package: str) -> Provider:
    return Provider("reference", f"{package}.reference", _runs_anywhere)


def _triton(module: str) -> Provider:
    return Provider("triton", module, _needs_triton)


_MODEL = (_triton("sglang_dsv4.kernels_triton"), _reference("sglang_dsv4"))
_BETWEEN = (_triton("sglang_dsv4.kernels_triton_mhc"), _MODEL[-1])
_LINEAR = (Provider("cublas", "sglang_dsv4.kernels_cublas", _needs_gpu), _MODEL[-1])
_LINEAR_FP8 = (_triton("sglang_dsv4.kernels_triton_linear"), _MODEL[-1])
_LINEAR_FP4 = (_triton("sglang_dsv4.kernels_triton_linear_fp4"), _MODEL[-1])
_ATTENTION = (_triton("sglang_dsv4.attention.kernels_triton"), _reference("sglang_dsv4.attention"))
_COMPRESS = (_triton("sglang_dsv4.attention.kernels_triton_compress"), _ATTENTION[-1])
_INDEX = (_triton("sglang_dsv4.attention.kernels_triton_index"), _ATTENTION[-1])
_METADATA = (
    _triton("sglang_dsv4.attention.kernels_triton_metadata"),
    Provider("reference", "sglang_dsv4.attention.reference_metadata", _runs_anywhere),
)
_SLOTS = (
    _triton("sglang_dsv4.kernels_triton_slots"),
    Provider("reference", "sglang_dsv4.reference_slots", _runs_anywhere),
)
_SPARSE_ATTENTION = (
    Provider("flashmla", "sglang_dsv4.attention.kernels_flashmla", _needs_flashmla),
    _ATTENTION[0],
    Provider("flashinfer", "sglang_dsv4.attention.kernels_flashinfer", _needs_flashinfer),
    _ATTENTION[-1],
)
_MOE = (_triton("sglang_dsv4.moe.kernels_triton"), _reference("sglang_dsv4.moe"))
_EXPERTS_FP4 = (
    _triton("sglang_dsv4.moe.kernels_triton_fp4"),
    Provider("marlin", "sglang_dsv4.moe.kernels_marlin", _needs_marlin),
    Provider("humming", "sglang_dsv4.moe.kernels_humming", _needs_humming),
    _MOE[-1],
)
_EXPERTS = (_triton("sglang_dsv4.moe.kernels_triton_experts"), _MOE[-1])
WITH_ALL_EXPERTS = frozenset({"humming", "marlin"})  # they cannot skip those of other ranks

# op -> providers, best first as far as they were measured
PROVIDERS: Mapping[str, tuple[Provider, ...]] = MappingProxyType(
    {
        "linear_fp32": _LINEAR,
        "linear_fp8": _LINEAR_FP8,
        "linear_fp4": _LINEAR_FP4,
        "rms_norm": _MODEL,
        "mhc_post_pre_norm": _BETWEEN,
        "mhc_post": _MODEL,
        "mhc_head": _MODEL,
        "decode_slots": _SLOTS,
        "build_metadata": _METADATA,
        "query_norm_rope": _ATTENTION,
        "kv_norm_rope_store": _ATTENTION,
        "compress_csa": _COMPRESS,
        "compress_hca": _COMPRESS,
        "index_query": _INDEX,
        "select_entries": _INDEX,
        "csa_index_list": _ATTENTION,
        "sparse_attention": _SPARSE_ATTENTION,
        "route_scored": _MOE,
        "route_hashed": _MOE,
        "routed_experts": _EXPERTS,
        "routed_experts_fp4": _EXPERTS_FP4,
        "swiglu": _MOE,
    }
)

Op = Callable[..., Any]


@dataclass(frozen=True)
class Ops:
    """The chosen implementation of every op, and the name of its provider."""

    linear_fp32: Op
    linear_fp8: Op
    linear_fp4: Op
    rms_norm: Op
    mhc_post_pre_norm: Op
    mhc_post: Op
    mhc_head: Op
    decode_slots: Op
    build_metadata: Op
    query_norm_rope: Op
    kv_norm_rope_store: Op
    compress_csa: Op
    compress_hca: Op
    index_query: Op
    select_entries: Op
    csa_index_list: Op
    sparse_attention: Op
    route_scored: Op
    route_hashed: Op
    routed_experts: Op
    routed_experts_fp4: Op
    swiglu: Op
    machine: Machine
    providers: Mapping[str, str]

    def describe(self) -> list[str]:
        """One line per op: `op: provider`."""
        return [f"{op}: {provider}" for op, provider in self.providers.items()]


def choose(machine: Machine, named: str = "", *, expert_parallel: int = 1) -> Ops:
    """Pick a provider for every op: the named one, else the best that this machine can run.

    named: "op=provider,...", where "all" stands for every op that is not named itself. On a GPU the
    reference is only taken where it is named. expert_parallel: see `Parallel`. Raises SettingsError
    for an unknown op or provider, RuntimeError where nothing can run.
    """
    requested = parse(named, expert_parallel)
    default = requested.get("all")
    chosen = {op: _pick(op, machine, requested.get(op, default)) for op in PROVIDERS}
    functions = {
        op: getattr(importlib.import_module(provider.module), op) for op, provider in chosen.items()
    }
    names = MappingProxyType({op: provider.name for op, provider in chosen.items()})
    return Ops(**functions, machine=machine, providers=names)


def prepare_attention(
    ops: Ops, *, tokens: int, heads: int, width: int, scale: float, device: str
) -> None:
    """Tell the provider of sparse_attention a shape before it is captured in a graph.

    tokens: of the step, padding included; heads: of this rank; width: K of its index lists. Most
    providers need nothing; one that plans on the host does it here, and never inside a graph.
    """
    module = importlib.import_module(ops.sparse_attention.__module__)
    if hasattr(module, "prepare"):
        module.prepare(tokens, heads, width, scale=scale, device=device)


def on_this_gpu(call: Callable[[], Any]) -> Callable[[], Any]:
    """`call` for another thread: one begins on the first GPU, whichever this thread is on."""
    if not torch.cuda.is_available():
        return call
    device = torch.cuda.current_device()

    def there() -> Any:
        with torch.cuda.device(device):
            return call()

    return there


def pack_weights(ops: Ops, model: nn.Module) -> None:
    """Have the providers of routed_experts_fp4, linear_fp4 and linear_fp8 order codes in `model` as
    they read them, in place, one stack of matrices after the other, after they were loaded."""
    for part in model.modules():
        if isinstance(part, FP4Matrices | FP8Matrix) and not part.packed:
            op = ops.routed_experts_fp4
            if isinstance(part, KeptMatrix):
                op = ops.linear_fp8 if isinstance(part, FP8Matrix) else ops.linear_fp4
            module = importlib.import_module(op.__module__)
            if hasattr(module, "pack"):
                module.pack(part)


def parse(named: str, expert_parallel: int = 1) -> dict[str, str]:
    """Reads "op=provider,..." into op -> provider name; raises SettingsError for unknown names, and
    for a provider that cannot do with some of the experts."""
    known = {op: tuple(provider.name for provider in PROVIDERS[op]) for op in PROVIDERS}
    every = tuple(dict.fromkeys(name for names in known.values() for name in names))
    chosen = parse_assignments(VARIABLE, named, {"all": every, **known})
    unfit = WITH_ALL_EXPERTS & {*chosen.values()}
    if expert_parallel > 1 and unfit:
        raise SettingsError(
            f"{VARIABLE}: {min(unfit)} needs all experts on every rank: leave it out, or --ep-size"
        )
    return chosen


def _pick(op: str, machine: Machine, name: str | None) -> Provider:
    providers = PROVIDERS[op]
    if name is not None:
        return _named(op, machine, name)
    reasons = []
    for provider in providers:
        reason = _not_by_default(op, machine, provider) or provider.refuses(machine)
        if reason is None:
            return provider
        reasons.append(f"{provider.name}: {reason}")
    raise RuntimeError(f"no provider of {op} for {machine.name}: " + "; ".join(reasons))


def _not_by_default(op: str, machine: Machine, provider: Provider) -> str | None:
    """A GPU takes kernels and a CPU the reference, even where an interpreter could run kernels."""
    if (provider.name == "reference") == (machine.device == "cpu"):
        return None
    return f"runs only where it is named: SGLANG_DSV4_OPS={op}={provider.name}"


def _named(op: str, machine: Machine, name: str) -> Provider:
    matches = [provider for provider in PROVIDERS[op] if provider.name == name]
    if not matches:
        known = ", ".join(provider.name for provider in PROVIDERS[op])
        raise ValueError(f"{op} has no provider {name!r}; known: {known}")
    reason = matches[0].refuses(machine)
    if reason is not None:
        raise RuntimeError(f"{op}: provider {name} cannot run on {machine.name}: {reason}")
    return matches[0]


assert {field.name for field in fields(Ops)} == {*PROVIDERS, "machine", "providers"}
