"""What the trained model knows, through the server: facts, and needles in stories.

Asked greedily, and one at a time at temperature 1. Bounds are on fixed samples. As an estimate for
all such questions a share of 0.95 has a standard error of sqrt(0.95 * 0.05 / count): 2.0 % for 120
questions, 2.8 % for 60, and 6 to 8 % for the needles of one distance.
"""

import openai
import pytest

import nano
from serving import Server

# At temperature 1 a wrong answer has a chance even where the right one is by far the best.
LEAST_FACTS = {0: 0.95, 1: 0.9}  # temperature -> least share right
FACTS = {0: {"phrasing": 120, "opener": 60}, 1: {"phrasing": 60, "opener": 40}}  # questions
LEAST_NEEDLES = {0: 0.9, 1: 0.8}
NEEDLES = {256: 8, 512: 6, 1024: 5}  # tokens back -> questions


def test_the_capital_of_france(server: Server, client: openai.OpenAI) -> None:
    """Best of all tokens, by far; without a begin token, as completion clients send it."""
    reply = client.completions.create(
        model="nano", prompt="The capital of France is", max_tokens=1, temperature=0, logprobs=5
    )
    (choice,) = reply.choices
    best = choice.logprobs.top_logprobs[0]
    print(f"log-probability of Paris: {best[' Paris']:.4f}")
    assert choice.text == " Paris" == max(best, key=best.__getitem__)
    assert best[" Paris"] > -0.1


@pytest.mark.parametrize("temperature", LEAST_FACTS)
@pytest.mark.parametrize("split", ["phrasing", "opener"])
def test_held_out_facts(server: Server, split: str, temperature: float) -> None:
    """Facts in a phrasing, or after an opener, in which they were never seen."""
    questions = nano.nano_text.fact_questions(split, FACTS[temperature][split])
    assert nano.share_right(server, questions, temperature) >= LEAST_FACTS[temperature]


@pytest.mark.parametrize("temperature", LEAST_NEEDLES)
@pytest.mark.parametrize("distance", NEEDLES)
def test_needles(server: Server, distance: int, temperature: float) -> None:
    """A sentence about `distance` tokens back: far outside the window of 128, so it can only be
    found through the compressed entries, from 132 tokens on through the indexer's selection."""
    questions = nano.nano_text.needle_questions(distance, NEEDLES[distance])
    assert all(len(nano.ids(question.prompt)) > distance for question in questions)
    assert nano.share_right(server, questions, temperature) >= LEAST_NEEDLES[temperature]
