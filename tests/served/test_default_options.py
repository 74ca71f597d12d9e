"""The options that the README names for a CPU, and nothing else: no request waits for ever."""

from collections.abc import Callable
from pathlib import Path

import oracle
from serving import Server


def test_a_second_prompt_that_shares_a_page(serve: Callable[..., Server], checkpoint: Path) -> None:
    """A small pool, of which the host would give a tenth to window rows: less than a chunk."""
    story = oracle.story()
    defaults = {"swa_full_tokens_ratio": None, "chunked_prefill_size": None}
    defaults |= {"context_length": None, "max_running_requests": None}
    with serve(checkpoint, forked=False, **defaults) as server:
        server.generate(story[:300], 4)
        reply = server.generate(story[:1400], 4)
        assert len(reply.tokens) == 4 and reply.cached == 256
        assert "window rows instead of" in server.log.read_text()
