"""Fixtures of the plugin tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from relax_cli.cli.app import build_app
from relax_cli.plugin.manager import load_plugins
from relax_cli.plugin.scaffold import package_files

Install = Callable[..., str]
Relax = Callable[..., Result]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put the new package `name` on the path as pip would, after replacing some text in it; returns the name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, old: str = "", new: str = "") -> str:
        files = package_files(name)
        assert not old or any(old in text for text in files.values()), f"{old!r} is nowhere in the package"
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text.replace(old, new) if old else text)
        info = tmp_path / f"relax_{name}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: relax-{name}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[relax.plugins]\n{name} = relax_{name}\n")
        return name

    yield write
    for module in [m for m in sys.modules if str(getattr(sys.modules[m], "__file__", "")).startswith(str(tmp_path))]:
        del sys.modules[module]


@pytest.fixture
def relax() -> Relax:
    """Run `relax` with the plugins that are installed at that moment."""
    return lambda *argv: CliRunner().invoke(build_app(load_plugins()), list(argv))
