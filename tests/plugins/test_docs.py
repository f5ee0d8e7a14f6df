"""docs/plugins.md is complete, and what it shows runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from relax_cli import AdvantageInputs, Config, LossInputs
from relax_cli.config.schema import AlgorithmSection, BatchSection
from relax_cli.plugin import hookspecs
from relax_cli.plugin.kit import advantages as testing_advantages
from relax_cli.plugin.kit import check_plugin
from relax_cli.plugin.kit import loss as testing_loss
from relax_cli.plugin.kit import package as testing_package
from relax_cli.plugin.manager import load_plugins
from relax_cli.plugin.scaffold import package_files

DOCS = Path(__file__).parents[2] / "docs" / "plugins.md"
HOOKS = {name for name in vars(hookspecs) if name.startswith("relax_")}
Write = Callable[[str, dict[str, str]], None]


@pytest.fixture
def text() -> str:
    return DOCS.read_text("utf-8")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Put files and an entry point `name = relax_name` on the path, as pip would."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, files: dict[str, str]) -> None:
        info = {
            "METADATA": f"Metadata-Version: 2.1\nName: relax-{name}\nVersion: 0.1.0\n",
            "entry_points.txt": f"[relax.plugins]\n{name} = relax_{name}\n",
        }
        for path, content in {**files, **{f"relax_{name}-0.1.0.dist-info/{n}": c for n, c in info.items()}}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(content, "utf-8")

    return write


def section(text: str, title: str) -> str:
    """What stands under the heading `## title`."""
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_every_hook_is_a_heading_and_every_such_heading_a_hook(text: str) -> None:
    headings = re.findall(r"^### (relax_\w+)$", text, flags=re.MULTILINE)
    assert sorted(headings) == sorted(HOOKS)


def test_every_rule_of_the_kit_is_listed_and_no_other(text: str) -> None:
    listed = set(
        re.findall(r"^\| `([a-z-]+)` \|", section(text, "What `relax plugins check` tests"), flags=re.MULTILINE)
    )
    rules = {*testing_package.CHECKS, *testing_advantages.CHECKS, *testing_loss.CHECKS, "references"}
    assert listed == rules


@pytest.mark.parametrize("record", [AdvantageInputs, LossInputs])
def test_every_field_of_a_record_is_explained(text: str, record: type) -> None:
    table = section(text, "The two functions").split(f"| `{record.__name__}` |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE) == [field.name for field in fields(record)]


def test_the_example_is_what_new_writes_and_passes_the_kit(text: str, install: Write) -> None:
    example = section(text, "A complete estimator")
    (toml,) = re.findall(r"```toml\n(.*?)```", example, flags=re.DOTALL)
    init, loss = python_blocks(example)
    shown = {"pyproject.toml": toml, "relax_rloo/__init__.py": init, "relax_rloo/loss.py": loss}
    assert shown.items() <= package_files("rloo").items()
    install(
        "documented",
        {path.replace("rloo", "documented"): code.replace("rloo", "documented") for path, code in shown.items()},
    )
    (plugin,) = load_plugins().named("documented")
    results = check_plugin(plugin)
    assert len(results) > 20
    assert [result for result in results if result.status == "failed"] == []


def test_the_example_of_every_hook_runs(text: str, install: Write, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = python_blocks(section(text, "Hooks"))
    assert len(blocks) == len(HOOKS)
    install("hook_examples", {"relax_hook_examples.py": "\n".join(blocks)})
    plugins = load_plugins()
    (plugin,) = plugins.named("hook_examples")
    assert (plugin.row.status, set(plugin.row.hooks)) == ("ok", HOOKS)

    odd = Config(
        algorithm=AlgorithmSection(advantage_estimator="mine", use_kl_loss=True),
        batch=BatchSection(n_samples_per_prompt=3),
    )
    assert [problem.id for problem in plugins.check(odd)] == ["mine-needs-pairs"]
    normalized = plugins.normalize(odd)
    assert [change.option for change in normalized.changes] == ["--use-kl-loss"]
    assert not normalized.config.algorithm.use_kl_loss
    assert plugins.service_graph(normalized.config).names == ("rollout", "critic", "advantages", "actor")
    assert "brief" in plugins.rewards()
    assert "house" in plugins.trackers()
    assert plugins.launch(SimpleNamespace(config=Config())) is None
    assert plugins.step_end(7, {"reward/mean": 1.0}) == []
    assert "solved at step 7" in capsys.readouterr().err
