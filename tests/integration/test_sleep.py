"""Model roles take turns: at most one is awake at any instant of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_cli.backends import device
from relax_cli.backends.device import Parking
from relax_cli.config.layers import Layers
from relax_cli.engine.local import LocalRanks, LocalSession
from relax_cli.engine.run import prepare_run
from relax_cli.engine.run_folder import claimed, written_folders
from relax_cli.engine.session import recorded
from relax_cli.engine.stopping import StopRequest
from relax_cli.engine.trainer import Trainer
from relax_cli.plugin.launch_plan import LaunchPlan
from relax_cli.plugin.manager import load_plugins
from relax_cli.preflight.check_run import check_run
from tests.support.cli_runs import without_times
from tests.support.local_runs import train
from tests.support.quickstart import small_task


class Quiet:
    """A watcher that nobody looks at; it keeps the phases."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.display = self

    def step(self, rollout_id: int, metrics: dict[str, Any]) -> None: ...
    def evaluated(self, step: int, metrics: dict[str, Any]) -> None: ...
    def warn(self, message: str) -> None: ...
    def status(self, text: str) -> None: ...

    def phase(self, name: str) -> None:
        self.phases.append(name)


MODEL_ROLES = ("rollout", "critic", "actor")


@pytest.fixture
def session(tmp_path: Path) -> Any:
    """A local session of the quickstart task, two steps, the first of them critic-only."""
    small_task(tmp_path / "q", steps=2)
    plugins = load_plugins()
    small = ["batch.rollout_batch_size=8", "batch.micro_batch_size=4", "critic.num_critic_only_steps=1"]
    flags = {"launcher": "local"}
    config, run_dir = prepare_run(
        check_run(plugins, Layers([str(tmp_path / "q" / "recipe.yaml")], {}, small, flags)).require_valid()
    )
    plan = LaunchPlan(
        config=config,
        graph=plugins.service_graph(config),
        model_folder=Path(config.model.hf_checkpoint),
        run_dir=run_dir,
        actor_load=None,
        critic_load=None,
        status=lambda _: None,
    )
    with claimed(written_folders(config)):
        session = LocalSession(plan)
        yield session, config
        session.close()


def run_all(session: Any, config: Any, watcher: Quiet) -> None:
    """Every step of the run."""
    stop = StopRequest(lambda _: None)
    Trainer(session, config, watcher, stop, first=0, dump_fields=["values"], checkpoint_meta={}).run()


def test_every_phase_is_announced_when_it_starts(session: Any) -> None:
    session, config = session
    watcher = Quiet()
    run_all(session, config, watcher)
    critic_only = ["rollout", "critic", "advantages", "publish", "record"]
    learning = ["rollout", "critic", "advantages", "actor", "publish", "record", "checkpoint"]
    assert watcher.phases == [*critic_only, *learning]


def test_at_most_one_model_role_is_awake_at_any_call_of_a_run(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session, config = session
    roles = {name: getattr(session.roles, name).ranks.role for name in MODEL_ROLES}
    seen: list[tuple[str, str, list[str]]] = []
    call = LocalRanks.on

    def watched(self: LocalRanks[Any], rank: int, request: Callable[[Any], Any]) -> Any:
        result = call(self, rank, request)
        seen.append((self.name, recorded(request).method, [name for name, role in roles.items() if role.awake]))
        return result

    assert not any(role.awake for role in roles.values())
    monkeypatch.setattr(LocalRanks, "on", watched)
    run_all(session, config, Quiet())
    assert max(len(awake) for _, _, awake in seen) == 1
    working = {(name, method): awake for name, method, awake in seen}
    for name, method in (
        ("rollout", "generate"),
        ("rollout", "load_weights"),
        ("critic", "predict"),
        ("critic", "update"),
        ("actor", "train"),
        ("actor", "export_weights"),
        ("critic", "write_checkpoint"),
    ):
        assert working[name, method] == [name]
    assert not any(role.awake for role in roles.values())


def test_a_run_whose_models_sleep_outside_memory_is_the_same(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ("batch.rollout_batch_size=16", "batch.micro_batch_size=8", "critic.num_critic_only_steps=0")
    staying = train(task, tmp_path / "staying", "tiny-ppo-cpu", *small)
    parked: list[int] = []
    park, on_cpu = Parking.park, device.select_device

    def watched(self: Parking, *args: Any, **kwargs: Any) -> None:
        park(self, *args, **kwargs)
        parked.append(self.parked_bytes)

    monkeypatch.setattr(Parking, "park", watched)
    monkeypatch.setattr(device, "select_device", lambda *args, **_: replace(on_cpu("cpu"), shared_memory=True))
    leaving = train(task, tmp_path / "leaving", "tiny-ppo-cpu", *small)
    assert len(parked) > 6
    assert min(parked) > 1 << 20
    assert leaving.samples == staying.samples
    assert without_times(leaving.metrics) == without_times(staying.metrics)
