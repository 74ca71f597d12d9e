"""The bytes that a call of an op has to move at least: what it must read, and what it must write.

Most ops read their arguments and write their results once. Those that look things up (a cache, a
table, experts) read only what this call's indices name. Reading an index back makes the host wait
for the device: this is for benchmarks, not for a step.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Arguments = Mapping[str, Any]


def size(value: Any) -> int:
    """Bytes of the values of tensors, alone or in tuples, dataclasses and modules."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, tuple | list):
        return sum(map(size, value))
    if isinstance(value, nn.Module):
        return sum(map(size, value.parameters()))
    if dataclasses.is_dataclass(value):
        return sum(size(getattr(value, field.name)) for field in dataclasses.fields(value))
    return 0


def moved(op: str, arguments: Arguments, result: Any) -> int:
    """arguments: of one call by name, as the op's signature has them; result: what it returned."""
    if op in LOOKING_UP:
        return LOOKING_UP[op](arguments, result)
    return sum(map(size, arguments.values())) + size(result)


def _metadata(given: Arguments, result: Any) -> int:
    """The result holds all that is read of the batch, but for lengths and the host's map, in which
    each row of a window is looked up."""
    batch = given["batch"]
    looked_up = int(result.window.lengths.sum()) * batch.window_map.element_size()
    return size(result) + size(batch.prefix_lens) + size(batch.new_lens) + looked_up


def _attention(given: Arguments, result: Any) -> int:
    row = given["cache"].shape[1] * given["cache"].element_size()
    return size(given["q"]) + size(result) + int(given["keys"].lengths.sum()) * row


def _store(given: Arguments, result: Any) -> int:
    return size(given["kv"]) + size(given["weight"]) + _rows(given["rows"], given["cache"])


def _compress_csa(given: Arguments, result: Any) -> int:
    """A token leaves a row of state; one that closes an entry reads those of the 7 before it."""
    state, kept = given["state"], int((given["plan"].ring_store != 0).sum())
    closing = int((given["rows"] != 0).sum())
    states = (kept + 7 * closing) * state.shape[1] * state.element_size()
    entries = _rows(given["rows"], given["cache"])
    return size(given["kv"]) + size(given["gate"]) + states + entries


def _compress_hca(given: Arguments, result: Any) -> int:
    """Each request's running vectors are read and written."""
    state, requests = given["state"], given["plan"].request_slots.shape[0]
    states = 2 * requests * state.shape[1] * state.element_size()
    entries = _rows(given["plan"].row, given["cache"])
    return size(given["kv"]) + size(given["gate"]) + states + entries


def _rows(rows: torch.Tensor, cache: torch.Tensor) -> int:
    """Of the cache's rows that are written; row 0 stands for none."""
    return int((rows != 0).sum()) * cache.shape[1] * cache.element_size()


def _select(given: Arguments, result: Any) -> int:
    keys = given["keys"]
    seen = int(given["table"].visible.sum()) * keys.shape[1] * keys.element_size()
    return size(given["q"]) + size(given["head_weights"]) + seen + size(result)


def _index_list(given: Arguments, result: Any) -> int:
    return size(given["selected"]) + size(given["window"]) + size(result)


def _route_hashed(given: Arguments, result: Any) -> int:
    table = given["tid2eid"]
    rows = given["token_ids"].numel() * table.shape[1] * table.element_size()
    return size(given["logits"]) + size(given["token_ids"]) + rows + size(result)


def _experts(given: Arguments, result: Any) -> int:
    used = given["experts"].unique().numel() / given["w13"].shape[0]
    weights = int(used * (size(given["w13"]) + size(given["w2"])))
    chosen = size(given["weights"]) + size(given["experts"])
    return size(given["x"]) + chosen + weights + size(result)


LOOKING_UP: Mapping[str, Callable[[Arguments, Any], int]] = {
    "build_metadata": _metadata,
    "compress_csa": _compress_csa,
    "compress_hca": _compress_hca,
    "csa_index_list": _index_list,
    "kv_norm_rope_store": _store,
    "route_hashed": _route_hashed,
    "routed_experts": _experts,
    "routed_experts_fp4": _experts,
    "select_entries": _select,
    "sparse_attention": _attention,
}
