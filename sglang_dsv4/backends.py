"""The one place that asks about hardware and chooses a provider for every op."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import torch

from sglang_dsv4.settings import parse_assignments

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


@dataclass(frozen=True)
class Provider:
    """An implementation of ops: a module, and a test that says why a machine cannot run it."""

    name: str
    module: str
    refuses: Callable[[Machine], str | None]


def _runs_anywhere(machine: Machine) -> str | None:
    return None


def _reference(package: str) -> Provider:
    return Provider("reference", f"{package}.reference", _runs_anywhere)


_MODEL = (_reference("sglang_dsv4"),)
_ATTENTION = (_reference("sglang_dsv4.attention"),)
_MOE = (_reference("sglang_dsv4.moe"),)

# op -> providers, best first
PROVIDERS: Mapping[str, tuple[Provider, ...]] = MappingProxyType(
    {
        "rms_norm": _MODEL,
        "mhc_pre": _MODEL,
        "mhc_post": _MODEL,
        "mhc_head": _MODEL,
        "query_norm_rope": _ATTENTION,
        "kv_norm_rope_store": _ATTENTION,
        "compress_csa": _ATTENTION,
        "compress_hca": _ATTENTION,
        "index_query": _ATTENTION,
        "select_entries": _ATTENTION,
        "csa_index_list": _ATTENTION,
        "sparse_attention": _ATTENTION,
        "route_scored": _MOE,
        "route_hashed": _MOE,
        "routed_experts": _MOE,
        "swiglu": _MOE,
    }
)

Op = Callable[..., Any]


@dataclass(frozen=True)
class Ops:
    """The chosen implementation of every op, and the name of its provider."""

    rms_norm: Op
    mhc_pre: Op
    mhc_post: Op
    mhc_head: Op
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
    swiglu: Op
    machine: Machine
    providers: Mapping[str, str]

    def describe(self) -> list[str]:
        """One line per op: `op: provider`."""
        return [f"{op}: {provider}" for op, provider in self.providers.items()]


def choose(machine: Machine, named: str = "") -> Ops:
    """Pick a provider for every op: the named one, else the best that this machine can run.

    named: "op=provider,...", where "all" stands for every op that is not named itself. On a GPU the
    reference is only taken where it is named. Raises SettingsError for an unknown op or provider,
    RuntimeError where nothing can run.
    """
    requested = parse(named)
    default = requested.get("all")
    chosen = {op: _pick(op, machine, requested.get(op, default)) for op in PROVIDERS}
    functions = {
        op: getattr(importlib.import_module(provider.module), op)
        for op, provider in chosen.items()
    }
    names = MappingProxyType({op: provider.name for op, provider in chosen.items()})
    return Ops(**functions, machine=machine, providers=names)


def parse(named: str) -> dict[str, str]:
    """Reads "op=provider,..." into op -> provider name; raises SettingsError for unknown names."""
    known = {op: tuple(provider.name for provider in PROVIDERS[op]) for op in PROVIDERS}
    every = tuple(dict.fromkeys(name for names in known.values() for name in names))
    return parse_assignments(VARIABLE, named, {"all": every, **known})


def _pick(op: str, machine: Machine, name: str | None) -> Provider:
    providers = PROVIDERS[op]
    if name is not None:
        return _named(op, machine, name)
    reasons = []
    for provider in providers:
        reason = provider.refuses(machine)
        if reason is None and provider.name == "reference" and machine.device != "cpu":
            reason = f"runs only where it is named: SGLANG_DSV4_OPS={op}=reference"
        if reason is None:
            return provider
        reasons.append(f"{provider.name}: {reason}")
    raise RuntimeError(f"no provider of {op} for {machine.name}: " + "; ".join(reasons))


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
