"""Rewrites a checkpoint in NVFP4: a shard at a time, and on from there after an interruption.

`convert_plan` decides what happens to each tensor, `quantise` computes it, `convert_config` says so
in the config files, `convert_files` keeps the folder.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from sglang_dsv4 import convert_files, convert_plan, quantise, weights
from sglang_dsv4.checkpoint import CheckpointError
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.convert_files import Lossy, Shard, State
from sglang_dsv4.convert_plan import Options, Plan, Step, Way
from sglang_dsv4.dequant import MXFP4_GROUP
from sglang_dsv4.formats import LAYOUTS, Found, Part, Stored

_DAMAGED = "the checkpoint is damaged, download it again"


@dataclass(frozen=True)
class Report:
    """What a conversion did.

    bytes_before, bytes_after: of all files of weights. ways: tensors by what happened to them.
    dropped: activation scales of a weight's former format, left out. recoded_blocks: of MXFP4, all;
    lossy: the matrices where some of them changed their values. below_the_floor: what the source
    holds in less than BF16. contradictions: what the copy's config says and its tensors deny; none
    is expected. resumed: files that were finished before.
    """

    path: str
    files: Sequence[str]
    bytes_before: int
    bytes_after: int
    ways: Mapping[str, int]
    dropped: int
    recoded_blocks: int
    lossy_blocks: int
    lossy: Sequence[Lossy]
    below_the_floor: Sequence[str]
    contradictions: Sequence[str]
    resumed: int


@torch.no_grad()
def convert(
    source: Path, out: Path, options: Options, *, resume: bool = False, show_progress: bool = False
) -> Report:
    """Writes the checkpoint in `source` to `out` with weights in NVFP4.

    What is held at a time is the tensors of one shard of the copy and one weight in FP32.

    Raises ConfigError or CheckpointError for a source that cannot be converted, before anything is
    written, and CheckpointError for values that are not finite; FileExistsError for an `out` that
    is not empty, unless it is to be resumed and was begun in the same way; OSError where the disk
    is too small.
    """
    config = DSV4Config.from_checkpoint(source)
    before = weights.check(source, config)
    plan = convert_plan.make(source, config, options)
    state = State(out, convert_files.identity(source, plan, options))
    state.take_up(resume)
    convert_files.check_place(source, out, plan, state)
    resumed = len(state.shards)
    state.begin()
    with tqdm(
        total=plan.bytes_read(),
        initial=sum(step.bytes_read for file in state.shards for step in plan.files[file]),
        unit="B",
        unit_scale=True,
        desc="convert",
        disable=None if show_progress else True,  # None: hidden where there is no terminal
    ) as progress:
        for file in plan.files:
            if file not in state.shards:
                state.finish(file, _write(file, source, out, plan, progress))
    convert_files.complete(source, out, plan, state)
    after = weights.check(out, config)
    state.path.unlink()
    lossy = [item for file in plan.files for item in state.shards[file].lossy]
    ways = Counter(step.way for step in plan.steps())
    return Report(
        path=str(out),
        files=[file for file in plan.files if state.shards[file].size],
        bytes_before=sum((source / file).stat().st_size for file in plan.files),
        bytes_after=sum(shard.size for shard in state.shards.values()),
        ways={way.value: ways[way] for way in Way if ways[way]},
        dropped=len(plan.dropped),
        recoded_blocks=sum(step.values for step in plan.steps() if step.way is Way.RECODE)
        // MXFP4_GROUP,
        lossy_blocks=sum(item.blocks for item in lossy),
        lossy=lossy,
        below_the_floor=before.below_the_floor,
        contradictions=after.contradictions,
        resumed=resumed,
    )


# ------------------------------------------------------------------------------------ one shard


def _write(file: str, source: Path, out: Path, plan: Plan, progress: Any) -> Shard:
    """Writes a file of the copy, if it has tensors, reading scales from wherever they lie."""
    shard, held = Shard(), dict[str, Tensor]()
    with ExitStack() as stack:
        opened: dict[str, Any] = {}

        def read(name: str) -> Tensor:
            where = plan.file_of[name]
            if where not in opened:
                opened[where] = stack.enter_context(safe_open(source / where, framework="pt"))
            return opened[where].get_tensor(name)

        for step in plan.files[file]:
            stored = Stored(step.name)
            for part, found in step.parts.items():
                stored.add(part, Found(found.name, found.header, read(found.name)))
            held |= _made(step, stored, shard)
            progress.update(step.bytes_read)
        if held:
            temporary = out / f"{file}.part"
            save_file(held, temporary, metadata={"format": "pt"})
            temporary.chmod(0o644)  # It comes out readable by its owner alone.
            shard.size = temporary.stat().st_size
            temporary.replace(out / file)
    return shard


def _made(step: Step, stored: Stored, shard: Shard) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all that a step writes; lossy blocks are noted in `shard`."""
    if step.way is Way.COPY:
        yield step.name, stored.tensor()
        return
    if step.way is Way.BF16:
        whole = torch.empty(step.whole_shape(), dtype=torch.bfloat16)
        for number, matrix in enumerate(whole.view(-1, *step.shape)):
            matrix.copy_(_values(step, stored, number))
        _refuse_odd_values(step, whole)
        yield step.name, whole
        return
    for number, module in enumerate(step.modules):
        if step.way is Way.RECODE:
            codes, scale, factor, lossy = quantise.nvfp4_from_mxfp4(*_blocks(step, stored, number))
            if lossy.any():
                shard.lossy.append(Lossy(f"{module}.weight", int(lossy.sum()), lossy.numel()))
        else:
            values = _values(step, stored, number)
            _refuse_odd_values(step, values)
            codes, scale, factor = quantise.nvfp4(values)
        yield f"{module}.weight", codes
        yield f"{module}.weight_scale", scale
        yield f"{module}.weight_scale_2", factor


def _values(step: Step, stored: Stored, number: int) -> Tensor:
    """One matrix of a weight as numbers: in the source's own dtype, or else in FP32."""
    if step.format not in LAYOUTS:
        return stored.tensor().reshape(-1, *step.shape)[number]
    values = torch.empty(step.shape, dtype=torch.float32)
    rows, columns = (range(length) for length in step.shape)
    stored.fill(values, rows, columns, matrix=number, matrices=len(step.modules))
    return values


def _blocks(step: Step, stored: Stored, number: int) -> tuple[Tensor, Tensor]:
    """Codes [N, K/2] and scales [N, K/32] of one matrix in MXFP4."""
    parts = (stored.tensor(Part.WEIGHT), stored.tensor(Part.SCALE))
    codes, scale = (part.reshape(len(step.modules), step.shape[0], -1)[number] for part in parts)
    if bool((scale.view(torch.uint8) == 255).any()):
        name = stored.parts[Part.SCALE].name
        raise CheckpointError(f"{name}: some scales are NaN: {_DAMAGED}")
    return codes, scale


def _refuse_odd_values(step: Step, values: Tensor) -> None:
    low, high = (bound.item() for bound in torch.aminmax(values))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise CheckpointError(f"{step.name}: some values are NaN or infinite: {_DAMAGED}")
