"""The MoE layer: router, routed experts, shared expert; divided among ranks by width and expert.

Source: the DeepSeek-V4 paper, section 2.1. Parameters carry the checkpoint's names; the gate (w1)
and up (w3) rows of every expert are stacked as w13.
"""

import torch
from torch import nn

from sglang_dsv4.backends import Ops
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.fp4 import FP4Matrices
from sglang_dsv4.linears import ALL_DENSE, KeptLinears, Linears
from sglang_dsv4.parallel import Parallel
from sglang_dsv4.parameters import Stack, tensor


class MoE(nn.Module):
    """Routed experts plus the shared expert.

    Each rank holds its own inner channels of the shared expert, and of all routed experts or, with
    expert parallelism, its own channels of its own experts. Every rank routes every token.
    """

    def __init__(
        self,
        config: DSV4Config,
        layer_id: int,
        ops: Ops,
        parallel: Parallel,
        expert_group: int | None = None,
        kept: KeptLinears = ALL_DENSE,
    ) -> None:
        """config, parallel: as `parallel.check` wants them.

        expert_group: values that share a scale where the routed experts lie in memory in four bits
        (16 or 32), None where they are dense. kept: of the shared expert's matrices.
        """
        super().__init__()
        width = len(parallel.share.of(config.moe_intermediate_size))
        self.parallel = parallel
        hashed = layer_id < config.num_hash_layers
        linears, rows = Linears(ops, kept), {"gate.weight": config.n_routed_experts}
        if not linears.keeps("ffn.shared_experts.w13"):
            rows["shared_experts.w13"] = 2 * width
        self.ops, self.inputs = ops, Stack(config.hidden_size, rows)
        self.gate = HashRouter(config, ops) if hashed else ScoredRouter(config, ops)
        self.experts = RoutedExperts(config, parallel, ops, expert_group)
        self.shared_experts = SharedExpert(config, width, ops, linears)

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """x [T, D] (normed), token_ids [T] -> [T, D] fp32.

        Nothing is rounded before ranks have added their parts, so that their number changes the
        order of additions and nothing else.
        """
        logits, *gate_up = self.inputs.apart(self.ops.linear_fp32(x, self.inputs.weight))
        weights, experts = self.gate(logits, token_ids)
        shared = self.shared_experts(x, *gate_up)
        return self.parallel.all_reduce(self.experts(x, weights, experts, shared))


class ScoredRouter(nn.Module):
    """Chooses the best scoring experts; a learned bias moves the choice, not the weights."""

    def __init__(self, config: DSV4Config, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.top_k = config.num_experts_per_tok
        self.scale = config.routed_scaling_factor
        self.bias = tensor(config.n_routed_experts, dtype=torch.float32)

    def forward(
        self, logits: torch.Tensor, token_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [T, E] fp32 -> weights [T, k] fp32, experts [T, k] int64; token_ids only fit the
        call."""
        return self.ops.route_scored(logits, self.bias, top_k=self.top_k, scale=self.scale)


class HashRouter(nn.Module):
    """The router of the first layers: a fixed table gives every token id its experts."""

    tid2eid: torch.Tensor

    def __init__(self, config: DSV4Config, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.scale = config.routed_scaling_factor
        # Valid before anything is loaded: the host can fill weights, but no table, with dummies.
        table = torch.arange(config.num_experts_per_tok).repeat(config.vocab_size, 1)
        self.register_buffer("tid2eid", table)

    def forward(
        self, logits: torch.Tensor, token_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [T, E] fp32, token_ids [T] -> weights [T, k] fp32, experts [T, k] int64."""
        return self.ops.route_hashed(logits, token_ids, self.tid2eid, scale=self.scale)


class RoutedExperts(nn.Module):
    """This rank's part of the experts that a router chooses from."""

    w13: torch.Tensor | FP4Matrices
    w2: torch.Tensor | FP4Matrices

    def __init__(self, config: DSV4Config, parallel: Parallel, ops: Ops, group: int | None) -> None:
        """group: see MoE; hidden_size and a rank's width are multiples of it."""
        super().__init__()
        self.limit = config.swiglu_limit
        self.total, held = config.n_routed_experts, parallel.experts.of(config.n_routed_experts)
        width = len(parallel.expert_width.of(config.moe_intermediate_size))
        self.first, experts, hidden = held.start, len(held), config.hidden_size
        if group is None:
            self.op = ops.routed_experts
            self.w13 = tensor(experts, 2 * width, hidden)
            self.w2 = tensor(experts, hidden, width)
        else:
            self.op = ops.routed_experts_fp4
            self.w13 = FP4Matrices(experts, 2 * width, hidden, group=group, parts=2)
            self.w2 = FP4Matrices(experts, hidden, width, group=group, parts=1)

    def forward(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        base: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, D], weights [T, k], experts [T, k], base [T, D] fp32 -> [T, D] fp32: base and this
        rank's part of the sum."""
        return self.op(
            x,
            weights,
            experts,
            self.w13,
            self.w2,
            limit=self.limit,
            base=base,
            first=self.first,
            total=self.total,
        )


class SharedExpert(nn.Module):
    """This rank's slice of the expert that every token passes through, with weight 1."""

    w13: nn.Module | None
    w2: nn.Module | torch.Tensor

    def __init__(self, config: DSV4Config, width: int, ops: Ops, linears: Linears) -> None:
        """A dense w13 is in the stack of what multiplies the layer's input."""
        super().__init__()
        self.ops = ops
        self.limit = config.swiglu_limit
        hidden, self.w13 = config.hidden_size, None
        if linears.keeps("ffn.shared_experts.w13"):
            self.w13 = linears.as_stored("ffn.shared_experts.w13", 2 * width, hidden, suffix="")
        if linears.keeps("ffn.shared_experts.w2"):
            self.w2 = linears.as_stored("ffn.shared_experts.w2", hidden, width, suffix="")
        else:
            self.w2 = tensor(hidden, width)

    def forward(self, x: torch.Tensor, gate_up: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, D] (normed) -> [T, D] fp32, this rank's part of the sum.

        gate_up: [T, 2 * width] fp32, x times w13, where that is dense.
        """
        if self.w13 is not None:
            gate_up = self.w13(x, torch.float32)
        activated = self.ops.swiglu(gate_up, limit=self.limit)
        if isinstance(self.w2, nn.Module):
            return self.w2(activated, torch.float32)
        return self.ops.linear_fp32(activated, self.w2)
