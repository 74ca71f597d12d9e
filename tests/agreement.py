"""When two greedy generations count as the same: tokens equal, log-probabilities within a bound.

A difference of tokens is excused only by a recorded tie: at that step the two best logits, or the
k-th and the next index score of some layer, were closer than TIE. Everything after such a step may
differ. At most EXCUSED of all tokens may go unchecked in this way.
"""

from collections.abc import Sequence
from typing import Protocol

from oracle import Generation

LOGPROB_TOLERANCE = 1e-4
TIE = 1e-4
EXCUSED = 0.01


class Generated(Protocol):
    """Tokens and their log-probabilities."""

    @property
    def tokens(self) -> tuple[int, ...]: ...

    @property
    def logprobs(self) -> tuple[float, ...]: ...


class Comparison:
    """Collects generations of one test; `check` at its end."""

    def __init__(self) -> None:
        self.compared = 0
        self.excused = 0
        self.worst = 0.0
        self.failures: list[str] = []

    def add(self, name: str, found: Generated, wanted: Generated, ties: Sequence[float]) -> None:
        """Compare; ties[i] is the smallest margin of any discrete choice at step i."""
        assert len(found.tokens) == len(wanted.tokens) > 0, name
        for step, (token, reference) in enumerate(zip(found.tokens, wanted.tokens, strict=True)):
            difference = abs(found.logprobs[step] - wanted.logprobs[step])
            if token == reference and difference <= LOGPROB_TOLERANCE:
                self.compared += 1
                self.worst = max(self.worst, difference)
                continue
            if ties[step] < TIE:
                self.excused += len(found.tokens) - step
            else:
                self.failures.append(
                    f"{name}, step {step}: token {token}, expected {reference}; log-probability "
                    f"{found.logprobs[step]:.6f}, expected {wanted.logprobs[step]:.6f}; "
                    f"margin {ties[step]:.2e}"
                )
            return

    def check(self) -> None:
        """Raise with every difference, or when too much was excused."""
        total = self.compared + self.excused
        print(f"{self.compared} tokens equal, {self.excused} excused, worst {self.worst:.2e}")
        assert not self.failures, "\n".join(self.failures)
        assert total and self.excused <= EXCUSED * total, f"{self.excused} of {total} excused"


def ties(generation: Generation) -> list[float]:
    """The smallest margin of any discrete choice up to each step."""
    margins = zip(generation.index_gaps, generation.router_gaps, strict=True)
    running, smallest = float("inf"), []
    for (index, router), logits in zip(margins, generation.logit_gaps, strict=True):
        running = min(running, index, router)
        smallest.append(min(running, logits))
    return smallest
