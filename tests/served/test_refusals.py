"""What we cannot serve is refused in a sentence, before a process is started or memory is taken."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from serving import Server
from sglang_dsv4 import options, plugin

Refused = Callable[..., str]


@pytest.fixture
def refused(serve: Callable[..., Server], checkpoint: Path, tmp_path: Path) -> Refused:
    """Starts a server that must not come up; the end of what it said. `change` gets a private copy
    of the checkpoint."""

    def start(change: Callable[[Path], None] | None = None, **options: Any) -> str:
        folder = checkpoint
        if change is not None:
            folder = shutil.copytree(checkpoint, tmp_path / "changed")
            change(folder)
        server = serve(folder, **options)
        status = server.exit_status()
        text = server.tail()
        assert status != 0, text
        return text

    return start


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("tp_size", "3", "tensor parallel size = 3 is refused"),
    ],
)
def test_unsupported_option(refused: Refused, option: str, value: str, says: str) -> None:
    text = refused(**{option: value})
    assert says in text and "Traceback" not in text[text.index(says) :]
    assert "Load weight begin" not in text


def change_config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def change_tensors(edit: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return change


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 1000)


def lose_shard(folder: Path) -> None:
    """A checkpoint in two shards, of which one did not arrive."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {
        "model-00001-of-00002.safetensors": names[: len(names) // 2],
        "model-00002-of-00002.safetensors": names[len(names) // 2 :],
    }
    index = {name: shard for shard, held in shards.items() for name in held}
    first = "model-00001-of-00002.safetensors"
    save_file({name: tensors[name] for name in shards[first]}, folder / first)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def add_unknown(tensors: dict[str, torch.Tensor]) -> None:
    for number in range(5):
        tensors[f"model.layers.0.mystery_{number}.weight"] = torch.zeros(2)


def drop_one(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.2.attn.attn_sink"]


def misshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(7)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (change_tensors(add_unknown), "mystery_4"),
    ],
    ids=["unknown"],
)
def test_broken_checkpoint(refused: Refused, change: Callable[[Path], None], says: str) -> None:
    text = refused(change)
    assert says in text
    assert "Load weight begin" not in text


def server_arguments(folder: Path, **changes: Any) -> SimpleNamespace:
    """Those that the check of a checkpoint reads."""
    defaults = dict(model_path=str(folder), load_format="auto", dtype="auto")
    defaults |= dict(device="cpu", json_model_override_args="{}", tp_size=1, ep_size=1)
    return SimpleNamespace(**(defaults | changes))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (truncate, "model.safetensors"),
        (lose_shard, "model-00002-of-00002.safetensors"),
        (change_tensors(drop_one), "layers.2.attn.attn_sink"),
        (change_tensors(misshape), "model.norm.weight"),
        (change_config(sliding_window=64), "sliding_window"),
        (change_config(kv_source_layer_ids=[2]), "this is DeepSeek-V4.1"),
    ],
    ids=["truncated", "missing shard", "missing", "misshaped", "window", "v4.1 in disguise"],
)
def test_the_check_that_refuses(
    checkpoint: Path, tmp_path: Path, change: Callable[[Path], None], says: str
) -> None:
    """The same check as above, called as the server calls it, without its start-up time."""
    folder = shutil.copytree(checkpoint, tmp_path / "changed")
    change(folder)
    arguments = server_arguments(folder)
    with pytest.raises(SystemExit, match=re.escape(says)):
        plugin._check_checkpoint(arguments)


