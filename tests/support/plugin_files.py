"""Distributions with one plugin module, the way pip leaves them on disk."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent


def write_plugin(folder: Path, name: str, source: str, *, distribution: str = "") -> Path:
    """Install a plugin into `folder`, which is on the path; returns its module's file."""
    distribution = distribution or f"dist-{name}"
    module = f"plugin_of_{distribution}_{folder.name}".replace("-", "_")
    file = folder / f"{module}.py"
    file.write_text(dedent(source))
    info = folder / f"{distribution.replace('-', '_')}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[relax.plugins]\n{name} = {module}\n")
    return file


def estimator_source(name: str, extra: str = "") -> str:
    """A plugin with an estimator whose references lead nowhere, and whatever `extra` adds."""
    return dedent(
        f"""
        from relax_cli import ClipOptions, Estimator, hookimpl

        @hookimpl
        def relax_estimators():
            return [Estimator("{name}", "s", "p", ClipOptions, "m:advantages", "m:policy_loss")]
        """
    ) + dedent(extra)
