"""The soft penalty of overlong responses (DAPO)."""

from __future__ import annotations


def overlong_penalty(length: int, *, longest: int, buffer: int) -> float:
    """What a response of `length` tokens loses, from 0 to 1 (Yu et al. 2025, arXiv:2503.14476, eq. 13).

    With L the longest response and B the buffer: 0 up to L − B, then (length − (L − B)) / B, and 1 at L.
    """
    return min(1.0, max(0.0, (length - (longest - buffer)) / buffer))
