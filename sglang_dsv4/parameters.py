"""Holders of parameters under the checkpoint's own names."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Weight(nn.Module):
    """A tensor that the checkpoint calls `<name>.weight`, of the given shape.

    It is uninitialised until loaded; its dtype is torch's default unless given.
    """

    def __init__(self, *shape: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = tensor(*shape, dtype=dtype)


class Matrix(Weight):
    """A Weight [N, K] that multiplies. groups: of rows, equally many; each multiplies K columns of
    the input of its own."""

    def __init__(self, rows: int, columns: int, *, groups: int = 1) -> None:
        super().__init__(rows, columns)
        self.groups = groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, groups * K] -> [T, N]."""
        if self.groups == 1:
            return functional.linear(x, self.weight)
        each, rows = x.unflatten(1, (self.groups, -1)), self.weight.unflatten(0, (self.groups, -1))
        out = x.new_empty(x.shape[0], *rows.shape[:2])
        # Into its place: as einsum it would be copied there afterwards.
        torch.bmm(each.transpose(0, 1), rows.transpose(1, 2), out=out.transpose(0, 1))
        return out.flatten(1)


class Stack(nn.Module):
    """Matrices that multiply the same input, one below the other: one product serves them all.

    rows: name of each, as seen from the module that holds the stack -> its number of rows.
    columns: of the input.
    """

    def __init__(self, columns: int, rows: Mapping[str, int]) -> None:
        super().__init__()
        self.rows = dict(rows)
        self.weight = tensor(sum(rows.values()), columns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, columns] -> [T, all rows]."""
        return functional.linear(x, self.weight)

    def apart(self, product: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[T, all rows] -> a view [T, rows] for each matrix."""
        return product.split(list(self.rows.values()), dim=1)

    def matrices(self) -> dict[str, torch.Tensor]:
        """Name, seen as in `rows` -> view [rows, columns]."""
        parts = self.weight.data.split(list(self.rows.values()))
        return dict(zip(self.rows, parts, strict=True))


class KeptMatrix:
    """Of a module that multiplies by a matrix [N, K] as its checkpoint holds it, in fewer bits than
    the model's dtype has: what its rows are called. It may be several matrices, as in a Stack.

    heights: as `Stack.rows`; empty for one matrix alone. suffix: what the name of that one's
    parameter would have behind the module's own if it were dense.
    """

    heights: Mapping[str, int]
    suffix: str

    @staticmethod
    def count(rows: int | Mapping[str, int]) -> int:
        """Of all matrices together."""
        return rows if isinstance(rows, int) else sum(rows.values())

    def name_rows(self, rows: int | Mapping[str, int], suffix: str) -> None:
        self.heights, self.suffix = {} if isinstance(rows, int) else dict(rows), suffix

    def all_rows(self) -> Any:
        """As the format has them, with a method rows(first, count)."""
        raise NotImplementedError

    def apart(self, product: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[T, all rows] -> a view [T, rows] for each matrix."""
        return product.split(list(self.heights.values()), dim=1)

    def matrices(self, path: str) -> dict[str, Any]:
        """The rows of each matrix, by the name of the parameter that it would be if it were dense.

        path: the module's own name.
        """
        if not self.heights:
            return {path + self.suffix: self.all_rows()}
        holder, whole, found, first = path[: path.rfind(".") + 1], self.all_rows(), {}, 0
        for name, count in self.heights.items():
            found[holder + name] = whole.rows(first, count)
            first += count
        return found


def tensor(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters without a dtype of their own are made in this one."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter by name, and the matrices in a stack, by theirs, as views of it."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    for path, module in model.named_modules():
        if isinstance(module, Stack):
            del found[f"{path}.weight"]
            holder = path[: path.rfind(".") + 1]
            found |= {holder + name: matrix for name, matrix in module.matrices().items()}
    return found
