"""`sglang-dsv4 warm`: which kernels it finds, what it remembers, what doctor says of it.

Nothing is compiled here: that needs a GPU. What is found is compared with what a model launches.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dsv4 import cli_warm, kernels_triton_mhc, linears, precision, warmup
from sglang_dsv4.backends import PROVIDERS, Machine, Ops, choose
from sglang_dsv4.cli import main
from sglang_dsv4.config import DSV4Config, LayerKind
from sglang_dsv4.linears import KeptLinears
from sglang_dsv4.moe.kernels_triton_experts import Tiles
from sglang_dsv4.moe.kernels_triton_fp4 import _tiles_of_hopper
from sglang_dsv4.parallel import Parallel
from sglang_dsv4.settings import SettingsError
from sglang_dsv4.warmup import Launch, Target

GPU = Machine("cuda", "a GPU", (9, 0))


def ops_by(provider: str) -> Ops:
    """Ops by their Triton kernels, if they have any, but for attention's, on tensors that the CPU
    could hold."""
    others = [op for op in PROVIDERS if op != "sparse_attention"]
    names = ",".join(f"{op}={PROVIDERS[op][0].name}" for op in others)
    patched = replace(GPU, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name, *_: name)
        return choose(patched, f"{names},sparse_attention={provider}")


def target(config: DSV4Config, provider: str = "triton", **changes: Any) -> Target:
    made = Target(
        config=config,
        ops=ops_by(provider),
        precision=precision.parse(""),
        parallel=Parallel(),
        context=config.max_position_embeddings,
        dtype=torch.bfloat16,
    )
    return replace(made, **changes)


def names(found: Sequence[Launch]) -> set[str]:
    return {launch.kernel.__name__ for launch in found}


@pytest.fixture(scope="module")
def flash() -> DSV4Config:
    return cli_warm.chosen_config(None, "flash")


@pytest.fixture(scope="module")
def decode(flash: DSV4Config) -> list[Launch]:
    return warmup.launches(target(flash), decodes=(1, 64), prefills=())


# ---- what is found ----


def test_every_kernel_of_a_decode_is_found(decode: list[Launch]) -> None:
    """All of each chosen module that a decode launches; those of large batches come with these."""
    assert {
        *("_rms_norm_kernel", "_project_kernel", "_collapse_kernel", "_post_kernel"),
        *("_query_norm_rope_kernel", "_kv_norm_rope_store_kernel", "_csa_index_list_kernel"),
        *("_attention_kernel", "_merge_kernel", "_compress_csa_kernel", "_compress_hca_kernel"),
        *("_index_query_kernel", "_score_kernel", "_select_kernel", "_route_scored_kernel"),
        *("_route_hashed_kernel", "_swiglu_kernel", "_grouped_product_kernel"),
        *("_add_choices_kernel", "_token_metadata_kernel", "_segment_metadata_kernel"),
        "_decode_slots_kernel",
    } <= names(decode)


def test_fused_kernels_between_sub_layers_halve_their_launches(
    flash: DSV4Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of few tokens. Each layer has two sites. Once in a step there is nothing to write
    before one, and a write with none after it; each attention has a norm of its own."""
    counted: Counter[str] = Counter()
    key = Launch.key
    monkeypatch.setattr(
        Launch, "key", lambda one: counted.update([one.kernel.__name__]) or key(one)
    )

    def launched(fused_tokens: int) -> Counter[str]:
        counted.clear()
        monkeypatch.setattr(kernels_triton_mhc, "FUSED_TOKENS", fused_tokens)
        warmup.launches(target(flash), decodes=(1,), prefills=())
        return Counter(counted)

    sites = 2 * len(warmup.one_of_each(flash).layer_kinds)
    separate, fused = launched(0), launched(1)
    # the first site has no write to be spared
    assert separate.total() - fused.total() == 2 * sites - 1
    assert separate["_post_kernel"] == sites and fused["_post_kernel"] == 1
    assert fused["_post_project_token_kernel"] == fused["_mix_norm_kernel"] == sites
    assert separate["_rms_norm_kernel"] - fused["_rms_norm_kernel"] == sites


@pytest.mark.parametrize("experts", [256, 384])
def test_every_tile_of_the_experts_is_among_them(experts: int) -> None:
    """Of Flash and of Pro, for every number of tokens of a step on Hopper."""

    def tiles(tokens: Iterable[int]) -> set[Tiles]:
        return {_tiles_of_hopper(6 * each / experts) for each in tokens}

    ahead = tiles((*warmup.DECODES, *warmup.PREFILLS))
    assert ahead == tiles(range(1, 8193)) and len(ahead) == 6


