"""SGLang as we use it: every name of the host that our model, cache and backend need.

Only this module and `plugin` import sglang. The classes here subclass the host's, so that its
scheduler, allocator and radix tree go on recognising them.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.distributed.communication_op import tensor_model_parallel_all_reduce
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend as AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.mem_cache import deepseek_v4_memory_pool as host_pool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.model_executor.pool_configurator import DSV4PoolConfigurator
from sglang.srt.runtime_context import get_device, get_model, get_parallel, get_schedule
from sglang.srt.utils import get_device_memory_capacity
from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY

from sglang_dsv4 import memory_plan
from sglang_dsv4.attention.cache import PAGE, LayerCache
from sglang_dsv4.attention.metadata import Batch
from sglang_dsv4.config import ConfigError, DSV4Config, LayerKind
from sglang_dsv4.parallel import Parallel

logger = logging.getLogger(__name__)

WITH_HEADERS = ("auto", "safetensors")  # values of --load-format that read safetensors
RAW_CONFIG = "dsv4_raw_config"  # attribute of the host's config that keeps our config.json


class HostConfig(_CONFIG_REGISTRY["deepseek_v4"]):  # type: ignore[name-defined]
    """The host's config of this model, for both dialects of config.json.

    The host reads fields that a config saved by transformers lacks, injects defaults of another
    model and rewrites the rope fields; so the raw file is kept beside what the host makes of it.
    """

    model_type = "deepseek_v4"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        raw = dict(config_dict)
        try:
            seen = raw | DSV4Config.from_dict(raw).host_fields()
        except ConfigError as error:
            raise SystemExit(
                f"sglang-dsv4 cannot serve this config.json: {error}\n"
                "SGLANG_PLUGINS=__none__ gives SGLang's built-in model."
            ) from None
        # Formats are decided per tensor; the host would act on what one global field says.
        seen.pop("quantization_config", None)
        result = super().from_dict(seen, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        setattr(config, RAW_CONFIG, raw)
        if config.dtype in (None, torch.float32, "float32"):
            # The host would run an fp32 checkpoint in fp16, for which this model was not made.
            # --dtype float32 still runs it in fp32.
            config.dtype = torch.bfloat16
        return result


def raw_config(config: Any) -> dict[str, Any]:
    """The checkpoint's config.json, with --json-model-override-args applied."""
    return getattr(config, RAW_CONFIG) | json.loads(get_model().json_model_override_args)


def checkpoint_folder() -> Path:
    """Where the checkpoint lies."""
    return Path(get_model().model_path)


def has_headers() -> bool:
    """Whether the weights can be looked at before they are loaded: a folder of safetensors."""
    return get_model().load_format in WITH_HEADERS and checkpoint_folder().is_dir()


def context_length() -> int | None:
    """Tokens that a request may have, where the user said so."""
    length: int | None = get_model().context_length
    return length


def loads_dummies() -> bool:
    """Whether the host fills the model with random weights instead of loading any."""
    return bool(get_model().load_format == "dummy")


def parallel() -> Parallel:
    """The groups of this process. Raises RuntimeError where the host numbers ranks otherwise."""
    groups = get_parallel()
    found = Parallel(
        rank=groups.tp_rank,
        size=groups.tp_size,
        all_reduce=tensor_model_parallel_all_reduce,
        expert_parallel=groups.moe_ep_size,
    )
    theirs = [
        (group.rank_in_group, group.world_size)
        for group in (groups.tp_group, groups.moe_ep_group, groups.moe_tp_group)
    ]
    ours = [tuple(share) for share in (found.share, found.experts, found.expert_width)]
    if ours != theirs:
        raise RuntimeError(
            f"SGLang divides experts among ranks as {theirs}, expected {ours}: (rank, size) of all,"
            " of groups, within a group"
        )
    return found


def just_in_time() -> list[tuple[str, Callable[[], Any]]]:
    """Host code that our path reaches and that is compiled at its first use on a GPU: what it is,
    and a call that compiles it."""
    from sglang.kernels.ops.attention.clamp_position import clamp_position

    def positions() -> Any:
        return clamp_position(torch.ones(1, dtype=torch.int64, device="cuda"))

    return [("SGLang positions", positions)]


def device() -> str:
    """The device type that the server runs on."""
    return str(get_device().device)


def device_memory(server_args: Any) -> tuple[str, int | None]:
    """(device type that the server will run on, bytes of memory of one such device or None).

    Asked of the driver's tools while arguments are resolved: torch would take memory on the GPU.
    """
    kind = str(resolving_view(server_args).device)
    if kind == "cpu":
        return kind, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        mebibytes = get_device_memory_capacity(kind)
    except (RuntimeError, ValueError):  # no such tool, or no such device: the host will say so
        mebibytes = None
    return kind, None if mebibytes is None else int(mebibytes * (1 << 20))


