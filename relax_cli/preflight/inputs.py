"""What model and data files say about a run: read once, for the rules and the plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from relax_cli.checkpoint.fingerprint import folder_of_model
from relax_cli.config.held_out import sampling_of_set
from relax_cli.config.layers import known
from relax_cli.config.schema import Config
from relax_cli.data import curriculum as curriculums
from relax_cli.data.envs import load as envs
from relax_cli.data.formats import FILE_MISSING
from relax_cli.data.light_tokenizer import try_tokenizer
from relax_cli.data.rewards import BUILTIN_REWARDS, USER_FILE
from relax_cli.data.sources import SOURCE
from relax_cli.errors import ConfigError, Problem
from relax_cli.models.families import MOE_FAMILIES
from relax_cli.models.files import irregular_files
from relax_cli.models.headers import weight_problems
from relax_cli.models.hybrid import language_config, read_any_spec
from relax_cli.models.spec import BRIDGE_FAMILIES, FAMILIES, ModelSpec, config_of, known_folder
from relax_cli.plugin.user_file import is_file_spec
from relax_cli.preflight.data_reader import DataReader
from relax_cli.preflight.memory.sizes import Lengths

PREPARE = "relax quickstart --prepare-only"
"""What writes the model and the data of the tiny recipes."""
ASSUMED_PROMPT = 512
"""Tokens of the longest prompt where nothing says how long they are."""


@dataclass(frozen=True)
class RunInputs:
    """All fields are empty where files were not read."""

    model: ModelSpec | None = None
    """What `config.json` means."""
    prompts: int | None = None
    prompt_lens: tuple[int, ...] = ()
    longest: tuple[int, str] | None = None
    """Tokens of the longest prompt of all sets, and its file and line."""
    longest_by_set: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """The same of each held-out set, and of the training prompts under ""."""
    model_config: Mapping[str, Any] = field(default_factory=dict)
    """`config.json` as it is; empty where it is missing or broken."""
    problems: tuple[Problem, ...] = ()
    tokenizer: Path | None = None
    """The model's folder, where its tokenizer may be loaded into this process."""

    @property
    def longest_prompt(self) -> int | None:
        """Tokens of the longest training prompt."""
        return max(self.prompt_lens, default=None)

    @property
    def needs_bridge(self) -> bool:
        """Whether the model goes through Megatron-Bridge."""
        return self.model_config.get("model_type") in BRIDGE_FAMILIES

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return self.model_config.get("model_type") in MOE_FAMILIES

    def model_count(self, name: str) -> int | None:
        """A positive integer of the language model's part of `config.json`; None where it has none of that name."""
        value = language_config(self.model_config).get(name)
        return value if type(value) is int and value > 0 else None

    def lengths_for(self, config: Config) -> Lengths:
        """Longest prompt and response: the limits, or what was seen where there is none."""
        section, evaluated = config.rollout, 0
        for name, _ in config.eval.sets:
            prompt, _ = self.longest_by_set.get(name, (section.rollout_max_prompt_len or ASSUMED_PROMPT, ""))
            with suppress(ValueError):  # eval-sampling tells of it.
                response = sampling_of_set(config.eval, name, section).rollout_max_response_len
                evaluated = max(evaluated, prompt + response)
        longest = section.rollout_max_prompt_len or self.longest_prompt or ASSUMED_PROMPT
        return Lengths(longest, section.rollout_max_response_len, evaluated)

    def rollouts(self, config: Config) -> int | None:
        """`--num-rollout`, or whole rollouts in `--num-epoch` passes over the prompts, at least one; None where that
        depends on data that were not read."""
        batch = config.batch
        if batch.num_rollout is not None or batch.num_epoch is None or self.prompts is None:
            return batch.num_rollout
        return max(1, self.prompts * batch.num_epoch // batch.rollout_batch_size)


def read_inputs(
    config: Config,
    progress: Callable[[str, float], None] | None = None,
    rewards: Collection[str] = BUILTIN_REWARDS,
) -> RunInputs:
    """Read the model's `config.json` and every prompt, and collect what is wrong in them. Rows may choose of the
    `rewards`; `progress` is told now and then which file is being read, and the part of it that is read."""
    model = read_model(config)
    problems = list(model.problems)
    for file, spec in (
        (USER_FILE, known(lambda: config.reward.custom_rm_path)),
        (envs.USER_FILE, known(lambda: config.episode.env)),
        (curriculums.USER_FILE, known(lambda: config.data.curriculum)),
    ):
        if spec and (file is USER_FILE or is_file_spec(spec)):
            problems += file.check(spec)
    reader = DataReader(config, model.tokenizer, model.model, progress, rewards)
    items, sets = known(lambda: config.data.prompt_data) or (), known(lambda: config.eval.sets) or ()
    sources = [("--prompt-data", spec) for spec in dict.fromkeys(items)]
    for option, source in (*sources, *(("--eval-prompt-data", spec) for _, spec in sets)):
        try:
            reader(config.data, source)
        except ConfigError as error:
            # A rule judges the words of training items.
            found = [p for p in error.problems if p.id != SOURCE.id or option != "--prompt-data"]
            problems += [_of_option(p, option) for p in found]
    counted = {spec: (max(s.lengths), s.longest) for spec, s in reader.summaries.items() if s.lengths}
    by_set = {name: counted[spec] for name, spec in sets if spec in counted}
    training = [counted[spec] for spec in items if spec in counted]
    seen = [reader.summaries[spec] for spec in items if spec in reader.summaries]
    is_whole = bool(items) and len(seen) == len(items)
    return replace(
        model,
        prompts=sum(one.prompts for one in seen) if is_whole else None,
        prompt_lens=tuple(n for one in seen for n in one.lengths) if is_whole else (),
        longest=max(counted.values(), default=None),
        longest_by_set=by_set | ({"": max(training)} if training else {}),
        problems=tuple(problems),
    )


def is_of_quickstart(path: str) -> bool:
    """Whether `relax quickstart --prepare-only` writes this file or folder."""
    return Path(path).parts[:1] == ("quickstart",)


def _of_option(problem: Problem, option: str) -> Problem:
    if problem.id == FILE_MISSING.id and is_of_quickstart(problem.got):
        problem = replace(problem, fix=PREPARE)
    if problem.option != "--prompt-data":
        return problem
    return replace(problem, option=option, fix=problem.fix.replace("--prompt-data", option))


def read_model(config: Config) -> RunInputs:
    """What `--hf-checkpoint` says, and what is wrong with it, or with `--ref-load` where the run has a KL term."""
    folder = known(lambda: folder_of_model(config.model.hf_checkpoint))
    problems = list(known(lambda: _reference_problems(config)) or ())
    if folder is None:
        described = known(lambda: known_folder(config.model.hf_checkpoint))
        spec, _ = _spec(described)
        model_config = {} if described is None else config_of(described)
        return RunInputs(spec, model_config=model_config, problems=tuple(problems))
    spec, found = _spec(folder)
    chat = bool(known(lambda: config.data.apply_chat_template))
    harmful = irregular_files(folder) or try_tokenizer(folder, apply_chat_template=chat)
    problems = [*found, *weight_problems(folder, spec), *harmful, *problems]
    tokenizer = None if harmful else folder
    return RunInputs(spec, model_config=config_of(folder), problems=tuple(problems), tokenizer=tokenizer)


def _reference_problems(config: Config) -> list[Problem]:
    name = config.model.ref_load
    folder = folder_of_model(name or "")
    if name in (None, config.model.hf_checkpoint) or folder is None or not config.algorithm.needs_reference:
        return []
    spec, found = _spec(folder)
    return [replace(problem, option="--ref-load") for problem in (*found, *weight_problems(folder, spec))]


def _spec(folder: Path | None) -> tuple[ModelSpec | None, list[Problem]]:
    """What `config.json` means, or why it cannot be used; rules report a broken file and an unsupported family."""
    if folder is None or config_of(folder).get("model_type") not in (*FAMILIES, *BRIDGE_FAMILIES):
        return None, []
    try:
        return read_any_spec(folder), []
    except ConfigError as error:
        return None, list(error.problems)
