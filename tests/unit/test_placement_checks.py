"""Rules about how roles and servers share GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from relax_cli.config.schema import Config, ParallelSection, RolloutSection, SglangSection
from relax_cli.preflight.rules.resources import unequal_shapes, update_weight_transport
from tests.support.rules import problems_by

OUTSIDE: dict[str, Any] = {"rollout_external": True, "rollout_external_engine_addrs": ("a:1",)}


def config(device: str = "cuda", engine: str = "auto", rollout: int = 2, **sglang: Any) -> Config:
    parallel = ParallelSection(resource={"actor": (1, 2), "rollout": (1, rollout)}, device=device)  # type: ignore[arg-type]
    return Config(
        parallel=parallel,
        rollout=RolloutSection(rollout_engine=engine),  # type: ignore[arg-type]
        sglang=SglangSection(**sglang),
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (config(update_weight_transport="distributed"), "auto, tensor or disk"),
        (config(update_weight_transport="tensor", **OUTSIDE), "auto, distributed or disk"),
    ],
)
def test_a_way_that_gpus_rule_out_is_refused(settings: Config, expected: str) -> None:
    (problem,) = problems_by(update_weight_transport, settings)
    assert (problem.id, problem.severity, problem.expected) == ("update-weight-transport", "error", expected)


@pytest.mark.parametrize(
    "settings",
    [
        config(),
        config(update_weight_transport="tensor"),
        config(update_weight_transport="disk"),
        config(update_weight_transport="distributed", **OUTSIDE),
        config(update_weight_transport="disk", **OUTSIDE),
        config("cpu", "sglang", update_weight_transport="distributed"),
        config("cpu", update_weight_transport="tensor", **OUTSIDE),
        config(engine="embedded", update_weight_transport="distributed"),
    ],
)
def test_other_ways_pass(settings: Config) -> None:
    assert problems_by(update_weight_transport, settings) == []


def test_external_servers_do_not_make_gpus_wait() -> None:
    assert len(problems_by(unequal_shapes, config(rollout=1))) == 1
    assert problems_by(unequal_shapes, config(rollout=1, **OUTSIDE)) == []
