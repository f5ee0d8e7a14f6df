"""The tokenizer of a model folder, tried in a process of its own: it may never answer, or fill the memory."""

from __future__ import annotations

import functools
import hashlib
import string
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from relax_cli.data.light_tokenizer import LightTokenizer, load_light
from relax_cli.data.tokenise import load_tokenizer
from relax_cli.errors import ConfigError, Problem, problem_kind
from relax_cli.plugin.apart import Unanswered, run_apart

DEADLINE = 30.0
"""The largest real tokenizers load in 2 s."""
MOST_BYTES = 4 << 30
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
OLDER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt")
"""Of tokenizers without a tokenizer.json."""
PROBE = string.printable + "äñçłßαωжשصह中日한𝔸🙂"

TRIAL = problem_kind(
    "tokenizer-trial",
    "Model",
    "The tokenizer does not load, encode a short text and render one chat message within 30 s and 4 GB. Tried in a"
    " process of its own before a launch.",
    option="--hf-checkpoint",
)

NOT_COUNTED = problem_kind(
    "prompts-not-counted",
    "Data",
    "A warning: the model folder has no tokenizer.json, and what it has cannot be made into one, so that the tokens of "
    "prompts are counted during the run only.",
    option="--hf-checkpoint",
    severity="warning",
)


@dataclass(frozen=True)
class _Tokenizer:
    """Folders with the same content are tried once."""

    content: bytes
    chat: bool
    folder: Path = field(compare=False)


def try_tokenizer(folder: Path, *, apply_chat_template: bool) -> list[Problem]:
    """Why the tokenizer of `folder`, whose files are regular, must not be loaded into this process."""
    content = hashlib.sha256()
    for name in FILES:
        if (folder / name).is_file():
            content.update((folder / name).read_bytes())
    reason = _trouble(_Tokenizer(content.digest(), apply_chat_template, folder))
    if reason is None:
        return []
    return [
        TRIAL(
            f"the {'chat template' if apply_chat_template else 'tokenizer'} cannot be used: a trial {reason}",
            where=str(folder),
            got="no answer",
            expected=f"an answer within {DEADLINE:g} s and {MOST_BYTES >> 30} GB",
            fix="download the tokenizer's files again from a source that you trust",
        )
    ]


@functools.lru_cache(64)
def _trouble(tokenizer: _Tokenizer) -> str | None:
    arguments = (str(tokenizer.folder), "chat" if tokenizer.chat else "")
    try:
        run_apart(f"{__name__}:use", *arguments, deadline=DEADLINE, most_bytes=MOST_BYTES)
    except Unanswered as error:
        return str(error)
    return None


def use(folder: str, chat: str) -> None:
    """Load, encode and render. What is merely wrong is found again, and reported, by the reader of the data."""
    try:
        tokenizer = load_light(Path(folder))
        if tokenizer is None:
            return
        tokenizer(PROBE)
        if chat and tokenizer.chat_template is not None:
            messages = [{"role": "user", "content": PROBE}]
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            tokenizer(text, add_special_tokens=False)
    # A template is a program of the user's, which may raise anything.
    except Exception as error:
        if isinstance(error, MemoryError):
            raise


def load_older(folder: Path) -> LightTokenizer | None:
    """The tokenizer of a folder without a tokenizer.json, as `transformers` makes it into one in another process.
    Raises ConfigError: it does not load, or, as a warning, it cannot be made into one."""
    if not any((folder / name).is_file() for name in OLDER_FILES):
        return None
    with tempfile.TemporaryDirectory(prefix="relax-") as made:
        try:
            if problems := run_apart(f"{__name__}:convert", str(folder), made):
                raise ConfigError(problems)
            # As that of any other folder: a template is a program of somebody else.
            if harmful := try_tokenizer(Path(made), apply_chat_template=True):
                raise ConfigError([replace(problem, where=str(folder)) for problem in harmful])
            tokenizer, reason = load_light(Path(made)), "gave no tokenizer.json"
        except Unanswered as error:
            tokenizer, reason = None, str(error)
    if tokenizer is None:
        message = f"the tokens of prompts are not counted before the launch: a trial to load the tokenizer {reason}"
        fix = "copy the tokenizer.json of the model there, where it has one"
        raise ConfigError(NOT_COUNTED(message, where=str(folder), expected="a tokenizer.json", fix=fix))
    return tokenizer


def convert(folder: str, made: str) -> None:
    """Write what the run's tokenizer is as a tokenizer.json, where it can be."""
    load_tokenizer(Path(folder)).save_pretrained(made)
