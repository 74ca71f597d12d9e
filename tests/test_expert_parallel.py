"""Experts divided over groups of ranks: who holds what, what is loaded, what is refused."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from checkpoint_files import Tensors
from sglang_dsv4 import backends, host, tiny_formats, tiny_weights, weights
from sglang_dsv4.checkpoint import CheckpointError
from sglang_dsv4.cli_make_tiny import shipped_config
from sglang_dsv4.config import ConfigError, DSV4Config
from sglang_dsv4.fp4 import FP4Matrices
from sglang_dsv4.graph_safety_step import SmallLM
from sglang_dsv4.ledger import ELSEWHERE
from sglang_dsv4.parallel import (
    Parallel,
    Share,
    check,
    expert_parallel_sizes,
    tensor_parallel_sizes,
)
from sglang_dsv4.precision import Precision
from sglang_dsv4.settings import SettingsError

# (ranks, groups of them): an expert whole on one rank, and an expert divided within its group.
SPLITS = [(2, 2), (4, 4), (4, 2), (8, 2)]


# ---- who holds what ----


@pytest.mark.parametrize(("size", "groups"), [*SPLITS, (1, 1), (8, 1)])
def test_ranks_are_numbered_as_sglang_numbers_them(
    size: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.runtime_context import derive_spawn_ranks

    def member(rank: int, of: int) -> SimpleNamespace:
        return SimpleNamespace(rank_in_group=rank, world_size=of)

    for rank in range(size):
        theirs = derive_spawn_ranks(
            world_rank=rank,
            tp_size=size,
            ep_join_rank_offset=0,
            attn_cp_size=1,
            attn_tp_size=size,
            moe_dp_size=1,
            moe_ep_size=groups,
        )
        context = SimpleNamespace(
            tp_rank=rank,
            tp_size=size,
            moe_ep_size=groups,
            tp_group=member(rank, size),
            moe_ep_group=member(theirs["moe_ep_rank"], groups),
            moe_tp_group=member(theirs["moe_tp_rank"], size // groups),
        )
        monkeypatch.setattr(host, "get_parallel", lambda context=context: context)
        assert host.parallel().experts == (theirs["moe_ep_rank"], groups)
        if groups > 1:
            context.moe_ep_group.rank_in_group = (theirs["moe_ep_rank"] + 1) % groups
            with pytest.raises(RuntimeError, match="SGLang divides experts among ranks as"):
                host.parallel()


@pytest.mark.parametrize(("size", "groups"), SPLITS)
def test_each_part_of_each_expert_is_held_once(size: int, groups: int) -> None:
    ranks = [Parallel(rank, size, expert_parallel=groups) for rank in range(size)]
    held = [
        (expert, channel)
        for rank in ranks
        for expert in rank.experts.of(8)
        for channel in rank.expert_width.of(16)
    ]
    assert sorted(held) == [(expert, channel) for expert in range(8) for channel in range(16)]


def test_a_share_is_even() -> None:
    assert Share(2, 3).of(12) == range(8, 12)
    with pytest.raises(AssertionError, match="13 cannot be divided by 3"):
        Share(2, 3).of(13)


# ---- which sizes ----

TINY = DSV4Config.from_dict(shipped_config("tiny", "bfloat16"))  # 8 experts, 8 groups of heads


@pytest.mark.parametrize(
    ("size", "groups", "told"),
    [
        (4, 3, "must be a divisor of tensor parallel size = 4, n_routed_experts = 8"),
        (2, 4, "must be a divisor of tensor parallel size = 2$"),
        (3, 3, "^tensor parallel size = 3 is refused"),
        (2, 0, "^expert parallel size = 0 is refused: must be at least 1$"),
        (2, -2, "^expert parallel size = -2 is refused: must be at least 1$"),
    ],
)
def test_uneven_sizes_are_refused(size: int, groups: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check(TINY, size, groups)


def test_sizes_that_work() -> None:
    assert expert_parallel_sizes(TINY, 8) == [1, 2, 4, 8] == tensor_parallel_sizes(TINY)
    assert tensor_parallel_sizes(TINY, 4) == [4, 8]
    pruned = DSV4Config.from_dict(shipped_config("tiny", "bfloat16") | {"n_routed_experts": 6})
    assert expert_parallel_sizes(pruned, 8) == [1, 2]
    with pytest.raises(ConfigError, match="must be a divisor of n_routed_experts = 6$"):
        check(pruned, 4, 4)


@pytest.mark.parametrize("provider", ["marlin", "humming"])
def test_a_provider_of_all_experts_is_refused(provider: str) -> None:
    assert backends.parse(f"routed_experts_fp4={provider}") == {"routed_experts_fp4": provider}
    for named in (f"routed_experts_fp4={provider}", f"all={provider}"):
        with pytest.raises(SettingsError, match=f"{provider} needs all experts on every rank"):
            backends.parse(named, 2)
    cpu = backends.Machine("cpu", "CPU", None)
    with pytest.raises(SettingsError, match="leave it out, or --ep-size"):
        backends.choose(cpu, f"routed_experts_fp4={provider}", expert_parallel=2)


# ---- what is loaded: one layer of four experts ----

HIDDEN, WIDTH, EXPERTS = 64, 256, 4
CONFIG = DSV4Config.from_dict(
    shipped_config("tiny", "bfloat16")
    | {"num_hidden_layers": 1, "compress_ratios": [0], "num_hash_layers": 0, "vocab_size": 16}
    | {"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "hidden_size": HIDDEN}
    | {"moe_intermediate_size": WIDTH}
)
OPS = backends.choose(backends.Machine("cpu", "CPU", None))
MATRIX = "layers.0.ffn.experts.{}.{}.weight"
SHAPES = {"w1": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH), "w3": (WIDTH, HIDDEN)}
GROUPS = {"mxfp4": 32, "nvfp4": 16, "packed": 16}


def checkpoint(stored: str | None) -> Tensors:
    """Everything that the model needs, its experts stored so; None is dense."""
    tensors: Tensors = {}
    for entry in tiny_weights.vendor_entries(CONFIG):
        if ".ffn.experts." not in entry.name:
            tensors |= tiny_weights.tensors(entry, torch.float32, seed=0)
    for expert in range(EXPERTS):
        for matrix, shape in SHAPES.items():
            name, draw = MATRIX.format(expert, matrix), torch.Generator()
            values = torch.randn(shape, generator=draw.manual_seed(10 * expert + int(matrix[1])))
            encoded = {} if stored is None else tiny_formats.encode(stored, name, values)
            tensors |= encoded or {name: values}
    return tensors


def stacked(tensors: Tensors) -> Tensors:
    """Dense experts in two stacks, under transformers' names."""
    kept = {name: tensor for name, tensor in tensors.items() if ".ffn.experts." not in name}
    for name, matrices in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
        of_experts = [
            torch.cat([tensors[MATRIX.format(expert, matrix)] for matrix in matrices])
            for expert in range(EXPERTS)
        ]
        kept[f"model.layers.0.mlp.experts.{name}"] = torch.stack(of_experts)
    return kept


