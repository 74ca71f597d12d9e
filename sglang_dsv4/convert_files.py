"""The folder of a conversion: what is finished in it, what else belongs there, the room for it."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_dsv4 import __version__, convert_config
from sglang_dsv4.checkpoint import INDEX_FILE, read_headers
from sglang_dsv4.convert_plan import Options, Plan
from sglang_dsv4.json_files import write_json

STATE_FILE = "conversion.json"  # there until the folder is complete
CONFIG, MODELOPT_CONFIG = "config.json", "hf_quant_config.json"
# Weights in other containers would double the copy, and would not be what its config says.
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".part")
_HEADER_BYTES = 256  # of a file's header for one tensor, at most


@dataclass(frozen=True)
class Lossy:
    """A matrix in MXFP4 of which NVFP4 cannot hold so many blocks as they are, of how many."""

    name: str
    blocks: int
    of: int


@dataclass
class Shard:
    """A file that is written. size: in bytes, 0 for one without tensors, which is not there."""

    size: int = 0
    lossy: list[Lossy] = field(default_factory=list)


class State:
    """Which files of a conversion are finished, kept beside them until all are.

    identity: what must be the same for files to belong together; messages call it by its keys.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any]) -> None:
        self.out, self.path, self.identity = out, out / STATE_FILE, identity
        self.shards: dict[str, Shard] = {}

    def take_up(self, resume: bool) -> None:
        """Reads what is finished in a folder that is not empty.

        Raises FileExistsError unless that is the beginning of this conversion, to be resumed.
        """
        if self.out.exists() and not self.out.is_dir():
            raise NotADirectoryError(f"{self.out} is not a folder: name another one")
        if not self.out.exists() or not any(self.out.iterdir()):
            return
        if not self.path.exists():
            raise FileExistsError(
                f"{self.out} is not empty, and holds no interrupted conversion: name another folder"
            )
        if not resume:
            raise FileExistsError(
                f"{self.out} holds an interrupted conversion: add --resume to go on with it, or"
                " name another folder"
            )
        self.shards = self._finished()

    def _finished(self) -> dict[str, Shard]:
        try:
            said = json.loads(self.path.read_text(encoding="utf-8"))
            shards = {
                file: Shard(shard["size"], [Lossy(**item) for item in shard["lossy"]])
                for file, shard in said["files"].items()
            }
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FileExistsError(f"{self.path} is damaged ({error!r}): empty its folder") from None
        differ = [key for key in self.identity if said.get(key) != self.identity[key]]
        if differ:
            raise FileExistsError(
                f"{self.out} was begun with another {' and another '.join(differ)}: take the same"
                " as then, or name another folder"
            )
        for file, shard in shards.items():
            if not shard.size:
                continue
            read_headers(self.out / file)
            if (self.out / file).stat().st_size != shard.size:
                raise FileExistsError(
                    f"{self.out / file} is not as it was written: empty its folder"
                )
        return shards

    def begin(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self._save()

    def finish(self, file: str, shard: Shard) -> None:
        self.shards[file] = shard
        self._save()

    def _save(self) -> None:
        files = {file: asdict(shard) for file, shard in self.shards.items()}
        temporary = self.path.with_suffix(".part")
        write_json(temporary, {**self.identity, "files": files})
        temporary.replace(self.path)


def identity(source: Path, plan: Plan, options: Options) -> dict[str, Any]:
    """The source, by its config and by the sizes and times of its files; options; version."""
    digest = hashlib.sha256((source / CONFIG).read_bytes())
    for file in plan.files:
        told = (source / file).stat()
        digest.update(f"{file} {told.st_size} {told.st_mtime_ns}\n".encode())
    chosen = {"weights": options.weights, "bf16": list(options.bf16)}
    return {"source": digest.hexdigest(), "options": chosen, "version": __version__}


def check_place(source: Path, out: Path, plan: Plan, state: State) -> None:
    """Raises OSError for a copy within its source, and for a disk without room for the rest."""
    if source.resolve() in out.resolve().parents:
        raise FileExistsError(f"{out} lies in {source}: name a folder elsewhere")
    needed = sum(path.stat().st_size for path, _ in _small_files(source))
    for file, steps in plan.files.items():
        if file not in state.shards:
            headers = [header for step in steps for header in step.outputs().values()]
            needed += sum(header.bytes + _HEADER_BYTES for header in headers)
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        sizes = f"{needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free"
        raise OSError(f"{out}: {sizes}: make room, or name a folder on another disk")


def complete(source: Path, out: Path, plan: Plan, state: State) -> None:
    """Everything but the weights, config.json last: a folder that has one has all."""
    for path, name in _small_files(source):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, out / name)
    written = [file for file in plan.files if state.shards[file].size]
    if plan.index or len(written) > 1:
        names = {
            name: file for file in written for step in plan.files[file] for name in step.outputs()
        }
        total = sum(h.bytes for step in plan.steps() for h in step.outputs().values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        write_json(out / INDEX_FILE, index)
    raw = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    write_json(out / MODELOPT_CONFIG, convert_config.modelopt_config(plan))
    write_json(out / CONFIG, convert_config.config(raw, plan))


def _small_files(source: Path) -> Iterator[tuple[Path, Path]]:
    """Tokenizer, card, code and the like: each file, and its name within the folder."""
    ours = {Path(name) for name in (CONFIG, MODELOPT_CONFIG, INDEX_FILE)}
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        hidden = any(part.startswith(".") for part in name.parts)
        if path.is_file() and not hidden and name not in ours:
            if path.suffix not in _OTHER_WEIGHTS:
                yield path, name
