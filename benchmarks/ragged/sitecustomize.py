"""Imported at the start of every Python process with this folder in PYTHONPATH: responses get ragged lengths."""

from lengths import response_length

from relax_cli.backends.rollout.protocol import Request, SamplingParams


def ragged_limit(request: Request, sampling: SamplingParams) -> int:
    """Instead of `Request.limit`."""
    return response_length(request.prompt_tokens, sampling.max_new_tokens)


Request.limit = ragged_limit  # type: ignore[assignment, method-assign]
