"""Checkpoints damaged in every way that we could think of: small, in every format, by fixed seeds.

A checkpoint here is what lies in its folder, by file name. Damages take one that is whole and give
another; the catalogue says of each what it should come to.
"""

import copy
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from sglang_dsv4 import cli_make_tiny, tiny_weights
from sglang_dsv4.checkpoint import BYTES, INDEX_FILE
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.formats import part_of
from sglang_dsv4.tensor_table import vendor_names
from sglang_dsv4.tiny_formats import RECIPES

SHARD, SECOND = "model.safetensors", "more.safetensors"
SMALL: dict[str, Any] = dict(
    vocab_size=32,
    hidden_size=32,
    num_hidden_layers=3,
    compress_ratios=[4, 128, 0, 0],
    num_hash_layers=1,
    num_attention_heads=1,
    q_lora_rank=32,
    o_lora_rank=64,
    o_groups=1,
    index_n_heads=1,
    n_routed_experts=3,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    eos_token_id=1,
    bos_token_id=0,
)
RAW = cli_make_tiny.shipped_config("tiny", "bfloat16") | SMALL
CONFIG = DSV4Config.from_dict(RAW)
# In two spellings where dense weights are concerned: transformers stacks experts.
TEMPLATES = {name: (name, recipe.names) for name, recipe in RECIPES.items()}
TEMPLATES["bf16, stacked"] = ("bf16", "hf")

# What a file name stands for: bytes of a file, or what makes something else than a file.
Files = dict[str, "bytes | Callable[[Path], object]"]
Entries = dict[str, dict[str, Any]]
Draw = random.Random


@cache
def template(name: str) -> "Whole":
    """A sound checkpoint in one file."""
    recipe, names = TEMPLATES[name]
    entries = tiny_weights.quantised_entries(CONFIG, RECIPES[recipe], names)
    tensors: dict[str, torch.Tensor] = {}
    for entry in entries:
        tensors |= tiny_weights.tensors(entry, torch.bfloat16, seed=0)
    content = save(tensors)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    raw = RAW | dict(RECIPES[recipe].config)
    return Whole(header, content[8 + length :], raw)


@dataclass(frozen=True)
class Whole:
    """A sound checkpoint: entries of its header, the bytes of its tensors, its config."""

    entries: Entries
    data: bytes
    raw: Mapping[str, Any]

    @property
    def files(self) -> Files:
        return self.with_entries(self.entries)

    def with_entries(self, entries: Any) -> Files:
        return self.with_header(json.dumps(entries).encode())

    def with_header(self, header: bytes, data: bytes | None = None) -> Files:
        header += b" " * (-len(header) % 8)
        length = len(header).to_bytes(8, "little")
        return self.with_shard(length + header + (self.data if data is None else data))

    def with_shard(self, content: "bytes | Callable[[Path], object]") -> Files:
        return {SHARD: content, "config.json": json.dumps(self.raw).encode()}

    @property
    def shard(self) -> bytes:
        content = self.files[SHARD]
        assert isinstance(content, bytes)
        return content

    def piece(self, name: str) -> bytes:
        begin, end = self.entries[name]["data_offsets"]
        return self.data[begin:end]

    def poked(self, name: str, at: int, value: bytes) -> Files:
        """With `value` at byte `at` of a tensor."""
        begin, end = self.entries[name]["data_offsets"]
        assert 0 <= at and begin + at + len(value) <= end
        place = begin + at
        data = self.data[:place] + value + self.data[place + len(value) :]
        return self.with_header(json.dumps(self.entries).encode(), data)

    def laid_out(self, parts: Mapping[str, str]) -> Files:
        """One file with these tensors: name -> the tensor whose header and values it has."""
        entries, pieces, end = {}, [], 0
        for name, source in parts.items():
            pieces.append(self.piece(source))
            begin, end = end, end + len(pieces[-1])
            entries[name] = self.entries[source] | {"data_offsets": [begin, end]}
        return self.with_header(json.dumps(entries).encode(), b"".join(pieces))

    def sharded(self, *, twice: str | None = None) -> Files:
        """In two files with an index; `twice`: a tensor that both hold."""
        names = list(self.entries)
        halves = [names[::2], names[1::2]]
        index = {n: file for file, half in zip((SHARD, SECOND), halves, strict=True) for n in half}
        if twice is not None:
            halves = [half if twice in half else [*half, twice] for half in halves]
        first, second = (self.laid_out({n: n for n in half}) for half in halves)
        listed = json.dumps({"metadata": {}, "weight_map": index}).encode()
        return {**first, SECOND: second[SHARD], INDEX_FILE: listed}


def write(folder: Path, files: Files) -> None:
    """Puts the files, and nothing else, into `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            content(folder / name)


@dataclass(frozen=True)
class Case:
    """A damaged checkpoint, and what should come of it.

    comes_to: "refused" by the check of headers; "refused at load"; "harmless", it loads right;
    "any" of these. told: the refusal must hold one of these.
    """

    template: str
    kind: str
    what: str
    make: Callable[[], Files] = field(repr=False)
    comes_to: str
    told: tuple[str, ...] = (SHARD,)


def called(name: str) -> tuple[str, ...]:
    """What a message may call a tensor."""
    weight = (part_of(name) or (name,))[0]
    known = [v for n in (name, weight) for v in vendor_names(n, CONFIG.n_routed_experts)]
    return (name, weight, *known)


def cases() -> Iterator[Case]:
    """The catalogue, in the same order and with the same draws at every call."""
    for number, name in enumerate(TEMPLATES):
        whole = template(name)
        alike = [family for place, family in enumerate(ALIKE) if place % len(TEMPLATES) == number]
        for family in (*alike, *DIFFERENT):
            for what, comes_to, make, told in family(whole, Draw(f"{number} {family.__name__}")):
                yield Case(name, family.__name__, what, make, comes_to, told)


Damage = tuple[str, str, Callable[[], Files], tuple[str, ...]]
REFUSED, AT_LOAD, HARMLESS, ANY = "refused", "refused at load", "harmless", "any"
FILE = (SHARD,)


# ---- the file ----


def cut(whole: Whole, draw: Draw) -> Iterator[Damage]:
    shard = whole.shard
    start = len(shard) - len(whole.data)
    places = {
        "the length": [*range(0, 8, 2)],
        "the header": [draw.randrange(8, start) for _ in range(6)],
        "the values": [draw.randrange(start, len(shard)) for _ in range(4)] + [len(shard) - 1],
    }
    for where, ends in places.items():
        for end in ends:
            yield f"at {end}, in {where}", REFUSED, lambda e=end: whole.with_shard(shard[:e]), FILE
    for more in (b"\0", bytes(999)):
        yield f"{len(more)} more", REFUSED, lambda m=more: whole.with_shard(shard + m), FILE
    for place in (draw.randrange(start) for _ in range(3)):
        shifted = shard[:place] + shard[place + 1 :]
        yield f"byte {place} is gone", REFUSED, lambda s=shifted: whole.with_shard(s), FILE


def length(whole: Whole, draw: Draw) -> Iterator[Damage]:
    shard = whole.shard
    true = int.from_bytes(shard[:8], "little")
    others = [0, 1, 2, true - 1, true + 1, len(shard), 100_000_000, 100_000_001, 1 << 31, 1 << 63]
    for number in [*others, (1 << 64) - 1, draw.getrandbits(64), draw.getrandbits(40)]:
        content = number.to_bytes(8, "little") + shard[8:]
        yield f"{number} for {true}", REFUSED, lambda c=content: whole.with_shard(c), FILE


def other_things(whole: Whole, draw: Draw) -> Iterator[Damage]:
    del draw
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    things: dict[str, bytes | Callable[[Path], object]] = {
        "empty": b"",
        "zeros": bytes(4096),
        "LFS pointer": pointer,
        "web page": b"<html>404</html>",
        "folder": lambda path: path.mkdir(),
        "link to itself": lambda path: path.symlink_to(path.name),
        "link to nothing": lambda path: path.symlink_to("blob"),
        "pipe": lambda path: os.mkfifo(path),
        "device": lambda path: path.symlink_to("/dev/zero"),
    }
    for what, thing in things.items():
        yield what, REFUSED, lambda t=thing: whole.with_shard(t), FILE


# ---- the header's text ----


def bit_flips(whole: Whole, draw: Draw) -> Iterator[Damage]:
    shard = whole.shard
    start = len(shard) - len(whole.data)
    for _ in range(20):
        place, bit = draw.randrange(8, start), draw.randrange(8)
        flipped = bytearray(shard)
        flipped[place] ^= 1 << bit
        made = bytes(flipped)
        around = shard[max(8, place - 8) : place + 8].decode()
        yield f"bit {bit} at {place} in {around!r}", ANY, lambda m=made: whole.with_shard(m), ()


def json_text(whole: Whole, draw: Draw) -> Iterator[Damage]:
    text = json.dumps(whole.entries)
    nothing = {name: b"" for name in ("{}", "[]", "null", "3", '"x"', "", "{", "{]", "\0" * 16)}
    headers: dict[str, bytes] = {f"only {name!r}": name.encode() for name in nothing}
    for depth in (600, 950, 1200, 100_000):
        headers[f"lists {depth} deep"] = b"[" * depth + b"]" * depth
        deep = "[" * depth + "]" * depth
        headers[f"a shape {depth} deep"] = text.replace("[", deep, 1).encode()
        headers[f"objects {depth} deep"] = b'{"a":' * depth + b"1" + b"}" * depth
    headers["UTF-16"] = text.encode("utf-16")
    headers["UTF-8 with a mark"] = text.encode("utf-8-sig")
    headers["Latin-1"] = text.replace("embed", "\xe9mbed").encode("latin-1")
    headers["NUL behind it"] = text.encode() + b"\0\0"
    headers["single quotes"] = text.replace('"', "'").encode()
    headers["metadata of numbers"] = text.replace("{", '{"__metadata__": {"a": 1}, ', 1).encode()
    headers["metadata is a list"] = text.replace("{", '{"__metadata__": [], ', 1).encode()
    headers["comma at the end"] = text.replace("}}", "},}").encode()
    for number in ("NaN", "Infinity", "1e999", "9" * 5000, "9" * 4000):
        headers[f"offset {number[:9]}"] = text.replace("[0, ", f"[{number}, ", 1).encode()
    for what, header in headers.items():
        yield what, REFUSED, lambda h=header: whole.with_header(h), FILE
    for _ in range(3):
        end = draw.randrange(9, len(text))
        cut_off = text[:end].encode() + b" " * (len(text) - end)
        yield f"blank from {end}", REFUSED, lambda h=cut_off: whole.with_header(h), FILE


# ---- what the header says of a tensor ----


def changed(whole: Whole, name: str, key: str, value: Any) -> Files:
    entries = copy.deepcopy(whole.entries)
    entries[name][key] = value
    return whole.with_entries(entries)


def an_activation(name: str) -> bool:
    return name.endswith(("input_scale", "input_global_scale"))


def dtypes(whole: Whole, draw: Draw) -> Iterator[Damage]:
    names = [name for name in whole.entries if not an_activation(name)]
    for name in draw.sample(names, 6):
        dtype = whole.entries[name]["dtype"]
        # BF16 and F16 cannot be told apart by a header; both are formats that we load.
        alike = [d for d in BYTES if BYTES[d] == BYTES[dtype] and {d, dtype} != {"BF16", "F16"}]
        other = draw.choice([d for d in alike if d != dtype])
        made = {"as large": other, "of another size": draw.choice(list(set_of(BYTES, dtype)))}
        for what, value in made.items():
            # Bytes may be called so: U8 or I8 for codes and scales.
            bytes_ = BYTES[dtype] == 1 and what == "as large"
            yield (
                *(f"{name}: {value} for {dtype}, {what}", ANY if bytes_ else REFUSED),
                *(lambda n=name, v=value: changed(whole, n, "dtype", v), (*FILE, *called(name))),
            )
    for value in draw.sample(["F99", "", "bf16", "F4", None, 5, [], {}, True, ["BF16"]], 4):
        name = draw.choice(names)
        yield (
            *(f"{name}: {value!r}", REFUSED),
            *(lambda n=name, v=value: changed(whole, n, "dtype", v), (*FILE, *called(name))),
        )


def set_of(sizes: Mapping[str, int], dtype: str) -> list[str]:
    return sorted(name for name in sizes if sizes[name] != sizes[dtype])


def shapes(whole: Whole, draw: Draw) -> Iterator[Damage]:
    matrices = [n for n, e in whole.entries.items() if len(e["shape"]) == 2]
    oblong = [n for n in matrices if len(set(whole.entries[n]["shape"])) == 2]

    def made(name: str, what: str, shape: Any) -> Damage:
        told = (*FILE, *called(name))
        return (
            *(f"{name}: {what}", REFUSED),
            *(lambda n=name, s=shape: changed(whole, n, "shape", s), told),
        )

    for name in draw.sample(oblong, 4):
        yield made(name, "turned", whole.entries[name]["shape"][::-1])
    for name in draw.sample(matrices, 3):
        yield made(name, "flat", [math.prod(whole.entries[name]["shape"])])
    for name in draw.sample(matrices, 3):
        yield made(name, "one dimension more", [1, *whole.entries[name]["shape"]])
    odd: list[Any] = [
        *([-32, -32], [32.0, 32], ["32", 32], [True, 32], [None], [[32], 32], None, 32, "32", {}),
        *([], [0], [0, 1 << 62, 1 << 62], [1 << 70, 0], [1 << 32, 1 << 32], [32] * 70, [-1]),
        *([2] * 100_000, [int("9" * 4000)], [1e400]),
    ]
    for shape in draw.sample(odd, 10):
        yield made(draw.choice(matrices), f"{str(shape)[:30]}", shape)


def offsets(whole: Whole, draw: Draw) -> Iterator[Damage]:
    size = len(whole.data)
    names = [name for name in whole.entries if len(whole.piece(name)) > 8]

    def made(name: str, what: str, place: Any) -> Damage:
        return (
            *(f"{name}: {what}", REFUSED),
            *(lambda n=name, p=place: changed(whole, n, "data_offsets", p), FILE),
        )

    for shift in (-8, -1, 1, 8, size, -size, 1 << 40, 1 << 63, 1 << 64, 1 << 200):
        name = draw.choice(names)
        begin, end = whole.entries[name]["data_offsets"]
        yield made(name, f"moved by {shift}", [begin + shift, end + shift])
        yield made(name, f"begins {shift} later", [begin + shift, end])
        yield made(name, f"ends {shift} later", [begin, end + shift])
    name = draw.choice(names)
    begin, end = whole.entries[name]["data_offsets"]
    odd: list[Any] = [
        *([end, begin], [float(begin), end], [begin, float(end)], [str(begin), str(end)]),
        *([begin], [begin, end, end], [], None, {}, 5, [None, None], [[begin], [end]], [0, size]),
        *([begin, True], [begin, math.nan], [begin, math.inf]),
    ]
    for place in odd:
        yield made(name, f"{str(place)[:40]}", place)
    for key in ("dtype", "shape", "data_offsets"):
        entries = copy.deepcopy(whole.entries)
        del entries[draw.choice(names)][key]
        yield f"no {key}", REFUSED, lambda e=entries: whole.with_entries(e), FILE
    for value in (None, [], 5, "x"):
        entries = copy.deepcopy(whole.entries)
        entries[draw.choice(names)] = value
        yield f"an entry is {value!r}", REFUSED, lambda e=entries: whole.with_entries(e), FILE


# ---- which tensors there are ----


def names(whole: Whole, draw: Draw) -> Iterator[Damage]:
    weights = [name for name in whole.entries if not an_activation(name)]

    def renamed(name: str, to: str) -> Files:
        return whole.with_entries({to if n == name else n: e for n, e in whole.entries.items()})

    strange = {
        "empty": lambda name: "",
        "shouted": str.upper,
        "a letter more": lambda name: name + "x",
        "a letter less": lambda name: name[:-1],
        "model. twice": lambda name: "model.model." + name,
        "a line break": lambda name: name + "\n",
        "a terminal's escape": lambda name: "\x1b[2J" + name,
        "half a surrogate": lambda name: name + "\ud800",
        "Arabic digits": lambda name: name.replace("0", "\u0660") + "\u0661",
        "a long one": lambda name: name + "x" * 10_000,
        "a long number": lambda name: f"layers.{'9' * 5000}.attn.wkv.weight",
        "a large number": lambda name: f"layers.{'9' * 400}.attn.wkv.weight",
        "a star": lambda name: "layers.*.attn.wkv.weight",
        "a path": lambda name: "../../" + name,
        "layer 9": lambda name: f"layers.9.attn.{name}",
        "expert 99": lambda name: "layers.1.ffn.experts.99.w1.weight",
        "expert -1": lambda name: "layers.1.ffn.experts.-1.w1.weight",
    }
    for what, rename in draw.sample(list(strange.items()), 9):
        name = draw.choice(weights)
        told = (*FILE, rename(name), *called(name))
        yield f"{name}: {what}", REFUSED, lambda n=name, r=rename: renamed(n, r(n)), told
    raw = json.dumps(whole.entries).encode()
    for garbage in (b"\xff", b"\xc3", b"\xed\xa0\x80"):
        name = draw.choice(weights)
        text = raw.replace(f'"{name}"'.encode(), b'"' + garbage + name.encode() + b'"')
        yield f"{name}: {garbage!r}", REFUSED, lambda t=text: whole.with_header(t), FILE
    for _ in range(4):
        one, other = unlike(whole, weights, draw)
        swap = {one: other, other: one}
        entries = {swap.get(n, n): e for n, e in whole.entries.items()}
        told = (*called(one), *called(other))
        yield f"{one} and {other}", REFUSED, lambda e=entries: whole.with_entries(e), told


def unlike(whole: Whole, names: list[str], draw: Draw) -> tuple[str, str]:
    """Two that differ in what a header tells."""
    while True:
        one, other = draw.sample(names, 2)
        if any(whole.entries[one][key] != whole.entries[other][key] for key in ("dtype", "shape")):
            return one, other


def missing(whole: Whole, draw: Draw) -> Iterator[Damage]:
    held = list(whole.entries)
    needed = [name for name in held if not an_activation(name)]
    scales = [name for name in needed if "scale" in name and "hc_" not in name]
    chosen = draw.sample(needed, 4) + draw.sample(scales, min(6, len(scales)))
    for name in chosen:
        parts = {n: n for n in held if n != name}
        yield name, REFUSED, lambda p=parts: whole.laid_out(p), called(name)
    for name in draw.sample(held, 3):
        parts = {n: n for n in held} | {"model.extra.weight": name}
        told = ("model.extra.weight",)
        yield f"{name} once more, as extra", REFUSED, lambda p=parts: whole.laid_out(p), told


def twice(whole: Whole, draw: Draw) -> Iterator[Damage]:
    needed = [name for name in whole.entries if not an_activation(name)]
    for name in draw.sample(needed, 4):
        text = json.dumps(whole.entries).encode()
        again = text[:-1] + f", {json.dumps(name)}: {json.dumps(whole.entries[name])}}}".encode()
        yield f"{name} in a header", REFUSED, lambda t=again: whole.with_header(t), FILE
    for name in draw.sample(needed, 4):
        other = name.removeprefix("model.") if name.startswith("model.") else "model." + name
        parts = {n: n for n in whole.entries} | {other: name}
        told = (*called(name), *called(other))
        yield f"{name}, spelled {other}", REFUSED, lambda p=parts: whole.laid_out(p), told
    for name in draw.sample(needed, 4):
        yield f"{name} in two files", REFUSED, lambda n=name: whole.sharded(twice=n), called(name)


# ---- the index ----


def index(whole: Whole, draw: Draw) -> Iterator[Damage]:
    sharded = whole.sharded()
    text = sharded[INDEX_FILE]
    assert isinstance(text, bytes)
    right = json.loads(text)["weight_map"]
    name = draw.choice(list(right))
    told = (INDEX_FILE,)

    def made(content: "bytes | Callable[[Path], object]") -> Callable[[], Files]:
        return lambda: sharded | {INDEX_FILE: content}

    def mapping(**changes: Any) -> Callable[[], Files]:
        return made(json.dumps({"weight_map": right | changes}).encode())

    yield "sound", HARMLESS, lambda: sharded, ()
    fewer = {n: f for n, f in right.items() if n != name}
    yield "a tensor less", HARMLESS, made(json.dumps({"weight_map": fewer}).encode()), ()
    for file in ("absent.safetensors", "x" * 300 + ".safetensors"):
        yield f"in {file[:30]}", REFUSED, mapping(**{name: file}), (file,)
    elsewhere = SECOND if right[name] == SHARD else SHARD
    yield "in the other file", REFUSED, mapping(**{name: elsewhere}), (name,)
    yield "a tensor more", REFUSED, mapping(extra=SHARD), ("extra",)
    one = {n: SHARD for n, f in right.items() if f == SHARD}
    yield "one file only", REFUSED, made(json.dumps({"weight_map": one}).encode()), ("missing",)
    for file in ("../model.safetensors", "/dev/zero", "sub/model.safetensors", "model.bin", ""):
        yield f"in {file!r}", REFUSED, mapping(**{name: file}), told
    for value in (None, 5, ["model.safetensors"], {}, "a\0.safetensors", "\ud800.safetensors"):
        yield f"in {value!r}", REFUSED, mapping(**{name: value}), told
    contents: dict[str, bytes | Callable[[Path], object]] = {
        "empty": b"",
        "list": b"[]",
        "no map": b"{}",
        "no names": b'{"weight_map": 3}',
        "deep": b"[" * 100_000,
        "repeated": text.replace(b'"weight_map": {', f'"weight_map": {{"{name}": "x", '.encode()),
        "not UTF-8": b"\xff" + text,
        "folder": lambda path: path.mkdir(),
        "link to itself": lambda path: path.symlink_to(path.name),
        "link to nothing": lambda path: path.symlink_to("blob"),
        "pipe": lambda path: os.mkfifo(path),
    }
    for what, content in contents.items():
        yield what, REFUSED, made(content), told
    for _ in range(3):
        end = draw.randrange(len(text))
        yield f"cut at {end}", REFUSED, made(text[:end]), told


# ---- the config ----


def config(whole: Whole, draw: Draw) -> Iterator[Damage]:
    told = ("config.json",)
    text = json.dumps(whole.raw).encode()

    def made(content: "bytes | Callable[[Path], object]") -> Callable[[], Files]:
        return lambda: whole.files | {"config.json": content}

    def saying(**changes: Any) -> Callable[[], Files]:
        return made(json.dumps(dict(whole.raw) | changes).encode())

    contents: dict[str, bytes | Callable[[Path], object]] = {
        "empty": b"",
        "list": b"[]",
        "deep": b"[" * 100_000,
        "deep field": text[:-1] + b', "x": ' + b"[" * 2000 + b"]" * 2000 + b"}",
        "not UTF-8": text.replace(b"deepseek", b"\xff"),
        "a number of 5000 digits": text[:-1] + b', "rope_theta": ' + b"9" * 5000 + b"}",
        "folder": lambda path: path.mkdir(),
        "link to nothing": lambda path: path.symlink_to("blob"),
    }
    for what, content in contents.items():
        yield what, REFUSED, made(content), told
    for _ in range(3):
        end = draw.randrange(len(text))
        yield f"cut at {end}", REFUSED, made(text[:end]), told
    sizes = sorted(key for key, v in SMALL.items() if isinstance(v, int) and "token_id" not in key)
    for key in draw.sample(sizes, 8):
        # One more is another model: told by the config, or by the tensors that are not there.
        others = [-1, 1 << 40, 10**9, 10**400, 0.5, "8", None, [8], True, SMALL[key] + 1]
        other = draw.choice(others)
        if key == "num_hash_layers" and other == 2:
            continue  # told too, but by names: see `names`
        yield f"{key} = {str(other)[:20]}", REFUSED, saying(**{key: other}), (*told, "layers.")
    for key in ("rope_theta", "rms_norm_eps", "partial_rotary_factor", "rope_scaling"):
        for other in (10**400, math.nan, [1], {"type": [["yarn"] * 3]}, -1.0, 1e308):
            yield f"{key} = {str(other)[:20]}", ANY, saying(**{key: other}), told
    for odd in (5, "x", [], {"ignore": 5}, {"config_groups": {"a": 5}}, ODD_CLAIMS):
        what = f"quantization_config = {str(odd)[:30]}"
        yield what, HARMLESS, saying(quantization_config=odd), ()


ODD_CLAIMS = {
    "quant_algo": "NVFP4",
    "ignore": ["re:(", "re:a{99999999999999}", "re:" + "(" * 5000, 5, None],
    "config_groups": {"a": {"weights": {"type": "float", "num_bits": [4]}, "targets": 7}},
    "quantized_layers": 3,
    "group_size": {},
}


# ---- values that no header shows ----


def values(whole: Whole, draw: Draw) -> Iterator[Damage]:
    nan, inf = b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f"
    bad = {
        "BF16": {"NaN": b"\xc0\x7f", "inf": b"\x80\x7f"},
        "F32": {"NaN": nan, "inf": inf, "-inf": b"\x00\x00\x80\xff"},
        "F8_E4M3": {"NaN": b"\x7f"},
        "F8_E8M0": {"NaN": b"\xff"},
        "I64": {n: int(n).to_bytes(8, "little", signed=True) for n in ("-1", "3", str(1 << 40))},
    }
    for dtype, poisons in bad.items():
        of_dtype = [
            name
            for name, entry in whole.entries.items()
            if entry["dtype"] == dtype and not an_activation(name)
        ]
        for what, value in poisons.items():
            for name in draw.sample(of_dtype, min(2, len(of_dtype))):
                at = draw.randrange(len(whole.piece(name)) // len(value)) * len(value)
                make = lambda n=name, a=at, v=value: whole.poked(n, a, v)  # noqa: E731
                yield f"{what} in {name}", AT_LOAD, make, called(name)
    factors = [n for n in whole.entries if n.endswith(("weight_scale_2", "weight_global_scale"))]
    for what, value in {"0": bytes(4), "-0": b"\0\0\0\x80", "-1": b"\0\0\x80\xbf"}.items():
        for name in draw.sample(factors, min(2, len(factors))):
            make = lambda n=name, v=value: whole.poked(n, 0, v)  # noqa: E731
            yield f"{what} as {name}", AT_LOAD, make, called(name)


# Those in which formats differ, and those in which one will do for all.
DIFFERENT = (bit_flips, dtypes, shapes, names, missing, twice, values)
ALIKE = (cut, length, other_things, json_text, offsets, index, config)
