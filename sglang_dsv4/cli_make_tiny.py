"""`sglang-dsv4 make-tiny`: writes a small random checkpoint that SGLang can serve."""

import argparse
import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

from sglang_dsv4.config import DSV4Config
from sglang_dsv4.json_files import write_json
from sglang_dsv4.tiny_formats import RECIPES
from sglang_dsv4.tiny_weights import Entry, quantised_entries, tensors

_DESCRIPTION = """\
Writes a small random checkpoint: config.json, safetensors, generation_config.json and a
byte-level tokenizer with DeepSeek's special tokens. config.json is written last, so a folder
that has one is complete.

presets:
  tiny      7 layers (SWA SWA CSA HCA CSA HCA CSA; the first three route by token id), hidden
            size 128, 8 experts, vocabulary 384: for tests and a first try on a CPU; 29 MB in
            float32, 15 MB in bfloat16
  flash-2l  2 layers (CSA routed by token id, HCA routed by score) of V4-Flash's widths, but 16
            experts a layer instead of 256; 4.3 GB in bfloat16
  pro-2l    the same of V4-Pro's widths, but 16 experts a layer instead of 384; 9.5 GB in
            bfloat16

formats:
  bf16                       nothing quantised; the dtype is that of --dtype
  vendor                     as released: FP8 in blocks of 128x128, experts in MXFP4
  fp8-base                   as the base models: experts in FP8, too
  nvfp4-experts              as released, but the experts in ModelOpt's NVFP4
  nvfp4-all                  every linear layer but the head in ModelOpt's NVFP4, names of hf
  compressed-tensors-w4a4    experts in packed NVFP4, attention in FP8
  compressed-tensors-w4a16   experts and attention in packed NVFP4, names of hf
Values that are not quantised have the dtype of --dtype. The sizes above are of bf16.
"""

PRESETS = ("tiny", "flash-2l", "pro-2l")
# One column per preset. The last ratio is that of the draft layer, whose weights are not written.
_SIZES: dict[str, tuple[Any, Any, Any]] = {
    "compress_ratios": ([0, 0, 4, 128, 4, 128, 4, 0], [4, 128, 0], [4, 128, 0]),
    "num_hidden_layers": (7, 2, 2),
    "num_hash_layers": (3, 1, 1),
    "hidden_size": (128, 4096, 7168),
    "num_attention_heads": (8, 64, 128),
    "q_lora_rank": (64, 1024, 1536),
    "o_groups": (8, 8, 16),
    "o_lora_rank": (32, 1024, 1024),
    "index_n_heads": (16, 64, 64),
    "index_topk": (8, 512, 1024),
    "n_routed_experts": (8, 16, 16),
    "num_experts_per_tok": (2, 6, 6),
    "moe_intermediate_size": (64, 2048, 3072),
    "routed_scaling_factor": (1.5, 1.5, 2.5),
    "vocab_size": (384, 129280, 129280),
    "max_position_embeddings": (8192, 1048576, 1048576),
}
_CONSTANTS = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "index_head_dim": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "rope_theta": 10000,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "use_cache": True,
}


