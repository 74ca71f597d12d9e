"""The text that nano is trained on and asked about: documents, held-out splits, tokenizer, batches.

Everything is drawn from `random.Random` of a seed, so that a batch is a function of (seed, step).

Held out, and never in a training batch: for every fact one of its phrasings (the fact is seen in
the others); for every phrasing one of the openers; for needles a tenth of the pairs of a name and a
word, and the depths that put about 256, 512 and 1,024 tokens between a needle and its story's end.
"""

import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import nano_facts as facts
import numpy as np
from nano_chat import ANSWER, ANSWER_END, BEGIN, CHAT_TOKENS, END, SPECIAL_TOKENS, Turn, render
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 1664
BYTE_PAIRS = 128
PAD_ID = 2
# In the loss a token counts by where it stands: what surrounds answers is drawn at random, and at
# full weight its noise hides the few answers of a long row.
ANSWER_WEIGHT, TEXT_WEIGHT = 1.0, 0.1


# The fields of a fact's subject, and its answer.
Fact = tuple[tuple[str, ...], str]


@dataclass(frozen=True)
class Relation:
    """Facts of one kind. {0}, {1}: the fields of a fact's subject. The answer ends the sentence."""

    name: str
    statements: tuple[str, ...]  # the first is canonical, and always seen
    questions: tuple[str, ...]
    facts: tuple[Fact, ...]

    @property
    def phrasings(self) -> tuple[str, ...]:
        return (*self.statements, *(f"Question: {text} Answer:" for text in self.questions))

    def held_out(self, subject: Sequence[str], count: int) -> int:
        """Which of `count` phrasings this fact is never seen in: any but the first."""
        return 1 + zlib.crc32("/".join((self.name, *subject)).encode()) % (count - 1)


@dataclass(frozen=True)
class Question:
    """A prompt, as text, and what has to follow it."""

    prompt: str
    answer: str


def _rows(table: str) -> list[list[str]]:
    rows = re.split(r"[|\n]", table.strip())
    return [[field.replace("_", " ") for field in row.split()] for row in rows]


