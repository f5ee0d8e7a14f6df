"""Plugins are found through entry points of real distributions (written to a folder on sys.path)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest

from relax_cli import Config, RoleSpec, ServiceGraph
from relax_cli.config.schema import AlgorithmSection, BatchSection, ParallelSection
from relax_cli.errors import ConfigError, Problem, RunError
from relax_cli.plugin.graph import base_graph
from relax_cli.plugin.manager import Plugins, installed_plugins, load_plugins
from relax_cli.plugin.records import Estimator, load_reference
from tests.support.plugin_files import estimator_source, write_plugin

BUILT_IN = {"cispo", "gspo", "grpo", "ppo", "sapo"}
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution with one plugin module."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name, source, **more: write_plugin(tmp_path, name, source, **more)


def config(estimator: str = "ppo", **changes: object) -> Config:
    """A configuration that PPO accepts."""
    algorithm = AlgorithmSection(advantage_estimator=estimator, use_rollout_logprobs=True)
    resource = {"actor": (1, 2), "critic": (1, 2), "rollout": (1, 2), "advantages": (1, 0)}
    parallel = ParallelSection(resource=resource, colocate=True, offload_train=True)
    sections = {"algorithm": algorithm, "parallel": parallel}
    for option, value in changes.items():
        owner = next(key for key, section in sections.items() if hasattr(section, option))
        sections[owner] = sections[owner].model_copy(update={option: value})
    return Config(**sections)


def ids(problems: Sequence[Problem]) -> list[str]:
    return [problem.id for problem in problems]


def row_of(plugins: Plugins, name: str) -> dict[str, object]:
    (row,) = [row for row in plugins.rows() if row.name == name]
    return {key: getattr(row, key) for key in ("kind", "distribution", "version", "status", "reason", "hooks")}


# -- finding plugins -------------------------------------------------------------------------------


def test_the_built_in_estimators_are_found_by_entry_points() -> None:
    plugins = load_plugins()
    assert {entry.name for entry in installed_plugins()} >= BUILT_IN
    assert plugins.estimators().keys() >= BUILT_IN
    for name in BUILT_IN:
        row = row_of(plugins, name)
        assert (row["kind"], row["status"], row["distribution"]) == ("estimator", "ok", "relax-cli"), row


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_built_in_estimator_leads_to_its_math(name: str) -> None:
    estimator = load_plugins().estimator(name)
    package = sys.modules[f"relax_{name}"]
    assert estimator.load_policy_loss() is package.policy_loss
    assert callable(estimator.load_advantages())
    assert (estimator.needs_critic, estimator.needs_groups) == (name == "ppo", name != "ppo")


def test_loading_every_plugin_imports_nothing_heavy() -> None:
    script = """
        import json, sys
        from relax_cli.plugin.manager import load_plugins
        plugins = load_plugins()
        from relax_cli import Config, LossTerms, ServiceGraph
        plugins.check(Config()), plugins.normalize(Config()), plugins.service_graph(Config())
        heavy = {"torch", "ray", "megatron", "transformers", "sglang", "numpy"}
        print(json.dumps([sorted(plugins.estimators()), sorted(heavy & sys.modules.keys())]))
    """
    done = subprocess.run([sys.executable, "-c", dedent(script)], capture_output=True, text=True, check=True)
    names, heavy = json.loads(done.stdout)
    assert set(names) >= BUILT_IN
    assert heavy == []


def test_a_plugin_that_fails_to_import_is_one_broken_row(install: Install) -> None:
    install("sick", "import a_module_that_is_not_there")
    plugins = load_plugins()
    row = row_of(plugins, "sick")
    assert (row["status"], row["distribution"], row["version"]) == ("broken", "dist-sick", "1.2")
    assert "a_module_that_is_not_there" in str(row["reason"])
    assert plugins.estimators().keys() >= BUILT_IN
    assert plugins.normalize(config()).config == config()


def test_a_requested_broken_plugin_is_an_error_with_its_reason(install: Install) -> None:
    install("sick", "raise RuntimeError('no licence')")
    with pytest.raises(ConfigError, match=r"'sick' \(dist-sick 1\.2\) is broken: RuntimeError: no licence"):
        load_plugins().estimator("sick")


def test_an_unknown_estimator_is_refused_with_name_and_node() -> None:
    with pytest.raises(ConfigError, match=r"estimator 'grp0' on node gpu-7") as caught:
        load_plugins().estimator("grp0", node="gpu-7")
    (problem,) = caught.value.problems
    assert problem.fix == "--advantage-estimator grpo"
    assert "sapo" in problem.expected


DUPLICATES = {
    "estimator": "duplicate-estimator",
    "reward": "duplicate-reward",
    "env": "duplicate-env",
    "curriculum": "duplicate-curriculum",
    "tracker": "duplicate-tracker",
}


@pytest.mark.parametrize("what", DUPLICATES)
def test_two_plugins_with_one_name_are_a_problem_of_that_kind(install: Install, what: str) -> None:
    kind = what.title()
    head = f"from relax_cli import {kind}, hookimpl\n@hookimpl\ndef relax_{what}s():\n"
    record = f"{head}    return [{kind}('mine', 's', 'm:f')]\n"
    source = {"estimator": estimator_source("mine")}.get(what, record)
    for plugin_name in ("one", "two"):
        install(plugin_name, source)
    with pytest.raises(ConfigError, match="dist-one and dist-two both provide") as caught:
        getattr(load_plugins(), f"{what}s")()
    assert ids(caught.value.problems) == [DUPLICATES[what]]


@pytest.mark.parametrize("plugin_name", ["other", "grpo"])
def test_two_distributions_with_one_estimator_are_both_named(install: Install, plugin_name: str) -> None:
    install(plugin_name, estimator_source("grpo"), distribution="a-rival")
    plugins = load_plugins()
    with pytest.raises(ConfigError, match="a-rival") as caught:
        plugins.estimators()
    assert "relax-cli" in str(caught.value)
    assert "'grpo'" in str(caught.value)
    with pytest.raises(ConfigError):
        plugins.estimator("grpo")
    assert all(row.status == "ok" for row in plugins.rows())


def test_a_misspelt_hook_is_an_error_row_with_the_right_name(install: Install) -> None:
    install("typo", estimator_source("typo", "@hookimpl\ndef relax_chek_config(config):\n    return []\n"))
    plugins = load_plugins()
    (problem,) = (problem for plugin in plugins.installed() for problem in plugin.misspelt)
    assert "relax_chek_config" in problem.message
    assert problem.fix == "rename it to relax_check_config"
    assert row_of(plugins, "typo")["status"] == "broken"
    assert "typo" not in plugins.estimators()


def test_correct_plugins_leave_nothing_pending() -> None:
    assert not any(plugin.misspelt for plugin in load_plugins().installed())


def test_a_hook_with_an_unknown_argument_is_a_broken_row(install: Install) -> None:
    install("args", estimator_source("args", "@hookimpl\ndef relax_check_config(cfg):\n    return []\n"))
    row = row_of(load_plugins(), "args")
    assert row["status"] == "broken"
    assert "cfg" in str(row["reason"])


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ("Reward('a', '', 'm:f'), Reward('a', '', 'm:g')", "returns two called 'a'"),
        ("Reward('a', '', print),", "function of the reward 'a' must be text"),
        ("Reward(3, '', 'm:f'),", "name of the reward 3 must be text"),
        ("Reward('a b=1', '', 'm:f'),", "text without blanks, got 'a b=1'"),
        ("Reward('a', '', ''),", "got ''"),
        ("Reward('a', '', 'm:f')", "must return a list of Reward"),
    ],
)
def test_a_record_that_cannot_be_used_makes_a_broken_row(install: Install, rewards: str, reason: str) -> None:
    install("bad", f"from relax_cli import Reward, hookimpl\n@hookimpl\ndef relax_rewards():\n    return {rewards}\n")
    row = row_of(load_plugins(), "bad")
    assert (row["status"], reason in str(row["reason"])) == ("broken", True)


def test_an_import_changes_no_settings_of_the_process(install: Install) -> None:
    def settings() -> object:
        return os.getcwd(), signal.getsignal(signal.SIGINT), sys.getrecursionlimit()

    before = settings()
    rude = "os.chdir('/')\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nsys.setrecursionlimit(4000)\n"
    install("rude", f"import os, signal, sys\n{rude}")
    assert row_of(load_plugins(), "rude")["status"] == "ok"
    assert settings() == before


@pytest.mark.parametrize("body", ["raise KeyError('x')", "return ['not an estimator']"])
def test_estimators_that_cannot_be_listed_make_a_broken_row(install: Install, body: str) -> None:
    install("bad", f"from relax_cli import hookimpl\n@hookimpl\ndef relax_estimators():\n    {body}\n")
    plugins = load_plugins()
    assert row_of(plugins, "bad")["status"] == "broken"
    assert "relax_estimators" in str(row_of(plugins, "bad")["reason"])
    assert plugins.estimators().keys() >= BUILT_IN


def test_a_dangling_reference_names_the_estimator() -> None:
    with pytest.raises(ConfigError, match=r"estimator rloo refers to 'relax_cli.errors:nothing'"):
        load_reference("relax_cli.errors:nothing", "estimator rloo")


# -- calling hooks ---------------------------------------------------------------------------------


def test_one_failing_tracker_does_not_silence_the_others(install: Install, tmp_path: Path) -> None:
    tracker = "from relax_cli import hookimpl\n@hookimpl\ndef relax_step_end(step, metrics):\n"
    note = tmp_path / "seen"
    install("calm", tracker + f"    open({str(note)!r}, 'a').write(f'{{step}} {{metrics}}')\n")
    install("angry", tracker + "    raise OSError('disk full')\n")
    (warning,) = load_plugins().step_end(3, {"reward/mean": 0.5})
    assert note.read_text() == "3 {'reward/mean': 0.5}"
    assert "'angry' (dist-angry)" in warning.message
    assert "disk full" in warning.got
    assert warning.severity == "warning"


def test_a_rule_that_raises_is_reported_under_its_plugin(install: Install) -> None:
    install("mine", estimator_source("mine", "@hookimpl\ndef relax_check_config(config):\n    return 1 / 0\n"))
    (problem,) = load_plugins().check(config("mine"))
    assert "'mine' (dist-mine) failed in relax_check_config" in problem.message
    assert "ZeroDivisionError" in problem.got


def test_only_the_chosen_estimators_plugin_judges_a_run(install: Install) -> None:
    hooks = ("relax_check_config(config)", "relax_normalize_config(config)", "relax_service_graph(graph)")
    source = "".join(f"@hookimpl\ndef {hook}:\n    raise AssertionError\n" for hook in hooks)
    install("nosy", estimator_source("nosy", source))
    plugins = load_plugins()
    grouped = config("grpo", colocate=False).model_copy(update={"batch": BatchSection(n_samples_per_prompt=4)})
    assert plugins.check(grouped) == []
    assert plugins.normalize(grouped).config is grouped
    assert plugins.service_graph(grouped) == base_graph().replace("actor", writes=("advantages",))


def test_rewards_of_plugins_are_found_by_name(install: Install) -> None:
    install(
        "judge",
        """
        from relax_cli import Reward, hookimpl

        @hookimpl
        def relax_rewards():
            return [Reward("length", "longer is better", "builtins:len")]
        """,
    )
    plugins = load_plugins()
    assert plugins.rewards()["length"].load() is len
    assert row_of(plugins, "judge")["kind"] == "reward"


def test_a_run_that_no_plugin_launches_is_left_to_the_engine() -> None:
    assert load_plugins().launch(SimpleNamespace(config=config("grpo"))) is None


def test_a_plugin_may_launch_a_run(install: Install) -> None:
    install("slurm", "from relax_cli import hookimpl\n@hookimpl\ndef relax_launch(plan):\n    return 'session'\n")
    assert load_plugins().launch(SimpleNamespace(config=config("grpo"))) == "session"


def test_a_launcher_that_fails_is_named(install: Install) -> None:
    install("slurm", "from relax_cli import hookimpl\n@hookimpl\ndef relax_launch(plan):\n    return 1 / 0\n")
    with pytest.raises(RunError, match=r"'slurm' \(dist-slurm\) failed in relax_launch"):
        load_plugins().launch(SimpleNamespace(config=config("grpo")))


# -- service graph ---------------------------------------------------------------------------------


def test_a_group_estimator_runs_rollout_and_actor() -> None:
    graph = load_plugins().service_graph(config("sapo"))
    assert graph.names == ("rollout", "actor")
    assert {"rewards", "group_ids"} <= set(graph["actor"].reads)


def test_ppo_adds_the_critic_and_a_cpu_only_advantages_service() -> None:
    graph = load_plugins().service_graph(config("ppo"))
    assert graph.names == ("rollout", "critic", "advantages", "actor")
    assert graph["critic"].writes == ("values",)
    assert graph["advantages"].writes == ("advantages", "returns")
    assert [role.name for role in graph.roles if not role.uses_device] == ["advantages"]
    assert "advantages" in graph["actor"].reads
    assert "values" in graph["advantages"].reads


def test_a_field_that_nobody_writes_is_refused(install: Install) -> None:
    hook = "@hookimpl\ndef relax_service_graph(graph):\n    return graph.replace('actor', reads=('oracle',))\n"
    install("lost", estimator_source("lost", hook))
    with pytest.raises(ConfigError, match="'actor' reads 'oracle', which no earlier role writes"):
        load_plugins().service_graph(config("lost"))


def test_a_graph_refuses_duplicate_roles_and_unknown_neighbours() -> None:
    judge = RoleSpec("judge", ("tokens",), ("verdicts",), uses_device=False)
    graph: ServiceGraph = base_graph().with_role(judge)
    assert graph.names == ("rollout", "judge", "actor")
    with pytest.raises(ConfigError, match="already has a role 'judge'"):
        graph.with_role(judge)
    with pytest.raises(ConfigError, match="no role 'critic'"):
        base_graph().with_role(judge, before="critic")


def test_two_writers_of_one_field_are_found() -> None:
    twice = base_graph().with_role(RoleSpec("judge", (), ("rewards",), uses_device=False))
    (problem,) = twice.problems()
    assert "'rollout' and 'judge' both write 'rewards'" in problem.message


# -- rules of the built-in estimators --------------------------------------------------------------


def test_a_proper_ppo_run_has_no_problems_and_is_left_as_it_is() -> None:
    plugins = load_plugins()
    assert plugins.check(config()) == []
    normalized = plugins.normalize(config())
    assert (normalized.config, normalized.changes, normalized.warnings) == (config(), (), ())


@pytest.mark.parametrize(
    ("rule", "option", "change"),
    [
        ("ppo-needs-critic", "--resource", {"resource": {"actor": (1, 2), "advantages": (1, 0)}}),
        ("ppo-needs-advantages", "--resource", {"resource": {"actor": (1, 2), "critic": (1, 2)}}),
        ("ppo-needs-colocate", "--colocate", {"colocate": False}),
        ("ppo-no-fully-async", "--fully-async", {"fully_async": True}),
        ("ppo-needs-rollout-logprobs", "--use-rollout-logprobs", {"use_rollout_logprobs": False}),
    ],
)
def test_each_ppo_rule_speaks_alone_and_in_four_parts(rule: str, option: str, change: dict[str, object]) -> None:
    (problem,) = load_plugins().check(config(**change))
    assert (problem.id, problem.option, problem.severity) == (rule, option, "error")
    assert problem.message
    assert problem.got
    assert problem.expected
    assert problem.fix


def test_ppo_reports_everything_that_is_wrong_at_once() -> None:
    default = Config(algorithm=AlgorithmSection(advantage_estimator="ppo"))
    assert ids(load_plugins().check(default)) == [
        "ppo-needs-critic",
        "ppo-needs-advantages",
        "ppo-needs-colocate",
        "ppo-needs-rollout-logprobs",
    ]


def test_the_resource_fix_is_complete_and_passes_the_rules() -> None:
    plugins = load_plugins()
    broken = config(resource={"actor": (1, 4), "rollout": (2, 2)})
    fixes = {problem.fix for problem in plugins.check(broken)}
    (fix,) = fixes
    resource = json.loads(fix.removeprefix("--resource '").removesuffix("'"))
    assert resource == {"actor": [1, 4], "rollout": [2, 2], "critic": [1, 4], "advantages": [1, 0]}
    assert plugins.check(config(resource=resource)) == []


def test_ppo_switches_kl_off_with_one_warning_and_offloading_on() -> None:
    wrong = config(use_kl_loss=True, kl_coef=0.1, offload_train=False)
    normalized = load_plugins().normalize(wrong)
    assert normalized.config == config()
    assert [(c.option, c.before, c.after) for c in normalized.changes] == [
        ("--use-kl-loss", True, False),
        ("--kl-coef", 0.1, 0.0),
        ("--offload-train", False, True),
    ]
    assert all(change.why for change in normalized.changes)
    (warning,) = normalized.warnings
    assert (warning.id, warning.severity) == ("ppo-kl-off", "warning")
    assert warning.fix == "drop --use-kl-loss and --kl-coef"


def test_forcing_offload_alone_is_no_warning() -> None:
    normalized = load_plugins().normalize(config(offload_train=False))
    assert normalized.config == config()
    assert len(normalized.changes) == 1
    assert normalized.warnings == ()


@pytest.mark.parametrize("name", sorted(BUILT_IN - {"ppo"}))
def test_a_group_baseline_needs_two_samples_per_prompt(name: str) -> None:
    plugins = load_plugins()
    assert ids(plugins.check(config(name))) == ["group-size"]
    pair = config(name).model_copy(update={"batch": BatchSection(n_samples_per_prompt=2)})
    assert plugins.check(pair) == []


def test_records_refuse_changes() -> None:
    estimator: Estimator = load_plugins().estimator("ppo")
    with pytest.raises(AttributeError):
        estimator.name = "other"  # type: ignore[misc]
