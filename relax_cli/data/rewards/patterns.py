"""Rewards whose label says what a right response looks like: `regex` and `json_schema`.

Both may take for ever on an unlucky text, so they judge one sample at a time in processes of their own.
"""

from __future__ import annotations

import json
import re
from typing import Any

from relax_cli.data.rewards.types import RewardInput

_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


def regex(sample: RewardInput) -> float:
    """1.0 where the label, a regular expression of Python, is found in the response, else 0.0.
    Raises RunError: the sample has no label."""
    return float(any(re.search(pattern, sample.response) for pattern in sample.answers("regex")))


def json_schema(sample: RewardInput) -> dict[str, float]:
    """1.0 where the response, or its last fenced block, is JSON by the schema that is the label, else 0.0.
    The part `json` is 1 where it is JSON at all."""
    from jsonschema.validators import validator_for
    from referencing import Registry

    schema = schema_of(sample.label)
    fenced = _FENCE.findall(sample.response)
    try:
        value = json.loads(fenced[-1] if fenced else sample.response)
    except (ValueError, RecursionError):
        return {"reward": 0.0, "json": 0.0}
    # A registry of its own: a schema that names another is not fetched from the network.
    validator = validator_for(schema)(schema, registry=Registry())
    return {"reward": float(validator.is_valid(value)), "json": 1.0}


def schema_of(label: Any) -> Any:
    """The schema of a label: an object, or its text. Raises ValueError: it is not a JSON object."""
    schema = json.loads(label) if isinstance(label, str) else label
    if not isinstance(schema, dict):
        raise ValueError("is not a JSON object")
    return schema


def pattern_fault(pattern: str) -> str:
    """Why a label is not a regular expression; empty where it is one."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"the label is not a regular expression: {error}"
    return ""


def schema_fault(label: Any) -> str:
    """Why a label is not a JSON schema; empty where it is one."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    try:
        schema = schema_of(label)
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        return f"the label is not a JSON schema: {error.message}"
    except ValueError as error:
        return f"the label is not a JSON schema: {error}"
    return ""