def add_parser(commands: "argparse._SubParsersAction[Any]") -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "make-tiny",
        help="write a small random checkpoint",
        description=_DESCRIPTION,
        epilog="example:\n  sglang-dsv4 make-tiny /tmp/tiny --preset tiny --dtype float32",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write")
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="(default: tiny)")
    parser.add_argument(
        "--names",
        choices=("vendor", "hf"),
        help="dialect of config.json and tensor names: as the model is shipped, or as"
        " transformers names them (default: that in which the format circulates, else vendor)",
    )
    parser.add_argument(
        "--format",
        choices=RECIPES,
        default="bf16",
        help="how weights are stored (default: bf16)",
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(default: bfloat16)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument(
        "--force", action="store_true", help="replace the checkpoint that is in OUT"
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    summary = write_checkpoint(
        arguments.out,
        preset=arguments.preset,
        names=arguments.names,
        format=arguments.format,
        dtype=arguments.dtype,
        seed=arguments.seed,
        force=arguments.force,
        show_progress=not arguments.json,
    )
    if arguments.json:
        print(json.dumps(summary))
        return 0
    print(
        f"{summary['path']}: {summary['parameters'] / 1e6:,.1f} M parameters,"
        f" {summary['bytes'] / 1e6:,.1f} MB in {len(summary['files'])} file(s),"
        f" layers {' '.join(summary['layers'])}\n"
        f"try: OMP_NUM_THREADS=1 python -m sglang.launch_server --model-path {summary['path']} "
        "--device cpu --max-total-tokens 16384 --skip-server-warmup"
    )
    return 0


def write_checkpoint(
    out: Path,
    *,
    preset: str,
    names: str | None = None,
    format: str = "bf16",
    dtype: str = "bfloat16",
    seed: int = 0,
    force: bool = False,
    show_progress: bool = False,
    shard_bytes: int = 1_000_000_000,
) -> dict[str, Any]:
    """Writes the checkpoint and returns what it wrote, ready for JSON.

    preset, names, format, dtype: as the options; names None is that of the format.

    Raises FileExistsError where `out` is not empty (unless `force`), OSError where the disk is
    too small. A shard holds at most `shard_bytes`, or one tensor that is larger.
    """
    raw, recipe = shipped_config(preset, dtype), RECIPES[format]
    config, names = DSV4Config.from_dict(raw), names or recipe.names
    entries = quantised_entries(config, recipe, names)
    element_size = 2 if dtype == "bfloat16" else 4
    shards = _shards(entries, shard_bytes, element_size)
    total = sum(entry.bytes(element_size) for entry in entries)
    _prepare_folder(out, total, force)
    files = _write_shards(out, shards, total, dtype, seed, show_progress)
    if recipe.modelopt is not None:
        write_json(out / "hf_quant_config.json", dict(recipe.modelopt))
    write_config(out, raw)
    if names == "hf" or recipe.config:
        said = _hf_config(out, raw) if names == "hf" else raw
        write_json(out / "config.json", said | dict(recipe.config))
    return {
        "path": str(out),
        "preset": preset,
        "names": names,
        "format": format,
        "dtype": dtype,
        "seed": seed,
        "layers": [kind.name for kind in config.layer_kinds],
        "parameters": sum(math.prod(e.shape) for e in entries if "tid2eid" not in e.name),
        "bytes": total,
        "files": files,
    }


def write_config(out: Path, raw: dict[str, Any]) -> None:
    """Everything but weights: what a server with --load-format dummy needs. config.json is last."""
    config = DSV4Config.from_dict(raw)
    out.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(out, config)
    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 1.0}
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    write_json(out / "generation_config.json", ids | sampling)
    write_json(out / "config.json", raw)


def shipped_config(preset: str, dtype: str) -> dict[str, Any]:
    """config.json of a preset in the dialect of the shipped checkpoints."""
    column = PRESETS.index(preset)
    sizes = {name: values[column] for name, values in _SIZES.items()}
    config = _CONSTANTS | sizes | {"torch_dtype": dtype}
    return copy.deepcopy(dict(sorted(config.items())))  # transformers changes what it is given


def _shards(entries: list[Entry], limit: int, element_size: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = []
    filled = limit
    for entry in entries:
        size = entry.bytes(element_size)
        if filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += size
    return shards


def _prepare_folder(out: Path, needed: int, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"{out} is not a folder: name another one")
    if out.exists() and any(out.iterdir()) and not force:
        raise FileExistsError(f"{out} is not empty: name another folder, or add --force")
    # config.json goes first: without it nobody takes what is left for a checkpoint.
    ours = ("config.json", "hf_quant_config.json", "model*.safetensors*")
    old = [file for pattern in ours for file in out.glob(pattern)]
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free + sum(file.stat().st_size for file in old)
    if needed > free:
        sizes = f"{needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free"
        raise OSError(f"{out}: {sizes}: make room, or name a folder on another disk")
    out.mkdir(parents=True, exist_ok=True)
    for file in old:
        file.unlink()


def _write_shards(
    out: Path, shards: list[list[Entry]], total: int, dtype: str, seed: int, show_progress: bool
) -> list[str]:
    import torch
    from safetensors.torch import save_file
    from tqdm import tqdm

    files: list[str] = []
    weight_map: dict[str, str] = {}
    # tqdm hides itself where stderr is not a terminal.
    disable = None if show_progress else True
    with tqdm(total=total, unit="B", unit_scale=True, desc="weights", disable=disable) as progress:
        for number, shard in enumerate(shards, start=1):
            name = "model.safetensors"
            if len(shards) > 1:
                name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            held: dict[str, torch.Tensor] = {}
            for entry in shard:
                made = tensors(entry, getattr(torch, dtype), seed)
                held |= made
                weight_map |= dict.fromkeys(made, name)
                progress.update(sum(tensor.nbytes for tensor in made.values()))
            save_file(held, out / name, metadata={"format": "pt"})
            (out / name).chmod(0o644)  # It comes out readable by its owner alone.
            files.append(name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(out / "model.safetensors.index.json", index)
    return files


def _hf_config(out: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """config.json as transformers itself writes it."""
    from transformers import DeepseekV4Config
    from transformers.utils import logging

    logging.set_verbosity_error()  # It warns of a YaRN factor that the release has, too.
    DeepseekV4Config(**raw).save_pretrained(out)
    return json.loads((out / "config.json").read_text(encoding="utf-8"))


# What the chat encoding looks up, in the order of their ids: begin and end of sentence are 0 and 1.
_SPECIAL_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
_CHAT_TOKENS = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜latest_reminder｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    "<｜extracted_url｜>",
)


def _write_tokenizer(out: Path, config: DSV4Config) -> None:
    """One token per byte, DeepSeek's special tokens, and fillers up to the vocabulary's size.

    A filler is never made from text. It only gives every id that a random model may choose a text
    of its own, " t271" for 271.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    known = [*_SPECIAL_TOKENS, *_CHAT_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    fillers = [f"Ġt{number}" for number in range(len(known), config.vocab_size)]
    vocabulary = {token: number for number, token in enumerate([*known, *fillers])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    # As in the release, only the first three are dropped from the text of an answer.
    for tokens, special in ((_SPECIAL_TOKENS, True), (_CHAT_TOKENS, False)):
        added = [AddedToken(token, special=special, normalized=False) for token in tokens]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    tokenizer.save(str(out / "tokenizer.json"))
    begin, end, _ = _SPECIAL_TOKENS
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": begin,
            "eos_token": end,
            "pad_token": end,
            "add_bos_token": False,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_position_embeddings,
        },
    )
