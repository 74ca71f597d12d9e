"""What the files of a checkpoint say they hold: names, shapes and formats, from headers alone."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

INDEX_FILE = "model.safetensors.index.json"
LISTED_AT_MOST = 20
LONGEST_HEADER = 100_000_000  # bytes; the safetensors format allows no more


class CheckpointError(ValueError):
    """The checkpoint cannot fill this model; the message says which tensors or files, and why."""


class Header(NamedTuple):
    """A tensor as its file announces it: safetensors dtype ("BF16") and shape."""

    dtype: str
    shape: tuple[int, ...]


# -------------------------------------------------------------------------- one tensor's format


class TensorFormat(Enum):
    """How a tensor's values are stored; decided for each tensor by itself."""

    DENSE = "BF16, FP16 or FP32"
    INTEGER = "integer"
    FP8 = "FP8"
    MXFP4 = "MXFP4"
    NVFP4 = "NVFP4"
    COMPRESSED_TENSORS = "compressed-tensors"
    OTHER = "format not known"


def tensor_format(dtype: str, companions: Mapping[str, str]) -> TensorFormat:
    """The format of a weight of safetensors dtype `dtype`.

    companions: suffix -> dtype of what is stored beside it, e.g. {"weight_scale": "F8_E4M3"}.
    """
    if "weight_packed" in companions:
        return TensorFormat.COMPRESSED_TENSORS
    if dtype in ("BF16", "F16", "F32"):
        return TensorFormat.DENSE
    if dtype in ("I64", "I32"):
        return TensorFormat.INTEGER
    if dtype in ("F8_E4M3", "F8_E5M2"):
        return TensorFormat.FP8
    if dtype not in ("U8", "I8") or not companions:
        return TensorFormat.OTHER
    nvfp4 = "weight_scale_2" in companions or companions.get("weight_scale") == "F8_E4M3"
    return TensorFormat.NVFP4 if nvfp4 else TensorFormat.MXFP4


# Beside a quantised X.weight lie its scales, X.<suffix>; beside a stacked X they are X_<suffix>.
_COMPANION = re.compile(
    r"(?P<module>.+?)(?P<joint>\.|_(?=weight|input))(?P<suffix>scale|weight_scale|weight_scale_inv"
    r"|weight_scale_2|weight_packed|weight_global_scale|input_scale|input_global_scale)"
)


def companions_of(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Name of a weight -> {suffix: name of the tensor stored beside it}.

    It goes by names alone: there need not be such a weight (hyper-connections have a "scale" too).
    """
    found: dict[str, dict[str, str]] = {}
    for name in names:
        match = _COMPANION.fullmatch(name)
        if match:
            weight = match["module"] + (".weight" if match["joint"] == "." else "")
            found.setdefault(weight, {})[match["suffix"]] = name
    return found


# ------------------------------------------------------------------------------------ the files


def read_index(folder: Path) -> Mapping[str, str]:
    """Tensor name -> file name, by the index in `folder`; empty where there is none."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: download the checkpoint, name its folder")
    path = folder / INDEX_FILE
    if not path.exists():
        return {}
    try:
        return {str(k): str(v) for k, v in json.loads(path.read_bytes())["weight_map"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index of shards ({error!r}): get it again") from error


def read_shards(folder: Path, index: Mapping[str, str]) -> dict[str, dict[str, Header]]:
    """File name -> its headers: the files that `index` names, or else all that `folder` has.

    Raises CheckpointError naming every file that is absent, cut short or not safetensors.
    """
    files = sorted(set(index.values())) or sorted(f.name for f in folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no *.safetensors file: name a checkpoint's folder")
    shards, faults = {}, []
    for file in files:
        try:
            shards[file] = read_headers(folder / file)
        except CheckpointError as error:
            faults.append(str(error))
    if faults:
        raise CheckpointError(
            listed(f"of {len(files)} files in {folder} cannot be used, download them again", faults)
        )
    return shards


def read_headers(file: Path) -> dict[str, Header]:
    """Tensor name -> header of one safetensors file; CheckpointError if it is not a whole one."""
    try:
        found = file.stat().st_size
        with file.open("rb") as stream:
            # 8 bytes with the length of a JSON text, that text, then the values.
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            text = stream.read(min(length, LONGEST_HEADER))
    except OSError as error:
        raise CheckpointError(f"{file.name}: {error.strerror}") from error
    if prefix == b"version ":
        raise CheckpointError(f"{file.name}: only a Git LFS pointer, {found} bytes (git lfs pull)")
    if length > LONGEST_HEADER:
        raise CheckpointError(f"{file.name}: not a safetensors file (header of {length} bytes)")
    if len(prefix) < 8 or len(text) < length:
        raise _wrong_length(file, f"at least {8 + length}", found)
    try:
        entries: dict[str, Any] = json.loads(text)
        entries.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        headers = {n: Header(e["dtype"], tuple(e["shape"])) for n, e in entries.items()}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{file.name}: not a safetensors file ({error!r})") from error
    if found != 8 + length + end:
        raise _wrong_length(file, str(8 + length + end), found)
    return headers


def _wrong_length(file: Path, expected: str, found: int) -> CheckpointError:
    return CheckpointError(f"{file.name}: expected {expected} bytes by its header, found {found}")


def listed(kind: str, faults: Sequence[str]) -> str:
    """The faults of one kind, one a line, at most LISTED_AT_MOST of them."""
    lines = [f"{len(faults)} {kind}:", *(f"  {fault}" for fault in sorted(faults)[:LISTED_AT_MOST])]
    if len(faults) > LISTED_AT_MOST:
        lines.append(f"  and {len(faults) - LISTED_AT_MOST} more")
    return "\n".join(lines)
