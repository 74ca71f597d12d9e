"""Runs the few PTX instructions that our kernels' inline assembly is made of, on NumPy words.

Triton's interpreter leaves assembly out, so that without a GPU nothing else tells whether it is
right.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Words = np.ndarray[Any, np.dtype[np.uint32]]

_STATEMENT = re.compile(r"(\w+)\.?([\w.]*) (\$?\w+), (.+)")


def assembly_of(kernel: Any) -> str:
    """The assembly in the source of a Triton function, which has one."""
    source = inspect.getsource(kernel.fn)
    (found,) = re.findall(r'inline_asm_elementwise\(\s*"""(.*?)"""', source, re.S)
    return str(found)


def run(source: str, outputs: int, inputs: Sequence[Words]) -> list[Words]:
    """$0 .. $[outputs - 1], where the operands after these are inputs."""
    registers = {f"${outputs + number}": words for number, words in enumerate(inputs)}
    for statement in source.strip(" \n{}").split(";"):
        statement = " ".join(statement.split())
        if not statement or statement.startswith(".reg"):
            continue
        match = _STATEMENT.fullmatch(statement)
        assert match is not None, f"not understood: {statement}"
        name, kind, target, operands = match.groups()
        values = [_value(each, registers, inputs[0]) for each in operands.split(", ")]
        registers[target] = _INSTRUCTIONS[f"{name}.{kind}"](*values)
    return [registers[f"${number}"] for number in range(outputs)]


def _value(operand: str, registers: dict[str, Words], like: Words) -> Words:
    if operand in registers:
        return registers[operand]
    return np.full_like(like, int(operand, 0))


def _turned_right(high: Words, low: Words, count: Words) -> Words:
    return (low >> count) | (high << (32 - count))


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    assert (table == 0xEA).all(), "only (a & b) | c"
    return (a & b) | c


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    picked = int(selector.flat[0])
    eight = [each >> np.uint32(8 * byte) & 0xFF for each in (a, b) for byte in range(4)]
    result = np.zeros_like(a)
    for byte in range(4):
        number = picked >> 4 * byte & 15
        assert number < 8, "no signs are spread"
        result |= eight[number] << np.uint32(8 * byte)
    return result


def _fma_bf16x2(a: Words, b: Words, c: Words) -> Words:
    """Exact products alone: a sum with -0 changes nothing, and what would round is refused."""
    assert (c == 0x80008000).all()
    result = np.zeros_like(a)
    for half in (0, 16):
        left, right = (((each >> half) << np.uint32(16)).view(np.float32) for each in (a, b))
        product = (left * right).view(np.uint32)
        assert not (product & 0xFFFF).any(), "a product that BF16 would round"
        result |= product >> np.uint32(16) << np.uint32(half)
    return result


_INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, count: a << count,
    "shr.b32": lambda a, count: a >> count,
    "shf.r.wrap.b32": lambda low, high, count: _turned_right(high, low, count),
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "fma.rn.bf16x2": _fma_bf16x2,
}
