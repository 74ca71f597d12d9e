"""SGLang's attention-backend contract: when metadata is built. The maths is in the layers."""

from typing import Any

from sglang_dsv4 import host
from sglang_dsv4.attention.metadata import Metadata, list_width
from sglang_dsv4.attention.nan_watch import NanWatch
from sglang_dsv4.backends import prepare_attention


class DSV4Backend(host.AttentionBackend):
    """Builds each forward's metadata and hands layers their caches.

    Lengths are read on the device only, from the host's static buffers, so a captured step builds
    its metadata itself. Metadata holds copies of the page table and of window rows: what the
    scheduler may overwrite while a step is running is read before the first layer and never after.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.caches = host.layer_caches(runner.token_to_kv_pool)
        self.window = int(runner.model_config.window_size)
        self.metadata: Metadata | None = None
        self.ops, self.attention = runner.model.ops, runner.model.model.layers[0].attn
        config, context = runner.model.config, self.req_to_token_pool.req_to_token.shape[1]
        self.widths = sorted(
            {
                list_width(kind, window=self.window, top_k=config.index_topk, max_len=context)
                for kind in config.layer_kinds
            }
        )
        self.prepared: set[int] = set()
        self.nan_watch = NanWatch(runner.model.model.layers)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to keep: the tensors of a captured step live in its graph's own memory."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Called by the host before each capture, each replay and each eager forward.

        A decode of a new size is announced to the provider of attention, which may have to plan it
        on the host; a replay's size was announced before its capture.
        """
        if not in_capture:
            self.nan_watch.before_forward()
        tokens = forward_batch.positions.shape[0]
        if not forward_batch.forward_mode.is_decode_or_idle() or tokens in {0, *self.prepared}:
            return
        for width in self.widths:
            prepare_attention(
                self.ops,
                tokens=tokens,
                heads=self.attention.heads,
                width=width,
                scale=self.attention.scale,
                device=str(self.caches[0].kv.device),
            )
        self.prepared.add(tokens)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Called by the host before the layers: in each eager forward, and within each capture."""
        batch = host.batch(
            forward_batch,
            req_to_token=self.req_to_token_pool.req_to_token,
            window_map=self.token_to_kv_pool.full_to_swa_index_mapping,
        )
        self.metadata = self.ops.build_metadata(
            batch, window=self.window, window_rows=self.caches[0].window_rows
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Padding requests count one token, which lands in the null page."""
        return 1