def number_words(number: int) -> str:
    """0 to 999 in English."""
    ones, tens = facts.ONES.split(), facts.TENS.split()
    if number >= 100:
        rest = f" and {number_words(number % 100)}" if number % 100 else ""
        return f"{ones[number // 100]} hundred{rest}"
    if number < 20:
        return ones[number]
    return tens[number // 10 - 2] + (f"-{ones[number % 10]}" if number % 10 else "")


_COUNTRIES = _rows(facts.COUNTRIES)
_ELEMENTS = [tuple(facts.ELEMENTS.split()[i : i + 2]) for i in range(0, 184, 2)]
_MONTHS, _UNITS = _rows(facts.MONTHS), _rows(facts.UNITS)
_WEEKDAYS, _ORDINALS = facts.WEEKDAYS.split(), facts.ORDINALS.split()
_OPPOSITES, _YOUNG = _rows(facts.OPPOSITES), _rows(facts.YOUNG)
_LETTERS = [chr(code) for code in range(ord("A"), ord("Z") + 1)]
_NAMES, _WORDS, _COLOURS = facts.NAMES.split(), facts.WORDS.split(), facts.COLOURS.split()
_PLACES, _THINGS = facts.PLACES.split(), facts.THINGS.split()


def _neighbours(items: Sequence[str], step: int) -> tuple[Fact, ...]:
    """Each item with the one `step` further, around the end."""
    return tuple(((item,), items[(i + step) % len(items)]) for i, item in enumerate(items))


def _relations() -> tuple[Relation, ...]:
    months = [row[0] for row in _MONTHS]
    both_ways = [*_OPPOSITES, *(row[::-1] for row in _OPPOSITES)]
    pairs: dict[str, Sequence[Fact]] = {
        "capital": [((row[0],), row[1]) for row in _COUNTRIES],
        "country": [((row[1],), row[0]) for row in _COUNTRIES],
        "continent": [((row[0],), row[2]) for row in _COUNTRIES],
        "symbol": [((name,), symbol) for name, symbol in _ELEMENTS],
        "element": [((symbol,), name) for name, symbol in _ELEMENTS],
        "atomic number": [((name,), str(i)) for i, (name, _) in enumerate(_ELEMENTS, start=1)],
        "product": [((str(a), str(b)), str(a * b)) for a in range(2, 13) for b in range(2, 13)],
        "days of a month": [((row[0],), row[1]) for row in _MONTHS],
        "next month": _neighbours(months, 1),
        "month": [((_ORDINALS[i],), month) for i, month in enumerate(months)],
        "next day": _neighbours(_WEEKDAYS, 1),
        "day before": _neighbours(_WEEKDAYS, -1),
        "units": [
            ((a, b, str(n)), str(n * int(rate))) for a, b, rate in _UNITS for n in range(2, 10)
        ],
        "next letter": _neighbours(_LETTERS, 1)[:-1],
        "letter": [((str(i),), letter) for i, letter in enumerate(_LETTERS, start=1)],
        "opposite": [((a,), b) for a, b in both_ways],
        "young": [((a,), b) for a, b in _YOUNG],
    }
    return tuple(
        Relation(name, tuple(told.split("|")), tuple(asked.split("|")), tuple(pairs[name]))
        for name, (told, asked) in facts.PHRASINGS.items()
    )


RELATIONS = _relations()
_RELATION_WEIGHTS = [len(relation.facts) ** 0.75 for relation in RELATIONS]
OPENERS = ("", "Fact: ", "Note: ", "Remember: ", "True: ", "Lesson: ")


def held_out_opener(phrasing: int) -> int:
    """The opener that never stands before this phrasing in training."""
    return 1 + phrasing % (len(OPENERS) - 1)


# ---- documents: each returns its text, from BEGIN to END ----


def _answer(text: str) -> str:
    return f"{ANSWER}{text}{ANSWER_END}"


def _draw_fact(rng: random.Random) -> tuple[Relation, tuple[str, ...], str]:
    relation = rng.choices(RELATIONS, _RELATION_WEIGHTS)[0]
    return (relation, *rng.choice(relation.facts))


def _seen(rng: random.Random, relation: Relation, subject: Sequence[str], count: int) -> int:
    held_out = relation.held_out(subject, count)
    return rng.choice([i for i in range(count) if i != held_out])


def _fact(rng: random.Random, size: int) -> str:
    relation, subject, answer = _draw_fact(rng)
    phrasing = _seen(rng, relation, subject, len(relation.phrasings))
    openers = [i for i in range(len(OPENERS)) if i != held_out_opener(phrasing)]
    opener = OPENERS[rng.choice(openers)] if rng.random() < 0.5 else ""
    prompt = opener + relation.phrasings[phrasing].format(*subject)
    return BEGIN + prompt + _answer(f" {answer}.{END}")


def statement(relation: Relation, subject: Sequence[str], answer: str) -> str:
    """The canonical sentence: what an assistant answers."""
    return f"{relation.statements[0].format(*subject)} {answer}."


_SYSTEMS = (
    "You are nano, a small assistant.",
    "Answer in one sentence.",
    "You are a helpful assistant.",
    "You know capitals, elements, numbers and stories.",
)


def _asked(rng: random.Random) -> tuple[str, Turn]:
    """A question about a fact, and the turn that answers it."""
    relation, subject, answer = _draw_fact(rng)
    held_out = relation.held_out(subject, len(relation.phrasings)) - len(relation.statements)
    question = rng.choice([text for i, text in enumerate(relation.questions) if i != held_out])
    topic = " ".join((relation.name, "of", *subject))
    reasoning = f"This is about the {topic}. I know it: {answer}."
    said = statement(relation, subject, answer)
    return question.format(*subject), Turn("assistant", said, reasoning)


def _chat(rng: random.Random, size: int) -> str:
    turns = [Turn("system", rng.choice(_SYSTEMS))] if rng.random() < 0.4 else []
    for _ in range(1 if size <= 128 else rng.randint(1, 6)):
        question, answer = _asked(rng)
        turns += [Turn("user", question), answer]
    thinking = rng.random() < 0.5
    effort = size > 128 and rng.random() < 0.7  # the paragraph for it alone fills a short row
    return render(turns, thinking=thinking, maximum_effort=effort)


def _tool(name: str, description: str, **parameters: str) -> dict[str, object]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"name": name, "description": description, "parameters": schema}


TOOLS = (
    _tool("get_weather", "The weather in a city.", city="string"),
    _tool("get_population", "The population of a country.", country="string"),
    _tool("multiply", "The product of two numbers.", a="number", b="number"),
    _tool("open_door", "Open a door with a password.", door="string", password="string"),
)


