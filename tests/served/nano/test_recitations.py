"""Texts that the trained model knows by heart: hundreds of tokens in which nothing may slip."""

import pytest

import nano
from serving import Server

RECITATIONS = nano.nano_text.recitation_questions()
LONG = 400  # tokens; every recitation is longer


@pytest.mark.parametrize(
    ("number", "temperature"),
    [*((number, 0) for number in range(len(RECITATIONS))), (3, 1)],
)
def test_recitations(server: Server, number: int, temperature: float) -> None:
    """Hundreds of tokens without an error, then the end, by itself; and no loop on the way."""
    question = RECITATIONS[number]
    text = nano.ids(question.answer)
    reply = nano.ask(server, question, temperature)
    allowed = nano.repeats(text)
    loops = {run: n for run, n in nano.repeats(reply.tokens).items() if n > max(1, allowed[run])}
    assert not loops, [nano.tokenizer().decode(list(run)) for run in loops]
    right = nano.common_prefix(reply.tokens, text)
    assert right >= LONG, nano.tokenizer().decode(list(reply.tokens[max(0, right - 20) :]))
    assert list(reply.tokens) == text
    assert reply.meta["finish_reason"] == {"type": "stop", "matched": nano.END_ID}
