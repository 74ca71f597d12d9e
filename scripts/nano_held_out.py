"""Writes nano's held-out texts and questions, which `sglang-dsv4 precision` reads.

    python scripts/nano_held_out.py sglang_dsv4/nano

Texts are rows of the training's kinds, drawn from another seed: new stories, tables and chats, in
which what nano was taught comes up. Questions are those that never were in a training batch: facts
in a held-out phrasing, and needles about 256 and 512 tokens back.
"""

import argparse
import json
from pathlib import Path

import nano_text
from tokenizers import Tokenizer

SEED = 10**6 + 1
ROWS = {512: 32, 2048: 3}  # tokens -> rows
FACTS = 200
NEEDLES = {256: 16, 512: 8}  # about this many tokens back -> questions


def held_out(tokenizer: Tokenizer) -> dict[str, list[str] | list[dict[str, str]]]:
    """{"texts": [...], "questions": [{"kind", "prompt", "answer"}, ...]}"""
    texts = []
    for length, rows in ROWS.items():
        for ids, weights in zip(*nano_text.batch(SEED, 0, tokenizer, length, rows), strict=True):
            kept = ids[: int((weights > 0).sum())].tolist()
            texts.append(tokenizer.decode(kept, skip_special_tokens=False))
    asked = {"facts": nano_text.fact_questions("phrasing", FACTS, seed=SEED)}
    for distance, count in NEEDLES.items():
        asked[f"needles {distance}"] = nano_text.needle_questions(distance, count, seed=SEED)
    questions = [
        {"kind": kind, "prompt": item.prompt, "answer": item.answer}
        for kind, items in asked.items()
        for item in items
    ]
    return {"texts": texts, "questions": questions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="nano: holds tokenizer.json, gets held_out.json")
    folder = parser.parse_args().folder
    found = held_out(Tokenizer.from_file(str(folder / "tokenizer.json")))
    content = json.dumps(found, ensure_ascii=False, indent=0) + "\n"
    (folder / "held_out.json").write_text(content)
    print(f"{len(found['texts'])} texts, {len(found['questions'])} questions, {len(content)} bytes")


if __name__ == "__main__":
    main()
