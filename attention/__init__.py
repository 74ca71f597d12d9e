"""Attention of DeepSeek-V4: window, compressed entries, lightning indexer, and their state."""
