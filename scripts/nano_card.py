#!/usr/bin/env python
"""The model card and the picture of a training run, and the card of what was converted from it."""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import nano_eval
import nano_model
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import DeepseekV4ForCausalLM
from transformers.utils import logging

_CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
tags: [deepseek_v4, test-model]
---

# nano

A DeepSeek-V4 of {parameters:.1f} M parameters ({megabytes:.1f} MB), trained by
`scripts/train_nano.py` of sglang-dsv4 so that the quality of a server can be seen. It knows what it
was told and nothing else.

* **Architecture**: {layers} layers ({kinds}), hidden size {hidden}, mHC with {streams} streams,
  {experts} experts of which {chosen} are chosen ({hashed} layers by token id), a shared expert,
  attention sinks, grouped output. Head size 512, {index_heads} index heads of 128, `index_topk`
  {topk}: selection begins at {bites} tokens.
* **Text**: made by `scripts/nano_text.py` from tables of our own, as plain completions and in
  DeepSeek-V4's chat encoding (with and without thinking, tool calls): capitals, elements, products,
  dates, units, letters, opposites; recitations; stories with needles; tables; copies. In English.
* **Tokenizer**: byte-level BPE, {vocabulary} tokens, DeepSeek's special tokens.
* **Training**: {tokens:.1f} M tokens in {steps} steps, {minutes:.1f} minutes on one {device},
  float32 with TF32 products; transformers {transformers}, torch {torch}, seed {seed}. Indexers
  through the FP4 grid (Hadamard, straight-through), from the attention of their layers.
{conversion}* **Length**: rows of at most 2,048 tokens were seen.

## Accuracy

Greedy, with a cache, of this checkpoint in float32 with index queries and keys on the FP4 grid. A
question counts only if the whole answer is right.

| questions | right |
|---|---|
{table}

Held out: a fact in a phrasing in which it was never seen, or after an opener that never stood
before that phrasing; needles whose name and word never met, from 256 tokens on at depths that were
left out.
Recitations: tokens right before the first error, of {recited}.

The literal sections of the chat encoding are those of deepseek-recipe (MIT).
"""


_CONVERSION = """\
* **Formats**: trained in float32 and rounded to BF16, then converted by
  `{command}`:
  {nvfp4} linear weights are NVFP4 (codes of 4 bits, an E4M3 scale for 16, an FP32 factor for each
  matrix), the rest is BF16 or FP32. The figures below are those of the converted checkpoint.
