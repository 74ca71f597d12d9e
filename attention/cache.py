"""What a layer remembers: its rows, its entries' index keys, its compressor state.

Geometry (the host's): tokens live in pages of `PAGE`; a page holds 64 CSA entries with their index
keys, and 2 HCA entries. Window rows sit in a smaller pool with pages of the same size, and a CSA
ring of `RING` slots belongs to each window page, so that a prefix hit finds its overlap rows there.
HCA state is one row of running vectors per request. Page 0 and row 0 are never handed out: they
absorb the stores of padding and of tokens that emit nothing, and row 0 stays zero.
"""

from dataclasses import dataclass

import torch

from sglang_dsv4.config import DSV4Config, LayerKind

PAGE = 256  # tokens per page; a multiple of 128, so that no hit ever needs partial HCA state
RING = 8  # CSA state slots per window page: 4 tokens of the open window and 4 of overlap


@dataclass(frozen=True)
class LayerCache:
    """State of one layer.

    kv [window_rows + entries, 512] in the row dtype: window rows first, then compressed entries.
    window_rows: the number of window rows, hence the first entry's row.
    index_keys [csa entries, 128] in the row dtype, CSA only.
    csa_state [window pages * RING, 4 * 512] and index_state [same, 4 * 128] float32, CSA only: each
        row is a token's two series of values, then its two series of gate scores (bias included).
    hca_state [request slots, 3 * 512] float32, HCA only: running maximum, sum of exponentials, and
        weighted sum of the window that is not closed yet.
    """

    kv: torch.Tensor
    window_rows: int
    index_keys: torch.Tensor | None = None
    csa_state: torch.Tensor | None = None
    index_state: torch.Tensor | None = None
    hca_state: torch.Tensor | None = None


def entries_per_page(kind: LayerKind) -> int:
    """Compressed entries that a page of tokens holds in a layer of this kind."""
    return PAGE // kind.value if kind.value else 0


def allocate(
    config: DSV4Config,
    *,
    pages: int,
    window_pages: int,
    requests: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> tuple[LayerCache, ...]:
    """Every layer's cache outside a server: `pages` token pages and `window_pages` window pages
    (page 0 of each is the null page), and `requests` request slots."""

    def state(rows: int, width: int) -> torch.Tensor:
        return torch.zeros(rows, width, dtype=torch.float32, device=device)

    caches = []
    for kind in config.layer_kinds:
        entries = pages * entries_per_page(kind)
        rows = window_pages * PAGE + entries
        kv = torch.zeros(rows, config.head_dim, dtype=dtype, device=device)
        csa, hca = kind is LayerKind.CSA, kind is LayerKind.HCA
        index_dim = config.index_head_dim
        caches.append(
            LayerCache(
                kv=kv,
                window_rows=window_pages * PAGE,
                index_keys=(
                    torch.zeros(entries, index_dim, dtype=dtype, device=device) if csa else None
                ),
                csa_state=state(window_pages * RING, 4 * config.head_dim) if csa else None,
                index_state=state(window_pages * RING, 4 * index_dim) if csa else None,
                hca_state=state(requests, 3 * config.head_dim) if hca else None,
            )
        )
    return tuple(caches)
