"""`sglang-dsv4 make-tiny`: writes a small random checkpoint that SGLang can serve.

The weights depend on the seed and on each tensor's vendor name alone, so the two spellings of
names hold the same model, and the two dtypes the same model up to rounding.
"""

import argparse
import errno
import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dsv4.config import DSV4Config, LayerKind

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 1_000_000_000

_DESCRIPTION = """\
Writes a small random checkpoint: config.json, safetensors, generation_config.json and a
byte-level tokenizer with DeepSeek's special tokens. config.json comes last, so a folder that has
one is complete.

presets:
  tiny      7 layers (SWA SWA CSA HCA CSA HCA CSA), hidden size 128, 8 experts, vocabulary 384;
            90 MB in float32: for tests and for a first try on a CPU
  flash-2l  2 layers (CSA with hash routing, HCA with scored routing) of V4-Flash's widths, but
            16 experts instead of 256; 4.4 GB in bfloat16
  pro-2l    the same with V4-Pro's widths and 16 experts instead of 384; 9.7 GB in bfloat16
"""

_SHARED = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "compress_rope_theta": 160000,
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "index_head_dim": 128,
    "initializer_range": 0.02,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "rope_theta": 10000,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "use_cache": True,
}
# The last entry of compress_ratios is the draft layer's, whose weights are not written.
_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 0],
        "num_hidden_layers": 7,
        "num_hash_layers": 3,
        "hidden_size": 128,
        "num_attention_heads": 8,
        "q_lora_rank": 64,
        "o_groups": 8,
        "o_lora_rank": 32,
        "index_n_heads": 16,
        "index_topk": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "routed_scaling_factor": 1.5,
        "vocab_size": 384,
        "max_position_embeddings": 8192,
    },
    "flash-2l": {
        "compress_ratios": [4, 128, 0],
        "num_hidden_layers": 2,
        "num_hash_layers": 1,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "index_topk": 512,
        "n_routed_experts": 16,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 1.5,
        "vocab_size": 129280,
        "max_position_embeddings": 1048576,
    },
    "pro-2l": {
        "compress_ratios": [4, 128, 0],
        "num_hidden_layers": 2,
        "num_hash_layers": 1,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "index_topk": 1024,
        "n_routed_experts": 16,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 3072,
        "routed_scaling_factor": 2.5,
        "vocab_size": 129280,
        "max_position_embeddings": 1048576,
    },
}
