"""`sglang-dsv4 warm`: compiles ahead what a server would compile while it starts."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dsv4 import precision
from sglang_dsv4.cli_make_tiny import shipped_config
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.settings import Settings, SettingsError

if TYPE_CHECKING:
    from sglang_dsv4.expert_storage import HeldByLayer
    from sglang_dsv4.linear_storage import LinearStorage
    from sglang_dsv4.warmup import Target

BUILD_FAILED = 1

_DESCRIPTION = """\
Builds the just-in-time caches that serving a model on this machine's GPU needs: our Triton kernels
in each variant that the model's shapes lead to, and the modules of SGLang and FlashInfer that are
compiled at first use. What is built already is found and left alone. Nothing is downloaded, no
weights are read, and little GPU memory is used. SGLang's own Triton kernels compile at its start.

Which model is said by a checkpoint's folder (its config.json is enough), or by --config. Whether
routed experts stay in four bits, and attention and the shared expert in FP8 or NVFP4, is told from
the headers of its weights, or for want of any by its config.json; flash and pro are as they were
released, with MXFP4 and FP8.
On a machine without a GPU nothing is compiled, and nothing needs warming.

exit codes: 0 warm (or nothing to do), 1 something could not be built, 2 bad command line
"""
_EXAMPLES = """\
examples:
  sglang-dsv4 warm /models/DeepSeek-V4-Flash
  sglang-dsv4 warm --config flash --tp-size 8
  sglang-dsv4 warm --config flash --tp-size 8 --ep-size 4
  sglang-dsv4 warm --config nano --json
"""
# name -> preset of make-tiny, and what the full model has more of; nano is in the package.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "flash": ("flash-2l", {"n_routed_experts": 256}),
    "pro": ("pro-2l", {"n_routed_experts": 384}),
    "tiny": ("tiny", {}),
}
RELEASED = ("flash", "pro")  # with experts in MXFP4, and FP8
NANO = Path(__file__).parent / "nano"
# Layers of the full models, one of each kind.
_LAYERS = {"num_hidden_layers": 3, "num_hash_layers": 1, "compress_ratios": [0, 4, 128, 0]}


def add_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "warm",
        help="compile kernels before a server needs them",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("checkpoint", metavar="CKPT", type=Path, nargs="?", help="a checkpoint")
    model.add_argument("--config", choices=(*CONFIGS, "nano"), help="a model by name")
    parser.add_argument("--tp-size", type=int, default=1, metavar="N", help="(default: 1)")
    parser.add_argument("--ep-size", type=int, default=1, metavar="N", help="(default: 1)")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(default: bfloat16)"
    )
    parser.add_argument(
        "--context-length", type=int, metavar="N", help="as for the server (default: the model's)"
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    from sglang_dsv4 import parallel
    from sglang_dsv4.backends import Machine

    config = chosen_config(arguments.checkpoint, arguments.config)
    parallel.check(config, arguments.tp_size, arguments.ep_size)
    machine = Machine.probe()
    if machine.device == "cpu":
        if arguments.json:
            print(json.dumps({"ok": True, "device": "cpu", "built": 0, "failed": []}))
        else:
            print("nothing needs warming: no GPU here, and on a CPU no kernel is compiled")
        return 0
    held = expert_formats(config, arguments.checkpoint, arguments.config)
    return warm_up(made_target(config, held, machine, arguments), arguments.json)


def chosen_config(checkpoint: Path | None, name: str | None) -> DSV4Config:
    """The config of a checkpoint's folder, or of a model known by name."""
    if checkpoint is not None:
        if not checkpoint.is_dir():
            raise NotADirectoryError(f"{checkpoint} is no folder: name that of a checkpoint")
        return DSV4Config.from_checkpoint(checkpoint)
    if name == "nano":
        return DSV4Config.from_checkpoint(NANO)
    preset, changes = CONFIGS[name or "tiny"]
    return DSV4Config.from_dict(shipped_config(preset, "bfloat16") | _LAYERS | changes)


