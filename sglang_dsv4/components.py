"""The parts of the model as people call them, and which tensors belong to each."""

EXPERTS = "routed experts"
# Beginning of a tensor's vendor name within its layer, or in the model -> component; the first that
# fits counts.
_BEGINNINGS = (
    ("attn.indexer.", "indexer"),
    ("attn.compressor.", "compressor"),
    ("attn.", "attention"),
    ("ffn.experts.", EXPERTS),
    ("ffn.shared_experts.", "shared expert"),
    ("ffn.gate.", "router"),
    ("hc_", "mHC"),
    ("embed.", "embedding"),
    ("head.", "head"),
    ("", "norms"),
)
# In the order of a token's way.
NAMES = (
    *("embedding", "attention", "compressor", "indexer", "router", EXPERTS),
    *("shared expert", "mHC", "norms", "head"),
)
assert set(NAMES) == {name for _, name in _BEGINNINGS}


def component_of(vendor_name: str) -> str:
    """layers.3.attn.compressor.wkv.weight -> compressor; a star may stand for a number."""
    if vendor_name.startswith("layers."):
        _, _, vendor_name = vendor_name.split(".", 2)
    return next(name for beginning, name in _BEGINNINGS if vendor_name.startswith(beginning))