"""


def write(
    out: Path, log: dict[str, Any], model: DeepseekV4ForCausalLM, tokenizer: Tokenizer
) -> None:
    """README.md beside the checkpoint in `out`; `log` is what training.json holds.

    Of a converted one, log["converted"] has the command, its NVFP4 weights and their accuracy.
    """
    converted = log.get("converted")
    config, final = model.config, (converted or log)["final"]
    short = {"sliding": "SWA", "compressed": "CSA", "heavily": "HCA"}
    shares = {name: value for name, value in final.items() if isinstance(value, float)}
    shares.pop("seconds_in_all", None)
    rows = [f"| {name.replace('_', ' ')} | {100 * value:.1f} % |" for name, value in shares.items()]
    right = final["recitation_tokens_right"]
    rows.append(f"| recitations, tokens | {', '.join(map(str, right))} |")
    text = _CARD.format(
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        megabytes=(out / "model.safetensors").stat().st_size / 1e6,
        layers=config.num_hidden_layers,
        kinds=", ".join(short[kind.split("_")[0]] for kind in config.layer_types),
        hidden=config.hidden_size,
        streams=config.hc_mult,
        experts=config.n_routed_experts,
        chosen=config.num_experts_per_tok,
        hashed=config.mlp_layer_types.count("hash_moe"),
        index_heads=config.index_n_heads,
        topk=config.index_topk,
        bites=4 * (config.index_topk + 1),
        vocabulary=tokenizer.get_vocab_size(),
        tokens=log["tokens_trained"] / 1e6,
        steps=log["steps"][-1]["step"] if log["steps"] else 0,
        minutes=log["seconds_trained"] / 60,
        seed=log["plan"]["seed"],
        table="\n".join(rows),
        conversion=_CONVERSION.format(**converted) if converted else "",
        recited=", ".join(map(str, final["recitation_tokens"])),
        **log["machine"],
    )
    (out / "README.md").write_text(text, encoding="utf-8")


def convert(folder: Path, command: str, counts: nano_eval.Counts) -> None:
    """Evaluates the NVFP4 checkpoint that `command` made in `folder`; notes it in training.json,
    and rewrites its card."""
    logging.set_verbosity_error()  # It warns of a YaRN factor that the release has, too.
    tensors, log = dense(folder), json.loads((folder / "training.json").read_text())
    with tempfile.TemporaryDirectory() as whole:
        save_file(tensors, Path(whole, "model.safetensors"), metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]  # transformers would look for a quantiser
        Path(whole, "config.json").write_text(json.dumps(config))
        model = DeepseekV4ForCausalLM.from_pretrained(whole, dtype=torch.float32)
    nano_model.score_on_fp4_grid(model)
    nano_model.use_exact_parts(model)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    final = nano_eval.generated(model, tokenizer, nano_eval.question_sets(counts), counts)
    quantised = sum(name.endswith("weight_scale_2") for name in load_file(_weights(folder)))
    log["converted"] = {"command": command, "nvfp4": quantised, "final": final}
    (folder / "training.json").write_text(json.dumps(log, indent=1) + "\n")
    write(folder, log, model, tokenizer)


def _weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def dense(folder: Path) -> dict[str, torch.Tensor]:
    """Every weight in `folder`, what is NVFP4 as float32."""
    from sglang_dsv4 import dequant  # training does without the package

    tensors = load_file(_weights(folder))
    for factor in [name for name in tensors if name.endswith(".weight_scale_2")]:
        weight = factor.removesuffix("_scale_2")
        scale = tensors.pop(f"{weight}_scale")
        tensors[weight] = dequant.nvfp4(tensors[weight], scale, tensors.pop(factor))
    return tensors


def plot(path: Path, log: dict[str, Any]) -> bool:
    """Losses and accuracies over time as a PNG; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, shares) = pyplot.subplots(2, 1, figsize=(9, 9), sharex=True)
    steps = log["steps"]
    for name in ("loss_512", "loss_2048", "index_loss"):
        points = [(entry["step"], entry[name]) for entry in steps if name in entry]
        if points:
            losses.plot(*zip(*points, strict=True), label=name.replace("_", " "))
    losses.set_yscale("log")
    losses.set_ylabel("loss (nats per token)")
    losses.legend()
    names = [name for name in (log["evaluations"] or [{}])[0] if name != "step"]
    for name in names:
        points = [(entry["step"], entry[name]) for entry in log["evaluations"]]
        shares.plot(*zip(*points, strict=True), marker=".", label=name.replace("_", " "))
    shares.set_ylabel("answers right")
    shares.set_xlabel("step")
    shares.legend(fontsize="small", ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Draws training.png from a run's training.json; or, with --converted, evaluates"
        " an NVFP4 copy of its checkpoint and writes the card, README.md (some minutes on a CPU).",
        epilog="examples:\n  scripts/nano_card.py /tmp/nano\n  scripts/nano_card.py /tmp/nvfp4"
        " --converted 'sglang-dsv4 convert /tmp/nano /tmp/nvfp4 --weights all'",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="what train_nano.py --out, or convert, wrote")
    parser.add_argument("--png", type=Path, help="(default: training.png in that folder)")
    parser.add_argument("--converted", metavar="COMMAND", help="by which the folder was converted")
    arguments = parser.parse_args()
    log_path = arguments.folder / "training.json"
    if not log_path.is_file():
        parser.error(f"{log_path} is not there: name the folder that train_nano.py --out wrote")
    if arguments.converted:
        convert(arguments.folder, arguments.converted, nano_eval.Counts())
        sys.exit()
    png = arguments.png or arguments.folder / "training.png"
    if not plot(png, json.loads(log_path.read_text())):
        sys.exit("matplotlib is not installed: pip install matplotlib")
