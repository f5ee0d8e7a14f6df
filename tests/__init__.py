"""Tests; what several of them use is in `tests.support`."""