def expert_formats(config: DSV4Config, checkpoint: Path | None, name: str | None) -> "HeldByLayer":
    """How the routed experts are stored: by a checkpoint's headers or, where it has no weights, by
    its config.json; in a model known by name as in its release."""
    from sglang_dsv4 import expert_storage, format_claims
    from sglang_dsv4.checkpoint import CheckpointError

    folder = NANO if name == "nano" else checkpoint
    if folder is None:
        said = {"expert_dtype": "fp4"} if name in RELEASED else {}
        return expert_storage.from_claims(said, config)
    try:
        if any(folder.glob("*.safetensors")):
            return expert_storage.from_headers(folder)
    except CheckpointError as error:
        raise SettingsError(str(error)) from error
    return expert_storage.from_claims(format_claims.read(folder / format_claims.CONFIG), config)


def kept_linears(
    config: DSV4Config, value: str, device: str, arguments: argparse.Namespace
) -> "LinearStorage":
    """What else stays as it is stored, told from the same; value: of the component linears."""
    import torch

    from sglang_dsv4 import format_claims, linear_storage
    from sglang_dsv4.checkpoint import CheckpointError
    from sglang_dsv4.tensor_table import expected_tensors

    slots = expected_tensors(config)
    name, folder = arguments.config, NANO if arguments.config == "nano" else arguments.checkpoint
    if folder is None:
        said = {"quantization_config": {"quant_method": "fp8"}} if name in RELEASED else {}
        formats = linear_storage.from_claims(said, slots)
    elif any(folder.glob("*.safetensors")):
        try:
            formats = linear_storage.from_headers(folder)
        except CheckpointError as error:
            raise SettingsError(str(error)) from error
    else:
        said = format_claims.read(folder / format_claims.CONFIG)
        formats = linear_storage.from_claims(said, slots)
    return linear_storage.decide(
        config,
        slots,
        formats,
        chosen=value,
        device=device,
        run=getattr(torch, arguments.dtype),
        ranks=arguments.tp_size,
    )


def made_target(
    config: DSV4Config, held: "HeldByLayer", machine: Any, arguments: argparse.Namespace
) -> "Target":
    """What to warm up for; held: formats of the routed experts. Raises SettingsError for a context
    that the model does not have."""
    import torch

    from sglang_dsv4 import expert_storage
    from sglang_dsv4.backends import choose
    from sglang_dsv4.parallel import Parallel
    from sglang_dsv4.warmup import Target

    settings = Settings.read()
    longest = config.max_position_embeddings
    context = arguments.context_length or longest
    if not 1 <= context <= longest:
        raise SettingsError(f"--context-length {context}: the model has 1 to {longest} tokens")
    chosen = precision.parse(settings.precision)
    shared = Parallel(size=arguments.tp_size, expert_parallel=arguments.ep_size)
    storage = expert_storage.decide(
        config,
        held,
        chosen=chosen.routed_experts,
        device=machine.device,
        ranks=shared.expert_width.parts,
    )
    return Target(
        config=config,
        ops=choose(machine, settings.ops, expert_parallel=shared.expert_parallel),
        precision=chosen,
        parallel=shared,
        context=context,
        dtype=getattr(torch, arguments.dtype),
        expert_groups=storage.groups,
        linears=kept_linears(config, chosen.linears, machine.device, arguments).anywhere,
    )


def warm_up(target: "Target", as_json: bool) -> int:
    """Build everything with a progress bar, and say what was built."""
    from tqdm import tqdm

    from sglang_dsv4 import warmup

    print("looking up which kernels the model launches ...", file=sys.stderr)
    builders = warmup.builders(target)
    # tqdm hides itself where stderr is not a terminal.
    with tqdm(total=len(builders), unit="kernel", disable=True if as_json else None) as progress:

        def step(name: str) -> None:
            progress.set_postfix_str(name)
            progress.update()

        done = warmup.warm(target, builders, step)
    if as_json:
        device = target.ops.machine.name
        print(json.dumps({"ok": not done.failed, "device": device, **asdict(done)}))
    else:
        ready = f"{done.built} of {len(builders)} ready in {done.seconds} s"
        print(f"{ready} on {target.ops.machine.name}")
        for name, reason in done.failed:
            print(f"  {name} failed: {reason}")
    return BUILD_FAILED if done.failed else 0