def logits_processor(config: Any) -> torch.nn.Module:
    """The host's last step: logits in fp32 from weights as they are, log-probabilities, gathering
    over ranks."""
    config.enable_lm_head_fp32 = True
    return LogitsProcessor(config)


def expert_blocks() -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The host's kernel that sorts pairs of token and expert into blocks of one expert.

    Imported here: it is there on a GPU alone.
    """
    from sglang.srt.layers.moe.fused_moe_triton import moe_align_block_size

    return moe_align_block_size


def marlin_kernels() -> Mapping[str, Any]:
    """The host's kernels of weight-only products, and what orders weights for them, by name.

    Imported here: they are there on a GPU alone.
    """
    from sglang.kernels.ops.moe.moe_wna16_marlin import moe_wna16_marlin_gemm
    from sglang.kernels.ops.quantization.gptq_marlin_repack import gptq_marlin_repack
    from sglang.srt.layers.quantization import marlin_utils, marlin_utils_fp4

    return {
        "moe_wna16_marlin_gemm": moe_wna16_marlin_gemm,
        "gptq_marlin_repack": gptq_marlin_repack,
        "moe_align_block_size": expert_blocks(),
        "marlin_permute_scales": marlin_utils.marlin_permute_scales,
        "nvfp4_marlin_process_scales": marlin_utils_fp4.nvfp4_marlin_process_scales,
        "mxfp4_marlin_process_scales": marlin_utils_fp4.mxfp4_marlin_process_scales,
        "scalar_types": marlin_utils_fp4.scalar_types,
    }


def attention_backend() -> Any:
    """Our attention backend, as the host made it for this forward."""
    return get_attn_backend()


class RowPool(host_pool.DeepSeekV4SingleKVPool):
    """Book-keeping of one kind of rows; KVPool makes the rows themselves."""

    def _create_buffers(self) -> None:
        pages = host_pool._num_dsv4_physical_kv_pages(
            self.size, self.page_size, self.global_page_size
        )
        self.rows = pages * self.page_size
        self.kv_buffer: list[torch.Tensor] = []

    def append_view(self, rows: torch.Tensor) -> None:
        """Keep `rows` [n, 512] as [pages, page * 512], the shape that the host expects."""
        self.kv_buffer.append(rows.view(-1, self.page_size * rows.shape[1]))


class IndexKeyPool(host_pool.DeepSeekV4IndexerPool):
    """Index keys as plain rows [pages, page * 128] in the row dtype."""

    def _create_buffer(self) -> None:
        pages = host_pool._num_dsv4_physical_kv_pages(
            self.size, self.page_size, self.global_page_size
        )
        shape = (pages, self.page_size * self.index_head_dim)
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self.index_k_with_scale_buffer = [
                torch.zeros(shape, dtype=self.dtype, device=self.device)
                for _ in range(self.layer_num)
            ]

    def get_bytes_per_token(self) -> int:
        return self.index_head_dim * self.dtype.itemsize


class KVPool(host_pool.DeepSeekV4TokenToKVPool):
    """One buffer of plain rows per layer, window rows first, entries after; see attention.cache.

    `caches` holds a LayerCache per layer; the host's own sub-pools hold views of the same memory.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not host_pool.ONLINE_C128:
            raise RuntimeError(
                "the host's DSV4 pool was imported before SGLANG_OPT_USE_ONLINE_COMPRESS was set"
            )
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self.caches = tuple(
                self._layer_cache(layer) for layer in range(self._stage_start, self._stage_end)
            )
        self.mem_usage = self._bytes() / (1 << 30)

    def _layer_cache(self, layer: int) -> LayerCache:
        item = self.layer_mapping[layer]
        kind = LayerKind(item.compress_ratio)
        window, entries = self.swa_kv_pool, item.compress_kv_pool
        rows = window.rows + (entries.rows if entries is not None else 0)
        width = self.qk_nope_head_dim + self.qk_rope_head_dim
        kv = torch.zeros(rows, width, dtype=self.dtype, device=self.device)
        window.append_view(kv[: window.rows])
        if entries is not None:
            entries.append_view(kv[window.rows :])
        state = self.compress_state_pools[layer]
        state_rows = None if state is None else state.kv_score_buffer.kv_score
        if kind is not LayerKind.CSA:
            return LayerCache(kv, window.rows, hca_state=state_rows)
        keys = self.c4_indexer_kv_pool.index_k_with_scale_buffer[item.compress_layer_id]
        return LayerCache(
            kv,
            window.rows,
            index_keys=keys.view(-1, self.indexer_head_dim),
            csa_state=state_rows,
            index_state=self.indexer_compress_state_pools[layer].kv_score_buffer.kv_score,
        )

    def _bytes(self) -> int:
        return sum(
            tensor.nbytes
            for cache in self.caches
            for tensor in (
                cache.kv,
                cache.index_keys,
                cache.csa_state,
                cache.index_state,
                cache.hca_state,
            )
            if tensor is not None
        )

    def _make_kv_pool(self, *, cls: type = RowPool, **kwargs: Any) -> RowPool:
        return super()._make_kv_pool(cls=RowPool, **kwargs)

    def _make_indexer_pool(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        index_head_dim: int,
        layer_num: int,
        device: str,
        enable_memory_saver: bool,
        *,
        global_page_size: int | None = None,
    ) -> IndexKeyPool:
        return IndexKeyPool(
            size,
            page_size,
            dtype,
            index_head_dim,
            layer_num,
            device,
            enable_memory_saver,
            global_page_size=global_page_size,
        )


