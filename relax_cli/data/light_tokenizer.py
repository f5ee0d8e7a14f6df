"""A model folder's tokenizer before a launch: enough to count tokens, without `transformers`, which may import torch.

It is tried in a process of its own first: it may never answer, or fill the memory. The run itself uses
`data.tokenise.load_tokenizer`; a test checks that both give the same ids.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import string
import tempfile
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer

from relax_cli.data.tokenise import load_tokenizer
from relax_cli.errors import ConfigError, Problem, problem_kind
from relax_cli.models.files import MODEL_FOLDER, MOST_TOKENIZER_BYTES, check_regular, read_json
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
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class LightTokenizer:
    """What `data.tokenise.encode_prompt` needs of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None, special: dict[str, str]) -> None:
        # The run's tokenizer pads and truncates nothing, whatever its file says.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._special = special
        self.chat_template = chat_template
        eos = special.get("eos_token")
        self.eos_token_id: int | None = None if eos is None else tokenizer.token_to_id(eos)

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> SimpleNamespace:
        """The `input_ids` of a text."""
        return SimpleNamespace(input_ids=self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_many(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Ids of each text, on all cores."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool, tokenize: bool, **given: Any
    ) -> str:
        """Rendered chat messages. Raises jinja2.TemplateError: the template is invalid or refuses the messages."""
        assert not tokenize
        known = {"tools": None, "documents": None, **self._special, **given}
        template = _compiled(self.chat_template or "")
        text: str = template.render(messages=messages, add_generation_prompt=add_generation_prompt, **known)
        return text


def load_light(folder: Path) -> LightTokenizer | None:
    """The tokenizer of a model folder; None where there is no tokenizer.json.
    Raises ConfigError: its files are damaged."""
    path = folder / "tokenizer.json"
    if not path.exists() or not (folder / "tokenizer_config.json").is_file():
        return None
    config = read_json(folder / "tokenizer_config.json")
    try:
        check_regular(path, MOST_TOKENIZER_BYTES)
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        problem = MODEL_FOLDER(
            f"the tokenizer does not load: {error}",
            got=str(path),
            expected="a tokenizer.json of the tokenizers library",
            fix="copy the tokenizer files of the model again",
        )
        raise ConfigError(problem) from error
    special = {name: token for name in SPECIAL_TOKENS if (token := _token(config.get(name))) is not None}
    return LightTokenizer(tokenizer, _template(folder, config), special)


@functools.lru_cache(8)
def _compiled(template: str) -> Any:
    """A chat template with what templates on Hugging Face may use. Raises jinja2.TemplateError: it is invalid."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    # Only training on whole chats asks which text the assistant generated; the tag itself prints nothing.
    template = re.sub(r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", template)
    template = re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", template)
    return environment.from_string(template)


def _token(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


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
        run_apart(
            f"{__name__}:use", *arguments, what="a trial of the tokenizer", deadline=DEADLINE, most_bytes=MOST_BYTES
        )
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
            if problems := run_apart(
                f"{__name__}:convert", str(folder), made, what="transformers to load the tokenizer"
            ):
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
