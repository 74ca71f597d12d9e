"""The class that SGLang's model registry finds under the architecture name of checkpoints."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from sglang_dsv4 import (
    checkpoint,
    expert_storage,
    host,
    linear_storage,
    parallel,
    precision,
    warmup,
    weights,
)
from sglang_dsv4.ahead import Ahead
from sglang_dsv4.backends import Machine, choose, pack_weights
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.expert_storage import ExpertStorage
from sglang_dsv4.formats import TensorFormat
from sglang_dsv4.linear_storage import LinearStorage
from sglang_dsv4.model import Model
from sglang_dsv4.parameters import Weight
from sglang_dsv4.precision import keeps_stored
from sglang_dsv4.settings import Settings
from sglang_dsv4.tensor_table import expected_tensors

logger = logging.getLogger(__name__)
_NOT_AHEAD = "sglang-dsv4: kernels compile when they are needed"


class DeepseekV4ForCausalLM(nn.Module):
    """The class that SGLang's model registry knows by this name."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        """config: SGLang's HF config, which carries the checkpoint's raw config.json with it.

        quant_config is SGLang's reading of one global field; formats are decided per tensor here.
        """
        super().__init__()
        self.config = DSV4Config.from_dict(host.raw_config(config))
        self.parallel = host.parallel()
        groups = self.parallel.expert_parallel
        parallel.check(self.config, self.parallel.size, groups)
        settings = Settings.read()
        self.chosen = chosen = precision.parse(settings.precision)
        self.ops = choose(Machine.probe(host.device()), settings.ops, expert_parallel=groups)
        logger.info("sglang-dsv4 precision:\n%s", chosen.describe())
        logger.info("sglang-dsv4 ops:\n%s", "\n".join(self.ops.describe()))
        storage, linears = self._storage(host.raw_config(config))
        for note in storage.notes if self.parallel.rank == 0 else ():
            logger.warning("sglang-dsv4: %s", note)
        self.kept = (storage.groups, linears.anywhere)
        self.filled = False  # with weights
        self.model = Model(
            self.config, chosen, self.ops, self.parallel, storage.groups, linears.layers
        )
        self.head = Weight(self.config.vocab_size // self.parallel.size, self.config.hidden_size)
        self.logits_processor = host.logits_processor(config)
        self.ahead = self._begin_kernels()  # before the first weight, wherever weights come from

    def _storage(self, raw: dict[str, Any]) -> tuple[ExpertStorage, LinearStorage]:
        """Which experts and which other matrices stay as they are stored: by the headers of the
        checkpoint, read once for both, or where there are none, by its config.json."""
        device, run = self.ops.machine.device, torch.get_default_dtype()
        experts, others = self.chosen.routed_experts, self.chosen.linears
        slots = expected_tensors(self.config)
        held: expert_storage.HeldByLayer = {}
        formats: Mapping[str, TensorFormat] = {}
        if keeps_stored(experts, device) or linear_storage.wanted(others, device, run):
            if host.has_headers():
                folder = host.checkpoint_folder()
                formats = expert_storage.stored_formats(folder, lambda name: True)
                held = expert_storage.from_formats(formats)
            else:
                formats = linear_storage.from_claims(raw, slots)
                held = expert_storage.from_claims(raw, self.config)
        width, size = self.parallel.expert_width.parts, self.parallel.size
        return (
            expert_storage.decide(self.config, held, chosen=experts, device=device, ranks=width),
            linear_storage.decide(
                self.config, slots, formats, chosen=others, device=device, run=run, ranks=size
            ),
        )

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> Any:
        """One step of SGLang: input_ids [T], positions [T] -> logits where the host wants them."""
        backend = host.attention_backend()
        # The host passes on ids that a request made up; one such request must not end the server.
        token_ids = input_ids.clamp(0, self.config.vocab_size - 1)
        hidden = self.model(token_ids, backend.metadata, backend.caches)
        return self.logits_processor(input_ids, hidden, self.head, forward_batch)

    def load_weights(self, stream: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill every parameter from (name, tensor) pairs, or raise weights.CheckpointError: then
        what came before that is in place."""
        rank = self.parallel.rank
        try:
            report = weights.load(
                self,
                stream,
                self.config,
                rank=rank,
                size=self.parallel.size,
                expert_parallel=self.parallel.expert_parallel,
                total_bytes=checkpoint.total_bytes(host.checkpoint_folder()) if rank == 0 else None,
                chosen=self.chosen,
            )
            self._pack()
        except BaseException as error:
            if self.ahead is not None:  # the process may end now, and must not compile till then
                self.ahead.stop()
                self.ahead = None
            if self.filled and isinstance(error, weights.CheckpointError):
                self._pack()  # an update while the server runs: its graphs read packed weights
            raise
        logger.info("sglang-dsv4 weights: %s", report)
        self._finish_kernels()

    def post_load_weights(self) -> None:
        """Called by the host where it did not call `load_weights`."""
        if host.loads_dummies():
            self._pack()
            self._finish_kernels()

    def _pack(self) -> None:
        self.filled = True
        pack_weights(self.ops, self.model)

    def _begin_kernels(self) -> Ahead | None:
        """All variants at once, while weights load, for the host captures one batch size after the
        other. What is not found or fails compiles when it is needed; other ranks of this node find
        rank 0's."""
        if self.ops.machine.device == "cpu" or self.parallel.rank:
            return None
        if others := sorted(set(self.ops.providers.values()) - warmup.LEAVE_NO_TRACE):
            why = "cannot be tried out on tensors without values"
            logger.info(
                "sglang-dsv4: kernels compile when they are needed, not ahead: %s %s",
                ", ".join(others),
                why,
            )
            return None
        groups, linears = self.kept
        target = warmup.Target(
            config=self.config,
            ops=self.ops,
            precision=self.chosen,
            parallel=self.parallel,
            context=host.context_length() or self.config.max_position_embeddings,
            dtype=self.head.weight.dtype,
            expert_groups=groups,
            linears=linears,
        )
        try:
            return Ahead(target, host.just_in_time())
        except Exception:
            logger.warning(_NOT_AHEAD, exc_info=True)
            return None

    def _finish_kernels(self) -> None:
        """Once: weights may be loaded again while the server runs."""
        ahead, self.ahead = self.ahead, None
        if ahead is None:
            return
        try:
            done = ahead.finish()
        except Exception:
            logger.warning(_NOT_AHEAD, exc_info=True)
            return
        ready = "sglang-dsv4: %d kernel variants and modules ready in %s s, %s s after the weights"
        logger.info(ready, done.built, done.seconds, ahead.waited)
        for name, reason in done.failed:
            logger.warning("sglang-dsv4: %s compiles when it is needed: %s", name, reason)


EntryClass = DeepseekV4ForCausalLM
