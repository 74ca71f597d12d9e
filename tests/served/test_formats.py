"""Quantised checkpoints are served: the tokens of the model with the same weights, dense.

One server has a layer in each format, and keeps in four bits what has them. The values
of a whole checkpoint in each are compared without a server, in `tests/test_formats.py`.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoint_files import dense_twin
from inprocess import Runner
from mixed_formats import write_mixed
from serving import Server

COUNT = 12
LENGTHS = (3, 130, 257)


def prompt(length: int) -> list[int]:
    draw = torch.Generator().manual_seed(length)
    return torch.randint(16, 384, (length,), generator=draw).tolist()


def greedy(runner: Runner, tokens: list[int]) -> tuple[list[int], list[float]]:
    """COUNT tokens after the prompt, and their log-probabilities."""
    request = runner.open()
    logits = runner.run(request, tokens)[-1]
    chosen: list[int] = []
    logprobs: list[float] = []
    while True:
        chosen.append(int(logits.argmax()))
        logprobs.append(logits.log_softmax(-1)[chosen[-1]].item())
        if len(chosen) == COUNT:
            return chosen, logprobs
        logits = runner.run(request, chosen[-1:])[-1]


def test_answers_are_those_of_the_dense_twin(serve: Callable[..., Server], tmp_path: Path) -> None:
    """With a config.json that says NVFP4 throughout, as ModelOpt writes it."""
    folder, twin = tmp_path / "mixed", tmp_path / "twin"
    tensors = write_mixed(folder)
    twin.mkdir()
    save_file(dense_twin(tensors.items(), torch.float32), twin / "model.safetensors")
    (twin / "config.json").write_bytes((folder / "config.json").read_bytes())
    runner = Runner(twin)
    wanted = [greedy(runner, prompt(length)) for length in LENGTHS]
    kept = {"SGLANG_DSV4_PRECISION": "routed_experts=fp4,linears=fp4"}
    with serve(folder, dtype="float32", env=kept) as server:
        replies = server.generate_all([prompt(length) for length in LENGTHS], COUNT)
        log = server.log.read_text(errors="replace")
    for reply, (tokens, logprobs) in zip(replies, wanted, strict=True):
        assert min(reply.gaps) > 1e-3  # no near tie, else tokens need not agree
        assert list(reply.tokens) == tokens
        assert reply.logprobs == pytest.approx(logprobs, abs=1e-4)
    experts = {"BF16": 1, "FP8": 1, "MXFP4": 1, "NVFP4": 2, "compressed-tensors NVFP4": 2}
    for held, layers in experts.items():
        counted = f"{layers} layer{'s' * (layers > 1)}\n"
        run = "F32 at load" if held in ("BF16", "FP8") else f"{held}, kept"
        assert f"ffn.experts.*.w1: {held} in the checkpoint -> {run}, {counted}" in log
    assert "attn.wo_b: NVFP4 in the checkpoint -> NVFP4, kept, 1 layer\n" in log
    assert "attn.compressor.wkv: NVFP4 in the checkpoint, 1 layer: below the floor" in log