def loaded(
    tensors: Mapping[str, Tensor], parallel: Parallel, group: int | None = None
) -> tuple[SmallLM, weights.LoadReport]:
    """The model with experts of this group, or dense ones, in FP32."""
    lm = SmallLM(CONFIG, OPS, Precision(), parallel, {} if group is None else {0: group})
    report = weights.load(
        lm,
        tensors.items(),
        CONFIG,
        rank=parallel.rank,
        size=parallel.size,
        expert_parallel=parallel.expert_parallel,
    )
    return lm, report


def experts_of(lm: SmallLM) -> nn.Module:
    return lm.model.layers[0].ffn.experts


def cut(values: Tensor, parallel: Parallel, dim: int, parts: int = 1) -> Tensor:
    """Of all experts [E, N, K] what a rank holds: its experts, of these a piece of each part."""
    pieces = parallel.size // parallel.expert_parallel
    group, piece = divmod(parallel.rank, pieces)
    mine = values.chunk(parallel.expert_parallel)[group]
    blocks = mine.chunk(parts, dim=1)
    return torch.cat([block.chunk(pieces, dim=dim)[piece] for block in blocks], dim=1)


def assert_part(found: nn.Module, whole: nn.Module, parallel: Parallel) -> None:
    """Bit for bit, of a rank's experts and those of a single rank."""
    for name, dim, parts in (("w13", 1, 2), ("w2", 2, 1)):
        mine, all_of_it = getattr(found, name), getattr(whole, name)
        if not isinstance(mine, FP4Matrices):
            assert torch.equal(mine, cut(all_of_it, parallel, dim, parts)), name
            continue
        for part in ("codes", "scales"):
            expected = cut(getattr(all_of_it, part), parallel, dim, parts)
            assert torch.equal(getattr(mine, part), expected), (name, part)
        expected = all_of_it.factors.chunk(parallel.expert_parallel)[parallel.experts.part]
        assert torch.equal(mine.factors, expected)


