"""The application with the five built-in plugins, in this process and in a real one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from relax_cli.cli.app import build_app
from relax_cli.plugin.manager import Plugins
from tests.support.cli_app import Invoke, Process, built_in_plugins


@pytest.fixture(scope="session")
def plugins() -> Plugins:
    return built_in_plugins()


@pytest.fixture(scope="session")
def app(plugins: Plugins) -> typer.Typer:
    return build_app(plugins)


@pytest.fixture
def invoke(app: typer.Typer) -> Invoke:
    """Run a command line in this process."""
    return lambda *args, **kwargs: CliRunner().invoke(app, list(args), **kwargs)


@pytest.fixture
def process() -> Process:
    """Run Python code in a process of its own."""

    def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, env=os.environ | env, timeout=120)

    return run
