"""SGLang's options that this version cannot honour, and says so instead of ignoring them."""

from typing import Any

PAGE_SIZE = 256
ROW_DTYPES = ("auto", "bf16", "bfloat16")
RUN_DTYPES = ("auto", "bfloat16", "float32", "float")
# Values of --load-format with which SGLang hands a checkpoint's tensors to the model, or dummies;
# the others fill parameters as they find them, which are not those of a checkpoint.
LOAD_FORMATS = (
    *("auto", "safetensors", "pt", "npcache", "mistral", "dummy"),
    *("fastsafetensors", "instanttensor", "runai_streamer"),
)

# What this version cannot honour -> SGLang's default, all that it accepts: some would do nothing.
UNSUPPORTED = {
    "attn_cp_size": 1,
    "attn_dp_size": 1,
    "cpu_offload_gb": 0,
    "dcp_size": 1,
    "decode_attention_backend": None,
    "disaggregation_mode": "null",
    "dsv4_attn_backend": "auto",
    "dwdp_size": 1,
    "elastic_ep_backend": None,
    "enable_deepseek_v4_fp4_indexer": False,
    "enable_dp_attention": False,
    "enable_eplb": False,
    "enable_hierarchical_cache": False,
    "enable_hisparse": False,
    "enable_lora": None,
    "enable_prefill_cp": False,
    "enable_torch_compile": False,
    "enable_two_batch_overlap": False,
    "ep_dispatch_algorithm": None,
    "ep_num_redundant_experts": 0,
    "init_expert_location": "trivial",
    "lora_paths": None,
    "moe_a2a_backend": "none",
    "moe_dp_size": 1,
    "moe_runner_backend": "auto",
    "pp_size": 1,
    "prefill_attention_backend": None,
    "quantization": None,
    "speculative_algorithm": None,
}


def why_refused(server_args: Any, backend: str) -> str | None:
    """The first option that cannot be honoured, in a sentence that says what to do; or None.

    server_args: SGLang's, with the user's own values. backend: the name of our attention backend.
    """
    given = server_args
    if given.page_size not in (None, PAGE_SIZE):
        return (
            f"--page-size {given.page_size}: DeepSeek-V4's cache has pages of {PAGE_SIZE} "
            "tokens (64 CSA entries, 2 HCA entries). Leave the option out."
        )
    if given.kv_cache_dtype not in ROW_DTYPES:
        return (
            f"--kv-cache-dtype {given.kv_cache_dtype}: this version keeps rows in BF16 "
            "(fp32 with --dtype float32). Use auto or bfloat16."
        )
    if given.dtype not in RUN_DTYPES:
        return f"--dtype {given.dtype}: use one of {', '.join(RUN_DTYPES)}."
    if given.attention_backend not in (None, "dsv4", backend):
        return (
            f"--attention-backend {given.attention_backend}: the model brings its own, "
            f"{backend}. Leave the option out."
        )
    if given.load_format not in LOAD_FORMATS:
        return (
            f"--load-format {given.load_format}: what it loads are not the tensors of a checkpoint."
            f" Use one of {', '.join(LOAD_FORMATS)}."
        )
    for option, default in UNSUPPORTED.items():
        found = getattr(given, option)
        if found != default:
            return (
                f"--{option.replace('_', '-')} (given: {found}) is not supported in this version. "
                "Leave the option out, or set SGLANG_PLUGINS=__none__ for SGLang's built-in model."
            )
    return None
