"""Graph safety, on the device: a captured step must replay as it runs eagerly, bit for bit."""

from collections.abc import Sequence

import torch

from sglang_dsv4.backends import PROVIDERS, Machine, Ops, choose, parse
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.graph_safety_rules import Finding
from sglang_dsv4.graph_safety_step import HostSync, capture, decode_batch, described, make_step
from sglang_dsv4.graph_safety_trace import Sources, error_frames, message

BATCHES = (4,)
STARTS = (1, 120, 250, None)  # tokens before the first step, None for padding
STEPS = 300  # on past 4, 128 and 256
# Rows in BF16 are what is served, and what the fast kernels take; in fp32 others run.
DTYPES = (torch.bfloat16, torch.float32)


def check_device(
    config: DSV4Config,
    machine: Machine,
    sources: Sources,
    named: str,
    batches: Sequence[int] = BATCHES,
) -> tuple[list[Finding], str]:
    """Capture the step with padding only, then replay it against the same step run eagerly; for
    each batch size, in each of DTYPES."""
    ops = choose(machine, provider_names(machine, named))
    used = ", ".join(f"{op}={name}" for op, name in ops.providers.items())
    for batch in batches:
        for dtype in DTYPES:
            finding = check_size(config, ops, sources, batch, dtype)
            if finding is not None:
                return [finding], f"batch {batch}, {dtype} ({used})"
    sizes = " ".join(map(str, batches))
    kinds = " and ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    return [], (
        f"{STEPS} replays equal eager bit for bit at batch {sizes}, in {kinds}, on {machine.name}"
        f" ({used})"
    )


def check_size(
    config: DSV4Config, ops: Ops, sources: Sources, batch: int, dtype: torch.dtype
) -> Finding | None:
    """What is wrong with one batch size, if anything."""
    starts = starts_of(batch)
    device = ops.machine.device
    captured, eager = (make_step(config, ops, starts, device, dtype) for _ in range(2))
    captured.fill([0] * batch, decode_batch([None] * batch))
    try:
        graph, logits = capture(captured)
    except HostSync as error:
        cause = error.__cause__ or error
        file, line, function = sources.innermost(error_frames(cause)) or ("", 0, "")
        return Finding(file, line, "synchronize", "device", function, message(cause))
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        lengths = [None if start is None else start + number for start in starts]
        ids = torch.randint(config.vocab_size, (batch,), generator=generator).tolist()
        for step in (captured, eager):
            step.fill(ids, decode_batch(lengths))
        graph.replay()
        if fault := difference(logits, eager.run(), lengths):
            return Finding("", 0, "replay", "device", "", f"batch {batch}, {dtype}: {fault}")
    return None


def starts_of(batch: int) -> list[int | None]:
    """STARTS over and over, each time 7 tokens later, so that few requests are in step."""
    rounds = (divmod(row, len(STARTS)) for row in range(batch))
    return [
        None if (start := STARTS[place]) is None else start + 7 * count for count, place in rounds
    ]


def difference(
    found: torch.Tensor, wanted: torch.Tensor, lengths: Sequence[int | None]
) -> str | None:
    """How logits [rows, V] of a replay differ from those of the eager step; padding rows may."""
    rows = [row for row, length in enumerate(lengths) if length is not None]
    if not wanted[rows].isfinite().all():
        return f"the eager step's logits are not finite at lengths {described(lengths)}"
    if torch.equal(found[rows], wanted[rows]):
        return None
    return f"logits differ at lengths {described(lengths)}"


def provider_names(machine: Machine, named: str) -> str:
    """`named`, and the reference by name for every op that has nothing else on this machine."""
    requested = parse(named)
    missing = [
        f"{op}=reference"
        for op, providers in PROVIDERS.items()
        if not {op, "all"} & set(requested)
        and all(one.name == "reference" or one.refuses(machine) for one in providers)
    ]
    return ",".join(filter(None, [named, *missing]))
