"""--load-format dummy: SGLang fills floating tensors and loads nothing, so tables must be valid."""

import torch
from sglang.srt.model_loader.weight_utils import initialize_dummy_weights

from sglang_dsv4 import graph_safety_step
from sglang_dsv4.backends import Machine, choose
from sglang_dsv4.cli_make_tiny import shipped_config, write_config
from sglang_dsv4.config import DSV4Config


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
    step.fill([3, config.vocab_size - 1, 0], step.batch)
    logits = step.run()
    assert logits.isfinite().all()


def test_a_folder_without_weights_has_all_else(tmp_path) -> None:
    raw = shipped_config("tiny", "bfloat16")
    write_config(tmp_path, raw)
    assert DSV4Config.from_checkpoint(tmp_path) == DSV4Config.from_dict(raw)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    }
