"""What the ablation reads: held-out texts, and questions with their answers, as token ids."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sglang_dsv4.settings import SettingsError

BESIDE = "held_out.json"  # what a checkpoint may bring along
SHORTEST = 16  # tokens of a text that can be measured


@dataclass(frozen=True)
class Question:
    """A prompt and the answer that has to follow it, as token ids."""

    kind: str
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Material:
    """Where it is from, texts as token ids, and questions of any kinds."""

    source: str
    texts: Sequence[list[int]]
    questions: Sequence[Question]

    def limited(self, limit: int | None) -> "Material":
        """The first `limit` texts, and as many questions of each kind; all for None."""
        if limit is None:
            return self
        kinds = dict.fromkeys(question.kind for question in self.questions)
        kept = [
            question
            for kind in kinds
            for question in [item for item in self.questions if item.kind == kind][:limit]
        ]
        return replace(self, texts=self.texts[:limit], questions=kept)


def read(folder: Path, file: Path | None, *, tokens: int) -> Material:
    """The texts of `file`, or of held_out.json beside the checkpoint, with its tokenizer.

    file: one text a line, or JSON: a list of texts, or {"texts": [...], "questions": [{"kind",
    "prompt", "answer"}, ...]}. tokens: longer texts are cut; questions are not.
    Raises SettingsError for a file that is none of these, or without a text of SHORTEST tokens.
    """
    file = file or folder / BESIDE
    if not file.is_file():
        raise SettingsError(
            f"{file} is not there: give held-out text with --texts FILE (a text a line, or JSON)"
        )
    found = _parsed(file)
    words = folder / "tokenizer.json"
    if not words.is_file():
        raise SettingsError(f"{words} is not there: texts are read with the model's tokenizer")
    tokenizer = Tokenizer.from_file(str(words))

    def ids(text: str) -> list[int]:
        encoded: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return encoded

    texts = [cut for text in found["texts"] if len(cut := ids(text)[:tokens]) >= SHORTEST]
    if not texts:
        raise SettingsError(f"{file}: no text of {SHORTEST} tokens or more")
    questions = [
        Question(item["kind"], ids(item["prompt"]), ids(item["answer"]))
        for item in found.get("questions", [])
    ]
    return Material(file.name, texts, questions)


def _parsed(file: Path) -> dict[str, Any]:
    content = file.read_text()
    if file.suffix != ".json":
        return {"texts": [line for line in content.splitlines() if line.strip()]}
    try:
        found = json.loads(content)
    except ValueError as error:
        raise SettingsError(f"{file}: not JSON: {error}") from error
    found = {"texts": found} if isinstance(found, list) else found
    if not isinstance(found, dict) or not _is_material(found):
        raise SettingsError(
            f'{file}: expected a list of texts, or {{"texts": [...], "questions": [{{"kind":'
            ' ..., "prompt": ..., "answer": ...}, ...]}}'
        )
    return found


def _is_material(found: dict[str, Any]) -> bool:
    texts, questions = found.get("texts"), found.get("questions", [])
    return (
        isinstance(texts, list)
        and all(isinstance(text, str) for text in texts)
        and isinstance(questions, list)
        and all(
            isinstance(item, dict)
            and all(isinstance(item.get(key), str) for key in ("kind", "prompt", "answer"))
            for item in questions
        )
    )
