"""What a run would meet in its data: every row of every set is read, templated, tokenised and counted."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path

from relax_cli.checkpoint.layout import sha256_of
from relax_cli.config.schema import Config, DataSection, RewardSection
from relax_cli.data.light_tokenizer import LightTokenizer, load_light, load_older
from relax_cli.data.prompts import Prompt, empty, read_prompts
from relax_cli.data.rewards import BUILTIN_REWARDS
from relax_cli.data.sources import source_of
from relax_cli.data.tokenise import encoded_text, ids_problem, prompt_too_long, stop_token_ids
from relax_cli.data.values import shown
from relax_cli.errors import MOST_PLACES, ConfigError, Problem, RepeatedProblems, problem_kinds
from relax_cli.models.packages import default_cache_dir
from relax_cli.models.spec import ModelSpec
from relax_cli.preflight.labels import label_check

CHUNK = 1024
declare = problem_kinds("Data")
MESSAGE_LEFT_OUT = declare(
    "chat-message-left-out",
    "A warning: the chat template does not show a message to the model, most often because it does not know its role.",
    option="--apply-chat-template",
    severity="warning",
)


OVERLONG = declare(
    "prompts-overlong",
    "A warning: so many prompts are over `--rollout-max-prompt-len`, and are dropped or cut by `--overlong-prompts`.",
    option="--overlong-prompts",
    severity="warning",
)


@dataclass(frozen=True)
class PromptSummary:
    """What is known of one set of prompts."""

    prompts: int
    lengths: tuple[int, ...]
    """Tokens of the prompts; empty where there was no tokenizer to count them."""
    longest: str = ""
    """File and line of the longest of them."""
    over: int = 0
    """Prompts over `--rollout-max-prompt-len`, where they are dropped or cut."""
    most: int = 0
    """Tokens of the longest of those."""


LEAST_BYTES = 1 << 20
"""A smaller file is checked faster than it is looked up."""
MOST_ENTRIES = 64
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", "special_tokens_map.json"),
)


def cache_key(
    spec: str, folder: Path | None, section: DataSection, reward: RewardSection, limits: tuple[int | None, str]
) -> str | None:
    """Hash of all that the check of a file depends on, its content first; None where it is not worth it."""
    try:
        source = source_of(spec)
        files = [] if source.is_task else source.files()
        if not all(file.is_file() for file in files) or sum(file.stat().st_size for file in files) < LEAST_BYTES:
            return None
        files += [] if folder is None else [folder / name for name in TOKENIZER_FILES]
        hashes = [sha256_of(file) if file.is_file() else "" for file in files]
        judged_by = (reward.rm_type, reward.custom_rm_path is None, reward.rm_url is None)
        rest = [section.model_dump(mode="json"), *judged_by, limits]
        return hashlib.sha256(json.dumps([version("relax-cli"), spec, hashes, rest]).encode()).hexdigest()
    except (OSError, ConfigError):
        return None


def load_summary(key: str) -> PromptSummary | None:
    """What was stored under a key."""
    try:
        count, lengths, *rest = json.loads((_folder() / key).read_text("utf-8"))
        return PromptSummary(count, tuple(lengths), *rest)
    except (OSError, ValueError, TypeError):
        return None


def store_summary(key: str, summary: PromptSummary) -> None:
    """Keep it, where the cache folder can be written."""
    folder = _folder()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f"{key}.{os.getpid()}"
        new.write_text(json.dumps(astuple(summary)), "utf-8")
        new.replace(folder / key)
        oldest_first = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)
        for file in oldest_first[:-MOST_ENTRIES]:
            file.unlink()


def _folder() -> Path:
    return default_cache_dir(os.environ) / "checked-data"


class DataReader:
    """Reads sets of prompts for the rules, and remembers what it saw."""

    def __init__(
        self,
        config: Config,
        model_folder: Path | None,
        model: ModelSpec | None,
        progress: Callable[[str, float], None] | None,
        rewards: Collection[str] = BUILTIN_REWARDS,
    ) -> None:
        """Folder of the tokenizer, and model, where they are known; the names of all rewards, which rows may choose."""
        self.summaries: dict[str, PromptSummary] = {}
        self._config, self._folder, self._model = config, model_folder, model
        self._progress, self._rewards = progress, rewards
        self._loaded = False
        self._tokenizer: LightTokenizer | None = None
        self._not_counted: list[Problem] = []

    def __call__(self, section: DataSection, spec: str) -> None:
        """Read every row of `spec`, and count its tokens.
        Raises ConfigError: rows are bad, or prompts do not fit the limits; or there are warnings about them."""
        # Not before there is something to read: values that cannot be read hide no problem of the model.
        self._limit = self._config.rollout.rollout_max_prompt_len
        self._mode = self._config.rollout.overlong_prompts
        self._load_tokenizer()
        key = cache_key(spec, self._folder, section, self._config.reward, (self._limit, self._mode))
        if key is not None and (known := load_summary(key)) is not None:
            self.summaries[spec] = known
            self._say_overlong(spec, [])
            return
        rows = read_prompts(section, spec, self._progress)
        seen = _Seen(RepeatedProblems())
        while chunk := list(islice(rows, CHUNK)):
            self._check(chunk, seen)
        longest = seen.longest.source if seen.longest else ""
        summary = PromptSummary(seen.count, tuple(seen.lengths), longest, seen.over, seen.over_most)
        if seen.count and not seen.has_bad_rows:
            self.summaries[spec] = summary
        problems = [*seen.problems.all(), *self._too_long(seen)]
        if not seen.count and not problems:
            problems = [empty(spec)]
        if key is not None and not problems:
            store_summary(key, summary)
        self._say_overlong(spec, problems)

    def _say_overlong(self, spec: str, problems: list[Problem]) -> None:
        """Raise these problems, and the warning about prompts that are dropped or cut."""
        problems, self._not_counted = [*problems, *self._not_counted], []
        summary = self.summaries.get(spec)
        if summary is not None and summary.over and self._mode != "error":
            dropped = self._mode == "drop"
            count, total = summary.over, summary.prompts + summary.over * dropped
            does = "dropped" if dropped else f"cut to their last {self._limit} tokens"
            message = f"{count:,} of {total:,} prompts are longer than {self._limit} tokens and are {does}"
            fix = f"--rollout-max-prompt-len {summary.most} keeps them whole"
            problems.append(OVERLONG(message, where=spec, got=f"up to {summary.most} tokens", fix=fix))
        if problems:
            raise ConfigError(problems)

    def _load_tokenizer(self) -> None:
        if self._loaded or self._folder is None:
            return
        self._loaded = True
        try:
            self._tokenizer = load_light(self._folder) or load_older(self._folder)
        except ConfigError as error:
            if error.problems[0].severity == "error":
                raise
            self._not_counted = list(error.problems)
        if self._tokenizer is not None and self._model is not None:
            stop_token_ids(self._folder, self._tokenizer)

    def _check(self, rows: Sequence[Prompt | Problem], seen: _Seen) -> None:
        check = label_check(self._config.reward, self._rewards)
        for problem in filter(None, (row if isinstance(row, Problem) else check(row) for row in rows)):
            seen.problems.add(problem)
        prompts = [row for row in rows if isinstance(row, Prompt)]
        seen.has_bad_rows |= len(prompts) < len(rows)
        seen.count += len(prompts)
        if self._tokenizer is not None:
            self._count(prompts, seen)

    def _count(self, prompts: Sequence[Prompt], seen: _Seen) -> None:
        assert self._tokenizer is not None
        chat = self._config.data.apply_chat_template
        texts: list[str] = []
        rendered: list[Prompt] = []
        for prompt in prompts:
            try:
                text = encoded_text(self._tokenizer, prompt, apply_chat_template=chat)
            except ConfigError as error:
                seen.problems.add(error.problems[0])
                continue
            if chat and (left_out := _left_out(prompt, text)) is not None:
                seen.problems.add(left_out)
            texts.append(text)
            rendered.append(prompt)
        vocab_size = None if self._model is None else self._model.vocab_size
        for prompt, ids in zip(rendered, self._tokenizer.encode_many(texts, add_special_tokens=not chat), strict=True):
            if (problem := ids_problem(prompt, ids, vocab_size)) is not None:
                seen.problems.add(problem)
                continue
            length = len(ids)
            if self._limit is not None and length > self._limit:
                seen.over += 1
                seen.over_places += [prompt.source] if len(seen.over_places) < MOST_PLACES else []
                if length > seen.over_most:
                    seen.over_most, seen.over_longest = length, prompt
                if self._mode == "drop":
                    seen.count -= 1
                    continue
                length = self._limit if self._mode == "truncate-left" else length
            if length > seen.most:
                seen.most, seen.longest = length, prompt
            seen.lengths.append(length)

    def _too_long(self, seen: _Seen) -> list[Problem]:
        if self._mode != "error" or self._limit is None or seen.over_longest is None:
            return []
        # The fix must hold for the longest of them.
        problem = prompt_too_long(seen.over_longest, seen.over_most, self._limit)
        places = tuple(seen.over_places) if seen.over > 1 else ()
        return [replace(problem, where=seen.over_places[0], count=seen.over, places=places)]


@dataclass
class _Seen:
    """What was found so far in one set of prompts."""

    problems: RepeatedProblems
    count: int = 0
    lengths: list[int] = field(default_factory=list)
    most: int = 0
    longest: Prompt | None = None
    has_bad_rows: bool = False
    over: int = 0
    over_most: int = 0
    over_longest: Prompt | None = None
    over_places: list[str] = field(default_factory=list)


def _left_out(prompt: Prompt, text: str) -> Problem | None:
    """A message that the chat template does not show to the model, such as one of a role that it does not know."""
    if isinstance(prompt.content, str) and prompt.system is None:
        return None
    for message in prompt.messages:
        # What an assistant thought or a tool answered is often shortened or rewritten on purpose.
        if message["role"] not in ("assistant", "tool", "function") and message["content"].strip() not in text:
            what = f"the chat template leaves out a message of the role {message['role']!r}"
            fix = "give the messages roles that the template knows: system, user, assistant"
            return MESSAGE_LEFT_OUT(what, fix=fix, where=prompt.source, got=shown(message["content"]))
    return None
