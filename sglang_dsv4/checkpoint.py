"""What the files of a checkpoint say they hold: names, dtypes and shapes, from headers alone."""

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

INDEX_FILE = "model.safetensors.index.json"
LISTED_AT_MOST, LISTED_LENGTH = 20, 1000  # faults of a kind, characters of one
LONGEST_HEADER = 100_000_000  # bytes; the safetensors format allows no more
LONGEST_NAME, MOST_DIMENSIONS = 500, 64
# Servers look for shards in the folder itself, whatever an index says.
_SHARD = re.compile(r"[^/\0\ud800-\udfff]*\.safetensors")
# What reading or interpreting damaged JSON may raise.
_JSON_FAULTS = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)
# Of one element, by the dtypes of safetensors that are whole bytes.
BYTES = {name: 8 for name in ("F64", "I64", "U64", "C64")}
BYTES |= {name: 4 for name in ("F32", "I32", "U32")} | {n: 2 for n in ("BF16", "F16", "I16", "U16")}
BYTES |= {name: 1 for name in ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL")}


class CheckpointError(ValueError):
    """The checkpoint cannot fill this model; the message says which tensors or files, and why."""


class Header(NamedTuple):
    """A tensor as its file announces it: safetensors dtype ("BF16") and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * BYTES[self.dtype]


# ------------------------------------------------------------------------------------ the files


def read_index(folder: Path) -> Mapping[str, str]:
    """Tensor name -> file name, by the index in `folder`; empty where there is none."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: download the checkpoint, name its folder")
    path = folder / INDEX_FILE
    if not os.path.lexists(path):  # a link that leads nowhere is an index that is damaged
        return {}
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")
        content = json.loads(path.read_bytes(), object_pairs_hook=_without_repetition)
        index: dict[str, str] = dict(content["weight_map"].items())
        for name, file in index.items():
            if not _SHARD.fullmatch(file):
                raise ValueError(f"{name} in {file!r}: expected a *.safetensors file beside it")
    except (OSError, *_JSON_FAULTS) as error:
        raise CheckpointError(f"{path} is no index of shards ({error!r}): get it again") from error
    return index


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


def total_bytes(folder: Path) -> int | None:
    """Size of a checkpoint's files, which a stream of its tensors goes through; None if unknown."""
    try:
        files = set(read_index(folder).values()) or {f.name for f in folder.glob("*.safetensors")}
        return sum((folder / file).stat().st_size for file in files) or None
    except (CheckpointError, OSError):
        return None


def read_headers(file: Path) -> dict[str, Header]:
    """Tensor name -> header of one safetensors file; CheckpointError if it is not a whole one."""
    try:
        status = file.stat()
        found = status.st_size
        if not stat.S_ISREG(status.st_mode):  # a pipe would wait for a writer
            raise CheckpointError(f"{file.name}: is no regular file")
        with file.open("rb") as stream:
            # 8 bytes with the length of a JSON text, that text, then the values.
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            text = stream.read(min(length, LONGEST_HEADER, found))
    except OSError as error:
        raise CheckpointError(f"{file.name}: {error.strerror}") from error
    if prefix == b"version ":
        raise CheckpointError(f"{file.name}: only a Git LFS pointer, {found} bytes (git lfs pull)")
    if length > LONGEST_HEADER:
        raise CheckpointError(f"{file.name}: not a safetensors file (header of {length} bytes)")
    if len(prefix) < 8 or len(text) < length:
        raise _wrong_length(file, f"at least {8 + length}", found)
    try:
        content = text.decode()  # UTF-8 and nothing else, unlike json of bytes
        entries: dict[str, Any] = json.loads(content, object_pairs_hook=_without_repetition)
        entries.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if found != 8 + length + end:
            raise _wrong_length(file, str(8 + length + end), found)
        headers = {name: Header(e["dtype"], tuple(e["shape"])) for name, e in entries.items()}
        places = {name: entry["data_offsets"] for name, entry in entries.items()}
        _check_places(headers, places)
        # What will read the values must open it too: it knows the dtypes and is strict in more.
        with safe_open(file, framework="numpy"):
            pass
    except CheckpointError:
        raise
    except (OSError, SafetensorError, *_JSON_FAULTS) as error:
        raise CheckpointError(f"{file.name}: not a safetensors file ({error!r})") from error
    return headers


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"its header repeats {name}")
    return found


def _check_places(headers: Mapping[str, Header], places: Mapping[str, Sequence[int]]) -> None:
    """Raises ValueError unless the tensors lie one after the other, each as large as it says."""
    before = 0
    for name in sorted(places, key=lambda name: tuple(places[name])):
        if len(name) > LONGEST_NAME or not (name.isascii() and name.isprintable()):
            raise ValueError(f"it has a tensor called {ascii(name[:LONGEST_NAME])}")
        (begin, end), (dtype, shape) = places[name], headers[name]
        if len(shape) > MOST_DIMENSIONS:
            raise ValueError(f"{name} has {len(shape)} dimensions")
        numbers = all(type(size) is int and size >= 0 for size in (begin, end, *shape))
        if not numbers or math.prod(size or 1 for size in shape) >= 1 << 63:
            raise ValueError(f"{name} has shape {list(shape)} at {begin} to {end}")
        if begin != before:
            raise ValueError(f"{name} begins at {begin}, the tensor before it ends at {before}")
        if dtype in BYTES and end - begin != headers[name].bytes:
            raise ValueError(f"{name}, {dtype} {list(shape)}, has {end - begin} bytes")
        before = end


def _wrong_length(file: Path, expected: str, found: int) -> CheckpointError:
    return CheckpointError(f"{file.name}: expected {expected} bytes by its header, found {found}")


def listed(kind: str, faults: Sequence[str]) -> str:
    """The faults of one kind, one a line, at most LISTED_AT_MOST of them."""
    shown = map(_printable, sorted(faults)[:LISTED_AT_MOST])
    lines = [f"{len(faults)} {kind}:", *(f"  {fault}" for fault in shown)]
    if len(faults) > LISTED_AT_MOST:
        lines.append(f"  and {len(faults) - LISTED_AT_MOST} more")
    return "\n".join(lines)


def _printable(text: str) -> str:
    """What names in a damaged file hold may break a terminal, or a log that is no UTF-8."""
    cut = text if len(text) <= LISTED_LENGTH else text[:LISTED_LENGTH] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
