"""Checks of Triton kernels without a GPU: compiled for every architecture, run by the interpreter.

The compiler finds what does not fit an architecture (shared memory, spilled registers, types); the
interpreter finds wrong results. Neither sees races or times: tests marked `gpu` do.
"""

import contextlib
import io
import re
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver, interpreter
from triton.runtime.jit import JITFunction, KernelInterface

if TYPE_CHECKING:  # scripts that time kernels need no pytest
    from pytest import MonkeyPatch

# Compute capability -> bytes of shared memory that one block may use.
SHARED_MEMORY: Mapping[int, int] = {
    80: 166912,
    89: 101376,
    90: 232448,
    100: 232448,
    120: 101376,
}


# ---- compiled for every architecture ----


@dataclass(frozen=True)
class Report:
    """What one kernel needs on one architecture.

    capability: 90 for compute capability 9.0. shared: bytes of shared memory per block.
    registers: per thread. spilled: bytes per thread stored to and loaded from local memory because
    registers ran out. ptx, cubin: the code itself.
    """

    kernel: str
    capability: int
    shared: int
    registers: int
    spilled: int
    ptx: str
    cubin: bytes = field(repr=False)

    def __str__(self) -> str:
        return (
            f"{self.kernel} sm_{self.capability}: {self.registers} registers, "
            f"{self.shared} bytes of shared memory, {self.spilled} bytes spilled"
        )


@dataclass(frozen=True)
class CompileCase:
    """One kernel as it is launched: `compile_for_all`'s arguments under a name.

    per_capability overrides constexprs and options (num_warps, num_stages) for one capability.
    usual: capabilities of every run; what is left of `capabilities` is compiled with --thorough.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    options: Mapping[str, Any]
    per_capability: Callable[[int], Mapping[str, Any]] | None = None
    capabilities: Collection[int] = tuple(SHARED_MEMORY)
    usual: Collection[int] = tuple(SHARED_MEMORY)

    def report(self, capability: int) -> Report:
        """The case compiled for one of its capabilities."""
        changed = dict(self.per_capability(capability)) if self.per_capability else {}
        constexprs = {name: changed.pop(name, value) for name, value in self.constexprs.items()}
        options = {**self.options, **changed}
        return compile_for(capability, self.kernel, self.signature, constexprs, **options)


def compile_for_all(
    kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any], **options: Any
) -> list[Report]:
    """The kernel compiled for each capability of SHARED_MEMORY.

    signature: argument -> Triton type ("*bf16", "*i64", "i32", "fp32"), constexprs left out.
    constexprs: argument -> value. options: num_warps, num_stages, ...
    """
    return [
        compile_for(capability, kernel, signature, constexprs, **options)
        for capability in SHARED_MEMORY
    ]


def compile_for(
    capability: int,
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    *,
    unaligned: Collection[str] = (),
    **options: Any,
) -> Report:
    """The kernel compiled for one capability, without a GPU and without the cache.

    As in a launch on tensors of the model, pointers and integers are multiples of 16 bytes or
    elements, but for integers that the kernel does not specialise, and those named as unaligned.
    """
    if not isinstance(kernel, JITFunction):
        raise TypeError(f"{kernel.__name__}: compile it in a process without TRITON_INTERPRET")
    missing = set(kernel.arg_names) ^ {*signature, *constexprs}
    assert not missing, f"{kernel.__name__}: signature and arguments differ in {sorted(missing)}"
    types = {n: "constexpr" if n in constexprs else signature[n] for n in kernel.arg_names}
    aligned = {
        (parameter.num,): [["tt.divisibility", 16]]
        for parameter in kernel.params
        if signature.get(parameter.name, "fp").startswith(("*", "i"))
        and not parameter.do_not_specialize
        and parameter.name not in unaligned
    }
    source = ASTSource(kernel, types, constexprs, aligned)
    log = io.StringIO()
    target = GPUTarget("cuda", capability, 32)
    with (
        knobs.nvidia.scope(),
        knobs.compilation.scope(),
        contextlib.redirect_stdout(log),
        _active(target),
    ):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        compiled = triton.compile(source, target, options)
    registers = re.findall(r"Used (\d+) registers", log.getvalue())
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log.getvalue())
    assert len(registers) == 1 and spills, f"cannot read the assembler's log: {log.getvalue()}"
    return Report(
        kernel=kernel.__name__,
        capability=capability,
        shared=compiled.metadata.shared,
        registers=int(registers[0]),
        spilled=sum(map(int, spills)),
        ptx=compiled.asm["ptx"],
        cubin=compiled.asm["cubin"],
    )


@dataclass(frozen=True)
class _Driver:
    """In the place of Triton's: kernels ask it what they are compiled for."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target


@contextlib.contextmanager
def _active(target: GPUTarget) -> Iterator[None]:
    before = driver._active
    driver.set_active(_Driver(target))
    try:
        yield
    finally:
        driver.set_active(before)


def assert_fits(report: Report) -> None:
    """No spilled register, and no more shared memory than the architecture has."""
    assert report.spilled == 0, f"{report}: smaller tiles or more warps are needed"
    limit = SHARED_MEMORY[report.capability]
    assert report.shared <= limit, f"{report}: at most {limit} are there"


