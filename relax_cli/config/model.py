"""Look-ups in the configuration model by field name. Core sections are in `schema`, estimators add one each."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from relax_cli.config.schema import Config, Section


def options_by_name(model: type[Config]) -> dict[str, tuple[str, FieldInfo]]:
    """Every option of the model: field name, unique over all sections, to (section name, field)."""
    return {
        name: (section, field)
        for section in model.model_fields
        for name, field in section_model(model, section).model_fields.items()
    }


def section_model(model: type[Config], section: str) -> type[Section]:
    """The pydantic model of one section."""
    annotation = model.model_fields[section].annotation
    assert isinstance(annotation, type)
    assert issubclass(annotation, Section)
    return annotation


def option_value(config: Config, name: str) -> Any:
    """The value of an option by its field name, from any section."""
    section, _ = options_by_name(type(config))[name]
    return getattr(getattr(config, section), name)


def flag(name: str) -> str:
    """`rollout_batch_size` as `--rollout-batch-size`."""
    return "--" + name.replace("_", "-")


def base_type(field: FieldInfo) -> Any:
    """The type of a field without `None`: bool, int, float, str, tuple, dict or `Literal`."""
    annotation: Any = field.annotation
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (a for a in get_args(annotation) if a is not type(None))
    return get_origin(annotation) or annotation


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The allowed values of a `Literal` field, empty for any other."""
    annotation: Any = field.annotation
    options = [annotation, *get_args(annotation)]
    return tuple(str(a) for o in options if get_origin(o) is Literal for a in get_args(o))


def is_optional(field: FieldInfo) -> bool:
    """Whether the field may be `None`."""
    return type(None) in get_args(field.annotation)
