"""Texts that the trained model knows by heart: hundreds of tokens in which nothing may slip."""

from collections.abc import Iterable

import pytest

import nano
from serving import Server

RECITATIONS = nano.nano_text.recitation_questions()
LONG = 400  # tokens; every recitation is longer


@pytest.mark.parametrize(("temperature", "numbers"), [(0, range(len(RECITATIONS))), (1, [3])])
def test_recitations(server: Server, temperature: float, numbers: Iterable[int]) -> None:
    """Hundreds of tokens without an error, then the end, by itself; and no loop on the way."""
    questions = [RECITATIONS[number] for number in numbers]
    replies = nano.ask_all(server, questions, temperature)
    for question, reply in zip(questions, replies, strict=True):
        text = nano.ids(question.answer)
        allowed = nano.repeats(text)
        found = nano.repeats(reply.tokens).items()
        loops = [run for run, count in found if count > max(1, allowed[run])]
        assert not loops, [nano.tokenizer().decode(list(run)) for run in loops]
        right = nano.common_prefix(reply.tokens, text)
        assert right >= LONG, nano.tokenizer().decode(list(reply.tokens[max(0, right - 20) :]))
        assert list(reply.tokens) == text
        assert reply.meta["finish_reason"] == {"type": "stop", "matched": nano.END_ID}
