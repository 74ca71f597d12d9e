"""The layout of a layer's memory: sizes, index space, bytes."""

from dataclasses import replace

import pytest
import torch

import oracle
from sglang_dsv4.attention.cache import PAGE, RING, LayerCache, allocate, entries_per_page
from sglang_dsv4.config import DSV4Config, LayerKind

CONFIG = DSV4Config.from_dict(oracle.tiny_config().to_dict())
PAGES, WINDOW_PAGES, REQUESTS = 7, 4, 5


def layer(kind: LayerKind, dtype: torch.dtype = torch.bfloat16) -> LayerCache:
    (cache,) = allocate(
        replace(CONFIG, layer_kinds=(kind,), num_hidden_layers=1, num_hash_layers=0),
        pages=PAGES,
        window_pages=WINDOW_PAGES,
        requests=REQUESTS,
        dtype=dtype,
    )
    return cache


def test_pages_suit_both_compressors():
    """No window of either compressor crosses a page, nor does a ring overlap inside one."""
    assert PAGE % LayerKind.HCA.value == 0
    assert RING == 2 * LayerKind.CSA.value and PAGE % RING == 0


def test_entries_per_page():
    assert [entries_per_page(kind) for kind in (LayerKind.SWA, LayerKind.CSA, LayerKind.HCA)] == [
        0,
        64,
        2,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_layer_has_rows_only(dtype):
    cache = layer(LayerKind.SWA, dtype)
    assert cache.kv.shape == (WINDOW_PAGES * 256, 512) and cache.kv.dtype is dtype
    assert cache.window_rows == WINDOW_PAGES * 256
    assert cache.index_keys is cache.csa_state is cache.index_state is cache.hca_state is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_csa_layer(dtype):
    """State is float32 whatever the rows are, and belongs to window pages."""
    cache = layer(LayerKind.CSA, dtype)
    assert cache.kv.shape == (WINDOW_PAGES * 256 + PAGES * 64, 512) and cache.kv.dtype is dtype
    assert cache.window_rows == WINDOW_PAGES * 256
    assert cache.index_keys.shape == (PAGES * 64, 128) and cache.index_keys.dtype is dtype
    assert cache.csa_state.shape == (WINDOW_PAGES * 8, 2048)
    assert cache.index_state.shape == (WINDOW_PAGES * 8, 512)
    assert cache.csa_state.dtype is cache.index_state.dtype is torch.float32
    assert cache.hca_state is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_hca_layer(dtype):
    """State belongs to requests: maximum, sum and weighted sum."""
    cache = layer(LayerKind.HCA, dtype)
    assert cache.kv.shape == (WINDOW_PAGES * 256 + PAGES * 2, 512) and cache.kv.dtype is dtype
    assert cache.hca_state.shape == (REQUESTS, 3 * 512)
    assert cache.hca_state.dtype is torch.float32
    assert cache.index_keys is cache.csa_state is cache.index_state is None


def test_every_layer_has_its_own():
    caches = allocate(
        CONFIG, pages=PAGES, window_pages=WINDOW_PAGES, requests=REQUESTS, dtype=torch.float32
    )
    kinds = [
        LayerKind.CSA if c.csa_state is not None
        else LayerKind.HCA if c.hca_state is not None
        else LayerKind.SWA
        for c in caches
    ]
    assert tuple(kinds) == CONFIG.layer_kinds
    tensors = [t for c in caches for t in vars(c).values() if isinstance(t, torch.Tensor)]
    assert len({t.data_ptr() for t in tensors}) == len(tensors)
    assert all((t == 0).all() for t in tensors), "the null rows must start as zeros"


@pytest.mark.parametrize(
    ("kind", "expected"), [(LayerKind.SWA, 0), (LayerKind.CSA, 256 + 64), (LayerKind.HCA, 8)]
)
def test_bytes_that_a_token_of_context_costs(kind, expected):
    """In BF16: 1024 bytes for an entry and 256 for an index key, over 4 or 128 tokens."""
    cache = layer(kind)
    entries = (len(cache.kv) - cache.window_rows) * 512 * 2
    keys = 0 if cache.index_keys is None else cache.index_keys.numel() * 2
    assert entries + keys == expected * PAGES * PAGE
