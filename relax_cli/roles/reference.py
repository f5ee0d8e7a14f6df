"""Reference: a frozen policy that KL terms compare the trained one with."""

from __future__ import annotations

from relax_cli.backends.megatron.loaded import LoadedModel
from relax_cli.roles.training import ModelRole


class ReferenceRole(ModelRole[LoadedModel]):
    """One rank of the frozen policy."""

    name = "reference"
