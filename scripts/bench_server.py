"""`python -m sglang.launch_server` whose dummy weights route tokens as a trained model's would.

SGLang fills each floating tensor of --load-format dummy with numbers below 0.001. Norms then all
but erase what tells tokens apart, so every token goes to the same few experts; the table of hash
routing and four-bit codes hold what memory held. Such a model's times would be those of a handful
of experts that stay in the GPU's cache. So after SGLang's own filling, and before anything is
packed, `fill` gives each model, ours and the built-in one alike, values of a plausible size. And
the log says what the weights then take of this process's memory: SGLang tells how much less of the
GPU's is free, whoever took it.

    python scripts/bench_server.py --model-path DIR --load-format dummy ...
"""

import gc
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

LOADER = "sglang.srt.model_loader.loader"
FUNCTION, CLASS = "initialize_dummy_weights", "DummyModelLoader"
SMALL = 2.0**-6  # scales of quantised weights
# The same by type: the code of 1, which our four-bit matrices begin with, and that of SMALL.
CODES = {0x7F: 0x79, 0x38: 0x08}  # UE8M0, E4M3
SCALE_NAMES = ("weight_scale_inv", "weight_scale", ".scales")


def fill(model: Any) -> None:
    """Values by the parameters' names, dtypes and shapes; what no rule knows keeps SGLang's."""
    import torch

    from sglang_dsv4.bench_step import fill_hash_table

    named = dict([*model.named_parameters(), *model.named_buffers()])
    experts = max((t.shape[0] for name, t in named.items() if _is_stack(name, t)), default=0)
    generators: dict[Any, torch.Generator] = {}
    for name, tensor in named.items():
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device).manual_seed(0)
        if name.endswith("tid2eid"):
            fill_hash_table(tensor.data, experts)
        elif not _fill_scale(name, tensor.data):
            _fill_weight(name, tensor.data, generators[tensor.device])


def _is_stack(name: str, tensor: Any) -> bool:
    """Whether it holds a matrix of every routed expert."""
    return ".experts." in name and tensor.ndim == 3


def _fill_scale(name: str, tensor: Any) -> bool:
    """Whether the tensor holds scales or factors, which are filled then."""
    import torch

    if name.endswith(".factors"):
        tensor.fill_(1.0)
        return True
    if not name.endswith(SCALE_NAMES):
        return False
    if tensor.dtype is torch.float32:
        tensor.fill_(SMALL)
    elif tensor.dtype is torch.float8_e8m0fnu:
        tensor.view(torch.uint8).fill_(CODES[0x7F])
    elif tensor.dtype is torch.uint8 and tensor.numel():
        code = int(tensor.flatten()[0])
        tensor.fill_(CODES.get(code, code))
    return True


def _fill_weight(name: str, tensor: Any, generator: Any) -> None:
    import torch

    stacked = tensor.ndim == 3  # of experts
    if tensor.dtype in (torch.int8, torch.uint8) and stacked:  # two four-bit codes in a byte
        tensor.view(torch.uint8).random_(0, 256, generator=generator)
    elif tensor.dtype is torch.float8_e4m3fn or name.endswith(".codes"):
        for part in tensor.view(torch.uint8).flatten().split(1 << 28):
            part.random_(0, 256, generator=generator)
            part &= 0xBF  # below 2, and no NaN
    elif not tensor.is_floating_point() or tensor.itemsize < 2:
        return
    elif tensor.ndim == 1 and "norm" in name:
        tensor.fill_(1.0)
    elif stacked or (tensor.ndim == 2 and name.endswith(("weight", ".w2"))):
        size = 1.0 if "embed" in name else tensor.shape[-1] ** -0.5
        tensor.uniform_(-size * 3**0.5, size * 3**0.5, generator=generator)


# ---- where SGLang fills ----


class AfterImport(importlib.abc.MetaPathFinder):
    """Lets LOADER's own filling be followed by ours, once that module is imported.

    Importing it here already would put the imports of every process in another order.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != LOADER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{LOADER} is not where it was: dummy weights cannot be filled")
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            follow(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def follow(module: Any) -> None:
    """Make `fill` run after the module's own function, and the loader count what it allocates."""
    native, loader = getattr(module, FUNCTION), getattr(module, CLASS)
    load = loader.load_model

    def filled(model: Any, *arguments: Any, **options: Any) -> None:
        native(model, *arguments, **options)
        fill(model)
        print("bench_server: dummy weights are filled", flush=True)

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        before = allocated()
        model = load(self, *arguments, **options)
        gc.collect()
        if taken := allocated() - before:  # none on a CPU
            print(f"bench_server: weights take {taken} bytes", flush=True)
        return model

    setattr(module, FUNCTION, filled)
    loader.load_model = counted


def allocated() -> int:
    """Bytes of the GPU's memory that this process's tensors take."""
    import torch

    return torch.cuda.memory_allocated()


def serve() -> None:
    """What `python -m sglang.launch_server` does. Run as a module it would be what the scheduler's
    process imports; this file must be, for its filling."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ in ("__main__", "__mp_main__"):  # the launcher, and each process that it spawns
    sys.meta_path.insert(0, AfterImport())
if __name__ == "__main__":
    serve()
