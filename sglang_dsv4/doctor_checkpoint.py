"""What `doctor` finds out about a checkpoint, and about serving it on this machine."""

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_dsv4 import options, precision
from sglang_dsv4.components import EXPERTS
from sglang_dsv4.settings import Settings

if TYPE_CHECKING:  # torch is slow to import, and --help needs none of it
    from sglang_dsv4.backends import Machine
    from sglang_dsv4.inspection import Inspection

# What the chat encoding looks up in the tokenizer.
CHAT_TOKENS = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<｜latest_reminder｜>", "<think>", "</think>", "｜DSML｜"),
)


@dataclass(frozen=True)
class Row:
    """The result of one check; `status` is "ok", "warn" or "fail"."""

    name: str
    status: str
    found: str
    expected: str = ""
    remedy: str = ""


def machine_memory(machine: "Machine") -> int:
    """Bytes of one GPU, or of the CPU's memory."""
    if machine.capability is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    import torch

    return torch.cuda.mem_get_info()[1]


def check_checkpoint(folder: Path, ranks: int = 1, expert_parallel: int = 1) -> list[Row]:
    """What `inspect` finds, for `ranks` ranks on the devices of this machine."""
    from sglang_dsv4.backends import Machine
    from sglang_dsv4.inspection import Deployment, Inspection

    machine = Machine.probe()
    chosen = precision.parse(Settings.read().precision)
    deployment = Deployment(
        tensor_parallel=ranks,
        expert_parallel=expert_parallel,
        device=machine_memory(machine),
        device_name=f"this machine's {machine.name}",
        shared=machine.capability is None,
        routed_experts=chosen.routed_experts,
        linears=chosen.linears,
    )
    found = Inspection(folder, deployment)
    if found.config is None:
        return [Row("config.json", "fail", found.refusals[0], "a DeepSeek-V4 config.json")]
    return [
        _config(found),
        _weights(found),
        _draft_head(found),
        _ranks(found),
        _experts(found),
        *_linears(found),
        *_memory(found),
    ]


def _config(found: "Inspection") -> Row:
    from sglang_dsv4.config import LayerKind
    from sglang_dsv4.inspection import config_dialect

    config = found.config
    assert config is not None
    kinds = ", ".join(f"{config.layer_kinds.count(kind)} {kind.name}" for kind in LayerKind)
    layers = f"{config.num_hidden_layers} layers ({kinds}), {config.n_routed_experts} experts"
    return Row("config.json", "ok", f"{layers}; {config_dialect(found.folder)}")


def _weights(found: "Inspection") -> Row:
    from sglang_dsv4.ledger import counted

    survey = found.survey
    assert survey is not None
    if survey.faults:
        remedy = "download or convert the checkpoint again"
        faults = "\n".join(found.refused["weights"])
        return Row("weights", "fail", faults, "every tensor of the model", remedy)
    held = (
        f"{survey.used} tensors ({counted(survey.held)}), {survey.bytes:,} bytes in"
        f" {survey.files} files; names: {survey.dialect()}; skipped: {counted(survey.skipped)}"
    )
    suspect = found.warned["weights"]
    return Row("weights", "warn" if suspect else "ok", "\n".join([held, *suspect]))


def _draft_head(found: "Inspection") -> Row:
    assert found.survey is not None
    return Row("draft head", "ok", str(found.survey.draft))


def _ranks(found: "Inspection") -> Row:
    from sglang_dsv4.parallel import tensor_parallel_sizes

    assert found.config is not None
    if refused := found.refused["ranks"]:
        return Row("tensor parallel", "fail", refused[0])
    sizes = ", ".join(map(str, tensor_parallel_sizes(found.config)))
    ranks, groups = found.deployment.tensor_parallel, found.deployment.expert_parallel
    experts = f", experts in {groups} groups" if groups > 1 else ""
    return Row("tensor parallel", "ok", f"{ranks}{experts}; sizes that work: {sizes}")


def _experts(found: "Inspection") -> Row:
    """Whether routed experts stay in four bits."""
    if refused := found.refused.get("experts"):
        return Row("routed experts", "fail", "\n".join(refused))
    notes = found.warned.get("experts", [])
    runs = (row for row in found.holdings if row.component == EXPERTS)
    held = [f"{row.held} -> {row.run}, {row.layers} layers" for row in runs]
    return Row("routed experts", "warn" if notes else "ok", "\n".join([", ".join(held), *notes]))


def _linears(found: "Inspection") -> list[Row]:
    """How the other quantised weights run here."""
    from sglang_dsv4.census import QUANTISED

    if refused := found.refused.get("linears"):
        return [Row("linear weights", "fail", reason) for reason in refused]
    components: dict[str, list[str]] = {}
    for row in found.holdings:
        if row.held in QUANTISED and row.component != EXPERTS:
            components.setdefault(f"{row.held} -> {row.run}", []).append(row.component)
    held = [f"{form} ({', '.join(names)})" for form, names in components.items()]
    return [Row("linear weights", "ok", ", ".join(held) or "none are quantised")]


def _memory(found: "Inspection") -> list[Row]:
    from sglang_dsv4.memory_plan import GIB

    plan = found.plan
    if plan is None or plan.device is None:
        return []
    for status, reasons in (("fail", found.refused), ("warn", found.warned)):
        if lines := reasons.get("memory"):
            return [Row("memory", status, "\n".join(lines))]
    fits = (
        f"weights {plan.weights / GIB:.2f} GiB a rank, then {plan.pool_tokens:,} tokens of context"
        f" ({plan.cache}), at most {plan.requests} requests of {plan.context:,} at once"
    )
    return [Row("memory", "ok", fits)]


def check_options() -> list[Row]:
    """The options that serving this model wants or refuses."""
    plugin = importlib.import_module("sglang_dsv4.plugin")
    parsers = " ".join(
        f"--{field.replace('_', '-')} {parser}" for field, (parser, _) in plugin.PARSERS.items()
    )
    rows = (
        f"BF16 (FP32 with --dtype float32): {' or '.join(options.ROW_DTYPES)}; others are refused"
    )
    return [
        Row("parsers", "ok", f"for tool calls and reasoning, start with {parsers}"),
        Row("--kv-cache-dtype", "ok", rows),
    ]


def check_tokenizer(folder: Path) -> list[Row]:
    """The tokens without which SGLang's chat encoding refuses to start."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    remedy = "copy the tokenizer's files from the original checkpoint"
    if not path.is_file():
        return [Row("tokenizer", "fail", "no tokenizer.json", "a fast tokenizer", remedy)]
    try:
        known = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises nothing more precise
        return [Row("tokenizer", "fail", f"{path}: {error}", "a fast tokenizer", remedy)]
    missing = [token for token in CHAT_TOKENS if token not in known]
    if missing:
        found = f"no {' '.join(missing)}"
        return [Row("tokenizer", "fail", found, "DeepSeek's special tokens", remedy)]
    return [Row("tokenizer", "ok", f"{len(known)} tokens")]