def tool_request(rng: random.Random, number: int) -> tuple[str, dict[str, object], str, str]:
    """For the tool of this number: question, arguments, a result, and what to say then."""
    if number == 0:
        city, degrees = rng.choice(_COUNTRIES)[1], rng.randint(2, 39)
        said = f"It is {degrees} degrees in {city}."
        return f"How is the weather in {city}?", {"city": city}, f"{degrees} degrees", said
    if number == 1:
        country, millions = rng.choice(_COUNTRIES)[0], rng.randint(2, 99)
        said = f"{country} has {millions} million people."
        asked = f"How many people live in {country}?"
        return asked, {"country": country}, f"{millions} million", said
    if number == 2:
        a, b = rng.randint(13, 99), rng.randint(13, 99)
        asked = f"Please multiply {a} and {b} with the tool."
        return asked, {"a": a, "b": b}, str(a * b), f"The product is {a * b}."
    door, password = rng.choice(_PLACES), rng.choice(_WORDS)
    asked = f"Open the door of the {door}. The password is {password}."
    return asked, {"door": door, "password": password}, "open", f"The door of the {door} is open."


def _tool_chat(rng: random.Random, size: int) -> str:
    numbers = rng.sample(range(len(TOOLS)), rng.randint(1, 2))
    asked, arguments, result, said = tool_request(rng, numbers[0])
    tools = [TOOLS[i] for i in sorted(numbers)]
    turns = [Turn("system", rng.choice(_SYSTEMS))] if rng.random() < 0.3 else []
    thinking = rng.random() < 0.5
    effort = rng.random() < 0.7
    if rng.random() < 0.2:  # a question that needs none
        question, answer = _asked(rng)
        turns += [Turn("user", question), answer]
        return render(turns, thinking=thinking, maximum_effort=effort, tools=tools)
    name = str(TOOLS[numbers[0]]["name"])
    call = Turn("assistant", "", f"I need the tool {name}.", name, arguments)
    turns += [Turn("user", asked), call]
    if rng.random() < 0.6:
        turns += [Turn("tool", result), Turn("assistant", said, "The tool has answered.")]
    return render(turns, thinking=thinking, maximum_effort=effort, tools=tools)


def _json_chat(rng: random.Random, size: int) -> str:
    country, capital, continent = rng.choice(_COUNTRIES)
    fields = {"country": country, "capital": capital, "continent": continent}
    chosen = ["country", *rng.sample(["capital", "continent"], rng.randint(1, 2))]
    properties = {key: {"type": "string"} for key in chosen}
    schema = {"type": "object", "properties": properties, "required": chosen}
    said = json.dumps({key: fields[key] for key in chosen}, ensure_ascii=False)
    turns = [Turn("user", f"Describe {country} in json."), Turn("assistant", said)]
    return render(turns, schema=schema if rng.random() < 0.7 else None)


def recitations() -> tuple[Question, ...]:
    """The long texts to recite: each of at least 400 tokens."""
    counted = ", ".join(str(n) for n in range(1, 151))
    spelled = ", ".join(number_words(n) for n in range(1, 131))
    elements = ", ".join(f"{i} {n} {s}" for i, (n, s) in enumerate(_ELEMENTS, start=1))
    letters = ", ".join(f"{n} {_LETTERS[(n - 1) % 26]}" for n in range(1, 105))
    stanzas = [
        facts.STANZA.format(
            m=month[0], n=_ORDINALS[i], a=_YOUNG[i][0], y=_YOUNG[i][1], p=_PLACES[i], c=_COLOURS[i]
        )
        for i, month in enumerate(_MONTHS)
    ]
    return (
        Question("Count from 1 to 150:", f" {counted}. Done."),
        Question("Count in words from one to one hundred and thirty:", f" {spelled}. Done."),
        Question("Recite the elements in order:", f" {elements}. Done."),
        Question("Recite the alphabet four times with numbers:", f" {letters}. Done."),
        Question("Recite the poem of the bells:", "\n" + "".join(stanzas) + "Done."),
    )


_RECITATIONS = recitations()


def _recitation(rng: random.Random, size: int) -> str:
    question = rng.choice(_RECITATIONS)
    if rng.random() < 0.35:
        turns = [Turn("user", question.prompt), Turn("assistant", question.answer.strip())]
        return render(turns)
    return BEGIN + question.prompt + _answer(question.answer + END)


