"""The checkpoint's tokenizer: prompts to token ids, and the ids that end a response."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_cli.data.rows import TOOLS, Prompt
from relax_cli.data.values import printable
from relax_cli.errors import ConfigError, Problem, problem_kinds
from relax_cli.models.families import DEFAULTS
from relax_cli.models.files import MODEL_FOLDER, read_json
from relax_cli.models.hybrid import language_config
from relax_cli.models.spec import read_config

LACKS_TEMPLATE = "--hf-checkpoint with a chat template (chat_template.jinja), or prompts that are plain text"
CHUNK = 1024
"""Prompts that are tokenised at once."""
GENERIC_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Values of `tokenizer_class` that mean: exactly what tokenizer.json says."""

declare = problem_kinds("Data")
PROMPT_ENCODING = declare(
    "prompt-encoding",
    "A prompt cannot be tokenised: the chat template is missing or refuses it, or a token is not in the model's"
    " vocabulary. Every prompt is tried before a launch.",
    option="--prompt-data",
)
PROMPT_TOO_LONG = declare(
    "prompt-too-long",
    "A prompt is over `--rollout-max-prompt-len`, counted after the chat template.",
    option="--rollout-max-prompt-len",
)


def load_tokenizer(folder: Path) -> Any:
    """The `transformers` tokenizer of a model folder; the network is never asked.
    Raises ConfigError: there is none, or it does not load."""
    if not (folder / "tokenizer_config.json").is_file():
        raise _tokenizer_error(folder, "the model folder has no tokenizer (tokenizer_config.json)")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # For some architectures AutoTokenizer takes the architecture's usual class, whatever the folder asks for, and
    # that one may read a generic tokenizer.json wrongly (Qwen2: every text becomes empty).
    is_generic = read_json(folder / "tokenizer_config.json").get("tokenizer_class") in GENERIC_TOKENIZERS
    loader = PreTrainedTokenizerFast if is_generic else AutoTokenizer
    try:
        return loader.from_pretrained(folder, local_files_only=True)
    # A malformed tokenizer.json raises a bare Exception in the tokenizers library.
    except Exception as error:
        raise _tokenizer_error(folder, f"the tokenizer does not load: {error}") from error


def encode_prompt(tokenizer: Any, prompt: Prompt, *, apply_chat_template: bool) -> list[int]:
    """Token ids of a prompt.

    With the chat template the prompt ends where the assistant's turn begins; text counts as one user message.
    Without it text is encoded as the tokenizer is configured, a BOS token included where it adds one.
    Raises ConfigError: the tokenizer has no chat template, the template refuses the messages, messages came without
    `--apply-chat-template`, or there is nothing to encode.
    """
    text = encoded_text(tokenizer, prompt, apply_chat_template=apply_chat_template)
    ids = list(tokenizer(text, add_special_tokens=not apply_chat_template).input_ids)
    if (problem := ids_problem(prompt, ids, None)) is not None:
        raise ConfigError(problem)
    return ids


def encoded_text(tokenizer: Any, prompt: Prompt, *, apply_chat_template: bool) -> str:
    """The text of a prompt that is encoded; a chat template writes the special tokens itself.
    Raises ConfigError: see `encode_prompt`."""
    if apply_chat_template:
        return _render(tokenizer, prompt)
    if isinstance(prompt.content, str) and TOOLS not in prompt.template:
        return prompt.content
    what = "chat messages need" if not isinstance(prompt.content, str) else "tools need"
    fix = LACKS_TEMPLATE if tokenizer.chat_template is None else "--apply-chat-template"
    raise _prompt_error(prompt, f"{what} the chat template", fix=fix)


def ids_problem(prompt: Prompt, ids: list[int], vocab_size: int | None) -> Problem | None:
    """What is wrong with the token ids of a prompt: there are none, or the model does not know one."""
    if not ids:
        return encoding_problem(prompt, "the prompt has no tokens", fix="correct or remove the row")
    if vocab_size is not None and max(ids) >= vocab_size:
        return encoding_problem(
            prompt,
            f"the tokenizer gives token id {max(ids)}, the model knows {vocab_size}",
            fix="--hf-checkpoint with the tokenizer of its model",
        )
    return None