def test_large_batches_add_what_sorts_pairs(flash: DSV4Config) -> None:
    found = names(warmup.launches(target(flash), decodes=(), prefills=(2048,)))
    assert "_sort_pairs_kernel" in found


def test_the_shapes_are_the_model_s(flash: DSV4Config, decode: list[Launch]) -> None:
    """Widths, heads and numbers of experts reach the kernels as constants."""
    attention = [one for one in decode if one.kernel.__name__ == "_attention_kernel"]
    assert {one.options["HEADS"] for one in attention} == {16, 64}  # of 1 token, of 64
    products = [one for one in decode if one.kernel.__name__ == "_grouped_product_kernel"]
    assert products and {one.options["EXPERTS"] for one in products} == {256}
    shared = warmup.launches(target(flash, parallel=Parallel(size=8)), decodes=(1,), prefills=())
    (attention, *_) = (one for one in shared if one.kernel.__name__ == "_attention_kernel")
    assert attention.options["HEADS"] == 16  # 8 of them, padded


def test_a_rank_s_experts_are_those_it_holds(flash: DSV4Config) -> None:
    """Whichever they are, the variants are the same: those that rank 0 compiles are for all."""
    keys = []
    for rank in (0, 3):
        parts = target(flash, parallel=Parallel(rank, 4, expert_parallel=4))
        found = warmup.launches(parts, decodes=(1, 8), prefills=(2048,))
        products = [one for one in found if one.kernel.__name__ == "_grouped_product_kernel"]
        assert {one.options["EXPERTS"] for one in products} == {64}
        keys.append({one.key() for one in found})
    assert keys[0] == keys[1]
    assert parts.key() != target(flash, parallel=Parallel(3, 4)).key()


def test_no_rank_waits_for_another(flash: DSV4Config) -> None:
    def all_reduce(values: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the other rank is not there")

    pair = target(flash, parallel=Parallel(size=2, all_reduce=all_reduce))
    assert warmup.launches(pair, decodes=(1,), prefills=())


@pytest.mark.parametrize(
    ("form", "product", "unpacked"),
    [
        ("fp8", "_linear_kernel", "_dequantise_kernel"),
        ("fp4", "_linear_fp4_kernel", "_unpack_kernel"),
    ],
)
def test_matrices_as_they_are_stored_are_found(
    form: str, product: str, unpacked: str, flash: DSV4Config
) -> None:
    kept = target(flash, linears=(dict.fromkeys(linears.HOLDERS.values(), form),))
    few = names(warmup.launches(kept, decodes=(1,), prefills=()))
    assert {product, "_add_slices_kernel"} <= few and unpacked not in few
    assert unpacked in names(warmup.launches(kept, decodes=(), prefills=(257,)))


def test_matrices_in_both_forms_are_found(flash: DSV4Config) -> None:
    """What a layer in FP8 launches, and what one in NVFP4 does."""
    layers = [dict.fromkeys(linears.HOLDERS.values(), form) for form in ("fp8", "fp4")]

    def found(*kept: KeptLinears) -> set[tuple[Any, ...]]:
        made = target(flash, linears=kept)
        return {one.key() for one in warmup.launches(made, decodes=(1,), prefills=(257,))}

    one, other = map(found, layers)
    assert one - other and other - one and found(*layers) == one | other


def test_the_hash_of_kernels_has_what_they_share() -> None:
    folder = Path(warmup.__file__).parent
    before, hashed = warmup.sources(), []
    read = Path.read_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: hashed.append(path) or read(path))
        assert warmup.sources() == before
    assert {folder / "kernels_triton_fp4.py", folder / "reference.py"} < set(hashed)
    assert folder / "backends.py" not in hashed


def test_each_way_to_hold_experts_is_found(flash: DSV4Config) -> None:
    """Layers in MXFP4, in NVFP4 and dense, where each kind of layer stands for many."""
    some = target(flash, expert_groups={0: 32, 2: 16})
    assert some.storages == [32, None, 16]
    found = warmup.launches(some, decodes=(1,), prefills=())
    dense = names(warmup.launches(target(flash), decodes=(1,), prefills=()))
    products = [one for one in found if "_fp4_" in one.kernel.__name__]
    assert {one.options["GROUP"] for one in products} == {16, 32}
    assert dense < names(found) and not any("_fp4_" in name for name in dense)
    one_kind = replace(flash, num_hidden_layers=1, layer_kinds=(LayerKind.SWA,), num_hash_layers=0)
    assert warmup.one_of_each(one_kind, at_least=3).layer_kinds == (LayerKind.SWA,) * 3


