"""Requests that the scheduler retracts and runs again give the same answers; here with a floor that
is flipped, so the answers of a checkpoint like that."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import oracle
from agreement import Comparison, ties
from checkpoint_files import dense_twin
from serving import Server
from sglang_dsv4.tiny_formats import encode

COUNT = 20
# Of the story, free of ties also for the flipped model.
PROMPTS = (slice(5), slice(800, 927), slice(600, 899))
FLIPS = "lm_head=nvfp4,router_gate=nvfp4,compressor=nvfp4"
# The weights that are flipped, as the checkpoint names them, and as the log tells of them.
FLIPPED = re.compile(r"(head|model\.layers\.\d+\.(ffn\.gate|attn\.compressor\.w\w+))\.weight")
TOLD = {
    "head": "",
    "ffn.gate": ", 7 layers",
    "attn.compressor.wkv": ", 5 layers",
    "attn.compressor.wgate": ", 5 layers",
}


@pytest.fixture
def flipped(checkpoint: Path, tmp_path: Path) -> Path:
    """The checkpoint with those weights in NVFP4, multiplied out by hand."""
    folder = shutil.copytree(checkpoint, tmp_path / "flipped")
    tensors = load_file(folder / "model.safetensors")
    names = {name for name in tensors if FLIPPED.fullmatch(name)}
    assert len(names) == 1 + 7 + 5 + 5
    stored = {name: tensor for name, tensor in tensors.items() if name not in names}
    for name in names:
        stored |= encode("nvfp4", name, tensors[name])
    twin = dense_twin(stored.items(), torch.float32)
    assert {name for name in tensors if not torch.equal(twin[name], tensors[name])} == names
    save_file(twin, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_retracted_requests_equal_the_reference(
    serve: Callable[..., Server], checkpoint: Path, flipped: Path
) -> None:
    """The server rounds the checkpoint itself; the reference reads what is rounded already."""
    model = oracle.load(flipped, indexer_fp4=True)
    wanted = [oracle.greedy(model, oracle.story()[part], COUNT) for part in PROMPTS]
    env = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
    env["SGLANG_DSV4_PRECISION"] = FLIPS
    with serve(checkpoint, env=env, dtype="float32") as server:
        replies = server.generate_all([generation.prompt for generation in wanted], COUNT)
        log = server.log.read_text(errors="replace")
    assert sum(reply.meta["num_retractions"] for reply in replies) > 0
    comparison = Comparison()
    for reply, generation in zip(replies, wanted, strict=True):
        name = f"prompt of {len(generation.prompt)}, {reply.meta['num_retractions']} retractions"
        comparison.add(name, reply, generation, ties(generation))
    comparison.check()
    assert comparison.excused == 0
    assert log.count("new tokens of a decode are placed by decode_slots: reference\n") == 1
    assert "SGLang places the new tokens" not in log
    assert log.count("(flipped)") == len(TOLD)
    for name, layers in TOLD.items():
        assert f"{name}: F32 in the checkpoint -> NVFP4 values (flipped){layers}\n" in log
