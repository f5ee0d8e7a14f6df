"""What a run would meet in its data: every row is read, and the first prompts are templated, tokenised and counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from relax_cli.config.schema import Config, DataSection
from relax_cli.data.light_tokenizer import LightTokenizer, load_light
from relax_cli.data.prompts import MOST_PROBLEMS, PromptScan, scan_prompts
from relax_cli.data.tokenise import encode_prompt, prompt_too_long, stop_token_ids
from relax_cli.errors import ConfigError, Problem
from relax_cli.models.spec import ModelSpec
from relax_cli.preflight.labels import label_check

PREVIEW_ROWS = 128


@dataclass(frozen=True)
class PromptSummary:
    """What is known of one set of prompts."""

    prompts: int
    lengths: tuple[int, ...]
    """Tokens of the first prompts; empty where there was no tokenizer to count them."""
    longest: str = ""
    """File and line of the longest of them."""


class DataReader:
    """Reads sets of prompts for the rules, and remembers what it saw."""

    def __init__(
        self,
        config: Config,
        model_folder: Path | None,
        model: ModelSpec | None,
        progress: Callable[[str, float], None] | None,
    ) -> None:
        """Args:
        model_folder: where the tokenizer is; None where that is not known.
        model: what `config.json` says; None where it is unreadable.
        """
        self.summaries: dict[str, PromptSummary] = {}
        self._config = config
        self._model = model
        self._folder = model_folder
        self._tokenizer: LightTokenizer | None = None
        self._progress = progress

    def __call__(self, section: DataSection, spec: str) -> None:
        """Read every row of `spec`, and count the tokens of the first.

        Raises:
            ConfigError: rows are bad, or prompts do not fit the limits.
        """
        check = label_check(self._config.reward)
        scan = scan_prompts(section, spec, keep=PREVIEW_ROWS, check=check, progress=self._progress)
        self.summaries[spec] = PromptSummary(scan.count, ())
        self._load_tokenizer()
        if self._tokenizer is not None:
            self._count(spec, scan)

    def _load_tokenizer(self) -> None:
        if self._tokenizer is not None or self._folder is None:
            return
        folder, self._folder = self._folder, None
        self._tokenizer = load_light(folder)
        if self._tokenizer is not None and self._model is not None:
            stop_token_ids(folder, self._tokenizer)

    def _count(self, spec: str, scan: PromptScan) -> None:
        problems: list[Problem] = []
        lengths: dict[str, int] = {}
        limit = self._config.rollout.rollout_max_prompt_len
        for prompt in scan.first:
            try:
                ids = encode_prompt(
                    self._tokenizer,
                    prompt,
                    apply_chat_template=self._config.data.apply_chat_template,
                    vocab_size=None if self._model is None else self._model.vocab_size,
                )
            except ConfigError as error:
                problems += error.problems
                continue
            lengths[prompt.source] = len(ids)
            if limit is not None and len(ids) > limit:
                problems.append(prompt_too_long(prompt, len(ids), limit))
        longest = max(lengths, key=lambda source: lengths[source], default="")
        self.summaries[spec] = replace(self.summaries[spec], lengths=tuple(lengths.values()), longest=longest)
        if problems:
            raise ConfigError(_shortened(problems, spec))


def _shortened(problems: list[Problem], spec: str) -> list[Problem]:
    if len(problems) <= MOST_PROBLEMS:
        return problems
    rest = len(problems) - MOST_PROBLEMS
    more = replace(problems[0], message=f"{rest} more of the first prompts have problems", where=spec, got="")
    return [*problems[:MOST_PROBLEMS], more]
