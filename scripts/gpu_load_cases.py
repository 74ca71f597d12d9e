"""What the part `load` of gpu_acceptance.py asks, and how answers are compared; no server here."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_serving import TIE, compared

from serving import Reply

LONGEST = 64  # tokens of an answer that is compared
ABORTED = 10  # one request of so many
BURST = "page's end"  # the kind of the prompts that come all at once
PAGE = 256  # tokens; the radix cache shares whole pages
SHARED = (1000, 512, 257, 256, 255, 200, 129)  # tokens of prefixes that several requests begin with
DISTANCES = (1024, 512, 256, 128, 64, 32)  # tokens between a needle and its question


@dataclass(frozen=True)
class Case:
    """A prompt, and how many tokens are to follow it."""

    kind: str
    prompt: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class Job:
    """A request for cases[case]; after `stop` tokens it is aborted, as `how` says."""

    case: int
    how: str = ""
    stop: int = 0


# ---- what is asked ----


def cases(trained: Any, count: int, seed: int) -> list[Case]:
    """Distinct prompts, seven in turn: a fact, a chat, part of a recitation, two needles, and two
    facts asked after beginnings of a story; every story is begun in seven lengths. Then, one for
    twelve of these, recitations that are about to need a second page."""
    ends = max(count // 13, 2)
    text, ids, rng = trained.nano_text, trained.ids, random.Random(seed)
    turns = -(-(count - ends) // 7)
    facts = iter(text.fact_questions("seen", 3 * turns, seed))
    chats = text.chat_questions(turns, thinking=True, seed=seed)
    recited = [(ids(one.prompt), ids(one.answer)) for one in text.recitation_questions()]
    stories = text.needle_questions(1024, -(-2 * turns // len(SHARED)), seed)
    made: list[Case] = []

    def add(kind: str, prompt: Sequence[int], count: int) -> None:
        made.append(Case(kind, tuple(prompt), min(count, LONGEST)))

    def add_question(kind: str, begin: Sequence[int], question: Any) -> None:
        add(kind, [*begin, *ids(question.prompt)], len(ids(question.answer)))

    for turn in range(turns):
        add_question("fact", [], next(facts))
        add_question("chat", [], chats[turn])
        prompt, answer = recited[turn % len(recited)]
        begun = rng.randrange(len(answer) - LONGEST)
        add("recitation", prompt + answer[:begun], rng.randint(1, LONGEST))
        for at in (2 * turn, 2 * turn + 1):
            (needle,) = text.needle_questions(DISTANCES[at % len(DISTANCES)], 1, seed + at)
            answer = ids(needle.answer)
            add("needle", ids(needle.prompt), rng.choice((1, len(answer), LONGEST)))
            story = ids(stories[at // len(SHARED)].prompt)
            add_question("shared prefix", story[: SHARED[at % len(SHARED)]], next(facts))
    del made[count - ends :]
    for end in range(ends):
        prompt, answer = recited[end % len(recited)]
        add(BURST, (prompt + answer)[: PAGE - 6 - end], LONGEST)
    return made


def pages(texts: Iterable[Sequence[int]]) -> set[tuple[int, ...]]:
    """The whole pages of token sequences, each with all that comes before it."""
    return {tuple(text[:end]) for text in texts for end in range(PAGE, len(text) + 1, PAGE)}


def jobs(asked: Sequence[Case], count: int, burst: int, seed: int) -> list[Job]:
    """`count` requests in random order, each case equally often; one of ABORTED is aborted, by the
    client in turn with /abort_request. In the middle `burst` requests follow each other that are
    let in with a page each, and soon need another: the scheduler has to retract some."""
    rng = random.Random(seed)
    ends = [at for at, case in enumerate(asked) if case.kind == BURST]
    order = [at % (len(asked) - len(ends)) for at in range(count - burst)]
    rng.shuffle(order)
    middle = len(order) // 2
    order[middle:middle] = [ends[at % len(ends)] for at in range(burst)]
    made = [Job(case) for case in order]
    long = [at for at, case in enumerate(order) if asked[case].count >= 8]
    for turn, at in enumerate(rng.sample(long, count // ABORTED)):
        how = ("client", "abort_request")[turn % 2]
        made[at] = Job(order[at], how, rng.randint(1, asked[order[at]].count))
    return made


def far_prompt(trained: Any, count: int) -> list[int]:
    """`count` tokens: the end of many stories, the last of which is asked about."""
    tokens: list[int] = []
    seed = 0
    while len(tokens) < count:
        tokens = trained.ids(trained.nano_text.needle_questions(256, 1, seed)[0].prompt) + tokens
        seed += 1
    return tokens[-count:]


# ---- what is compared ----


@dataclass
class Tally:
    """Answers under load against those of the idle server."""

    answers: int = 0
    equal: int = 0  # token for token
    tokens: int = 0
    checked: int = 0  # tokens that are equal, before any near tie
    logprob: float = 0.0  # the largest difference among them
    ties: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)

    def add(self, case: Case, job: Job, said: Reply | str, alone: Reply) -> None:
        """said: or what went wrong instead. An aborted answer may end anywhere from job.stop on,
        and is compared as far as `alone` goes."""
        self.answers += 1
        facts = {"kind": case.kind, "prompt tokens": len(case.prompt), "aborted by": job.how}
        if isinstance(said, str):
            self.wrong.append(facts | {"error": said})
            return
        length = min(len(said.tokens), case.count)
        if length < (job.stop if job.how else case.count):
            self.wrong.append(facts | {"error": f"{length} tokens of {job.stop or case.count}"})
        pairs = zip(said.tokens[:length], alone.tokens, strict=False)
        step = next((at for at, (one, other) in enumerate(pairs) if one != other), length)
        self.tokens, self.checked = self.tokens + length, self.checked + step
        for one, other in zip(said.logprobs[:step], alone.logprobs, strict=False):
            self.logprob = max(self.logprob, abs(one - other))
        if step == length:
            self.equal += 1
            return
        gap = alone.gaps[step]
        facts |= {"step": step, "gap": gap, "said": said.tokens[step], "alone": alone.tokens[step]}
        facts |= {"retractions": said.meta.get("num_retractions", 0), "cached": said.cached}
        (self.ties if gap < TIE else self.wrong).append(facts)

    def smallest_gap(self) -> float | None:
        """Of the idle server, at a step where an answer parted."""
        return min((one["gap"] for one in self.ties + self.wrong if "gap" in one), default=None)


def spread(found: Sequence[Reply], alone: Sequence[Reply]) -> dict[str, Any]:
    """How far answers are from those that were computed alone."""
    each = [compared(one, other) for one, other in zip(found, alone, strict=True)]
    return {
        "ok": all(one["ok"] for one in each),
        "answers": len(each),
        "alike": sum(one["alike"] == one["tokens"] for one in each),
        "logprob": max(one["logprob"] for one in each),
    }


def identical(one: Sequence[Reply], other: Sequence[Reply]) -> bool:
    """Token ids and log-probabilities, the second best token's included, bit for bit."""
    return len(one) == len(other) and all(
        (a.tokens, a.logprobs, a.gaps) == (b.tokens, b.logprobs, b.gaps)
        for a, b in zip(one, other, strict=True)
    )
