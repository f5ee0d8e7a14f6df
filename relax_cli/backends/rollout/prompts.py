"""What every engine refuses before it generates: prompts that the model cannot take."""

from __future__ import annotations

from collections.abc import Sequence

from relax_cli.backends.rollout.protocol import Request, SamplingParams
from relax_cli.errors import RunError, problem_kind

ROLLOUT_PROMPT = problem_kind(
    "rollout-prompt",
    "During a run",
    "A prompt does not fit the model: an unknown token, or too long.",
    option="--prompt-data",
)


def check_prompts(
    requests: Sequence[Request],
    sampling: SamplingParams,
    vocab_size: int,
    max_positions: int,
    max_prompt: int | None = None,
) -> None:
    """Refuse ids outside the vocabulary, empty prompts, and prompts that leave no room for a response.
    Raises RunError: names the first such prompt."""
    for request in requests:
        prompt, limit = request.prompt_tokens, request.limit(sampling)
        room = max_positions - len(prompt)
        fix = "use the tokenizer that belongs to the model, and prompts that fit it"
        if not prompt:
            message, got, expected = "a prompt has no tokens", "0 tokens", "at least 1 token"
        elif min(prompt) < 0 or max(prompt) >= vocab_size:
            bad = next(token for token in prompt if not 0 <= token < vocab_size)
            message = f"prompt token id {bad} is outside the model's vocabulary"
            got, expected = str(bad), f"0 to {vocab_size - 1}"
        elif max_prompt is not None and len(prompt) > max_prompt:
            message = "a prompt is longer than the server accepts"
            got, expected = f"{len(prompt)} tokens", f"at most {max_prompt}"
            fix = f"--rollout-max-prompt-len {max_prompt} --overlong-prompts drop, or a server with a longer context"
        elif limit > room:
            message = f"a prompt of {len(prompt)} tokens leaves no room for {limit} new ones"
            got, expected = f"{len(prompt) + limit} positions", f"at most {max_positions}"
            fix = f"ask for at most {room} new tokens, or use shorter prompts" if room > 0 else "use shorter prompts"
        else:
            continue
        raise RunError(ROLLOUT_PROMPT(message, fix=fix, got=got, expected=expected, where=request.source))
