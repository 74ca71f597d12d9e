"""sgl.Engine, SGLang inside a program of the user's, serves with our classes as well."""

import json
import os
import subprocess
import sys
from pathlib import Path

import oracle
from agreement import Comparison, ties
from serving import Reply

COUNT = 16
PROGRAM = """
import json, sys
import sglang as sgl

if __name__ == "__main__":
    engine = sgl.Engine(
        model_path=sys.argv[1], device="cpu", dtype="float32", max_total_tokens=8192,
        context_length=2048, max_running_requests=4, swa_full_tokens_ratio=0.5,
        skip_server_warmup=True, log_level="error",
    )
    replies = engine.generate(
        input_ids=json.loads(sys.argv[2]),
        sampling_params={"temperature": 0, "max_new_tokens": int(sys.argv[3]), "ignore_eos": True},
        return_logprob=True,
    )
    (state,) = engine.get_server_info()["internal_states"]
    found = [[r["output_ids"], [l[0] for l in r["meta_info"]["output_token_logprobs"]]]
             for r in replies]
    print("RESULT " + json.dumps([found, state["sglang_dsv4"]["model_class"]]))
    engine.shutdown()
"""


def test_engine_equals_the_reference(
    checkpoint: Path, expected: tuple[oracle.Generation, ...], tmp_path: Path
) -> None:
    wanted = [g for g in expected if len(g.prompt) in (3, 129, 300)]
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    prompts = json.dumps([generation.prompt for generation in wanted])
    result = subprocess.run(
        [sys.executable, str(script), str(checkpoint), prompts, str(COUNT)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, result.stdout[-2000:] + result.stderr[-4000:]
    found, served = json.loads(lines[0].removeprefix("RESULT "))
    assert served == "sglang_dsv4.served.deepseek_v4.DeepseekV4ForCausalLM"
    comparison = Comparison()
    for (tokens, logprobs), generation in zip(found, wanted, strict=True):
        name = f"prompt of {len(generation.prompt)}"
        first = oracle.Generation(
            generation.prompt,
            generation.tokens[:COUNT],
            generation.logprobs[:COUNT],
            generation.logit_gaps[:COUNT],
            generation.index_gaps[:COUNT],
            generation.router_gaps[:COUNT],
        )
        reply = Reply(tuple(tokens), tuple(logprobs), (), 0, {})
        comparison.add(name, reply, first, ties(first))
    comparison.check()