class PoolSizing(DSV4PoolConfigurator):
    """Sizes the pools by our rows: 512 values per row, 128 per index key, no page padding.

    Rows are BF16, or fp32 where the model runs in fp32; the host's option knows no fp32.
    """

    def __init__(self, kvc: Any) -> None:
        if kvc.model_config.dtype is torch.float32:
            kvc.kv_cache_dtype = torch.float32
        config = DSV4Config.from_dict(raw_config(kvc.model_config.hf_config))
        self.cache = memory_plan.CacheSizes(config, kvc.kv_cache_dtype.itemsize)
        super().__init__(kvc)
        logger.info("sglang-dsv4 cache: %s rows, %s", kvc.kv_cache_dtype, self.cache)

    def _get_paged_kv_bytes_per_token(self, compress_ratio: int = 0) -> float:
        return self.cache.row

    def _compressed_bytes_per_full_token(self, ratio: int) -> float:
        return self.cache.entries(LayerKind(ratio))

    def _get_swa_tokens(self, full_token: int, page_size: int) -> int:
        """Never fewer window rows than a chunk of prefill and the page of a prefix hit need: with
        less, the host waits for rows to be freed that nobody holds."""
        wanted = super()._get_swa_tokens(full_token, page_size)
        chunk = min(get_schedule().chunked_prefill_size or self.context_len, self.context_len)
        floor = memory_plan.window_floor(chunk)
        if wanted < floor:
            logger.warning(
                "sglang-dsv4: %d window rows instead of %d: a chunk of %d tokens needs them",
                floor,
                wanted,
                chunk,
            )
        return max(wanted, floor)


def layer_caches(pool: Any) -> tuple[LayerCache, ...]:
    """The caches of a pool that is ours; anything else stops the server."""
    if not isinstance(pool, KVPool):
        raise SystemExit(f"sglang-dsv4: expected our KV pool, found {type(pool).__name__}")
    assert pool.page_size == pool.swa_page_size == PAGE
    return pool.caches


def batch(
    forward_batch: ForwardBatch,
    *,
    req_to_token: torch.Tensor,
    window_map: torch.Tensor,
) -> Batch:
    """What the host says about one forward, as device tensors.

    req_to_token [slots, context] int32: the host's token slots; window_map: its slot -> window row.
    """
    slots = forward_batch.req_pool_indices.long()
    requests, positions = slots.shape[0], forward_batch.positions
    if forward_batch.forward_mode.is_decode_or_idle():
        prefix_lens = (forward_batch.seq_lens.long() - 1).clamp(min=0)
        new_lens = torch.ones_like(prefix_lens)
        request = torch.arange(requests, device=slots.device)
        max_len = req_to_token.shape[1]
    else:
        prefix_lens = forward_batch.extend_prefix_lens.long()
        new_lens = forward_batch.extend_seq_lens.long()
        request = torch.repeat_interleave(
            torch.arange(requests, device=slots.device), new_lens, output_size=positions.shape[0]
        )
        max_len = max(
            prefix + new
            for prefix, new in zip(
                forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu, strict=True
            )
        )
    pages = -(-max_len // PAGE)
    return Batch(
        positions=positions.long(),
        request=request,
        request_slots=slots,
        prefix_lens=prefix_lens,
        new_lens=new_lens,
        page_table=req_to_token[:, ::PAGE][slots, :pages].long() // PAGE,
        window_map=window_map,
        max_len=max_len,
    )
