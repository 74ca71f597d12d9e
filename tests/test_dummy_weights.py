"""--load-format dummy: SGLang fills floating tensors and loads nothing, so tables must be valid."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_loader.loader import post_load_weights
from sglang.srt.model_loader.weight_utils import initialize_dummy_weights

from checkpoint_files import headers_of, write_holes
from sglang_dsv4 import graph_safety_step, host, precision
from sglang_dsv4.backends import Machine, choose
from sglang_dsv4.cli_make_tiny import shipped_config, write_config
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.parallel import Parallel
from sglang_dsv4.served import deepseek_v4
from sglang_dsv4.served.deepseek_v4 import DeepseekV4ForCausalLM
from sglang_dsv4.tiny_formats import RECIPES


def test_a_step_with_dummy_weights_is_finite(monkeypatch) -> None:
    """The hash table names experts that exist, and frequencies are those of the model."""
    config = DSV4Config.from_dict(shipped_config("tiny", "bfloat16"))
    assert config.num_hash_layers > 0
    monkeypatch.setattr(
        graph_safety_step.weights, "load", lambda lm, *_, **__: initialize_dummy_weights(lm)
    )
    ops = choose(Machine("cpu", "CPU", None))
    step = graph_safety_step.make_step(config, ops, (5, 130, None), "cpu", torch.bfloat16)
    for number in range(config.num_hash_layers):
        table = step.lm.model.layers[number].ffn.gate.tid2eid
        assert table.shape == (config.vocab_size, config.num_experts_per_tok)
        assert ((table >= 0) & (table < config.n_routed_experts)).all()
        assert (table.sort(dim=1).values.diff(dim=1) > 0).all(), "an expert twice"
    frequencies = step.lm.model.layers[0].attn.frequencies
    assert frequencies[0] == 1 and (frequencies.diff() < 0).all()
    kept = [layer.ffn.experts.w2.group for layer in step.lm.model.layers[1:3]]
    assert kept == [32, 16]  # in four bits, whose scales no dummy fills
    step.fill([3, config.vocab_size - 1, 0], step.batch)
    logits = step.run()
    assert logits.isfinite().all()


def served(**attributes: Any) -> DeepseekV4ForCausalLM:
    """The class that the host makes, without its host."""
    model = object.__new__(DeepseekV4ForCausalLM)
    vars(model).update(attributes)
    return model


@pytest.mark.parametrize("load_format", ["dummy", "sharded_state"])
def test_dummy_experts_in_four_bits_are_packed(load_format, monkeypatch) -> None:
    """The host calls post_load_weights after other loaders, too: those bring what was packed."""
    packed, compiled = [], []
    monkeypatch.setattr(deepseek_v4, "pack_weights", lambda *arguments: packed.append(arguments))
    monkeypatch.setattr(DeepseekV4ForCausalLM, "_finish_kernels", lambda self: compiled.append(1))
    monkeypatch.setattr(host, "get_model", lambda: SimpleNamespace(load_format=load_format))
    model = served(ops="ops", model="model")
    post_load_weights(model)
    assert packed == ([("ops", "model")] if load_format == "dummy" else [])
    assert len(compiled) == len(packed)


@pytest.mark.parametrize("filled", [False, True])
def test_a_refused_update_leaves_what_graphs_can_read(filled, monkeypatch) -> None:
    """Weights that came before are packed; where a start fails, nothing else is said."""
    packed = []

    def refused(*_: Any, **__: Any) -> None:
        raise deepseek_v4.weights.CheckpointError("missing tensors")

    monkeypatch.setattr(deepseek_v4.weights, "load", refused)
    monkeypatch.setattr(deepseek_v4, "pack_weights", lambda *arguments: packed.append(arguments))
    monkeypatch.setattr(deepseek_v4.host, "checkpoint_folder", lambda: "somewhere")
    monkeypatch.setattr(deepseek_v4.checkpoint, "total_bytes", lambda folder: 1)
    model = served(filled=filled, ops="ops", model="model", parallel=Parallel(), chosen=None)
    model.config = model.ahead = None
    with pytest.raises(deepseek_v4.weights.CheckpointError, match="missing tensors"):
        model.load_weights([])
    assert packed == [("ops", "model")] * filled


@pytest.mark.parametrize(("load_format", "group"), [("dummy", 32), ("auto", 16)])
def test_the_model_is_built_for_what_is_there(load_format, group, tmp_path, monkeypatch) -> None:
    """config.json says MXFP4, the headers NVFP4: believed is what can be looked at."""
    config = DSV4Config.from_dict(shipped_config("tiny", "bfloat16"))
    write_holes(tmp_path, headers_of(config, RECIPES["nvfp4-experts"]), lambda name: "all")
    seen = SimpleNamespace(load_format=load_format, model_path=str(tmp_path))
    monkeypatch.setattr(host, "get_model", lambda: seen)

    def groups(value: str, device: str) -> dict[int, int]:
        made = served(
            chosen=precision.parse(f"routed_experts={value},linears=bf16"),
            ops=SimpleNamespace(machine=Machine(device, device, None)),
            parallel=Parallel(),
        )
        made.config = config
        return made._storage({"expert_dtype": "fp4"})[0].groups

    assert groups("auto", "cuda") == groups("fp4", "cpu") == dict.fromkeys(range(7), group)
    assert groups("auto", "cpu") == groups("bf16", "cuda") == {}


def test_a_folder_without_weights_has_all_else(tmp_path) -> None:
    raw = shipped_config("tiny", "bfloat16")
    write_config(tmp_path, raw)
    assert DSV4Config.from_checkpoint(tmp_path) == DSV4Config.from_dict(raw)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    }
