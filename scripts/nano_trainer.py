"""How nano is trained: the plan of a run, its batches, and one step of it."""

import math
import sys
from dataclasses import dataclass
from typing import Any

import nano_model
import nano_text
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.data import Dataset
from tqdm import tqdm

# Row lengths: first the short rows of FIRST_MIXES, from `LONG_FROM` on both kinds in turn.
SHORT_ROW, LONG_ROW = 512, 2048
LONG_FROM = 0.3
# What the layers with entries see of their window, in turn, first and then until they select.
WHOLE = nano_model.WINDOW
FIRST_WINDOWS, NEXT_WINDOWS = (16, WHOLE, 4), (WHOLE, 16, WHOLE, WHOLE)
# Until this part of the run the indexers learn while all entries are attended to: what is not yet
# found among all entries is never selected, and then it cannot be learnt either.
SELECT_FROM = 0.6
WARM_UP = 0.03
LAST_RATE = 0.01  # of the peak


@dataclass(frozen=True)
class Plan:
    """What decides the result, together with the code; training.json has it."""

    seed: int
    steps: int
    tokens: int  # per step
    peak_rate: float
    weight_decay: float = 0.05
    index_weight: float = 1.0
    clip: float = 1.0
    muon: bool = True

    def is_first(self, step: int) -> bool:
        """Whether looking up at short distances is still what is learnt."""
        return step < LONG_FROM * self.steps

    def window(self, step: int) -> int:
        """How many tokens the layers with entries see besides them."""
        if step >= SELECT_FROM * self.steps:
            return WHOLE
        windows = FIRST_WINDOWS if self.is_first(step) else NEXT_WINDOWS
        return windows[step // 2 % len(windows)]

    def length(self, step: int) -> int:
        return SHORT_ROW if self.is_first(step) or step % 2 else LONG_ROW

    def rows(self, length: int) -> int:
        return max(1, self.tokens // length)

    def rate(self, progress: float) -> float:
        if progress < WARM_UP:
            return self.peak_rate * progress / WARM_UP
        cosine = 0.5 + 0.5 * math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP))
        return self.peak_rate * (LAST_RATE + (1 - LAST_RATE) * cosine)


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Batch number `step` as a function of the plan, whichever process asks for it."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer) -> None:
        self._plan, self._tokenizer = plan, tokenizer

    def __len__(self) -> int:
        return self._plan.steps

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        length = self._plan.length(step)
        rows = self._plan.rows(length)
        mixes = nano_text.FIRST_MIXES if self._plan.is_first(step) else nano_text.MIXES
        ids, weights = nano_text.batch(self._plan.seed, step, self._tokenizer, length, rows, mixes)
        return torch.from_numpy(ids), torch.from_numpy(weights)


class Trainer:
    """The model, its optimizer and what one step does."""

    def __init__(
        self, plan: Plan, vocab_size: int, device: torch.device, captures: bool = False
    ) -> None:
        self.plan = plan
        self.model = nano_model.build(nano_model.config(vocab_size), plan.seed).to(device).train()
        self.index_loss, self.balance = nano_model.prepare(self.model)
        indexed = {id(p) for p in nano_model.index_parameters(self.model)}
        every = list(self.model.parameters())
        self._main = [p for p in every if id(p) not in indexed]
        self._indexed = [p for p in every if id(p) in indexed]
        self._captures = captures
        self._graphs: dict[tuple[int, Any], Captured] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        kinds: dict[str, list[nn.Parameter]] = {"muon": [], "decayed": [], "plain": []}
        for name, parameter in self.model.named_parameters():
            kinds[_kind(name, parameter)].append(parameter)
        if not plan.muon:
            kinds["decayed"] += kinds["muon"]
        groups = [
            {"params": kinds["decayed"], "weight_decay": plan.weight_decay},
            {"params": kinds["plain"], "weight_decay": 0.0},
        ]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.97), eps=1e-10, fused=True)
        ]
        if plan.muon:
            self.optimizers.append(
                torch.optim.Muon(
                    kinds["muon"],
                    lr=0.0,
                    weight_decay=plan.weight_decay,
                    adjust_lr_fn="match_rms_adamw",
                )
            )

    def compute(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Adds one batch's gradients; returns the loss of its text, per weighted token, and of the
        indexers.
        """
        logits = nano_model.forward(self.model, ids)
        losses = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        weights = weights[:, 1:].flatten()
        text, index = (losses * weights).sum() / weights.sum(), self.index_loss.take()
        (text + self.plan.index_weight * index).backward()
        return text.detach(), index.detach()

    def differentiate(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """`compute` on cleared gradients; on a GPU from a graph: it is thousands of launches."""
        if not self._captures:
            return self.compute(ids, weights)
        kind = (ids.shape[1], nano_model.indexers(self.model)[0].index_topk)
        if kind not in self._graphs:
            try:
                self._graphs[kind] = Captured(self, ids, weights, self._pool)
            except RuntimeError as error:
                tqdm.write(f"not captured, launched one by one from here on: {error}", sys.stderr)
                self._captures = False
                return self.compute(ids, weights)
        return self._graphs[kind](ids, weights)

    def step(self, ids: Tensor, weights: Tensor, rate: float) -> tuple[Tensor, Tensor, Tensor]:
        """One update; also returns the gradient's norm before clipping, indexers left out."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        text, index = self.differentiate(ids, weights)
        norm = torch.nn.utils.clip_grad_norm_(self._main, self.plan.clip)
        torch.nn.utils.clip_grad_norm_(self._indexed, self.plan.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self.balance.step()
        return text, index, norm

    def forget(self) -> None:
        """Undoes what steps at rate 0 leave behind."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
        self.balance.reset()


class Captured:
    """Forward and backward for one shape of batch as a CUDA graph."""

    def __init__(self, trainer: Trainer, ids: Tensor, weights: Tensor, pool: Any) -> None:
        self._trainer, self._ids, self._weights = trainer, ids.clone(), weights.clone()
        parameters = list(trainer.model.parameters())
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                trainer.compute(self._ids, self._weights)
                for parameter in parameters:
                    parameter.grad = None
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._losses = trainer.compute(self._ids, self._weights)
        # What a replay writes; the pool is shared, so they hold until the next replay of any graph.
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        self._loads = trainer.balance.loads()

    def __call__(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The losses, as `Trainer.compute`; gradients as after it."""
        self._ids.copy_(ids)
        self._weights.copy_(weights)
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._trainer.balance.set_loads(self._loads)
        text, index = self._losses
        return text.clone(), index.clone()


def _kind(name: str, parameter: Tensor) -> str:
    """Which rule updates it: muon and decayed are matrices of products, experts among the latter;
    plain are norms, biases, mHC and the embedding.
    """
    kept = ("hc.", "hc_head", "position_bias", "embed_tokens")
    if parameter.dim() < 2 or any(part in name for part in kept):
        return "plain"
    return "muon" if parameter.dim() == 2 and "lm_head" not in name else "decayed"