@pytest.mark.parametrize(
    ("tp_size", "ep_size", "overrides", "says"),
    [
        (4, 3, {}, "must be a divisor of tensor parallel size = 4, n_routed_experts = 8"),
        (1, 2, {}, "must be a divisor of tensor parallel size = 1. Sizes that work: 1."),
        (4, 4, {"n_routed_experts": 6}, "must be a divisor of n_routed_experts = 6"),
        (2, 0, {}, "= 0 is refused: must be at least 1. Sizes that work: 1, 2."),
        (2, -1, {}, "= -1 is refused: must be at least 1. Sizes that work: 1, 2."),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(
    checkpoint: Path, tp_size: int, ep_size: int, overrides: dict[str, int], says: str
) -> None:
    arguments = server_arguments(
        checkpoint,
        tp_size=tp_size,
        ep_size=ep_size,
        load_format="dummy",
        json_model_override_args=json.dumps(overrides),
    )
    with pytest.raises(SystemExit, match=re.escape(says)):
        plugin._check_checkpoint(arguments)


def test_overrides_of_the_config_are_checked(checkpoint: Path) -> None:
    """Also where no weights are read."""
    overrides = '{"num_hidden_layers": 3}'
    arguments = server_arguments(
        checkpoint, load_format="dummy", json_model_override_args=overrides
    )
    with pytest.raises(SystemExit, match="layer_types = 7 is refused: must be 3"):
        plugin._check_checkpoint(arguments)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_four_bits_that_are_not_there_are_refused(
    checkpoint: Path, load_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By headers, and by config.json; the checkpoint is dense."""
    monkeypatch.setenv("SGLANG_DSV4_PRECISION", "routed_experts=fp4")
    with pytest.raises(SystemExit, match="routed_experts=fp4 .* the checkpoint holds none, but"):
        plugin._check_checkpoint(server_arguments(checkpoint, load_format=load_format))


def test_weights_that_cannot_fit_are_refused_on_a_gpu(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang_dsv4 import host

    caplog.set_level("INFO")
    arguments = server_arguments(checkpoint)
    monkeypatch.setattr(host, "device_memory", lambda _: ("cuda", 8 << 20))
    with pytest.raises(SystemExit) as refusal:
        plugin._check_checkpoint(arguments)
    told = "the weights of a rank take 0.0 GiB in memory; this machine's CUDA has 0.0 GiB."
    assert told in str(refusal.value)
    monkeypatch.setattr(host, "device_memory", lambda _: ("cuda", None))
    plugin._check_checkpoint(arguments)
    assert f"{checkpoint}: serves" in caplog.text
    monkeypatch.setattr(host, "device_memory", lambda _: ("cpu", 8 << 20))
    plugin._check_checkpoint(arguments)
    assert "this machine's CPU has 0.0 GiB" in caplog.text  # a warning: it may be paged


def test_nan_weights(refused: Refused) -> None:
    """Headers look right: this is found while the tensor is loaded."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.3.attn.wkv.weight"][0, 0] = float("nan")

    text = refused(change_tensors(spoil))
    assert "model.layers.3.attn.wkv.weight" in text and "NaN" in text


class TestServerArguments:
    """What the override makes of the user's flags, called as SGLang calls it."""

    ACCEPTED = dict(
        page_size=None,
        kv_cache_dtype="auto",
        dtype="auto",
        attention_backend=None,
        load_format="dummy",
        model_path="somewhere",
        tp_size=1,
        ep_size=1,
        json_model_override_args="{}",
        **dict.fromkeys(plugin.PARSERS),
        **options.UNSUPPORTED,
    )

    def override(self, **changes: Any) -> dict[str, Any]:
        config = SimpleNamespace(model_type=changes.pop("model_type", "deepseek_v4"))
        return plugin._override(SimpleNamespace(**(self.ACCEPTED | changes)), config)

    @pytest.mark.parametrize("asked", ["auto", "bfloat16", "bf16"])
    def test_rows_are_bf16(self, asked: str) -> None:
        declared = self.override(kv_cache_dtype=asked, page_size=256)
        assert declared["kv_cache_dtype"] == "bfloat16"
        assert declared["attention_backend"] == plugin.BACKEND

    @pytest.mark.parametrize(
        ("option", "value", "says"),
        [
            ("kv_cache_dtype", "fp8_e5m2", "Use auto or bfloat16"),
            ("kv_cache_dtype", "fp8_e4m3", "Use auto or bfloat16"),
            ("page_size", 64, "pages of 256 tokens"),
            ("load_format", "sharded_state", "Use one of auto, safetensors"),
        ],
    )
    def test_a_refusal_says_what_to_do(self, option: str, value: Any, says: str) -> None:
        with pytest.raises(SystemExit, match=re.escape(says)):
            self.override(**{option: value})

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("kv_cache_dtype", "fp8_e4m3"),
            ("kv_cache_dtype", "fp8_e5m2"),
            ("kv_cache_dtype", "nvfp4"),
            ("page_size", 64),
            ("page_size", 1),
            ("dtype", "float16"),
            ("attention_backend", "triton"),
            ("decode_attention_backend", "flashinfer"),
            ("moe_runner_backend", "flashinfer_mxfp4"),
            ("quantization", "fp8"),
            ("moe_a2a_backend", "deepep"),
            ("enable_eplb", True),
            ("ep_num_redundant_experts", 8),
            ("init_expert_location", "placement.json"),
            ("ep_dispatch_algorithm", "static"),
            ("elastic_ep_backend", "mooncake"),
            ("moe_dp_size", 2),
            ("dwdp_size", 2),
            ("pp_size", 2),
            ("speculative_algorithm", "EAGLE"),
            ("speculative_algorithm", "DSPARK"),
            ("disaggregation_mode", "prefill"),
            ("enable_lora", True),
            ("enable_hierarchical_cache", True),
            ("model_type", "deepseek_v41"),
        ],
    )
    def test_what_cannot_be_honoured_is_refused(self, option: str, value: Any) -> None:
        with pytest.raises(SystemExit, match=re.escape(str(value))):
            self.override(**{option: value})

    @pytest.mark.parametrize(
        ("variable", "value", "says"),
        [
            ("SGLANG_DSV4_PRECISION", "indexer_qk=fp8", "must be fp4 or full"),
            ("SGLANG_DSV4_PRECISION", "nonsense", "write name=value"),
            ("SGLANG_DSV4_OPS", "foo=reference", "'foo' is unknown"),
            ("SGLANG_DSV4_OPS", "rms_norm=cuda", "must be triton or reference"),
            ("SGLANG_DSV4_OPS", "routed_experts_fp4=marlin", "or --ep-size"),
        ],
    )
    def test_our_switches_are_read_early(
        self, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
    ) -> None:
        monkeypatch.setenv(variable, value)
        with pytest.raises(SystemExit, match=re.escape(says)):
            self.override(tp_size=2, ep_size=2)
