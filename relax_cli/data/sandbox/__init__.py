"""Runs Python that nobody trusts; `inside` says of what the sandbox consists."""
