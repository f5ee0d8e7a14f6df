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
        prompt = request.prompt_tokens
        if not prompt:
            raise _bad_prompt("a prompt has no tokens", "0 tokens", "at least 1 token", request.source)
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            bad = next(token for token in prompt if not 0 <= token < vocab_size)
            raise _bad_prompt(
                f"prompt token id {bad} is outside the model's vocabulary",
                str(bad),
                f"0 to {vocab_size - 1}",
                request.source,
            )
        if max_prompt is not None and len(prompt) > max_prompt:
            raise _bad_prompt(
                "a prompt is longer than the server accepts",
                f"{len(prompt)} tokens",
                f"at most {max_prompt}",
                request.source,
                f"--rollout-max-prompt-len {max_prompt} --overlong-prompts drop, or a server with a longer context",
            )
        needed = len(prompt) + request.limit(sampling)
        if needed > max_positions:
            raise _bad_prompt(
                f"a prompt of {len(prompt)} tokens leaves no room for {request.limit(sampling)} new ones",
                f"{needed} positions",
                f"at most {max_positions}",
                request.source,
                f"ask for at most {max_positions - len(prompt)} new tokens, or use shorter prompts"
                if len(prompt) < max_positions
                else "use shorter prompts",
            )


OTHER_TOKENIZER = "use the tokenizer that belongs to the model, and prompts that fit it"


def _bad_prompt(message: str, got: str, expected: str, where: str, fix: str = OTHER_TOKENIZER) -> RunError:
    return RunError(ROLLOUT_PROMPT(message, fix=fix, got=got, expected=expected, where=where))
