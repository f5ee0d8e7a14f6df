"""What model and data files say about a run, for the plan and the rules about this machine."""

from __future__ import annotations

from dataclasses import dataclass

from relax_cli.config.schema import BatchSection, Config
from relax_cli.models.spec import ModelSpec
from relax_cli.preflight.memory.sizes import Lengths

ASSUMED_PROMPT = 512
"""Tokens of the longest prompt where nothing says how long they are."""


@dataclass(frozen=True)
class Facts:
    """All fields are empty where files were not read."""

    model: ModelSpec | None = None
    """What `config.json` says."""
    prompts: int | None = None
    """Training prompts."""
    prompt_lens: tuple[int, ...] = ()
    """Tokens of the first training prompts."""

    @property
    def longest_prompt(self) -> int | None:
        """Tokens of the longest of the first prompts."""
        return max(self.prompt_lens, default=None)

    def lengths_for(self, config: Config) -> Lengths:
        """Longest prompt and response: the limits, or what was seen where there is none."""
        section = config.rollout
        prompt = section.rollout_max_prompt_len or self.longest_prompt or ASSUMED_PROMPT
        return Lengths(prompt, section.rollout_max_response_len)

    def rollouts(self, config: Config) -> int | None:
        """How many rollouts the run has; None where that depends on data that were not read."""
        return rollouts_of(config.batch, self.prompts)


def rollouts_of(batch: BatchSection, prompts: int | None) -> int | None:
    """`--num-rollout`, or whole rollouts in `--num-epoch` passes over so many prompts, at least one."""
    if batch.num_rollout is not None:
        return batch.num_rollout
    if batch.num_epoch is None or prompts is None:
        return None
    return max(1, prompts * batch.num_epoch // batch.rollout_batch_size)