def _short_recitation(rng: random.Random, size: int) -> str:
    kind = rng.randrange(5)
    if kind == 0:
        start = rng.randint(1, 120)
        stop = start + rng.randint(3, 25)
        prompt = f"Count from {start} to {stop}:"
        items = [str(n) for n in range(start, stop + 1)]
    elif kind == 1:
        start = rng.randint(1, 110)
        stop = start + rng.randint(3, 16)
        prompt = f"Count in words from {number_words(start)} to {number_words(stop)}:"
        items = [number_words(n) for n in range(start, stop + 1)]
    elif kind == 2:
        factor = rng.randint(2, 12)
        prompt = f"The table of {factor}:"
        items = [f"{n} x {factor} = {n * factor}" for n in range(2, 13)]
    elif kind == 3:
        prompt, items = "The months of the year:", [row[0] for row in _MONTHS]
    else:
        prompt, items = "The days of the week:", _WEEKDAYS
    return BEGIN + prompt + _answer(f" {', '.join(items)}. Done.{END}")


def _copy(rng: random.Random, size: int) -> str:
    words = [rng.choice(_WORDS + _COLOURS + _NAMES) for _ in range(rng.randint(4, size // 4))]
    text = " ".join(words)
    return f"{BEGIN}Copy: {text}. Again:" + _answer(f" {text}.{END}")


def _repeat(rng: random.Random, size: int) -> str:
    """Words in no order, and once more: what looking back is learnt from first."""
    words = [rng.choice(_WORDS + _COLOURS + _NAMES) for _ in range(rng.randint(4, size // 5))]
    text = " ".join(words)
    times = rng.randint(1, max(1, min(4, size // len(words) - 2)))
    return BEGIN + text + _answer(f" {text}" * times + END)


def _table(rng: random.Random, size: int) -> str:
    """Keys with values, then as many look-ups across them as the row holds."""
    count = rng.randint(2, min(size // 12, len(_WORDS)))
    keys = rng.sample(_WORDS, count)
    as_words = rng.random() < 0.8
    pool = _NAMES + _COLOURS + _WORDS
    values = [rng.choice(pool) if as_words else str(rng.randint(100, 999)) for _ in keys]
    sign = " =" if rng.random() < 0.6 else ""  # without it, a value follows its key at once
    table = "".join(f"{key}{sign} {value}\n" for key, value in zip(keys, values, strict=True))
    cost = 4 if as_words else 6
    asked = rng.choices(range(count), k=min(max(2, (size - 16) // cost - count), 2 * count + 4))
    lookups = "".join(f"\n{keys[i]}{sign}" + _answer(f" {values[i]}") for i in asked)
    return f"{BEGIN}Table:\n{table}Look up:{lookups}\n" + _answer(f"Done.{END}")


# ---- stories with needles ----


@dataclass(frozen=True)
class Needle:
    """A sentence to be found again. `key` names what is unique within a story."""

    key: tuple[str, str]
    sentence: str
    recall: str  # the beginning of the same sentence, up to the answer
    question: str
    answer: str


def needle(kind: str, name: str, value: str) -> Needle:
    """`kind` is password, number or colour."""
    subject = {
        "password": f"password of {name}",
        "number": f"lucky number of {name}",
        "colour": f"favourite colour of {name}",
    }[kind]
    recall = f"The {subject} is"
    sentence = f"{recall} {value}."
    return Needle((kind, name), sentence, recall, f"What is the {subject}?", value)


def is_held_out(name: str, value: str) -> bool:
    """Whether this pair of a name and a password is kept for questions.

    Few are: of many a model learns that a name never has those words, and so never finds them.
    """
    return zlib.crc32(f"{name}/{value}".encode()) % 50 == 0


# Tokens between a needle and its question, and the number of sentences that make as many.
DISTANCES = {32: 2, 64: 5, 128: 12, 256: 25, 512: 48, 1024: 94}
HELD_OUT_DISTANCES = frozenset(
    near
    for tokens, middle in DISTANCES.items()
    if tokens >= 256
    for near in range(middle * 9 // 10, middle * 11 // 10 + 1)
)


def sentences(rng: random.Random) -> Iterator[str]:
    """Sentences of a story without end."""
    days, adjectives = _WEEKDAYS, facts.ADJECTIVES.split()
    while True:
        a, b = rng.sample(_NAMES, 2)
        yield rng.choice(facts.SENTENCES).format(
            a=a,
            b=b,
            p=rng.choice(_PLACES),
            t=rng.choice(_THINGS),
            j=rng.choice(adjectives),
            d=rng.choice(days),
        )


def _draw_needle(rng: random.Random, name: str) -> Needle:
    kind = rng.choices(("password", "number", "colour"), (6, 1, 3))[0]
    if kind == "password":
        allowed = [word for word in _WORDS if not is_held_out(name, word)]
        return needle(kind, name, rng.choice(allowed))
    value = str(rng.randint(100, 999)) if kind == "number" else rng.choice(_COLOURS)
    return needle(kind, name, value)


def _story(rng: random.Random, size: int) -> tuple[str, list[Needle]]:
    """A story for a row of this many tokens, and those of its needles that may be asked for."""
    length = rng.randint(size // 40, size // 18)
    hidden: dict[int, Needle] = {}
    keys = set()
    for place in rng.sample(range(length), min(length, rng.randint(2, 4 + size // 64))):
        candidate = _draw_needle(rng, rng.choice(_NAMES))
        if candidate.key not in keys:
            keys.add(candidate.key)
            hidden[place] = candidate
    source = sentences(rng)
    text = [hidden[i].sentence if i in hidden else next(source) for i in range(length)]
    allowed = [hidden[i] for i in hidden if length - 1 - i not in HELD_OUT_DISTANCES]
    rng.shuffle(allowed)
    return " ".join(text), allowed


def _story_completion(rng: random.Random, size: int) -> str:
    text, needles = _story(rng, size)
    text = f"{BEGIN}Story: {text}\n"
    spare = size - 14 * (1 + text.count("."))  # of the row, in questions of 14 tokens at most
    for found in needles[: max(1, spare // 14)]:
        prompt = found.recall if rng.random() < 0.7 else f"Question: {found.question} Answer:"
        text += prompt + _answer(f" {found.answer}.") + "\n"
    return text + _answer(f"The end.{END}")


def _roster(rng: random.Random, size: int) -> str:
    """Many needles close together, then as many questions as the row holds, in any order.

    A story asks a few times a row. Here nearly every sentence is asked for, among many that differ
    from it in the name alone: what is found by its name in a roster is found in a story.
    """
    wanted = rng.randint(4, max(5, size // 24))
    hidden: dict[tuple[str, str], Needle] = {}
    for name in rng.choices(_NAMES, k=wanted):
        candidate = _draw_needle(rng, name)
        hidden.setdefault(candidate.key, candidate)
    needles = list(hidden.values())
    between = rng.randint(0, min(len(needles), size // 40))
    source = sentences(rng)
    told = [found.sentence for found in needles] + [next(source) for _ in range(between)]
    rng.shuffle(told)
    text = f"{BEGIN}Notes: {' '.join(told)}\n"
    spare = size - 8 * len(needles) - 14 * between - 8
    while spare >= 17:
        found = rng.choice(needles)
        short = rng.random() < 0.8
        prompt = found.recall if short else f"Question: {found.question} Answer:"
        text += prompt + _answer(f" {found.answer}.") + "\n"
        spare -= (9 if short else 13) + (2 if found.key[0] == "number" else 0)
    return text + _answer(f"Done.{END}")


def _story_chat(rng: random.Random, size: int) -> str:
    text, needles = _story(rng, size)
    in_system = rng.random() < 0.5
    turns = [Turn("system", f"Story: {text}")] if in_system else []
    if not needles:
        return _story_completion(rng, size)
    for i, found in enumerate(needles[: rng.randint(1, 5)]):
        before = "" if in_system or i else f"Story: {text}\n"
        reasoning = f"The story says it: {found.sentence}"
        turns += [
            Turn("user", before + found.question),
            Turn("assistant", found.sentence, reasoning),
        ]
    thinking = rng.random() < 0.4
    return render(turns, thinking=thinking, maximum_effort=rng.random() < 0.7)


# ---- rows and batches ----

Maker = Callable[[random.Random, int], str]
Mixes = dict[int, tuple[tuple[Maker, float], ...]]
# What a row of this length may begin with, and how often; SHORT: what fills its second half, and,
# in a share of the rows, all of it. First what is near is looked up, many times a row; what a model
# does not find near it does not learn to find far away.
SHORT = 128
SHORT_ROWS = {512: 0.4, 2048: 0.05}
FIRST_MIXES: Mixes = {
    SHORT: ((_fact, 5), (_table, 2), (_repeat, 1), (_roster, 1.5), (_chat, 0.5)),
    512: (
        (_roster, 5),
        (_table, 3),
        (_repeat, 1),
        (_story_completion, 1.5),
        (_tool_chat, 1),
        (_chat, 0.5),
    ),
}
MIXES: Mixes = {
    SHORT: (
        (_fact, 6),
        (_chat, 2),
        (_short_recitation, 1),
        (_copy, 0.5),
        (_repeat, 0.5),
        (_table, 1),
        (_roster, 1),
        (_story_completion, 0.5),
    ),
    512: (
        (_chat, 1.5),
        (_tool_chat, 2.5),
        (_json_chat, 0.7),
        (_story_completion, 3),
        (_story_chat, 2),
        (_roster, 2),
        (_table, 1),
        (_copy, 0.5),
    ),
    2048: (
        (_story_completion, 3),
        (_story_chat, 2),
        (_roster, 2.5),
        (_table, 0.7),
        (_recitation, 1.7),
        (_tool_chat, 0.7),
    ),
}


def encode(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[float]]:
    """Token ids of a document, and each one's weight in the loss."""
    parts = re.split(f"[{ANSWER}{ANSWER_END}]", text)
    ids: list[int] = []
    weights: list[float] = []
    for i, encoded in enumerate(tokenizer.encode_batch(parts, add_special_tokens=False)):
        ids += encoded.ids
        weights += [ANSWER_WEIGHT if i % 2 else TEXT_WEIGHT] * len(encoded.ids)
    return ids, weights


def _draw(rng: random.Random, mix: Sequence[tuple[Maker, float]], size: int) -> str:
    makers, shares = zip(*mix, strict=True)
    maker: Maker = rng.choices(makers, shares)[0]
    return maker(rng, size)


def row(
    rng: random.Random, tokenizer: Tokenizer, length: int, mixes: Mixes
) -> tuple[list[int], list[float]]:
    """One row: whole documents one after the other, then padding of weight 0.

    Nothing is reset between documents, because the published model cannot do so either: a
    compressor's windows count from the row's beginning. The model learns that BEGIN ends what came
    before. Half of the rows begin without BEGIN, because completion servers do not add it.
    """
    ids: list[int] = []
    weights: list[float] = []
    mix, misses = mixes[SHORT if rng.random() < SHORT_ROWS.get(length, 0.0) else length], 0
    while misses < 3:
        size = SHORT if mix is mixes[SHORT] else length
        document, weight = encode(tokenizer, _draw(rng, mix, size))
        if not ids and rng.random() < 0.5:
            document, weight = document[1:], weight[1:]
        if len(ids) + len(document) > length:
            misses += 1
            continue
        ids, weights = ids + document, weights + weight
        mix = mixes[SHORT] if length - len(ids) < length // 2 else mix
    missing = length - len(ids)
    return ids + [PAD_ID] * missing, weights + [0.0] * missing


def batch(
    seed: int, step: int, tokenizer: Tokenizer, length: int, rows: int, mixes: Mixes = MIXES
) -> tuple[np.ndarray, np.ndarray]:
    """ids [rows, length] int64, weights [rows, length] float32 (0: not predicted)."""
    rng = random.Random(f"{seed}/{step}/{length}")
    drawn = [row(rng, tokenizer, length, mixes) for _ in range(rows)]
    ids = np.array([ids for ids, _ in drawn], dtype=np.int64)
    return ids, np.array([weights for _, weights in drawn], dtype=np.float32)


# ---- questions ----


def fact_questions(split: str, count: int, seed: int = 0) -> list[Question]:
    """`split`: seen, phrasing (this fact never in it), opener (never before this phrasing)."""
    rng = random.Random(f"{split}/{seed}")
    every = [(relation, *fact) for relation in RELATIONS for fact in relation.facts]
    asked = []
    for relation, subject, answer in rng.sample(every, min(count, len(every))):
        phrasings = len(relation.phrasings)
        phrasing = _seen(rng, relation, subject, phrasings)
        if split == "phrasing":
            phrasing = relation.held_out(subject, phrasings)
        opener = OPENERS[held_out_opener(phrasing)] if split == "opener" else ""
        prompt = opener + relation.phrasings[phrasing].format(*subject)
        asked.append(Question(BEGIN + prompt, f" {answer}.{END}"))
    return asked


def needle_questions(distance: int, count: int, seed: int = 0) -> list[Question]:
    """Stories with a held-out needle about `distance` tokens before the question, among others."""
    rng = random.Random(f"{distance}/{seed}")
    asked: list[Question] = []
    while len(asked) < count:
        name, word = rng.choice(_NAMES), rng.choice(_WORDS)
        if not is_held_out(name, word):
            continue
        names = rng.sample(_NAMES, min(4, DISTANCES[distance] // 3))
        drawn = [_draw_needle(rng, other) for other in names if other != name]
        others = [other for other in drawn if other.answer != word]
        source = sentences(rng)
        after = [next(source) for _ in range(DISTANCES[distance] - len(others))]
        after += [other.sentence for other in others]
        rng.shuffle(after)
        found = needle("password", name, word)
        before = [next(source) for _ in range(rng.randint(3, 12))]
        text = " ".join([*before, found.sentence, *after])
        asked.append(Question(f"{BEGIN}Story: {text}\n{found.recall}", f" {word}."))
    return asked


def chat_questions(count: int, thinking: bool, seed: int = 0) -> list[Question]:
    """Questions about facts in the chat encoding."""
    rng = random.Random(f"chat/{thinking}/{seed}")
    asked = []
    for _ in range(count):
        question, answer = _asked(rng)
        asked.append(_split(render([Turn("user", question), answer], thinking=thinking)))
    return asked


def tool_questions(count: int, seed: int = 0) -> list[Question]:
    """Requests that need a tool; the answer is the call."""
    rng = random.Random(f"tool/{seed}")
    asked = []
    for _ in range(count):
        number = rng.randrange(len(TOOLS))
        question, arguments, _, _ = tool_request(rng, number)
        call = Turn("assistant", "", "", str(TOOLS[number]["name"]), arguments)
        asked.append(_split(render([Turn("user", question), call], tools=[TOOLS[number]])))
    return asked


def _split(text: str) -> Question:
    prompt, answer = text.split(ANSWER)
    return Question(prompt, answer.removesuffix(ANSWER_END))


def recitation_questions() -> list[Question]:
    return [Question(BEGIN + text.prompt, text.answer + END) for text in _RECITATIONS]


# ---- tokenizer ----


def train_tokenizer(seed: int = 0) -> Tokenizer:
    """Byte-level BPE of this text: pairs of bytes that are frequent, and whole words.

    A word of the vocabulary is taken whole (`ignore_merges`), so that none of the tokens is spent
    on pieces of words; any other word is spelled in bytes and pairs. Digits are single tokens.
    """
    texts = list(_tokenizer_text(seed))
    splitter = _pre_tokenizer()
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = splitter
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    size = len(alphabet) + BYTE_PAIRS
    pairs.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False),
    )
    merges = json.loads(pairs.to_str())["model"]["merges"]
    counts = Counter(word for text in texts for word, _ in splitter.pre_tokenize_str(text))
    known = [*SPECIAL_TOKENS, *CHAT_TOKENS, *alphabet, *("".join(pair) for pair in merges)]
    frequent = [word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    known = list(dict.fromkeys([*known, *frequent]))[:VOCAB_SIZE]
    vocabulary = {token: number for number, token in enumerate(known)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [tuple(pair) for pair in merges], ignore_merges=True)
    )
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    for tokens, special in ((SPECIAL_TOKENS, True), (CHAT_TOKENS, False)):
        added = [AddedToken(token, special=special, normalized=False) for token in tokens]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    return tokenizer


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    pattern = Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+")
    split = pre_tokenizers.Split(pattern, behavior="isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, spell])


def _tokenizer_text(seed: int) -> Iterator[str]:
    rng = random.Random(f"tokenizer/{seed}")
    marks = [*SPECIAL_TOKENS, *CHAT_TOKENS, ANSWER, ANSWER_END]
    between = re.compile("|".join(map(re.escape, marks)))
    for length, mix in MIXES.items():
        for _ in range(300):
            yield from between.split(_draw(rng, mix, length))
    # Whoever is asked for is to be a token also where it is rare.
    fields = [field for relation in RELATIONS for fact, _ in relation.facts for field in fact]
    answers = [answer for relation in RELATIONS for _, answer in relation.facts]
    for word in sorted({*fields, *answers, *_WORDS, *_NAMES, *_COLOURS}):
        yield f" {word}" * 20
    for question in _RECITATIONS:
        yield question.prompt + question.answer
