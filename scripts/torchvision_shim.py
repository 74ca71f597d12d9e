"""Makes a CUDA-built torchvision importable beside a CPU build of torch.

SGLang and transformers import torchvision for their image models. The published wheel expects
the operators of its CUDA library, and `import torchvision` fails beside a CPU torch with "operator
torchvision::nms does not exist". Declaring those operators first is enough: nobody calls them.

`env.sh` copies this file into site-packages with a `.pth` that imports it, so that it is in place
in every process. It waits for the first `import torchvision`, and leaves a CUDA torch alone.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

OPERATORS = ("nms", "qnms")
SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_operators() -> None:
    """Declare torchvision's operators where this torch is a CPU build and has not got them."""
    import torch

    if torch.version.cuda is not None:
        return
    for name in OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", SIGNATURE)


class BeforeTorchvision(MetaPathFinder):
    """Finds nothing itself: it declares the operators when torchvision is first looked for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            declare_operators()
        return None


sys.meta_path.insert(0, BeforeTorchvision())
