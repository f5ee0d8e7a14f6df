"""Run folders without a run: two samples of one prompt with hand-made numbers, hostile text among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from relax_cli.roles.sample_files import SampleWriter

HOSTILE = "</script><script>alert(1)</script> [bold]x[/bold] \x1b[31m{{x}} \u202e &lt;"


def floats(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=np.float32)


def made_up_sample(row: int, reward: float, **more: Any) -> dict[str, Any]:
    """A sample of four tokens, the third of which is an observation."""
    return {
        "row": row,
        "group": row // 2,
        "source": "train.jsonl:1",
        "prompt": "1+1=",
        "response": HOSTILE if row == 1 else "2",
        "label": "2",
        "reward": reward,
        "reward_parts": {"right": reward},
        "finish_reason": "stop",
        "prompt_token_ids": np.array([1, 2], np.int32),
        "response_token_ids": np.array([3, 4, 5, 6], np.int32),
        "response_mask": np.array([1, 1, 0, 1], np.int32),
        "log_probs": floats(-0.1, -0.2, -9, -0.3),
        "train_log_probs": floats(-0.1, -0.2 + np.log(2), -9, -0.3),
        "values": floats(0.1, 0.2, 0, 0.4),
        "advantages": floats(1, -1, 0, 0.5),
        "returns": floats(1.1, -0.8, 0, 0.9),
        **more,
    }


def made_up_run(folder: Path, steps: int = 3, **config: Any) -> Path:
    """A run folder with samples of every step."""
    folder.mkdir(parents=True)
    sections = {"algorithm": {"advantage_estimator": "ppo"}, "optimizer": {"lr": 1e-3}} | config
    origins = {f"{section}.{key}": "default" for section, body in sections.items() for key in body}
    record = {"format": 2, "config": sections, "origins": origins, "command": ["relax", "train"], "versions": {}}
    (folder / "config.json").write_text(json.dumps(record), "utf-8")
    evaluation = {"eval/held/reward/mean": 0.5, "eval/held/reward/ci95": 0.1}
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        file.write(json.dumps({"step": 0, "time": 90.0, **evaluation}) + "\n")
        for step in range(1, steps + 1):
            phases = {"rollout": 0.5, "critic": 0.25, "actor": 0.25}
            numbers = {"reward/mean": step / steps, "value_loss": 1 / step, "pg_loss": -0.1, "memory_gb": 1.5}
            more = evaluation if step == steps else {}
            file.write(
                json.dumps({"step": step, "time": 100.0 + step, **numbers, "phase_seconds": phases, **more}) + "\n"
            )
    writer = SampleWriter(folder)
    for step in range(1, steps + 1):
        writer.write(step, [made_up_sample(row, float(row == 0)) for row in range(4)])
    return folder
