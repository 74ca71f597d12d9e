"""Quantised checkpoints are served: the tokens of the model with the same weights, dense."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoint_files import dense_twin, read
from inprocess import Runner
from serving import Server
from sglang_dsv4.cli_make_tiny import write_checkpoint

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


@pytest.mark.parametrize("name", ["vendor", "nvfp4-all"])
def test_answers_are_those_of_the_dense_twin(
    name: str, serve: Callable[..., Server], tmp_path: Path
) -> None:
    """FP8 with MXFP4 as released, and NVFP4 throughout as ModelOpt writes it, its config beside."""
    folder, twin = tmp_path / name, tmp_path / "twin"
    write_checkpoint(folder, preset="tiny", format=name)
    twin.mkdir()
    save_file(dense_twin(read(folder), torch.float32), twin / "model.safetensors")
    (twin / "config.json").write_bytes((folder / "config.json").read_bytes())
    runner = Runner(twin)
    wanted = [greedy(runner, prompt(length)) for length in LENGTHS]
    with serve(folder, dtype="float32") as server:
        replies = server.generate_all([prompt(length) for length in LENGTHS], COUNT)
        log = server.log.read_text(errors="replace")
    for reply, (tokens, logprobs) in zip(replies, wanted, strict=True):
        assert min(reply.gaps) > 1e-3  # no near tie, else tokens need not agree
        assert list(reply.tokens) == tokens
        assert reply.logprobs == pytest.approx(logprobs, abs=1e-4)
    held = {"vendor": "MXFP4", "nvfp4-all": "NVFP4"}[name]
    assert f"ffn.experts.*.w1: {held} in the checkpoint -> F32 at load, 7 layers" in log
    told = "attn.compressor.wkv: NVFP4 in the checkpoint, 5 layers: below the floor"
    assert (told in log) == (name == "nvfp4-all")
