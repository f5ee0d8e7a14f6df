"""Runs Python that nobody trusts; `inside` says of what the sandbox consists."""

NOBODY = 65534
"""The user of the sandbox."""
