"""One server of the trained model for all tests of this folder: BF16, with SGLang's parsers."""

from collections.abc import Callable, Iterator

import openai
import pytest

import nano
from serving import Server

SEED = "20"


@pytest.fixture(scope="session")
def server(serve: Callable[..., Server]) -> Iterator[Server]:
    options = {"tool_call_parser": "deepseekv4", "reasoning_parser": "deepseek-v4"}
    # JSON allows any white space, and a small model that has no word for a key goes on with it.
    options["constrained_json_disable_any_whitespace"] = ""
    with serve(nano.FOLDER, random_seed=SEED, **options) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