@pytest.mark.parametrize(
    ("arguments", "groups"),
    [
        (["--config", "flash"], {32}),
        (["--config", "tiny"], set()),
        (["--config", "nano"], {16}),
        (["--config", "flash", "--tp-size", "8"], {32}),
        (["--config", "flash", "--tp-size", "8", "--ep-size", "4"], {32}),
    ],
)
def test_how_experts_of_known_models_are_held(
    arguments: list[str], groups: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_dsv4.backends.choose", lambda *_, **__: ops_by("triton"))
    found: list[Target] = []
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(cli_warm, "warm_up", lambda made, _: found.append(made) or 0)
    assert main(["warm", *arguments]) == 0
    assert set(found[0].expert_groups.values()) == groups
    assert found[0].parallel.expert_parallel == (4 if "--ep-size" in arguments else 1)
    monkeypatch.setenv("SGLANG_DSV4_PRECISION", "routed_experts=bf16")
    assert main(["warm", *arguments]) == 0
    assert found[1].expert_groups == {} and found[1].key() != found[0].key()


def test_how_experts_of_a_folder_are_held(tmp_path: Path, flash: DSV4Config) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"expert_dtype": "fp4"}))
    claimed = cli_warm.expert_formats(flash, tmp_path, None)
    assert {form.value for form in claimed[0]} == {"MXFP4"}
    (tmp_path / "model.safetensors").write_bytes(b"version https")
    with pytest.raises(SettingsError, match="Git LFS pointer"):
        cli_warm.expert_formats(flash, tmp_path, None)


def test_each_variant_is_found_once(decode: list[Launch]) -> None:
    keys = [launch.key() for launch in decode]
    assert len(set(keys)) == len(keys) < 60


def test_more_batches_find_more_variants(flash: DSV4Config, decode: list[Launch]) -> None:
    small = warmup.launches(target(flash), decodes=(1,), prefills=())
    assert {one.key() for one in small} < {one.key() for one in decode}


def test_flashmla_needs_no_compilation_but_its_neighbours(flash: DSV4Config) -> None:
    """A stand-in takes its place, whether it is installed or not."""
    found = names(warmup.launches(target(flash, "flashmla"), decodes=(32,), prefills=()))
    assert {"_narrow_kernel", "_turn_back_kernel"} <= found
    assert "_attention_kernel" not in found


def test_launches_work_again_afterwards() -> None:
    from triton.runtime.jit import KernelInterface

    before, installed = KernelInterface.__getitem__, sys.modules.get("flash_mla")
    with pytest.raises(ZeroDivisionError), warmup.recorded():
        assert KernelInterface.__getitem__ is not before
        _ = 1 / 0
    assert KernelInterface.__getitem__ is before
    assert sys.modules.get("flash_mla") is installed


def test_one_layer_of_each_kind_stands_for_all(flash: DSV4Config) -> None:
    many = replace(
        flash,
        num_hidden_layers=6,
        layer_kinds=(LayerKind.SWA, LayerKind.SWA, *(LayerKind.CSA, LayerKind.HCA) * 2),
        num_hash_layers=3,
    )
    kept = warmup.one_of_each(many)
    assert kept.layer_kinds == (LayerKind.SWA, LayerKind.SWA, LayerKind.CSA, LayerKind.HCA)
    assert kept.num_hash_layers == 1
    assert warmup.one_of_each(replace(many, num_hash_layers=0)).layer_kinds == kept.layer_kinds[1:]


# ---- what is built, and remembered ----


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path / "triton"


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "probe", classmethod(lambda cls, device=None: GPU))


