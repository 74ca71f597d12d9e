"""The attention ops said once more, plainly: float64, one token and one entry at a time.

What the ops' tests compare with, and how they lay out a cache. Nothing here calls an op.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from inprocess import Host, Part
from op_checks import MACHINE
from sglang_dsv4.attention.metadata import Batch, Metadata
from sglang_dsv4.attention.reference_metadata import build_metadata

EPS = 1e-6
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of the FP4 codes 0 to 7


def rope(vector: torch.Tensor, position: int, frequencies: torch.Tensor) -> torch.Tensor:
    """Rotate the last channels of one vector: pairs are complex numbers. float64 in and out.

    Angles are float32 products, as in the published code: at long contexts that rounding is part of
    the model.
    """
    angles = (frequencies.cpu().float() * float(position)).double()
    plain = vector.shape[0] - 2 * len(angles)
    pairs = torch.view_as_complex(vector[plain:].reshape(-1, 2).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles))
    return torch.cat([vector[:plain], turned.flatten()])


def rms(vector: torch.Tensor) -> torch.Tensor:
    """One float64 vector divided by its root mean square."""
    return vector / math.sqrt(float(vector @ vector) / vector.shape[0] + EPS)


def pool(values: Sequence[torch.Tensor], scores: Sequence[torch.Tensor]) -> torch.Tensor:
    """Each channel's softmax over the scores weighs its values."""
    shares = torch.stack(list(scores)).softmax(dim=0)
    return sum((share * value for share, value in zip(shares, values, strict=True)), shares[0] * 0)


@dataclass
class Inputs:
    """What a compressor gets for a whole sequence: values, gate scores, position bias, norm."""

    kv: torch.Tensor  # [tokens, series * width]
    gate: torch.Tensor  # [tokens, series * width]
    ape: torch.Tensor  # [ratio, series * width]
    weight: torch.Tensor  # [width]
    frequencies: torch.Tensor  # [32]

    def entry(self, number: int) -> torch.Tensor:
        """An entry by definition, from all tokens of the sequence: [width] float64."""
        ratio, width = self.ape.shape[0], self.weight.shape[0]
        own = slice(self.kv.shape[1] - width, None)  # the last series belongs to the own window
        slots = [(number * ratio + i, own) for i in range(ratio)]
        if self.kv.shape[1] == 2 * width and number > 0:
            slots += [((number - 1) * ratio + i, slice(0, width)) for i in range(ratio)]
        kv, gate, ape = (x.detach().cpu().double() for x in (self.kv, self.gate, self.ape))
        values = [kv[token, series] for token, series in slots]
        scores = [gate[token, series] + ape[token % ratio, series] for token, series in slots]
        entry = rms(pool(values, scores)) * self.weight.cpu().double()
        return rope(entry, number * ratio, self.frequencies)


def e2m1_blocks(vector: Sequence[float]) -> list[float]:
    """FP4 grid of float32 numbers, exactly: blocks of 32, a power of two each, codes by table."""
    result: list[float] = []
    for first in range(0, len(vector), 32):
        block = vector[first : first + 32]
        amax = Fraction(max(abs(value) for value in block))
        exponent = -126  # the smallest scale that float32 holds with full precision
        while amax > 6 * Fraction(2) ** exponent:
            exponent += 1
        scale = Fraction(2) ** exponent
        for value in block:
            exact = abs(Fraction(value)) / scale
            distances = [abs(exact - Fraction(code)) for code in E2M1]
            nearest = [code for code in range(8) if distances[code] == min(distances)]
            code = next(code for code in nearest if len(nearest) == 1 or code % 2 == 0)
            result.append(math.copysign(float(Fraction(E2M1[code]) * scale), value))
    return result


def sylvester(size: int) -> torch.Tensor:
    """Hadamard matrix without its factor: the sign is the parity of the common bits."""
    return torch.tensor(
        [[(-1.0) ** (row & column).bit_count() for column in range(size)] for row in range(size)],
        dtype=torch.float64,
    )


def metadata(host: Host, *parts: Part, window_rows: int, padding: int = 0) -> Metadata:
    """The forward that runs these new tokens, on the machine's device; the tokens are appended."""
    batch = on_device(host.batch(*parts, padding=padding))
    meta = build_metadata(batch, window=128, window_rows=window_rows)
    for request, tokens in parts:
        request.tokens.extend(tokens)
    return meta


def on_device(batch: Batch) -> Batch:
    """The same batch on the device that is tested."""
    moved: dict[str, Any] = {n: t.to(MACHINE.device) for n, t in tensors_of(batch).items()}
    return replace(batch, **moved)


def tensors_of(record: Any) -> dict[str, torch.Tensor]:
    """The fields of a dataclass that are tensors."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def assert_stays_on_device(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As in `op_checks`, also where tensors are fields of dataclasses. Returns the fake result."""
    with FakeTensorMode() as mode:

        def fake(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return mode.from_tensor(value)
            if is_dataclass(value) and not isinstance(value, type):
                names = [field.name for field in fields(value)]
                return replace(value, **{name: fake(getattr(value, name)) for name in names})
            return value

        return op(*map(fake, args), **{name: fake(value) for name, value in kwargs.items()})
