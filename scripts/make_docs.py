"""Write docs/configuration.md from the option models of the core and the built-in estimators."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

from relax_cli.cli.option_docs import configuration_markdown
from relax_cli.config.model import config_model
from relax_cli.plugin.manager import GROUP, Plugins

BUILT_IN = ("ppo", "grpo", "gspo", "cispo", "sapo")
TARGET = Path(__file__).parent.parent / "docs" / "configuration.md"


def render() -> str:
    """The page; plugins that happen to be installed here do not change it."""
    plugins = Plugins([EntryPoint(name, f"relax_{name}", GROUP) for name in BUILT_IN])
    return configuration_markdown(config_model(plugins.estimators().values()))


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(f"wrote {TARGET}")
