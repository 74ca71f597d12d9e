"""SGLANG_PLUGINS=__none__ gives SGLang's own model back; without it, everything is ours."""

import json
import os
import subprocess
import sys

import pytest

# What SGLang does before it parses arguments, then what it would build.
PROBE = """
import json
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups import model_override_base
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.model_executor import pool_configurator
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY
name = lambda cls: f"{cls.__module__}.{cls.__qualname__}"
print(json.dumps({
    "model": name(ModelRegistry.resolve_model_cls(["DeepseekV4ForCausalLM"])[0]),
    "pool": name(kv_cache_configurator.DeepSeekV4TokenToKVPool),
    "sizing": name(pool_configurator.DSV4PoolConfigurator),
    "config": name(_CONFIG_REGISTRY["deepseek_v4"]),
    "backend": "sglang_dsv4" in ATTENTION_BACKENDS,
    "overrides": [f.__module__ for f in
                  model_override_base._MODEL_OVERRIDE_FNS["DeepseekV4ForCausalLM"]],
}))
"""
NATIVE = {
    "model": "sglang.srt.models.deepseek_v4.DeepseekV4ForCausalLM",
    "pool": "sglang.srt.mem_cache.deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool",
    "sizing": "sglang.srt.model_executor.pool_configurator.DSV4PoolConfigurator",
    "config": "sglang.srt.utils.hf_transformers.common._DeepseekV4ConfigAlias",
    "backend": False,
    "overrides": ["sglang.srt.arg_groups.model_overrides.deepseek_v4"],
}
OURS = {
    "model": "sglang_dsv4.served.deepseek_v4.DeepseekV4ForCausalLM",
    "pool": "sglang_dsv4.host.KVPool",
    "sizing": "sglang_dsv4.host.PoolSizing",
    "config": "sglang_dsv4.host.HostConfig",
    "backend": True,
    "overrides": [*NATIVE["overrides"], "sglang_dsv4.plugin"],
}


@pytest.mark.parametrize(
    ("plugins", "expected"), [("__none__", NATIVE), ("dsv4,other", OURS)]
)
def test_whose_classes_would_serve(plugins: str, expected: dict[str, object]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=os.environ | {"SGLANG_PLUGINS": plugins},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads(result.stdout.splitlines()[-1]) == expected
