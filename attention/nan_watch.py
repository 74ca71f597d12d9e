"""Looks at how many scores of the indexers were NaN, without a step waiting for it.

Indexers count on the device, inside and outside graphs. Such a score is no error of a step: its
entry is chosen last, and everything after it may be finite. But it says that something is damaged.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch

from sglang_dsv4.attention.indexer import Indexer

logger = logging.getLogger(__name__)

EVERY = 64  # forwards from one look to the next

TOLD = (
    "sglang-dsv4: %d scores of the indexer were NaN (%s): weights or rows of the cache are damaged."
    " The requests that met them went on, and their answers may be wrong, as may those of requests"
    " that share a prefix with them. Check the files with `sglang-dsv4 inspect CKPT` and restart"
    " the server, which empties the cache and looks for NaN in every weight; if it comes back,"
    " report it. Told once; /server_info goes on counting (sglang_dsv4: nan_index_scores)."
)


class NanWatch:
    """The counters of a model's indexers, told of in the log when there is something to tell.

    On a GPU a look is a copy into pinned memory that is read in a later forward, once it is there.
    """

    def __init__(self, layers: Iterable[Any]) -> None:
        """layers: a Model's, on the device that they run on."""
        self.indexers: dict[int, Indexer] = {
            number: layer.attn.indexer
            for number, layer in enumerate(layers)
            if layer.attn.indexer is not None
        }
        self.on_gpu = any(indexer.nan_scores.is_cuda for indexer in self.indexers.values())
        self.on_host = torch.zeros(
            len(self.indexers), dtype=torch.int64, device="cpu", pin_memory=self.on_gpu
        )
        self.copied: torch.cuda.Event | None = None  # recorded after a copy that was not read yet
        self.forwards, self.told = 0, False

    def before_forward(self) -> None:
        """Called before each forward, outside graphs: every EVERY times a look. Never waits."""
        self.forwards += 1
        if self.copied is not None:
            if self.copied.query():
                self.copied = None
                self._tell(self.on_host.tolist())
        elif self.forwards % EVERY == 0 and self.indexers and not self.told:
            self._look()

    def counts(self) -> dict[str, int]:
        """NaN scores since the start by number of layer, without layers that had none; those of
        steps under way may be missing."""
        found = self._counters().tolist() if self.indexers else []
        self._tell(found)
        return {
            str(layer): count for layer, count in zip(self.indexers, found, strict=True) if count
        }

    def _look(self) -> None:
        if not self.on_gpu:
            self._tell(self._counters().tolist())
            return
        self.on_host.copy_(self._counters(), non_blocking=True)
        self.copied = torch.cuda.Event()
        self.copied.record()

    def _counters(self) -> torch.Tensor:
        return torch.cat([indexer.nan_scores for indexer in self.indexers.values()])

    def _tell(self, counts: list[int]) -> None:
        if self.told or not any(counts):
            return
        self.told = True
        layers = zip(self.indexers, counts, strict=True)
        each = ", ".join(f"layer {layer}: {count}" for layer, count in layers if count)
        logger.error(TOLD, sum(counts), each)
