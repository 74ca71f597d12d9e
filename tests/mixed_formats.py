"""One tiny checkpoint with a layer in each format: a format is each weight's own business."""

import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from checkpoint_files import Tensors
from sglang_dsv4 import tiny_weights
from sglang_dsv4.cli_make_tiny import write_checkpoint
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.tiny_formats import RECIPES

FORMATS = tuple(RECIPES)  # by layer


def write_mixed(folder: Path) -> Tensors:
    """Layer 0 in the first format, and so on, each under the names in which it circulates.

    Its config.json says NVFP4 throughout, as ModelOpt writes it.
    """
    write_checkpoint(folder, preset="tiny", format="nvfp4-all")
    config = DSV4Config.from_checkpoint(folder)
    assert config.num_hidden_layers == len(FORMATS) == 7
    file = folder / "model.safetensors"
    tensors = {name: held for name, held in load_file(file).items() if ".layers." not in name}
    for layer, recipe in enumerate(RECIPES.values()):
        for entry in tiny_weights.quantised_entries(config, recipe, recipe.names):
            if re.match(rf"(model\.)?layers\.{layer}\.", entry.name):
                tensors |= tiny_weights.tensors(entry, torch.bfloat16, seed=0)
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors
