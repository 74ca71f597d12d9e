"""The ablation: its oracle, each of its metrics, and what a planted error does to them."""

import argparse
import importlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import oracle
from sglang_dsv4 import ablation, ablation_report, ablation_texts, cli, cli_precision
from sglang_dsv4.ablation import AS_IT_IS, Subject, configurations, run
from sglang_dsv4.ablation_metrics import (
    Trace,
    bootstrap,
    change,
    compare,
    equal_tokens,
    perplexity,
    share,
)
from sglang_dsv4.ablation_oracle import Oracle
from sglang_dsv4.ablation_summary import Tally, summary
from sglang_dsv4.ablation_texts import Material, Question
from sglang_dsv4.config import DSV4Config
from sglang_dsv4.settings import SettingsError
from sglang_dsv4.tensor_table import vendor_names
from sglang_dsv4.tiny_formats import encode

TEXT = oracle.story()[:90]  # selection begins at 36 tokens; free of ties
DIFFERENT = ("kl", "top1", "last_layer", "selection", "experts")


# ---- metrics, by hand ----


def trace(seed: int = 0, tokens: int = 16) -> Trace:
    """Two layers of 2 streams of 3 channels, a vocabulary of 5, 2 entries and 1 expert chosen."""
    draw = torch.Generator().manual_seed(seed)
    layers = [torch.randn(tokens, 2, 3, generator=draw) for _ in range(2)]
    logits = torch.randn(tokens, 5, generator=draw)
    selected = torch.tensor([[0, 1]]).repeat(tokens, 1)
    experts = torch.tensor([[2]]).repeat(tokens, 1)
    return Trace(layers, logits, [selected], [experts])


IDS = [3, 1, 4, 1, 0, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]


def compared(found: Trace, reference: Trace) -> dict[str, float]:
    sums = compare(found, reference, IDS, ratio=4)
    return {name: total / count for name, (total, count) in sums.items()}


def test_a_trace_is_no_way_from_itself() -> None:
    found = compared(trace(), trace())
    same = {name: found[name] for name in ("kl", "layer 0", "layer 1")}
    assert same == pytest.approx(dict.fromkeys(same, 0), abs=1e-12)
    assert found["top1"] == found["selection"] == found["experts"] == 1


def test_metrics_by_hand() -> None:
    reference, found = trace(), trace()
    found.layers[1][:8] *= -1  # cosine -1 of half of the tokens
    found.layers[0][:] *= 7  # a length is no angle
    found.logits[0] = torch.tensor([0.0, 0, 0, 0, 2])
    reference.logits[0] = torch.tensor([9.0, 0, 0, 0, 0])
    found.selected[0][-1] = torch.tensor([1, 3])  # tokens from 11 on see 3 entries or more
    found.experts[0][4:8] = 1
    result = compared(found, reference)
    assert result["layer 1"] == pytest.approx(1)
    assert result["layer 0"] == pytest.approx(0, abs=1e-9)
    assert result["top1"] == 15 / 16
    assert result["selection"] == 9 / 10
    assert result["experts"] == 12 / 16
    p, q = (math.exp(9) / (math.exp(9) + 4), 1 / (math.exp(2) + 4))  # of token 0
    rest = (1 - p) / 4
    kl = p * math.log(p / q) + 3 * rest * math.log(rest / q)
    kl += rest * math.log(rest / (1 - 4 * q))
    assert result["kl"] == pytest.approx(kl / 16, rel=1e-6)
    logprobs = found.logits.double().log_softmax(1)
    nll = -sum(float(logprobs[i, IDS[i + 1]]) for i in range(15)) / 15
    assert result["nll"] == pytest.approx(nll)


def test_selection_counts_where_there_is_a_choice() -> None:
    """Tokens that see no more entries than are selected would always agree."""
    sums = compare(trace(), trace(), IDS, ratio=4)
    assert sums["selection"] == (10, 10)  # of tokens 11 to 15, two entries each
    short = compare(trace(tokens=11), trace(tokens=11), IDS[:11], ratio=4)
    assert short["selection"] == (0, 0)
    assert bootstrap([short["selection"]]) is None


def test_equal_tokens() -> None:
    logits = torch.eye(6)[[0, 4, 2, 3, 1, 0]]  # best after each of 6 tokens
    assert equal_tokens(logits, 2, [4, 2, 3, 1]) == 4
    assert equal_tokens(logits, 2, [4, 2, 5, 1]) == 2
    assert equal_tokens(logits, 2, [5, 2, 3, 1]) == 0


def test_the_bootstrap_is_near_the_known_interval() -> None:
    """Of a mean of 400 normal values: plus and minus 1.96 / 20; and the same at every call."""
    values = torch.randn(400, generator=torch.Generator().manual_seed(1)).tolist()
    found = bootstrap([(value, 1) for value in values])
    assert found is not None and found == bootstrap([(value, 1) for value in values])
    assert found.value == pytest.approx(sum(values) / 400)
    assert found.high - found.value == pytest.approx(0.098, rel=0.15)
    assert found.value - found.low == pytest.approx(0.098, rel=0.15)
    weighed = bootstrap([(10, 10), (0, 30)])  # a long text weighs more
    assert weighed is not None and weighed.value == 0.25


def test_a_change_is_told_text_by_text() -> None:
    """What all texts have in common cancels out; of perplexities it would hide the change."""
    before = [(float(10 * i), 10.0) for i in range(1, 40)]
    after = [(total + 0.1, count) for total, count in before]
    found = change(after, before)
    assert found is not None
    assert (found.low, found.value, found.high) == pytest.approx((0.01, 0.01, 0.01))
    wide = perplexity(before)
    assert wide is not None and wide.high - wide.low > 1


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    [(50, 50, 0.9287, 1.0), (0, 50, 0.0, 0.0713), (15, 20, 0.5313, 0.8881)],
)
def test_shares_have_wilsons_interval(right: int, of: int, low: float, high: float) -> None:
    found = share([True] * right + [False] * (of - right))
    assert found is not None
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


def test_answers_that_are_lost_and_won() -> None:
    sums = [compare(trace(), trace(), IDS, ratio=4)]
    before = Tally(sums, {"k": [True, True, True, False]}, [8, 8])
    after = Tally(sums, {"k": [True, False, False, True]}, [8, 3])
    found = summary({"a": before, "b": after}, {"a": "", "b": "x=y"}, "a")["configurations"][1]
    answers = {key: found["answers"]["k"][key] for key in ("right", "of", "lost", "won", "value")}
    assert answers == {"right": 2, "of": 4, "lost": 2, "won": 1, "value": 0.5}
    assert (found["name"], found["precision"]) == ("b", "x=y")
    assert found["metrics"]["equal"]["value"] == 5.5


# ---- the oracle ----


def test_the_oracle_is_the_tests_oracle(checkpoint: Path) -> None:
    """Written twice, from the same definitions: the grid, the transform, and what is recorded."""
    found = Oracle(checkpoint).trace(TEXT)
    wanted = oracle.record(oracle.load(checkpoint, indexer_fp4=True), TEXT)
    torch.testing.assert_close(found.logits, wanted.logits)
    for ours, layer in zip(found.layers, wanted.layers, strict=True):
        torch.testing.assert_close(ours, layer.streams)
    selected = [layer.selected for layer in wanted.layers if layer.selected is not None]
    for ours, theirs in zip(found.selected, selected, strict=True):
        assert torch.equal(ours.sort().values, theirs.sort().values)
    scored = [layer for layer in wanted.layers if layer.router_gap is not None]
    assert [tuple(experts.shape) for experts in found.experts] == [(len(TEXT), 3)] * len(scored)


# ---- runs of the small model with every kind of layer ----


@pytest.fixture(scope="module")
def material() -> Material:
    story = oracle.story()
    texts = [story[start : start + 48] for start in (0, 200)]
    questions = [Question("easy", story[:9], [5]), Question("hard", story[9:20], [7, 8])]
    return Material("story", texts, questions)


@pytest.fixture(scope="module")
def result(checkpoint: Path, material: Material) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ablation, "GENERATED", 6)
        return run(checkpoint, material, progress=False)


def by_name(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in result["configurations"]}


def value(result: dict[str, Any], name: str, metric: str) -> float:
    found: float = by_name(result)[name]["metrics"][metric]["value"]
    return found


def test_nothing_flipped_is_the_reference(result: dict[str, Any]) -> None:
    assert result["reference"] == "transformers in float32"
    assert value(result, AS_IT_IS, "kl") < 1e-8
    assert value(result, AS_IT_IS, "last_layer") < 1e-8
    for metric in ("top1", "selection", "experts"):
        assert value(result, AS_IT_IS, metric) == 1
    assert value(result, AS_IT_IS, "log_perplexity") == 0
    assert value(result, AS_IT_IS, "equal") == 6
    assert value(result, "reference", "kl") == 0
    whole = value(result, AS_IT_IS, "perplexity")
    assert whole == pytest.approx(value(result, "reference", "perplexity"), rel=1e-5)


def test_every_component_is_flipped(result: dict[str, Any]) -> None:
    flips = ["lm_head", "router_gate", "compressor_kv", "compressor_gate"]
    flips += ["indexer_compressor", "indexer_weights"]
    assert list(by_name(result)) == [
        *(AS_IT_IS, *flips, "all flipped", "indexer_qk=full", "reference")
    ]
    for name in (*flips, "all flipped"):
        assert value(result, name, "kl") > 1e-5, name
    assert value(result, "indexer_qk=full", "selection") < 1


def test_the_head_moves_logits_alone(result: dict[str, Any]) -> None:
    head = by_name(result)["lm_head"]
    assert all(layer["value"] < 1e-8 for layer in head["layers"])
    assert value(result, "lm_head", "selection") == value(result, "lm_head", "experts") == 1
    assert value(result, "lm_head", "log_perplexity") != 0


def test_the_router_moves_experts_first(result: dict[str, Any]) -> None:
    """Layers that route by token id keep their experts, whose weights change."""
    assert value(result, "router_gate", "experts") < 1
    layers = [layer["value"] for layer in by_name(result)["compressor_kv"]["layers"]]
    assert max(layers[:2]) < 1e-8 < layers[2]  # the first two layers have no compressor


def test_the_indexer_moves_selections_first(result: dict[str, Any]) -> None:
    for name in ("indexer_compressor", "indexer_weights"):
        assert value(result, name, "selection") < 1
        layers = [layer["value"] for layer in by_name(result)[name]["layers"]]
        assert max(layers[:2]) < 1e-8


def planted(checkpoint: Path, tmp_path: Path, part: str) -> Subject:
    """The model with noise as large as the weights in one of them."""
    tensors = load_file(checkpoint / "model.safetensors")
    (name,) = [name for name in tensors if vendor_names(name, experts=8) == [part]]
    noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(0))
    tensors[name] += noise * tensors[name].std()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    config = DSV4Config.from_checkpoint(tmp_path)
    return Subject(tmp_path, config, "", torch.float32)


@pytest.mark.parametrize(
    ("part", "moved"),
    [
        ("head.weight", {"kl", "top1"}),
        ("layers.6.ffn.gate.weight", {"kl", "top1", "layer 6", "experts"}),
        ("layers.6.attn.indexer.compressor.wkv.weight", {"selection", "kl", "top1", "layer 6"}),
    ],
)
def test_a_planted_error_moves_its_metric(
    part: str, moved: set[str], checkpoint: Path, tmp_path: Path
) -> None:
    whole = Subject(checkpoint, DSV4Config.from_checkpoint(checkpoint), "", torch.float32)
    reference = whole.trace(TEXT)
    sums = compare(planted(checkpoint, tmp_path, part).trace(TEXT), reference, TEXT, ratio=4)
    found = {name: total / count for name, (total, count) in sums.items()}
    shares = {"top1", "selection", "experts"}
    far = {
        name
        for name, ratio in found.items()
        if name != "nll" and (ratio < 0.97 if name in shares else ratio > 1e-4)
    }
    # The last layer's experts follow its attention, in whatever entries it selects.
    assert far - {"experts"} == moved - {"experts"} and ("experts" in far) >= ("experts" in moved)


def test_a_session_generates_what_it_reads(checkpoint: Path) -> None:
    """Through the cache, two requests at once, as in one forward, and as transformers reads it."""
    whole = Subject(checkpoint, DSV4Config.from_checkpoint(checkpoint), "", torch.float32)
    prompts = [oracle.story()[:130], TEXT[30:41]]  # the first closes an HCA window
    said = whole.generate(prompts, 5)
    together = [prompt + tokens for prompt, tokens in zip(prompts, said, strict=True)]
    read, wanted = whole.logits(together), Oracle(checkpoint).logits(together)
    for prompt, tokens, logits, theirs in zip(prompts, said, read, wanted, strict=True):
        torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=0)
        assert equal_tokens(logits, len(prompt), tokens) == 5
        wrong = [*tokens[:3], (tokens[3] + 1) % oracle.VOCAB_SIZE, tokens[4]]
        assert equal_tokens(logits, len(prompt), wrong) == 3


def test_a_session_reads_in_steps_what_it_reads_at_once(checkpoint: Path) -> None:
    """The first request's second HCA window, of tokens 128 to 255, closes in the second step, with
    what the first one kept of it beside the other request."""
    config = DSV4Config.from_checkpoint(checkpoint)
    whole, story = Subject(checkpoint, config, "", torch.float32), oracle.story()
    texts = [story[:260], TEXT[30:49]]
    parts = [story[:250], TEXT[30:41]], [story[250:257], TEXT[41:42]], [story[257:260], TEXT[42:49]]
    session = ablation.Session(config, [len(ids) for ids in texts], torch.float32)
    steps = [session.step(whole.lm, new) for new in parts]
    found = [torch.cat(logits) for logits in zip(*steps, strict=True)]
    torch.testing.assert_close(found, Oracle(checkpoint).logits(texts), atol=1e-4, rtol=0)


def test_configurations_share_what_is_equal(checkpoint: Path) -> None:
    config = DSV4Config.from_checkpoint(checkpoint)
    whole = Subject(checkpoint, config, "", torch.float32)
    flipped = Subject(checkpoint, config, "router_gate=nvfp4", torch.float32)
    flipped.share(whole)
    theirs = dict(whole.lm.named_parameters())
    own = {name for name, held in flipped.lm.named_parameters() if held is not theirs[name]}
    assert own == {f"model.layers.{layer}.ffn.inputs.weight" for layer in range(7)}


def test_a_quantised_checkpoint_reaches_the_oracle_dense(
    checkpoint: Path, tmp_path: Path, material: Material, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers gets the values that we made of it; what is quantised cannot be flipped."""
    monkeypatch.setattr(ablation, "GENERATED", 2)
    tensors = load_file(checkpoint / "model.safetensors")
    for name in [name for name in tensors if name.endswith("ffn.gate.weight")]:
        tensors |= encode("nvfp4", name, tensors.pop(name))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    short = Material("story", material.texts[:1], [])
    found = run(tmp_path, short, only=["router_gate", "lm_head"], progress=False)
    assert found["reference"] == "transformers in float32, of our dequantised weights"
    assert list(by_name(found)) == [AS_IT_IS, "lm_head", "reference"]
    assert found["refused"] == {
        "router_gate": "router_gate is NVFP4 in the checkpoint: there is no bf16 master to flip"
    }
    assert value(found, AS_IT_IS, "kl") < 1e-6 < value(found, "lm_head", "kl")


# ---- texts, reports, command line ----


def test_texts_of_all_kinds(checkpoint: Path, tmp_path: Path) -> None:
    lines, listed, both = (tmp_path / name for name in ("a.txt", "b.json", "c.json"))
    texts = ["The first text, long enough.", "x", "The second text, as long."]
    lines.write_text("\n\n".join(texts))
    listed.write_text(json.dumps(texts))
    question = {"kind": "k", "prompt": "ab", "answer": "c"}
    both.write_text(json.dumps({"texts": texts, "questions": [question] * 3}))
    for file in (lines, listed, both):
        found = ablation_texts.read(checkpoint, file, tokens=20)
        assert [len(ids) for ids in found.texts] == [20, 20]  # a byte is a token; "x" is too short
    assert [len(item.prompt + item.answer) for item in found.questions] == [3, 3, 3]
    limited = found.limited(1)
    assert (len(limited.texts), len(limited.questions)) == (1, 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "short\n", "no text of 16 tokens"),
        ("a.json", "{", "not JSON"),
        ("a.json", '{"texts": [3]}', "expected a list of texts"),
        ("a.json", '{"texts": [], "questions": [{"kind": "k"}]}', "expected a list of texts"),
        ("a.json", None, "give held-out text with --texts"),
    ],
)
def test_texts_that_cannot_be_read(
    name: str, content: str | None, message: str, checkpoint: Path, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SettingsError, match=message):
        ablation_texts.read(checkpoint, tmp_path / name, tokens=64)


def test_the_package_brings_texts_for_nano(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that its script makes; long enough for selection, and for several HCA entries."""
    monkeypatch.syspath_prepend(repository / "scripts")
    folder = Path(cli_precision.__file__).parent / "nano"
    file = folder / ablation_texts.BESIDE
    assert file.stat().st_size < 200_000
    made = importlib.import_module("nano_held_out").held_out(
        Tokenizer.from_file(str(folder / "tokenizer.json"))
    )
    assert json.loads(file.read_text()) == made
    found = ablation_texts.read(folder, None, tokens=2048)
    assert sum(map(len, found.texts)) > 20_000 and max(map(len, found.texts)) > 2000
    kinds = {item.kind for item in found.questions}
    assert kinds == {"facts", "needles 256", "needles 512"}


def test_packs_keep_every_question(material: Material) -> None:
    questions = [Question("k", [1] * count, [2]) for count in (900, 5, 300, 40, 1500, 6)]
    packed = ablation.packs(questions)
    assert [[len(item.prompt) for item in pack] for pack in packed] == [
        [5, 6, 40, 300],
        [900],
        [1500],
    ]


def test_only_names_components() -> None:
    assert list(configurations(["compressor", "lm_head"])) == [
        *(AS_IT_IS, "compressor_kv", "compressor_gate", "lm_head")
    ]
    assert configurations(["indexer_qk"]) == {AS_IT_IS: "", "indexer_qk=full": "indexer_qk=full"}
    with pytest.raises(SettingsError, match="'experts' is unknown"):
        configurations(["experts"])


def test_reports_show_every_number(result: dict[str, Any], tmp_path: Path) -> None:
    shown = {"checkpoint": "tiny"} | result
    text, page = ablation_report.table(shown), ablation_report.markdown(shown)
    for one in result["configurations"]:
        for metric, held in one["metrics"].items():
            for key in ("value", "low", "high"):
                number = ablation_report.number(metric, held[key])
                assert number in text and number in page
        assert page.count(f"\n| {one['name']} |") == 3  # two tables, and one by layer
        assert text.count(f"\n{one['name']} ") == 2
    sizes = [line.count("|") for line in page.splitlines() if line.startswith("|")]
    assert sizes == sorted(sizes, key=sizes.index) and len(sizes) == 3 * (2 + 10)
    picture = tmp_path / "p.png"
    ablation_report.plot(shown, picture)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000


def test_the_document_shows_what_was_measured(repository: Path) -> None:
    """docs/precision.md is the rendering of docs/precision*.json, and words about it."""
    page = (repository / "docs/precision.md").read_text()
    for name in ("precision", "precision-bfloat16"):
        result = json.loads((repository / f"docs/{name}.json").read_text())
        assert ablation_report.markdown(result) in page


def test_the_command(
    checkpoint: Path,
    result: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []

    def stand_in(folder: Path, material: Material, **options: Any) -> dict[str, Any]:
        asked.append({"folder": folder, "texts": len(material.texts)} | options)
        return result

    monkeypatch.setattr(ablation, "run", stand_in)
    texts, files = tmp_path / "t.txt", [tmp_path / name for name in ("r.json", "r.md", "r.png")]
    texts.write_text("a text that is long enough\n" * 4)
    command: Sequence[str] = [
        *("precision", str(checkpoint), "--texts", str(texts), "--limit", "3", "--json"),
        *("--dtype", "bfloat16", "--only", "lm_head"),
        *("--results", str(files[0]), "--markdown", str(files[1]), "--plot", str(files[2])),
    ]
    assert cli.main(command) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads(files[0].read_text())
    assert said["checkpoint"] == checkpoint.name
    assert all(file.stat().st_size for file in files)
    options = {"dtype": torch.bfloat16, "only": ["lm_head"]}
    assert asked == [{"folder": checkpoint, "texts": 3} | options]
    assert cli.main(["precision", str(checkpoint), "--only", "router"]) == 2
    assert "'router' is unknown" in capsys.readouterr().err
    assert cli.main(["precision", str(checkpoint)]) == 2
    assert "--texts FILE" in capsys.readouterr().err


def test_help_has_examples() -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    text = cli_precision.add_parser(commands).format_help()
    assert "examples:" in text and "--limit 8" in text
