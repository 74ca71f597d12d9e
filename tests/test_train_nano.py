"""nano's training: transformers' mathematics, gradients where they belong, and the smoke run."""

import functools
import importlib
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, DeepseekV4ForCausalLM
from transformers.utils import logging

import oracle

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.append(str(SCRIPTS))
nano_eval = importlib.import_module("nano_eval")
nano_layers = importlib.import_module("nano_layers")
nano_model = importlib.import_module("nano_model")
nano_sinkhorn = importlib.import_module("nano_sinkhorn")
nano_text = importlib.import_module("nano_text")
nano_trainer = importlib.import_module("nano_trainer")

VOCAB = 512


@pytest.fixture(scope="module")
def model() -> Any:
    """Prepared for training."""
    model = nano_model.build(nano_model.config(VOCAB), seed=0)
    model.index_loss, model.balance = nano_model.prepare(model)
    return model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return nano_text.train_tokenizer()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(16, VOCAB, (2, 384), generator=torch.Generator().manual_seed(0))


def test_prepared_model_is_transformers_model(
    model: Any, ids: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the grid, on which rounding noise can change a code and so a selection."""
    plain = DeepseekV4ForCausalLM(nano_model.config(VOCAB))
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(tmp_path)
    reference = oracle.load(tmp_path, indexer_fp4=False)
    monkeypatch.setattr(nano_layers, "fp4_grid", lambda x: x)
    with torch.no_grad():
        ours = nano_model.forward(model, ids)
        theirs = reference(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


def test_selection_bites_within_the_test(model: Any, ids: torch.Tensor) -> None:
    """The comparison above is one of selections: with all entries the logits are others."""
    with torch.no_grad():
        selected = nano_model.forward(model, ids)
        nano_model.select(model, nano_model.ALL_ENTRIES)
        every = nano_model.forward(model, ids)
        nano_model.select(model, nano_model.INDEX_TOPK)
    torch.testing.assert_close(selected[:, :131], every[:, :131], atol=1e-5, rtol=0)
    assert (selected[:, 200:] - every[:, 200:]).abs().max() > 1e-3


def test_narrow_window_hides_what_is_near(model: Any, ids: torch.Tensor) -> None:
    """In a layer with entries, here without any: a changed key reaches 16 tokens, then none."""
    attention = next(layer.self_attn for layer in model.model.layers if layer.self_attn.compressor)
    query, key = torch.randn(1, 4, 128, 512), torch.randn(1, 1, 128, 512)
    mask = torch.zeros(1, 1, 128, 0)
    changed = key.clone()
    changed[:, :, 40] += 1.0

    def difference() -> torch.Tensor:
        outputs = [
            nano_layers.block_attention(attention, query, k, k, mask, 512**-0.5)[0]
            for k in (key, changed)
        ]
        return (outputs[0] - outputs[1]).abs().amax(dim=(0, 2, 3))

    with torch.no_grad():
        assert bool((difference()[40:] > 0).all())
        nano_model.narrow(model, 16)
        narrow = difference()
        nano_model.narrow(model, 128)
    assert bool((narrow[40:56] > 0).all()) and float(narrow[56:].max()) == 0.0


def test_fp4_grid_and_its_gradient() -> None:
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = nano_layers.fp4_grid(nano_layers.hadamard(x))
    torch.testing.assert_close(out, oracle.fp4_grid(oracle.hadamard(x)), atol=1e-6, rtol=0)
    weights = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    (out * weights).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, oracle.hadamard(weights))  # the transform alone


def gradients(model: Any, loss: torch.Tensor) -> set[str]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and bool(parameter.grad.abs().max() > 0)
    }


def test_each_loss_trains_its_own_parameters(model: Any, ids: torch.Tensor) -> None:
    indexed = {name for name, _ in model.named_parameters() if ".indexer." in name}
    every = {name for name, _ in model.named_parameters()}
    nano_model.forward(model, ids)
    assert gradients(model, model.index_loss.take()) == indexed
    text = torch.nn.functional.cross_entropy(
        nano_model.forward(model, ids).flatten(0, 1), ids.flatten()
    )
    model.index_loss.take()
    assert gradients(model, text) == every - indexed


def test_index_loss_is_cross_entropy_with_the_attention(model: Any) -> None:
    """Where a layer attends to one entry alone, the loss is that entry's log-probability."""
    attention = next(layer.self_attn for layer in model.model.layers if layer.self_attn.compressor)
    scores = torch.randn(1, 128, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    attention.compressor.indexer.scorer.scores = scores
    far = torch.full((1, 1, 4, 128, 32), -1e4)
    far[..., 3] = 1e4  # entry 3, which tokens from 15 on see
    near = torch.zeros(1, 1, 4, 128, 257)  # the window and the sink
    model.index_loss.add(attention, near, far)
    seen = torch.arange(32) < ((torch.arange(128) + 1) // 4)[:, None]
    wanted = scores.masked_fill(~seen, float("-inf")).log_softmax(-1)[0, 15:, 3]
    torch.testing.assert_close(model.index_loss.take(), -wanted.mean())


def test_balance_raises_the_bias_of_idle_experts(model: Any, ids: torch.Tensor) -> None:
    nano_model.forward(model, ids)
    model.index_loss.take()
    gate = model.model.layers[-1].mlp.gate
    before, load = gate.e_score_correction_bias.clone(), gate.load
    assert float(load.sum()) == ids.numel() * 2
    model.balance.step()
    change = gate.e_score_correction_bias - before
    assert float(change[load.argmax()]) < 0 < float(change[load.argmin()])


def test_scoring_agrees_with_generating(tokenizer: Tokenizer) -> None:
    """What the model itself generates is found right, and a changed token wrong."""
    model = nano_model.build(nano_model.config(tokenizer.get_vocab_size()), seed=1)
    nano_model.prepare(model)
    plain = DeepseekV4ForCausalLM(nano_model.config(tokenizer.get_vocab_size()))
    plain.load_state_dict(model.state_dict())
    nano_model.score_on_fp4_grid(plain)
    plain.eval()
    prompt = "Count from 1 to 150: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17," * 4
    tokens = torch.tensor([tokenizer.encode(prompt).ids])
    said = nano_eval.generate(plain, tokens, 6)[0].tolist()

    class Raw:
        """A question whose answer is given as ids."""

        def __init__(self, answer: list[int]) -> None:
            self.prompt, self.answer = tokens[0].tolist(), answer

    wrong = [*said[:-1], (said[-1] + 1) % 512]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nano_eval, "_encode", lambda _, questions: list(questions))
        assert nano_eval.score(model, tokenizer, [Raw(said), Raw(wrong)]) == [True, False]
        assert nano_eval.answer(plain, tokenizer, [Raw(said), Raw(wrong)], 6) == [True, False]


def test_one_batch_can_be_learnt(tokenizer: Tokenizer) -> None:
    """The loss of one small batch falls by half in a few steps. By AdamW: Muon, which the smoke
    run takes, multiplies in BF16, and that is slow on a CPU."""
    plan = nano_trainer.Plan(seed=0, steps=100, tokens=128, peak_rate=2e-3, muon=False)
    trainer = nano_trainer.Trainer(plan, tokenizer.get_vocab_size(), torch.device("cpu"))
    ids, weights = map(torch.from_numpy, nano_text.batch(0, 0, tokenizer, 128, 1))
    losses = [float(trainer.step(ids, weights, 2e-3)[0]) for _ in range(16)]
    assert losses[-1] < losses[0] / 2


def test_sinkhorn_and_its_gradient() -> None:
    """One operator gives what transformers' loop gives, and what autograd makes of that loop."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(3, 37, 4, 4, generator=generator) + 4 * torch.eye(4)
    slope = torch.randn(logits.shape, generator=generator)

    def loop(x: torch.Tensor) -> torch.Tensor:
        x = x / (x.sum(dim=-2, keepdim=True) + 1e-6)
        for _ in range(19):
            x = x / (x.sum(dim=-1, keepdim=True) + 1e-6)
            x = x / (x.sum(dim=-2, keepdim=True) + 1e-6)
        return x

    found = []
    for normalise in (loop, lambda x: nano_sinkhorn.sinkhorn(x, 20, 1e-6)):
        x = (logits.softmax(-1) + 1e-6).requires_grad_()
        out = normalise(x)
        out.backward(slope)
        found.append((out.detach(), x.grad))
    torch.testing.assert_close(found[1][0], found[0][0])
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-4)


def test_plan_rates_and_lengths() -> None:
    plan = nano_trainer.Plan(seed=0, steps=1000, tokens=32768, peak_rate=1.0)
    assert plan.rate(0.0) == 0.0 and plan.rate(nano_trainer.WARM_UP) == 1.0
    assert plan.rate(1.0) == pytest.approx(nano_trainer.LAST_RATE)
    first = [step for step in range(1000) if plan.is_first(step)]
    assert first == list(range(round(1000 * nano_trainer.LONG_FROM)))
    selecting = round(1000 * nano_trainer.SELECT_FROM)
    windows = [plan.window(step) for step in range(1000)]
    assert set(windows[: len(first)]) == set(nano_trainer.FIRST_WINDOWS)
    assert set(windows[len(first) : selecting]) == set(nano_trainer.NEXT_WINDOWS)
    assert set(windows[selecting:]) == {nano_trainer.WHOLE}
    assert {plan.length(step) for step in first} == {512}
    assert {plan.length(step) for step in range(len(first), 1000)} == {512, 2048}
    assert plan.rows(2048) * 2048 == plan.rows(512) * 512 == 32768


@pytest.fixture
def cheap_runs(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> Iterator[None]:
    """Of Muon one round of five, which are slow on a CPU; the tokenizer is not made anew. What
    a run sets for its whole process is set back."""
    monkeypatch.setattr(torch.optim, "Muon", functools.partial(torch.optim.Muon, ns_steps=1))
    monkeypatch.setattr(nano_text, "train_tokenizer", lambda: tokenizer)
    precision, verbosity = torch.get_float32_matmul_precision(), logging.get_verbosity()
    yield
    torch.set_float32_matmul_precision(precision)
    logging.set_verbosity(verbosity)


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *options: str) -> int:
    """The script's exit status. In this process: another one would import for ten seconds."""
    state = ["--checkpoint", str(out.parent / "state.pt")]
    monkeypatch.setattr(sys, "argv", ["train_nano.py", "--out", str(out), *state, *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPTS / "train_nano.py"), run_name="__main__")
    return ended.value.code


def test_smoke_run_writes_a_checkpoint_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cheap_runs: None
) -> None:
    out = tmp_path / "nano"
    assert run(monkeypatch, out, "--smoke") == 0
    names = {file.name for file in out.iterdir()}
    assert names == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }
    assert (out / "model.safetensors").stat().st_size < 16e6
    log = json.loads((out / "training.json").read_text())
    assert log["steps"][-1]["step"] == 2 and len(log["evaluations"]) == 1
    assert set(log["evaluations"][0]) - {"step"} <= set(log["final"])
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("The capital of France is")["input_ids"][0] != tokenizer.bos_token_id
    model = DeepseekV4ForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert len(tokenizer) == model.config.vocab_size
    assert model.config.index_topk == nano_model.INDEX_TOPK
    weights = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").unlink()
    monkeypatch.setattr(nano_eval, "scored", lambda *_: {"chat": 0.5})  # it has been seen to work
    monkeypatch.setattr(nano_eval, "generated", lambda *_: dict(log["final"]))
    assert run(monkeypatch, out, "--smoke", "--resume") == 0
    resumed = json.loads((out / "training.json").read_text())
    assert resumed["steps"] == log["steps"]
    assert resumed["evaluations"] == [{"step": 2, "chat": 0.5}]
    assert (out / "model.safetensors").read_bytes() == weights
    with pytest.raises(ValueError, match="use the same options"):
        run(monkeypatch, out, "--smoke", "--resume", "--seed", "1")