def test_what_was_built_is_remembered(
    flash: DSV4Config, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(monkeypatch)
    assert warmup.caches_row()[1:3] == ("warn", "cold")
    calls: list[str] = []
    builders = [("one", lambda: calls.append("one")), ("two", lambda: calls.append("two"))]
    done = warmup.warm(target(flash), builders, step=calls.append)
    assert calls == ["one", "one", "two", "two"]
    assert (done.built, list(done.failed)) == (2, [])
    assert warmup.caches_row() == ("kernel caches", "ok", "warm for 1 model(s)")
    warmup.warm(target(flash), builders, step=calls.append)
    assert len(warmup.remembered()) == 1
    warmup.warm(target(flash, dtype=torch.float32), builders, step=calls.append)
    assert warmup.caches_row()[2] == "warm for 2 model(s)"
    monkeypatch.setattr(warmup, "sources", lambda: "others")
    assert warmup.caches_row()[2] == "cold"


def test_a_failure_is_told_and_not_remembered(flash: DSV4Config, cache: Path) -> None:
    def broken() -> None:
        raise RuntimeError("no compiler\nhere")

    done = warmup.warm(target(flash), [("one", broken), ("two", lambda: None)], lambda name: None)
    assert (done.built, dict(done.failed)) == (1, {"one": "RuntimeError: no compiler"})
    assert warmup.remembered() == {}


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_broken_manifest_is_cold(cache: Path, content: str) -> None:
    cache.mkdir()
    warmup.manifest().write_text(content)
    assert warmup.remembered() == {}


def test_the_key_follows_what_decides_about_variants(flash: DSV4Config) -> None:
    one = target(flash)
    others = [
        replace(one, parallel=Parallel(size=2)),
        replace(one, dtype=torch.float32),
        replace(one, context=1000),
        replace(one, linears=({"attn.wq_b": "fp8"},)),
        replace(one, linears=({"attn.wq_b": "fp4"},)),
        replace(one, linears=({"attn.wq_b": "fp8"}, {"attn.wq_b": "fp4"})),
        replace(one, config=replace(flash, n_routed_experts=128)),
        replace(one, ops=ops_by("reference")),
        replace(one, expert_groups={1: 32}),
    ]
    assert one.key() == target(flash).key()
    assert len({one.key(), *(other.key() for other in others)}) == 1 + len(others)


# ---- the command ----


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
@pytest.mark.parametrize("named", [["--config", "flash"], ["--config", "nano"]])
def test_a_cpu_needs_no_warming(named: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", *named]) == 0
    assert "nothing needs warming" in capsys.readouterr().out
    assert main(["warm", *named, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "ok": True, "device": "cpu", "built": 0, "failed": [],
    }  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
def test_command(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    """All but compilation, as on a GPU."""
    on_a_gpu(monkeypatch)
    monkeypatch.setattr("sglang_dsv4.backends.choose", lambda *_, **__: ops_by("triton"))
    monkeypatch.setattr(
        warmup, "launches", lambda chosen: [Launch(SimpleNamespace(__name__="_a_kernel"), (), {})]
    )
    built: list[Launch] = []

    def compile(launch: Launch) -> None:
        if fails:
            raise RuntimeError("no compiler")
        built.append(launch)

    monkeypatch.setattr(Launch, "compile", compile)
    monkeypatch.setattr(warmup, "host_builders", lambda: [])
    assert main(["warm", "--config", "flash", "--json"]) == (1 if fails else 0)
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is not fails
    assert answer["failed"] == [["a_kernel", "RuntimeError: no compiler"]] * fails
    assert len(built) == (0 if fails else 1)
    assert main(["warm", "--config", "flash"]) == (1 if fails else 0)
    out = capsys.readouterr().out
    assert ("a_kernel failed: RuntimeError: no compiler" in out) is fails and "ready in" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "flash", "--tp-size", "7"], "7"),
        (["--config", "flash", "--context-length", "-1"], "1 to 1048576 tokens"),
        (["/nowhere/at/all"], "is no folder"),
    ],
)
def test_what_cannot_be_warmed_up_is_said(
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    on_a_gpu(monkeypatch)
    monkeypatch.setattr("sglang_dsv4.backends.choose", lambda *_, **__: ops_by("triton"))
    assert main(["warm", *options]) == 2
    assert message in capsys.readouterr().err


def test_what_the_host_compiles_is_there() -> None:
    """By name: a call needs a GPU."""
    names = [name for name, _ in warmup.host_builders()]
    assert names[0] == "SGLang positions"


@pytest.mark.gpu((8, 0))
def test_a_second_warm_up_finds_everything(cache: Path, flash: DSV4Config) -> None:
    """Compiled once: a server's own launches would find the same keys."""
    chosen = replace(target(flash), ops=choose(Machine.probe(), ""))
    found = warmup.launches(chosen, decodes=(1, 64), prefills=(1001,))
    for launch in found:
        launch.compile()
    count = sum(1 for _ in cache.rglob("*.cubin"))
    assert 0 < count <= len(found)
    for launch in warmup.launches(chosen, decodes=(1, 64), prefills=(1001,)):
        launch.compile()
    assert sum(1 for _ in cache.rglob("*.cubin")) == count