def overwritten_operands(cubin: bytes) -> list[str]:
    """Products by wgmma whose left operand lies in registers, each with an instruction that may
    write one of these before the product is waited for, on any way through the machine code.

    PTX cannot tell: it has other names for registers, and the assembler gives those of an operand
    away as if it had been read at once.
    """
    code, labels = _disassembled(cubin)
    found = []
    for place, line in enumerate(code):
        if (product := re.search(r"HGMMA\S* R\d+, R(\d+), gdesc", line)) is None:
            continue
        operand = range(int(product[1]), int(product[1]) + 4)
        seen: set[int] = set()
        following = [place + 1]
        while following:
            at = following.pop()
            if at in seen or at >= len(code) or "WARPGROUP.DEPBAR.LE gsb0, 0x0" in code[at]:
                continue
            seen.add(at)
            if set(_written(code[at])) & set(operand):
                found.append(f"{line} | {code[at]}")
            following += _following(code, labels, at)
    return found


# Global memory, by registers or by a copy beside them; not prefetches, whose data no register gets.
_GLOBAL = re.compile(r"(@\S+ +)?(LDG|STG|LDGSTS|LD|ST|ATOMG?|REDG?|UTMA\w+|UBLKCP|UBLKRED)\b")


def memory_before_wait(cubin: bytes) -> list[str]:
    """Instructions of a kernel of Hopper or later that touch global memory or end it, and that it
    can reach before it waits for the kernels ahead of it (`kernels_triton_launch`)."""
    code, labels = _disassembled(cubin)
    found, seen, following = [], set[int](), [0]
    while following:
        at = following.pop()
        if at in seen or at >= len(code) or code[at].startswith("ACQBULK"):
            continue
        seen.add(at)
        if _GLOBAL.match(code[at]) or "EXIT" in code[at].replace("PREEXIT", ""):
            found.append(code[at])
        following += _following(code, labels, at)
    return found


def _following(code: list[str], labels: Mapping[str, int], at: int) -> list[int]:
    """Places of the instructions that may come after one."""
    target = re.search(r"BRA.*\((\.L_\w+)\)", code[at])
    found = [labels[target[1]]] if target else []
    return found if re.match(r"(BRA|EXIT)(?!.*P\d)", code[at]) else [*found, at + 1]


def _disassembled(cubin: bytes) -> tuple[list[str], dict[str, int]]:
    """Instructions, and the places of labels among them."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    code: list[str] = []
    labels: dict[str, int] = {}
    for label, instruction in re.findall(r"^(\.L_\w+):|/\*[0-9a-f]{4,}\*/ +(.*?) *;", text, re.M):
        if label:
            labels[label] = len(code)
        else:
            code.append(instruction)
    return code, labels


def _written(instruction: str) -> range:
    """The vector registers that it writes, but for sums of wgmma."""
    match = re.match(r"(?:@\S+ +)?(\S+) +(?:U?P[\dT]+, *)?R(\d+)\b", instruction)
    if match is None or re.match(r"ST|RED|HGMMA|R2P|FCHK|BRA|WARP", match[1]):
        return range(0)
    width = 1
    for mark, count in ((r"\.64|WIDE|CS2R|\.2$", 2), (r"\.128|LDSM.*\.4$", 4)):
        if re.search(mark, match[1]):
            width = count
    return range(int(match[2]), int(match[2]) + width)


def assert_compiles_without_spills(
    kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any], **options: Any
) -> list[Report]:
    """`compile_for_all`, and every report fits. Returns the reports."""
    reports = compile_for_all(kernel, signature, constexprs, **options)
    for report in reports:
        assert_fits(report)
    return reports


# ---- run by the interpreter (test_kernels_interpreted.py says what) ----


def is_interpreting() -> bool:
    """Whether kernels of this process run in the interpreter."""
    return bool(knobs.runtime.interpret)


def correct_interpreter(patch: "MonkeyPatch") -> None:
    """Where it is wrong: it multiplies bfloat16 codes as integers, cuts where a GPU rounds to the
    nearest even, and spreads a scalar comparison of floats over a block as floats."""
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) == (triton.language.bfloat16, triton.language.float32):
            return data.astype(numpy.uint32) << 16
        if (source, target) == (triton.language.float32, triton.language.bfloat16):
            values = torch.from_numpy(numpy.array(data, dtype=numpy.float32, order="C"))
            codes = values.bfloat16().view(torch.uint16).numpy()
            return codes.reshape(data.shape)
        return convert(data, source, target, mode)

    def multiplied(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (
            interpreter.TensorHandle(
                rounded(x.data, x.dtype, triton.language.float32, None).view(numpy.float32),
                triton.language.float32,
            )
            if x.dtype == triton.language.bfloat16
            else x
            for x in (a, b)
        )
        return dot(builder, a, b, *rest)

    def spread(builder: Any, result_type: Any, value: Any) -> Any:
        data = numpy.full(result_type.shape, value.data.reshape(-1)[0], dtype=value.data.dtype)
        return interpreter.TensorHandle(data, value.dtype.scalar)

    patch.setattr(interpreter, "_convert_float", rounded)
    patch.setattr(interpreter.InterpreterBuilder, "create_splat", spread)
    patch.setattr(interpreter.InterpreterBuilder, "create_dot", multiplied)


def skip_fake_launches(patch: "MonkeyPatch") -> None:
    """A launch on tensors without values does nothing: what remains is the wrapper's own code."""
    launch = KernelInterface.__getitem__

    def guarded(kernel: Any, grid: Any) -> Any:
        run = launch(kernel, grid)

        def call(*args: Any, **options: Any) -> Any:
            if any(isinstance(value, FakeTensor) for value in (*args, *options.values())):
                return None
            return run(*args, **options)

        return call

    patch.setattr(KernelInterface, "__getitem__", guarded)


@contextlib.contextmanager
def kernels_ready_for_tests() -> Iterator[None]:
    """What a test session needs around kernels, in the interpreter or on a GPU."""
    from pytest import MonkeyPatch

    with MonkeyPatch.context() as patch:
        skip_fake_launches(patch)
        if is_interpreting():
            correct_interpreter(patch)
        yield