def fitting(prompts: Sequence[Prompt], *, tokenizer: Any, limit: int, apply_chat_template: bool) -> list[Prompt]:
    """The prompts of at most `limit` tokens."""
    kept: list[Prompt] = []
    for first in range(0, len(prompts), CHUNK):
        chunk = prompts[first : first + CHUNK]
        texts = [encoded_text(tokenizer, p, apply_chat_template=apply_chat_template) for p in chunk]
        ids = tokenizer(texts, add_special_tokens=not apply_chat_template).input_ids
        kept += [prompt for prompt, one in zip(chunk, ids, strict=True) if len(one) <= limit]
    return kept


def prompt_too_long(prompt: Prompt, length: int, limit: int) -> Problem:
    """The problem of a prompt that is over `--rollout-max-prompt-len`."""
    return PROMPT_TOO_LONG(
        "a prompt is longer than the limit",
        where=prompt.source,
        got=f"{length} tokens",
        expected=f"at most {limit}",
        fix=f"--rollout-max-prompt-len {length}, --overlong-prompts drop, or shorten that row",
    )


def model_vocab_size(folder: Path) -> int:
    """Rows of the model's embedding, from `config.json`.
    Raises ConfigError: `config.json` is missing, unreadable or does not say."""
    config = read_config(folder)
    default = DEFAULTS.get(str(config.get("model_type")), {}).get("vocab_size")
    size = language_config(config).get("vocab_size", default)
    if type(size) is not int:
        raise _tokenizer_error(folder, "config.json has no vocab_size")
    return size


def stop_token_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a response, ascending: those of generation_config.json, config.json and the tokenizer.
    Raises ConfigError: a file is unreadable, or an id is not in the model's vocabulary."""
    generation = folder / "generation_config.json"
    found = [*_eos_ids(read_config(folder)), *(_eos_ids(read_json(generation)) if generation.is_file() else ())]
    found += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    size = model_vocab_size(folder)
    if wrong := [number for number in found if type(number) is not int]:
        raise _tokenizer_error(folder, f"the end-of-sequence id {wrong[0]!r} is not a whole number")
    ids = set(found)
    if beyond := sorted(number for number in ids if not 0 <= number < size):
        raise _tokenizer_error(folder, f"end-of-sequence id {beyond[0]} is not below vocab_size {size}")
    return tuple(sorted(ids))


def prompt_text(tokenizer: Any, prompt: Prompt) -> str:
    """The prompt as its reward sees it: text as it is in the data, chat messages as the template renders them."""
    return prompt.content if isinstance(prompt.content, str) else _render(tokenizer, prompt)


def _render(tokenizer: Any, prompt: Prompt) -> str:
    if tokenizer.chat_template is None:
        is_plain = isinstance(prompt.content, str) and TOOLS not in prompt.template
        fix = "leave out --apply-chat-template" if is_plain else LACKS_TEMPLATE
        raise _prompt_error(prompt, "the tokenizer has no chat template", fix=fix)
    try:
        text: str = tokenizer.apply_chat_template(
            prompt.messages, add_generation_prompt=True, tokenize=False, **prompt.template
        )
    # A template is a program of the user's: besides TemplateError it raises what its expressions do.
    except Exception as error:
        what = f"the chat template refuses the messages: {str(error) or type(error).__name__}"
        raise _prompt_error(prompt, what, fix="correct or remove the row") from error
    return text


def _eos_ids(config: dict[str, Any]) -> list[Any]:
    found = config.get("eos_token_id", language_config(config).get("eos_token_id"))
    return found if isinstance(found, list) else [] if found is None else [found]


def _tokenizer_error(folder: Path, message: str) -> ConfigError:
    return ConfigError(
        MODEL_FOLDER(
            message,
            got=str(folder),
            expected="a folder with config.json, safetensors and tokenizer files",
            fix="--hf-checkpoint MODEL_FOLDER",
        )
    )


def encoding_problem(prompt: Prompt, message: str, *, fix: str) -> Problem:
    """The problem of a prompt that cannot be tokenised."""
    return PROMPT_ENCODING(message, where=prompt.source, got=printable(str(prompt.content)[:80]), fix=fix)


def _prompt_error(prompt: Prompt, message: str, *, fix: str) -> ConfigError:
    return ConfigError(encoding_problem(prompt, message, fix=fix))
