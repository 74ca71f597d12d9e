"""The reference of the ablation: transformers' DeepSeek-V4 in fp32, which shares no op with ours.

transformers scores index entries in full precision; the Hadamard transform and the FP4 grid that
the model was trained with are put in front of its scorer here, written anew for this purpose.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV4ForCausalLM

from sglang_dsv4.ablation_metrics import Trace


class CannotLoad(RuntimeError):
    """transformers does not make this checkpoint's model, or not all of it."""


class Oracle:
    """One sequence at a time, without a cache, in float32."""

    def __init__(self, folder: Path) -> None:
        """Raises CannotLoad with what transformers said, also where it left parameters unfilled."""
        try:
            model, report = DeepseekV4ForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
        except Exception as error:  # whatever it may raise: there is another reference
            raise CannotLoad(f"{type(error).__name__}: {error}".splitlines()[0]) from error
        unfilled = [*report["missing_keys"], *report["mismatched_keys"]]
        if unfilled:
            raise CannotLoad(f"{len(unfilled)} parameters were not in it, such as {unfilled[0]}")
        self.model = model.eval()
        self.model.set_experts_implementation("eager")
        self._seen: dict[str, list[torch.Tensor]] = {}
        for layer in self.model.model.layers:
            self._keep("layers", layer, _hidden)
            indexer = getattr(getattr(layer.self_attn, "compressor", None), "indexer", None)
            if indexer is not None:
                indexer.scorer.register_forward_pre_hook(_score_on_fp4_grid)
                self._keep("selected", indexer, lambda output: output[0])
            if not layer.mlp.is_hash:
                self._keep("experts", layer.mlp.gate, lambda output: output[2])

    def _keep(self, kind: str, module: torch.nn.Module, part: Any) -> None:
        def keep(_: Any, __: Any, output: Any) -> None:
            self._seen.setdefault(kind, []).append(part(output))

        module.register_forward_hook(keep)

    @torch.no_grad()
    def logits(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """[T, V] fp32 of each sequence."""
        self._seen.clear()
        return [self._run(ids) for ids in sequences]

    @torch.no_grad()
    def trace(self, ids: Sequence[int]) -> Trace:
        """All that is compared of one text."""
        self._seen.clear()
        logits = self._run(ids)
        kinds = ("selected", "experts")
        return Trace(self._seen["layers"], logits, *(self._seen.get(kind, []) for kind in kinds))

    def _run(self, ids: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        return logits


def _hidden(output: Any) -> torch.Tensor:
    """Of the only sequence: [T, streams, hidden]."""
    streams: torch.Tensor = (output[0] if isinstance(output, tuple) else output)[0]
    return streams


@functools.cache
def _hadamard(size: int) -> torch.Tensor:
    """[size, size]: entry (i, j) is -1 where i and j share an odd number of bits, divided by the
    root of the size: orthonormal, in Sylvester's order."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return torch.tensor(signs) * size**-0.5


def _on_fp4_grid(vectors: torch.Tensor) -> torch.Tensor:
    """Blocks of 32 channels as E2M1 with a power-of-two scale, ties to the even code."""
    blocks = vectors.unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 6)))
    scale = torch.where(largest == 0, torch.ones_like(scale), scale)
    scaled = blocks / scale
    # Below 2 codes are 0.5 apart, below 4 they are 1 apart, up to 6 they are 2 apart.
    step = torch.full_like(scaled, 0.5)
    step = torch.where(scaled.abs() >= 2, torch.ones_like(step), step)
    step = torch.where(scaled.abs() >= 4, torch.full_like(step, 2.0), step)
    return (torch.round(scaled / step) * step * scale).flatten(-2)


def _score_on_fp4_grid(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    query, keys, hidden = inputs  # query and keys after their rope
    turn = _hadamard(query.shape[-1])
    return _on_fp4_grid(query @ turn), _on_fp4_grid(keys @ turn), hidden
