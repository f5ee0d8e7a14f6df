"""Rules about prompts. What is wrong in the rows is found while they are read (`relax_cli.preflight.inputs`)."""

from __future__ import annotations

from collections.abc import Mapping

from relax_cli.config.schema import DataSection
from relax_cli.data.curriculum import USER_FILE
from relax_cli.data.sources import SOURCE, source_of, weights_of
from relax_cli.errors import ConfigError
from relax_cli.plugin.records import Curriculum
from relax_cli.plugin.user_file import is_file_spec
from relax_cli.preflight.rules.registry import Finding, Found, rule


@rule("prompt-data-missing", "Data", option="--prompt-data", needs="files")
def prompt_data_missing(data: DataSection) -> Found:
    """`--prompt-data` is required."""
    if not data.prompt_data:
        yield Finding(fix="add --prompt-data FILE.jsonl, or --prompt-data reasoning-gym:chain_sum?size=512")


@rule(USER_FILE.nowhere)
def curriculum_unknown(data: DataSection, curriculums: Mapping[str, Curriculum]) -> Found:
    """There is no built-in curriculum of that name, nor one of a plugin."""
    if (name := data.curriculum) is not None and not is_file_spec(name) and name not in curriculums:
        yield USER_FILE.unknown(name, curriculums)


RESERVED = {
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length"),
    *("messages", "padding", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
}


@rule("chat-template-kwargs-reserved", "Data", option="--chat-template-kwargs")
def chat_template_kwargs_reserved(data: DataSection) -> Found:
    """`--chat-template-kwargs` names what relax gives the chat template itself."""
    if reserved := sorted(RESERVED & data.chat_template_kwargs.keys()):
        yield Finding(fix="leave it out; tools are in the rows, under --tools-key", got=", ".join(reserved))


@rule(SOURCE)
def prompt_data_source(data: DataSection) -> Found:
    """An item of `--prompt-data` has a slice or a weight that cannot be read, or only some have a weight."""
    try:
        weights_of([source_of(item) for item in data.prompt_data])
    except ConfigError as error:
        yield from error.problems