def without_values(tensors: Tensors, parallel: Parallel) -> Tensors:
    """The same, where whoever reads from another rank's expert fails."""
    mine = parallel.experts.of(EXPERTS)
    return {
        name: tensor.to("meta")
        if ".ffn.experts." in name and int(name.split(".")[4]) not in mine
        else tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("stored", [None, *GROUPS])
@pytest.mark.parametrize(("size", "groups"), SPLITS)
def test_a_rank_reads_and_holds_its_own_experts(
    size: int, groups: int, stored: str | None, kept: bool
) -> None:
    """Dense, dequantised, and in four bits; what all ranks divide is divided as ever."""
    group = GROUPS.get(stored or "") if kept else None
    tensors = checkpoint(stored)
    whole, all_of_it = loaded(tensors, Parallel(), group)
    for rank in range(size):
        parallel = Parallel(rank, size, expert_parallel=groups)
        lm, report = loaded(without_values(tensors, parallel), parallel, group)
        assert_part(experts_of(lm), experts_of(whole), parallel)
        twin = loaded(tensors, Parallel(rank, size))[0].state_dict()
        others = {name: value for name, value in lm.state_dict().items() if ".experts." not in name}
        assert len(others) > 10
        assert all(torch.equal(value, twin[name]) for name, value in others.items())
        names = [name for name in tensors if ".ffn.experts." in name]
        of_experts = sum("input_" not in name for name in names)
        elsewhere = of_experts - of_experts // groups
        assert report.skipped[ELSEWHERE] == elsewhere
        assert report.tensors + elsewhere == all_of_it.tensors
        assert f"{elsewhere} {ELSEWHERE}" in str(report)


@pytest.mark.parametrize(("size", "groups"), SPLITS)
def test_stacks_are_cut(size: int, groups: int) -> None:
    tensors = checkpoint(None)
    whole, _ = loaded(tensors, Parallel())
    for rank in range(size):
        parallel = Parallel(rank, size, expert_parallel=groups)
        lm, report = loaded(stacked(tensors), parallel)
        assert_part(experts_of(lm), experts_of(whole), parallel)
        assert ELSEWHERE not in report.skipped  # some of every tensor is read


def missing(tensors: Tensors) -> None:
    del tensors[MATRIX.format(3, "w1")]


def misshapen(tensors: Tensors) -> None:
    tensors[MATRIX.format(3, "w1")] = torch.zeros(WIDTH, HIDDEN + 1)


def twice(tensors: Tensors) -> None:
    name = MATRIX.format(3, "w1")
    tensors["model." + name] = tensors[name]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (missing, "1 missing tensors"),
        (misshapen, "1 wrong shapes"),
        (twice, "1 tensors that come twice"),
    ],
)
def test_other_ranks_experts_are_accounted_for(spoil: Callable[[Tensors], None], told: str) -> None:
    tensors = checkpoint(None)
    spoil(tensors)
    with pytest.raises(CheckpointError, match=told):
        loaded(tensors, Parallel(0, 2, expert_parallel=2))


def test_damage_is_found_by_the_rank_that_holds_it() -> None:
    tensors = checkpoint(None)
    tensors[MATRIX.format(3, "w1")][0, 0] = torch.nan
    loaded(tensors, Parallel(0, 2, expert_parallel=2))
    with pytest.raises(CheckpointError, match=r"experts\.3\.w1\.weight \(expert 3\): 1 of"):
        loaded(tensors, Parallel(1, 2, expert_parallel=2))
