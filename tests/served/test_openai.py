"""The OpenAI endpoints, the frontend language and bad requests, with a vendor-named checkpoint."""

import json
import subprocess
import sys
import urllib.error
from collections.abc import Callable, Iterator

import openai
import pytest

from serving import Server

STORY = "The keeper counted the ships and wrote each of them into his book. " * 8  # > 512 tokens
QUESTION = [
    {"role": "system", "content": STORY},
    {"role": "user", "content": "What did the keeper write?"},
]


@pytest.fixture(scope="module")
def server(
    serve: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A BF16 checkpoint as the vendor names it, served as it is."""
    folder = tmp_path_factory.mktemp("vendor") / "tiny"
    command = [sys.executable, "-m", "sglang_dsv4.cli", "make-tiny", str(folder)]
    options = ["--preset", "tiny", "--names", "vendor", "--dtype", "bfloat16", "--seed", "0"]
    subprocess.run([*command, *options], check=True, capture_output=True)
    with serve(folder, max_total_tokens="4096") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_rows_are_bf16_by_default(server: Server) -> None:
    state = server.state()
    assert state["sglang_dsv4"]["model_class"].startswith("sglang_dsv4.")
    assert state["kv_cache_dtype"] == "bfloat16" and state["dtype"] == "auto"
    assert state["moe_runner_backend"] == "triton"
    assert state["memory_usage"]["kvcache"] > 0


def test_completion_twice(client: openai.OpenAI, server: Server) -> None:
    server.flush()
    replies = [
        client.completions.create(model="m", prompt=STORY, max_tokens=12, temperature=0)
        for _ in range(2)
    ]
    assert replies[0].choices[0].text and replies[0].usage.completion_tokens == 12
    assert replies[0].choices[0].text == replies[1].choices[0].text
    cached = [reply.usage.prompt_tokens_details for reply in replies]
    assert not cached[0] or not cached[0].cached_tokens
    assert cached[1].cached_tokens == replies[1].usage.prompt_tokens // 256 * 256


def test_streamed_completion_is_the_same(client: openai.OpenAI) -> None:
    request = dict(model="m", prompt=STORY, max_tokens=16, temperature=0)
    whole = client.completions.create(**request).choices[0]
    parts = list(client.completions.create(**request, stream=True))
    assert len(parts) > 4
    assert "".join(part.choices[0].text for part in parts) == whole.text
    assert parts[-1].choices[0].finish_reason == whole.finish_reason == "length"


def test_chat_and_its_stream(client: openai.OpenAI, server: Server) -> None:
    request = dict(model="m", messages=QUESTION, max_tokens=16, temperature=0)
    whole = client.chat.completions.create(**request)
    assert whole.choices[0].message.role == "assistant" and whole.choices[0].message.content
    # One token a byte, the begin token, and two role tokens: rendered by DeepSeek's own encoder.
    assert whole.usage.prompt_tokens > len(STORY)
    parts = client.chat.completions.create(**request, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    again = client.chat.completions.create(**request)
    assert again.usage.prompt_tokens_details.cached_tokens >= 512


def test_frontend_program(server: Server) -> None:
    """gen and fork of SGLang's frontend language; forks share the story's pages."""
    program = """
import json, sys
import sglang as sgl

@sgl.function
def ask(s, story):
    s += story
    s += "Q: ships?" + sgl.gen("ships", max_tokens=6, temperature=0)
    forks = s.fork(2)
    for i, f in enumerate(forks):
        f += f" Tip {i}:" + sgl.gen("tip", max_tokens=5, temperature=0)
    forks.join()
    s += " Tips: " + forks[0]["tip"] + forks[1]["tip"] + sgl.gen("end", max_tokens=4, temperature=0)

sgl.set_default_backend(sgl.RuntimeEndpoint(sys.argv[1]))
states = ask.run_batch([{"story": sys.argv[2]}] * 2)
print(json.dumps([[s["ships"], s["end"], s.text()] for s in states]))
"""
    server.flush()
    result = subprocess.run(
        [sys.executable, "-c", program, server.url, STORY],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    first, second = json.loads(result.stdout.splitlines()[-1])
    assert first == second and all(first)
    assert first[2].startswith(STORY) and " Tips: " in first[2]
    prompt = list(STORY.encode())
    assert server.request("/generate", {"text": STORY, "sampling_params": {"max_new_tokens": 1}})[
        "meta_info"
    ]["cached_tokens"] == len(prompt) // 256 * 256


def test_prompt_longer_than_the_context(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="longer than the model's context length"):
        client.completions.create(model="m", prompt=STORY * 8, max_tokens=4)
    reply = client.completions.create(model="m", prompt="still here", max_tokens=2)
    assert reply.usage.completion_tokens == 2


@pytest.mark.parametrize(
    "asked",
    [
        {"input_ids": [5, 384]},
        {"input_ids": [5, -1]},
        {"input_ids": [5, 1 << 40]},
        {"input_ids": []},
        {"input_embeds": [[0.1] * 128] * 5},
    ],
    ids=["id too large", "negative id", "id too large for 32 bits", "no ids", "embeddings"],
)
def test_impossible_requests_do_not_end_the_server(server: Server, asked: dict) -> None:
    with pytest.raises(urllib.error.HTTPError, match="400"):
        server.request("/generate", {**asked, "sampling_params": {"max_new_tokens": 2}})
    assert len(server.generate([20, 21, 22], 2).tokens) == 2


def test_more_requests_than_the_cache_holds(client: openai.OpenAI, server: Server) -> None:
    """The pool holds 4,096 tokens: of 9 requests of 600 tokens some must wait, and none is lost."""
    server.flush()
    prompts = [(list(range(20 + n, 270)) * 3)[:600] for n in range(9)]
    replies = server.generate_all(prompts, 8, concurrency=9)
    assert [len(reply.tokens) for reply in replies] == [8] * 9
