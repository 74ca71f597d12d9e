"""Entry point of SGLang's plugin framework: takes over DeepSeek-V4, or stops the process.

SGLang logs a plugin's exception and goes on with its built-in model. A server that silently is not
ours would be worse than none, so every failure here becomes SystemExit, which it does not catch.
"""

import inspect
import json
import logging
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sglang_dsv4 import options
from sglang_dsv4.settings import Settings, set_host_environment

logger = logging.getLogger(__name__)

ARCHITECTURE = "DeepseekV4ForCausalLM"
BACKEND = "sglang_dsv4"
SERVED_PACKAGE = "sglang_dsv4.served"
# The host's parsers of this model's answers, none of which it takes by itself.
PARSERS = {
    "tool_call_parser": ("deepseekv4", "tool calls"),
    "reasoning_parser": ("deepseek-v4", "reasoning"),
}


def register() -> None:
    """Called by SGLang in every process before it parses its arguments."""
    try:
        set_host_environment(SERVED_PACKAGE)
        for hook in HOOKS:
            _apply(hook)
    except SystemExit:
        raise
    except BaseException as error:
        _stop("register", f"{type(error).__name__}: {error}")


def _stop(hook: str, reason: str) -> None:
    raise SystemExit(
        f"sglang-dsv4 {version('sglang-dsv4')}: hook {hook!r} does not fit SGLang "
        f"{version('sglang')}: {reason}\n"
        "The server stops here, because SGLang would go on with its built-in model. Install the "
        "SGLang version that this plugin pins, or set SGLANG_PLUGINS=__none__ for that model."
    )


def _apply(hook: Callable[[], None]) -> None:
    try:
        hook()
    except SystemExit:
        raise
    except BaseException as error:
        _stop(hook.__name__.lstrip("_"), f"{type(error).__name__}: {error}")


def _expect(function: Callable[..., Any], *parameters: str) -> None:
    """Raise TypeError unless `function` has exactly these parameters."""
    found = tuple(inspect.signature(function).parameters)
    if found != parameters:
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(f"{name} takes {found}, expected {parameters}")


def _model_class() -> None:
    """The model class; a registry that was filled earlier, as in `sgl.Engine`, is corrected."""
    from sglang.srt.models.registry import ModelRegistry

    _expect(ModelRegistry.resolve_model_cls, "architectures")
    from sglang_dsv4.served.deepseek_v4 import EntryClass

    ModelRegistry.models[ARCHITECTURE] = EntryClass
    found, _ = ModelRegistry.resolve_model_cls([ARCHITECTURE])
    if found is not EntryClass:
        raise TypeError(f"the registry answers {found.__module__}.{found.__name__}")


