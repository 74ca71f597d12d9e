"""The join with SGLang: hooks fit, and one that does not fit stops the process."""

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dsv4 import options, plugin
from sglang_dsv4.backends import Machine, choose


def test_every_hook_fits_the_pinned_sglang() -> None:
    results = plugin.self_check()
    assert [name for name, _, _ in results] == [
        "config_class",
        "model_class",
        "attention_backend",
        "kv_pool",
        "pool_sizing",
        "model_override",
        "served_state",
        "request_check",
        "penalties",
    ]
    assert all(fits for _, fits, _ in results), results


# Each breaks one seam of the host before our plugin is loaded, as another version would.
BREAKS = {
    "model_class": "from sglang.srt.models import registry as m\n"
    "m.ModelRegistry.resolve_model_cls = lambda name, strict: None",
    "request_check": "from sglang.srt.managers import tokenizer_manager as m\n"
    "m.TokenizerManager._validate_one_request = lambda self, obj: None",
    "penalties": "from sglang.srt.sampling.penaltylib import repetition_penalty as m\n"
    "m.apply_scaling_penalties = lambda logits: None",
    "config_class": "from sglang.srt.utils.hf_transformers import common as m\n"
    "del m._CONFIG_REGISTRY['deepseek_v4']",
    "kv_pool": "from sglang.srt.mem_cache import deepseek_v4_memory_pool as m\n"
    "m.DeepSeekV4TokenToKVPool._make_kv_pool = lambda self, size: None",
    "pool_sizing": "from sglang.srt.model_executor import pool_configurator as m\n"
    "m.DSV4PoolConfigurator._compressed_bytes_per_full_token = lambda self: 0",
    "attention_backend": "from sglang.srt.layers.attention import attention_registry as m\n"
    "m.register_attention_backend = lambda name, extra: None",
    "model_override": "from sglang.srt.arg_groups import overrides as m\n"
    "m.register_model_override = lambda arch, extra: None",
    "served_state": "from sglang.srt.managers.scheduler_components import internal_state as m\n"
    "del m.SchedulerInternalStateController",
}


# Imports SGLang once, then breaks each seam in a process of its own.
PROGRAM = """
import json, os, sys
from pathlib import Path
from sglang.srt.plugins import load_plugins
import sglang.srt.managers.scheduler  # before the forks, so that none has to
breaks, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
for hook, code in breaks.items():
    child = os.fork()
    if child == 0:
        said = os.open(folder / hook, os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        exec(code)
        load_plugins()
        print("still alive", flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(json.dumps([hook, os.waitstatus_to_exitcode(status)]))
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """hook -> exit status and output of a process whose SGLang is broken there."""
    folder = tmp_path_factory.mktemp("breaks")
    command = [sys.executable, "-c", PROGRAM, json.dumps(BREAKS), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    statuses = dict(json.loads(line) for line in result.stdout.splitlines() if line[:2] == '["')
    return {hook: (statuses[hook], (folder / hook).read_text()) for hook in BREAKS}


@pytest.mark.parametrize("hook", BREAKS)
def test_a_seam_that_changed_stops_the_process(ends, hook: str) -> None:
    """SGLang catches Exception around plugins and would go on with its own model."""
    status, said = ends[hook]
    assert status != 0 and "still alive" not in said
    assert f"hook {hook!r} does not fit SGLang 0.5.23" in said, said[-2000:]
    assert "sglang-dsv4 0.1.0" in said


def test_the_backend_refuses_what_is_not_ours() -> None:
    class Runner:
        model = object()

    with pytest.raises(SystemExit, match="the runner holds object"):
        plugin._create_backend(Runner())


@pytest.mark.parametrize(
    ("option", "value"), [("enable_dp_attention", True), ("attn_dp_size", 2), ("moe_dp_size", 2)]
)
def test_ranks_with_requests_of_their_own_are_refused(option: str, value: Any) -> None:
    """So no rank waits for others while it has no request."""
    taken = dict(page_size=None, kv_cache_dtype="auto", dtype="auto", attention_backend=None)
    arguments = taken | {"load_format": "auto"} | options.UNSUPPORTED
    assert options.why_refused(SimpleNamespace(**arguments), plugin.BACKEND) is None
    told = options.why_refused(SimpleNamespace(**arguments | {option: value}), plugin.BACKEND)
    assert told and told.startswith(f"--{option.replace('_', '-')} (given: {value}) is not")


def test_an_idle_batch_goes_through_the_backend() -> None:
    """No request and no token, as a rank has them that waits for others: nothing to do, at once."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from sglang_dsv4.attention.backend import DSV4Backend
    from sglang_dsv4.attention.metadata import Metadata

    backend = DSV4Backend.__new__(DSV4Backend)  # what the host would give it stands below
    backend.window, backend.caches = 128, (SimpleNamespace(window_rows=512),)
    backend.ops = choose(Machine.probe("cpu"))
    backend.token_to_kv_pool = SimpleNamespace(full_to_swa_index_mapping=torch.zeros(513).long())
    backend.req_to_token_pool = SimpleNamespace(req_to_token=torch.zeros(9, 1024).int())
    nothing = torch.zeros(0, dtype=torch.int64)
    forward = SimpleNamespace(
        forward_mode=ForwardMode.IDLE,
        req_pool_indices=nothing,
        positions=nothing,
        seq_lens=nothing,
    )
    backend.init_forward_metadata_in_graph(forward)
    meta = backend.metadata
    assert isinstance(meta, Metadata)
    assert meta.positions.shape == meta.window_store.shape == meta.csa.entry.shape == (0,)
    assert meta.window.rows.shape == (0, 128) and meta.hca_list.rows.shape[0] == 0
    assert meta.hca.row.shape == (0,) and meta.entries.page_table.shape == (0, 4)
