"""DSV4Backend against a host that captures, replays and runs eagerly, with a stand-in provider."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from inprocess import Host
from sglang_dsv4 import host
from sglang_dsv4.attention.backend import DSV4Backend
from sglang_dsv4.attention.reference import csa_index_list
from sglang_dsv4.attention.reference_metadata import build_metadata
from sglang_dsv4.config import LayerKind

CONTEXT, WINDOW, TOP_K, HEADS, SCALE = 1024, 128, 96, 3, 0.25
WIDTHS = [WINDOW, WINDOW + CONTEXT // 128, WINDOW + TOP_K]


@pytest.fixture
def provider(monkeypatch):
    """A module with `sparse_attention` and a `prepare` that notes its calls."""
    module = ModuleType("stand_in_provider")
    module.calls = []

    def prepare(tokens, heads, width, *, scale, device):
        assert (heads, scale, device) == (HEADS, SCALE, "cpu")
        module.calls.append((tokens, width))

    def sparse_attention():
        raise AssertionError("only prepared here")

    sparse_attention.__module__ = module.__name__
    module.prepare, module.sparse_attention = prepare, sparse_attention
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def make_backend(monkeypatch, provider, kinds=tuple(LayerKind)):
    caches = (SimpleNamespace(kv=torch.zeros(1, 512), window_rows=1),)
    monkeypatch.setattr(host, "layer_caches", lambda pool: caches)
    layer = SimpleNamespace(attn=SimpleNamespace(heads=HEADS, scale=SCALE, indexer=None))
    model = SimpleNamespace(
        ops=SimpleNamespace(sparse_attention=provider.sparse_attention),
        config=SimpleNamespace(index_topk=TOP_K, layer_kinds=kinds),
        model=SimpleNamespace(layers=[layer]),
    )
    return DSV4Backend(
        SimpleNamespace(
            token_to_kv_pool=None,
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(2, CONTEXT)),
            model_config=SimpleNamespace(window_size=WINDOW),
            model=model,
        )
    )


def forward(tokens, mode=ForwardMode.DECODE):
    return SimpleNamespace(positions=torch.zeros(tokens), forward_mode=mode)


def test_each_size_is_prepared_once_for_every_width(monkeypatch, provider):
    backend = make_backend(monkeypatch, provider)
    backend.init_forward_metadata_out_graph(forward(4), in_capture=True)
    assert provider.calls == [(4, width) for width in WIDTHS]
    backend.init_forward_metadata_out_graph(forward(4), in_capture=True)
    backend.init_forward_metadata_out_graph(forward(4))  # a replay
    assert len(provider.calls) == len(WIDTHS)
    backend.init_forward_metadata_out_graph(forward(8), in_capture=True)
    assert provider.calls[len(WIDTHS) :] == [(8, width) for width in WIDTHS]


def test_an_eager_decode_of_a_new_size_is_prepared_before_its_metadata(monkeypatch, provider):
    backend = make_backend(monkeypatch, provider)
    order = []
    monkeypatch.setattr(
        backend,
        "init_forward_metadata_in_graph",
        lambda forward_batch: order.append(len(provider.calls)),
    )
    backend.init_forward_metadata(forward(3))
    backend.init_forward_metadata(forward(3))
    backend.init_forward_metadata(forward(5))
    assert order == [3, 3, 6]


@pytest.mark.parametrize(
    "batch", [forward(4, ForwardMode.EXTEND), forward(4, ForwardMode.MIXED),
              forward(0, ForwardMode.IDLE)]
)  # fmt: skip
def test_prefill_and_idle_steps_are_not_prepared(monkeypatch, provider, batch):
    make_backend(monkeypatch, provider).init_forward_metadata_out_graph(batch)
    assert provider.calls == []


def test_widths_of_layer_kinds_that_the_model_lacks_are_left_out(monkeypatch, provider):
    backend = make_backend(monkeypatch, provider, (LayerKind.SWA, LayerKind.CSA))
    backend.init_forward_metadata_out_graph(forward(2), in_capture=True)
    assert provider.calls == [(2, WINDOW), (2, WINDOW + TOP_K)]


def test_each_forward_but_no_capture_looks_for_nan(monkeypatch, provider):
    """Before the forward, whatever it is: replay, eager decode, prefill."""
    backend = make_backend(monkeypatch, provider)
    monkeypatch.setattr(backend, "init_forward_metadata_in_graph", lambda forward_batch: None)
    assert backend.nan_watch.forwards == 0
    backend.init_forward_metadata_out_graph(forward(4), in_capture=True)
    assert backend.nan_watch.forwards == 0
    backend.init_forward_metadata_out_graph(forward(4))
    backend.init_forward_metadata(forward(4))
    backend.init_forward_metadata(forward(9, ForwardMode.EXTEND))
    assert backend.nan_watch.forwards == 3


def test_metadata_is_built_by_the_op_of_the_model(monkeypatch, provider):
    backend = make_backend(monkeypatch, provider)
    backend.token_to_kv_pool = SimpleNamespace(full_to_swa_index_mapping=None)
    monkeypatch.setattr(host, "batch", lambda *_, **__: "a batch")
    backend.ops.build_metadata = lambda batch, **options: (batch, options)
    backend.init_forward_metadata_in_graph(None)
    assert backend.metadata == ("a batch", {"window": WINDOW, "window_rows": 1})


def test_the_widths_are_those_of_a_decode_step(monkeypatch, provider):
    """As the layers get their lists: a plan for another width would never be found."""
    served = Host(context=CONTEXT)
    request = served.open()
    meta = build_metadata(served.batch((request, [1])), window=WINDOW, window_rows=256)
    selected = torch.full((1, TOP_K), -1)
    lists = (meta.window, meta.hca_list, csa_index_list(selected, meta.window, meta.entries))
    found = [keys.rows.shape[1] for keys in lists]
    assert found == WIDTHS == make_backend(monkeypatch, provider).widths
