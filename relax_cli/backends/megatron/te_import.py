"""Whether TransformerEngine imports, found out in a process of its own: a build for another CUDA may crash or hang."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from relax_cli.errors import MACHINE_THEME, EnvironmentFault, Problem, problem_kind
from relax_cli.plugin.apart import Unanswered, run_apart

PACKAGE = "transformer_engine"
DEADLINE = 300.0
NO_TRANSFORMER_ENGINE = problem_kind(
    "transformer-engine-missing",
    MACHINE_THEME,
    "`--transformer-impl transformer_engine`, but TransformerEngine does not import on this machine.",
    option="--transformer-impl",
)


def trouble() -> Problem | None:
    """Why TransformerEngine cannot be used here; None where it imports."""
    if find_spec(PACKAGE) is None:
        return _problem("TransformerEngine is not installed")
    try:
        found = run_apart(f"{__name__}:use", what="the import of TransformerEngine", deadline=DEADLINE)
    except Unanswered as error:
        return _problem(f"the import of TransformerEngine {error}")
    return found[0] if found else None


def use() -> None:
    """Import it. Raises EnvironmentFault: it does not import."""
    try:
        import_module(f"{PACKAGE}.pytorch")
    # Besides ImportError: an OSError is a shared library of another CUDA version, and its own checks raise anything.
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise EnvironmentFault(_problem(f"TransformerEngine does not import: {reason}")) from error


def _problem(message: str) -> Problem:
    return NO_TRANSFORMER_ENGINE(
        message,
        fix="pip install 'relax-cli[gpu]', or --transformer-impl local",
        got="transformer_engine",
        expected="auto or local on this machine",
    )
