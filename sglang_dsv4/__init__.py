"""sglang-dsv4: serves DeepSeek-V4 through SGLang, with our model, cache and attention backend."""

from importlib.metadata import version

__version__ = version("sglang-dsv4")
