"""What may not happen in a decode step that is captured as one CUDA graph: the rules, by id.

A graph holds kernels, their launch sizes and their addresses. Whatever the host does during the
capture happens once; a replay repeats the kernels alone. So the host may neither wait for the
device nor act on a value that lives there.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """why: what breaks in a graph; fix: what to write in its place."""

    why: str
    fix: str


RULES: dict[str, Rule] = {
    "item": Rule(
        "reading a value waits for the device, which a capture refuses",
        "keep it as a tensor, or take the number from the host's own data",
    ),
    "tolist": Rule(
        "reading values waits for the device, which a capture refuses",
        "keep them as a tensor and index it on the device",
    ),
    "to-host": Rule(
        "a copy to the host waits for the device, and what is made of it is not repeated by replay",
        "compute on the device; copy outside the step",
    ),
    "scalar": Rule(
        "turning a tensor into a Python number waits for the device",
        "use tensor arithmetic, or a number that the host already has",
    ),
    "branch": Rule(
        "the host decides on a value of the capture, and every replay follows that decision",
        "compute both sides and choose with torch.where or masked_fill",
    ),
    "compare": Rule(
        "the answer is a Python bool, for which the host waits",
        "compare elementwise and keep the result on the device",
    ),
    "format": Rule(
        "writing a tensor as text reads its values, and a replay writes nothing",
        "print shapes and dtypes, or print outside the step",
    ),
    "data-shape": Rule(
        "the size of the result depends on values, so the host waits for it and the graph fixes it",
        "use a fixed size with padding: masks, torch.where with three arguments, output_size",
    ),
    "mask-index": Rule(
        "indexing with a boolean mask is nonzero(): its size depends on values",
        "use masked_fill or torch.where, or store to a null row",
    ),
    "device-shape": Rule(
        "a size, bound or count is read from the device and fixed in the graph",
        "use a bound that the host knows and mask what lies beyond",
    ),
    "loop": Rule(
        "Python walks over a tensor: the number of launches is fixed by the capture, and comparing"
        " elements reads them",
        "use one operation over the whole tensor",
    ),
    "host-data": Rule(
        "a tensor made from host data keeps the capture's values and is copied from memory that"
        " the graph does not own",
        "make it when the model is built, or fill a static input before replay",
    ),
    "move": Rule(
        "a copy between devices waits, and a replay reads the host's old address",
        "make the tensor on the device (device=x.device), or when the model is built",
    ),
    "synchronize": Rule(
        "waiting, asking whether work is done, or freeing memory is refused during a capture",
        "leave it to the caller of the step",
    ),
    "clock": Rule(
        "time and host random numbers are read once, at capture, and frozen into the graph",
        "pass a static input tensor, or draw on the device",
    ),
    "environment": Rule(
        "the environment is read once, at capture, and later changes do nothing",
        "read it at start-up (settings.py) and pass the value down",
    ),
    "host-state": Rule(
        "Python state changes at capture only; a replay does not repeat it",
        "keep the state in a tensor that the step updates in place",
    ),
    "host-decision": Rule(
        "the same batch with other lengths runs other operations, shapes or numbers",
        "let the host decide on shapes and configuration only",
    ),
    "failed": Rule(
        "the step did not run through, so nothing after this line was checked",
        "make the step run; on the meta device nothing can be read from a tensor",
    ),
    "replay": Rule(
        "the replayed graph and the same step run eagerly differ",
        "look for state or addresses that only the capture saw",
    ),
    "table": Rule(
        "a table of the detector names what is not there, or what does not match",
        "correct the table in graph_safety.py",
    ),
}


@dataclass(frozen=True, order=True)
class Finding:
    """One violation: where (path as shown, line; 0 for none), which rule, what was seen.

    check: "static", "dispatch" or "device". function: qualified name, empty where unknown.
    """

    file: str
    line: int
    rule: str
    check: str
    function: str
    text: str

    def __post_init__(self) -> None:
        assert self.rule in RULES, self.rule


@dataclass(frozen=True)
class Allowed:
    """A finding that is no fault: rule, file, function, and why."""

    file: str
    function: str
    rule: str
    reason: str

    def covers(self, finding: Finding) -> bool:
        """Whether the finding is what this entry allows."""
        return (self.file, self.function, self.rule) == (
            finding.file,
            finding.function,
            finding.rule,
        )


def apply_allowed(
    findings: Sequence[Finding], allowed: Sequence[Allowed], table: str
) -> tuple[list[Finding], list[tuple[Allowed, int]]]:
    """Findings that remain, and how many each entry of `allowed` covers.

    An entry that covers nothing becomes a finding itself, in the file `table`.
    """
    counted = [(entry, sum(map(entry.covers, findings))) for entry in allowed]
    left = [finding for finding in findings if not any(entry.covers(finding) for entry in allowed)]
    for entry, count in counted:
        if not count:
            text = f"{entry.file}, {entry.function}: {entry.rule} is allowed and does not occur"
            left.append(Finding(table, 0, "table", "static", "ALLOWED", text))
    return left, counted
