"""How close a result must be, in one table by dtype, and the comparison that uses it."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True)
class Tolerance:
    """|actual - expected| <= absolute + relative * |expected|, and 1 - cosine <= `cosine`."""

    absolute: float
    relative: float
    cosine: float


# Each is the error of fp32 arithmetic over a few hundred terms of order 1, plus one rounding to the
# dtype: half a unit in the last place, which is at most 2^-8 of a bfloat16. So `expected` must be
# the exact value, not one that was rounded as well.
TOLERANCES: Mapping[torch.dtype, Tolerance] = MappingProxyType(
    {
        torch.float32: Tolerance(absolute=1e-5, relative=1e-5, cosine=1e-9),
        torch.bfloat16: Tolerance(absolute=1e-5, relative=2**-8 + 1e-5, cosine=1e-5),
    }
)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, name: str = "result") -> None:
    """Compare with the exact value: shape, places of NaN and infinity, error, direction.

    The tolerance is that of actual's dtype; dtypes outside the table must agree exactly.
    A failure names the worst element and both values.
    """
    assert actual.shape == expected.shape, f"{name}: {actual.shape} is not {expected.shape}"
    if actual.dtype not in TOLERANCES:
        assert torch.equal(actual.cpu(), expected.cpu().to(actual.dtype)), f"{name} differs"
        return
    tolerance = TOLERANCES[actual.dtype]
    got, want = actual.detach().cpu().double(), expected.detach().cpu().double()
    torch.testing.assert_close(
        torch.where(got.isfinite(), 0.0, got),
        torch.where(want.isfinite(), 0.0, want),
        rtol=0,
        atol=0,
        equal_nan=True,
        msg=lambda text: f"{name}: NaN or infinity in other places. {text}",
    )
    got, want = got.nan_to_num(0.0, 0.0, 0.0), want.nan_to_num(0.0, 0.0, 0.0)
    excess = (got - want).abs() - tolerance.absolute - tolerance.relative * want.abs()
    if excess.numel() == 0:
        return
    worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    assert excess.max() <= 0, (
        f"{name}: {int((excess > 0).sum())} of {excess.numel()} elements are off; "
        f"the worst is at {worst}: {float(got[worst])!r}, expected {float(want[worst])!r}"
    )
    norms = float(got.norm() * want.norm())
    if norms > 0:
        cosine = float((got * want).sum()) / norms
        assert 1 - cosine <= tolerance.cosine, f"{name}: cosine {cosine}"


def assert_close_by_norm(
    actual: torch.Tensor, expected: torch.Tensor, name: str = "result"
) -> None:
    """Compare with the exact value along the last dimension: |error| <= 2^-8 |expected|.

    For kernels that round a factor of every term to bfloat16 before they add (attention's weights,
    an expert's activation): a single element may be off by more than its own rounding, a vector
    may not. Where nothing is expected, nothing may be there.
    """
    assert actual.shape == expected.shape, f"{name}: {actual.shape} is not {expected.shape}"
    got, want = actual.detach().cpu().double(), expected.detach().cpu().double()
    assert not got.isnan().any(), f"{name}: NaN"
    if got.numel() == 0:
        return
    excess = (got - want).norm(dim=-1) - 2**-8 * want.norm(dim=-1)
    assert excess.max() <= 0, f"{name}: {int((excess > 0).sum())} vectors are off by {excess.max()}"
