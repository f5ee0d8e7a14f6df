"""Limits of the embedded rollout engine, which the memory plan also counts with."""

from __future__ import annotations

MOST_ROWS = 256
"""Most rows that it generates at a time."""
KV_CACHE_BYTES = 1 << 30
"""Most bytes of its key/value cache, unless a single row needs more."""
PREFILL_TOKENS = 512
"""Prompt tokens that it computes at a time."""
