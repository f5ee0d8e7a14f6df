"""What can be known to be wrong before anything starts: small rules, all asked, all reported. One file a theme."""

from importlib import import_module
from pkgutil import iter_modules

from relax_cli.preflight.rules.registry import RULES, RuleContext, run_rules

__all__ = ["RULES", "RuleContext", "run_rules"]

for _theme in iter_modules(__path__, f"{__name__}."):
    import_module(_theme.name)