def _config_class() -> None:
    """Both dialects of config.json, seen by the host's own ModelConfig."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.utils.hf_transformers import common

    from sglang_dsv4.host import HostConfig

    if "deepseek_v4" not in common._CONFIG_REGISTRY:
        raise KeyError("deepseek_v4 is not in the host's config registry")
    common._CONFIG_REGISTRY["deepseek_v4"] = HostConfig
    native = ModelConfig._parse_quant_hf_config
    _expect(native, "self")

    def parse(self: Any) -> Any:
        # Not hf_quant_config.json either: formats are decided per tensor.
        return None if isinstance(self.hf_config, HostConfig) else native(self)

    ModelConfig._parse_quant_hf_config = parse


def _attention_backend() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    _expect(register_attention_backend, "name")
    add_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(_create_backend)


def _create_backend(runner: Any) -> Any:
    """The factory that SGLang calls: everything it has built so far must be ours."""
    from sglang_dsv4.attention.backend import DSV4Backend
    from sglang_dsv4.served.deepseek_v4 import DeepseekV4ForCausalLM

    if not isinstance(runner.model, DeepseekV4ForCausalLM):
        _stop("model_class", f"the runner holds {type(runner.model).__name__}")
    _place_new_tokens(runner.model.ops)
    return DSV4Backend(runner)


def _place_new_tokens(ops: Any) -> None:
    """No hook: where it does not fit, SGLang's own function serves as well, only slower."""
    try:
        from sglang_dsv4 import host_slots

        reason = host_slots.register(ops)
    except (AttributeError, ImportError, OSError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
    if reason is None:
        provider = ops.providers["decode_slots"]
        logger.info("sglang-dsv4: new tokens of a decode are placed by decode_slots: %s", provider)
    else:
        logger.warning("sglang-dsv4: SGLang's own function places new tokens: %s", reason)


def _kv_pool() -> None:
    from sglang.srt.mem_cache import deepseek_v4_memory_pool, kv_cache_configurator

    from sglang_dsv4.host import KVPool

    native = KVPool.__mro__[1]
    _expect(
        native._make_kv_pool,
        *("self", "size", "page_size", "dtype", "layer_num", "device", "enable_memory_saver"),
        *("global_page_size", "cls", "kv_layout"),
    )
    _expect(
        native._make_indexer_pool,
        *("self", "size", "page_size", "dtype", "index_head_dim", "layer_num", "device"),
        *("enable_memory_saver", "force_fp4", "global_page_size", "index_k_page8"),
    )
    _rebind("DeepSeekV4TokenToKVPool", KVPool, deepseek_v4_memory_pool, kv_cache_configurator)


def _pool_sizing() -> None:
    from sglang.srt.model_executor import pool_configurator

    from sglang_dsv4.host import PoolSizing

    native = PoolSizing.__mro__[1]
    _expect(native.__init__, "self", "kvc")
    _expect(native._get_paged_kv_bytes_per_token, "self", "compress_ratio")
    _expect(native._compressed_bytes_per_full_token, "self", "ratio")
    _rebind("DSV4PoolConfigurator", PoolSizing, pool_configurator)


def _rebind(name: str, replacement: type, *modules: Any) -> None:
    """Put our subclass in the place of the host's class in the modules that use it."""
    for module in modules:
        if not issubclass(replacement, getattr(module, name)):
            raise TypeError(f"{module.__name__}.{name} is not the class that ours extends")
        setattr(module, name, replacement)


def _model_override() -> None:
    import sglang.srt.arg_groups.model_overrides  # noqa: F401  the built-in one registers first
    from sglang.srt.arg_groups.overrides import register_model_override

    _expect(register_model_override, "architecture")
    register_model_override(ARCHITECTURE)(_override)


def _override(server_args: Any, hf_config: Any) -> dict[str, Any]:
    """Server arguments that this model needs; refuses those of the user's that it cannot honour.

    `server_args` still holds the user's own values: the host keeps what it declares apart.
    """
    if hf_config.model_type != "deepseek_v4":
        raise _refusal(
            f"it serves model_type deepseek_v4, found {hf_config.model_type!r}; "
            "set SGLANG_PLUGINS=__none__ to serve it with SGLang's built-in model."
        )
    if reason := options.why_refused(server_args, BACKEND):
        raise _refusal(reason)
    _check_settings(server_args.ep_size)
    _check_checkpoint(server_args)
    _warn_of_missing_parsers(server_args)
    return {
        "attention_backend": BACKEND,
        "kv_cache_dtype": "bfloat16",
        "moe_runner_backend": "triton",
    }


def _refusal(reason: str) -> SystemExit:
    return SystemExit(f"sglang-dsv4 {version('sglang-dsv4')} cannot start: {reason}")


def _check_settings(expert_parallel: int) -> None:
    """Our own switches, before a process is started; what they name may still not run here."""
    from sglang_dsv4 import backends, precision

    settings = Settings.read()
    try:
        precision.parse(settings.precision)
        backends.parse(settings.ops, expert_parallel)
    except ValueError as error:
        raise _refusal(str(error)) from None


def _check_checkpoint(server_args: Any) -> None:
    """What `sglang-dsv4 inspect` asks, of a local checkpoint, before any process is started or
    memory taken."""
    import torch

    from sglang_dsv4 import host, inspection, precision

    folder = Path(server_args.model_path)
    if not folder.is_dir():
        return
    device, memory = host.device_memory(server_args)
    chosen = precision.parse(Settings.read().precision)
    wanted = inspection.Deployment(
        tensor_parallel=server_args.tp_size,
        expert_parallel=server_args.ep_size,
        run=torch.float32 if server_args.dtype in ("float32", "float") else torch.bfloat16,
        device=memory,
        device_name=f"this machine's {device.upper()}",
        shared=device == "cpu",
        fraction=1.0,  # refuses only what no sizing of the cache can save
        context=1,
        routed_experts=chosen.routed_experts,
        linears=chosen.linears,
    )
    headers = server_args.load_format in host.WITH_HEADERS
    try:
        overrides = json.loads(server_args.json_model_override_args)
        found = inspection.Inspection(folder, wanted, overrides=overrides, headers=headers)
    except ValueError as error:
        raise _refusal(f"{folder} cannot be served:\n{error}") from None
    if found.refusals:
        raise _refusal("\n".join([f"{folder} cannot be served:", *found.refusals]))
    logger.info("sglang-dsv4 checkpoint: %s", found.told())
    for line in found.warnings:
        logger.warning("sglang-dsv4 checkpoint: %s", line)


def _warn_of_missing_parsers(server_args: Any) -> None:
    """What is not parsed reaches the client as text in `content`, and nothing there says why."""
    for field, (parser, what) in PARSERS.items():
        if getattr(server_args, field) is None:
            option = "--" + field.replace("_", "-")
            logger.warning(
                "sglang-dsv4: %s is not given, so a chat's answers hold %s as plain text. To have "
                "it parsed, add %s %s.",
                *(option, what, option, parser),
            )


def _served_state() -> None:
    """The scheduler tells which classes serve, so that clients and tests can read it."""
    from sglang.srt.managers.scheduler_components import internal_state

    owner = internal_state.SchedulerInternalStateController
    _expect(owner._add_topology, "self", "state")
    native = owner._add_topology

    def add_topology(self: Any, state: dict[str, Any]) -> None:
        native(self, state)
        runner = self.scheduler.tp_worker.model_runner
        state["sglang_dsv4"] = {
            "version": version("sglang-dsv4"),
            "model_class": _path(runner.model),
            "attention_backend": _path(runner.attn_backend),
            "kv_pool": _path(runner.token_to_kv_pool),
            "rows": str(runner.token_to_kv_pool.dtype).removeprefix("torch."),
            "ops": dict(runner.model.ops.providers),
            "nan_index_scores": runner.attn_backend.nan_watch.counts(),
        }

    owner._add_topology = add_topology


def _request_check() -> None:
    """Requests that the model cannot answer are refused (400) before they reach the scheduler."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    native = TokenizerManager._validate_one_request
    _expect(native, "self", "obj", "input_ids")

    def validate(self: Any, obj: Any, input_ids: list[int] | None) -> None:
        native(self, obj, input_ids)
        vocab_size = self.model_config.vocab_size
        strangers = [token for token in input_ids or () if not 0 <= token < vocab_size]
        if strangers:
            raise ValueError(f"token id {strangers[0]} is not in 0..{vocab_size - 1}")
        for field in ("input_embeds", "positional_embed_overrides"):
            if getattr(obj, field, None) is not None:
                raise ValueError(f"{field}: the hash-routed layers need token ids, send input_ids")

    TokenizerManager._validate_one_request = validate


def _penalties() -> None:
    """Repetition penalties uncompiled: the host compiles three operators at the first request that
    wants one, which stalls a CPU, and ends the server where there is no C++ compiler.
    """
    from sglang.srt.sampling import sampling_batch_info
    from sglang.srt.sampling.penaltylib import repetition_penalty

    plain = inspect.unwrap(repetition_penalty.apply_scaling_penalties)
    _expect(plain, "logits", "scaling_penalties")
    assert hasattr(sampling_batch_info, "apply_scaling_penalties")
    for module in (repetition_penalty, sampling_batch_info):
        module.apply_scaling_penalties = plain


def _path(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


HOOKS = (
    _config_class,
    _model_class,
    _attention_backend,
    _kv_pool,
    _pool_sizing,
    _model_override,
    _served_state,
    _request_check,
    _penalties,
)


def self_check() -> list[tuple[str, bool, str]]:
    """Whether each hook fits the installed SGLang: (hook, fits, reason), for `doctor`."""
    results = []
    for hook in HOOKS:
        name = hook.__name__.lstrip("_")
        try:
            hook()
            results.append((name, True, "fits"))
        except BaseException as error:
            results.append((name, False, f"{type(error).__name__}: {error}"))
    return results
