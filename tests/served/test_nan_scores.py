"""A weight that is finite and senseless, as no check of a checkpoint finds: the server tells."""

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

from serving import Server
from sglang_dsv4.attention.nan_watch import EVERY

PROMPT = 40


def test_nan_scores_are_told_of_and_counted(
    serve: Callable[..., Server], checkpoint: Path, tmp_path: Path
) -> None:
    """Head weights of one indexer overflow, and nothing else is NaN: the request is answered."""
    folder = shutil.copytree(checkpoint, tmp_path / "damaged")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    (name,) = (one for one in tensors if "layers.4." in one and "weights_proj" in one)
    tensors[name].fill_(3e38)
    save_file(tensors, file, metadata={"format": "pt"})
    with serve(folder) as server:
        assert server.state()["sglang_dsv4"]["nan_index_scores"] == {}
        reply = server.generate(range(20, 20 + PROMPT), EVERY + 8)
        assert len(reply.tokens) == EVERY + 8
        assert server.log.read_text().count("scores of the indexer were NaN (layer 4: ") == 1
        counts = server.state()["sglang_dsv4"]["nan_index_scores"]
        assert counts.keys() == {"4"}
        # Every visible entry of every token that went through the model.
        assert counts["4"] >= sum(n // 4 for n in range(1, PROMPT + EVERY + 8))
        assert server.log.read_text().count("scores of the indexer were NaN") == 1
