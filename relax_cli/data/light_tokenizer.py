"""A model folder's tokenizer without `transformers`, which may import torch: enough to count tokens before a launch.

The run itself uses `data.tokenise.load_tokenizer`; a test checks that both give the same ids.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer

from relax_cli.errors import ConfigError
from relax_cli.models.files import MODEL_FOLDER, MOST_TOKENIZER_BYTES, check_regular, read_json

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


@lru_cache(8)
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
