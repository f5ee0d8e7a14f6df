"""The closing words of a run: what was reached, where the files are, what to do next."""

from __future__ import annotations

import math
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from relax_cli.config.held_out import sampling_of_set
from relax_cli.config.text import shortened, table
from relax_cli.engine.run import FinishedRun, resume_lines
from relax_cli.tracking.numbers import curve
from relax_cli.tracking.run_files import Evaluation, read_run, read_samples

EXAMPLES = 3
"""Responses shown for each held-out set."""
WIDEST = 28
"""Characters of a column of them."""


def summary_dict(run: FinishedRun) -> dict[str, Any]:
    """The object that `--format json` prints."""
    rewards = run.report.rewards
    evaluations = read_run(run.run_dir).evaluations
    pairs = before_and_after(evaluations)
    return {
        "ok": run.ended_by is None,
        "run_dir": str(run.run_dir),
        "steps": run.report.steps,
        "seconds": round(run.report.seconds, 2),
        "reward_before": rewards[0] if rewards else None,
        "reward_after": rewards[-1] if rewards else None,
        "eval_before": pairs[0][0].metrics["reward/mean"] if pairs else None,
        "eval_after": pairs[0][1].metrics["reward/mean"] if pairs else None,
        "best": None if run.report.best is None else asdict(run.report.best),
        "evaluations": [evaluation.dict() for evaluation in evaluations],
    }


def closing_lines(run: FinishedRun) -> list[str]:
    """For a person, off and on a terminal alike."""
    report, config = run.report, run.config
    total = config.batch.num_rollout
    lines = [""]
    if run.ended_by is None:
        finished = f" The {report.first} rollouts were finished before." if not report.steps else ""
        lines.append(f"Done: {report.steps} steps in {report.seconds:.0f} s.{finished}")
    else:
        lines.append(f"Stopped after {report.steps} finished steps of {total}.")
    if len(report.rewards) > 1:
        lines += ["", "Mean reward per step", *curve(report.rewards, width=60, height=6)]
    evaluations = read_run(run.run_dir).evaluations
    for before, after in before_and_after(evaluations):
        lines += ["", *evaluation_lines(run, before, after)]
        between = [e for e in evaluations if e.name == after.name and before.step < e.step < after.step]
        if between:
            shown = ", ".join(f"{e.metrics['reward/mean']:.3f} (step {e.step})" for e in between)
            lines += wrap(f"between: {shown}", initial_indent="  ", subsequent_indent="    ")
    lines += ["", f"Metrics   {run.run_dir / 'metrics.jsonl'}", f"Samples   {run.run_dir / 'rollouts'}"]
    if evaluations:
        lines.append(f"          and {run.run_dir / 'evals'}")
    if config.checkpoint.save and report.saved_iteration is not None:
        lines.append(f"Saved     iteration {report.saved_iteration} in {config.checkpoint.save}")
        if config.critic.critic_save:
            lines.append(f"          and {config.critic.critic_save}")
    if report.best is not None:
        lines.append(f"Best      iteration {report.best.iteration} by {report.best.metric} ({report.best.value:.6g})")
    lines += ["", *resume_lines(run.config, run.resume, complete=run.ended_by is None)]
    return lines


def before_and_after(evaluations: list[Evaluation]) -> list[tuple[Evaluation, Evaluation]]:
    """First and last evaluation of each held-out set; the same one twice where there is only one."""
    by_name: dict[str, list[Evaluation]] = {}
    for evaluation in evaluations:
        by_name.setdefault(evaluation.name, []).append(evaluation)
    return [(found[0], found[-1]) for found in by_name.values()]


def evaluation_lines(run: FinishedRun, before: Evaluation, after: Evaluation) -> list[str]:
    found = f"mean reward {after.metrics['reward/mean']:.3f}"
    if before is not after:
        found = f"mean reward {before.metrics['reward/mean']:.3f} before, {after.metrics['reward/mean']:.3f} after"
    lines = [f"Held-out set `{before.name}`: {found}"]
    sampling, interval = (
        sampling_of_set(run.config.eval, after.name, run.config.rollout),
        after.metrics.get("reward/ci95"),
    )
    how = ", greedy" if sampling.rollout_top_k == 1 else f" at temperature {sampling.rollout_temperature:g}"
    how += f", 95 % interval ±{interval:.3f}" if interval else ""
    lines.append(f"  ({after.metrics['samples']} samples{how})")
    names = [name for name in after.metrics if name.startswith(("pass@", "majority@"))]
    # Where there are several samples of a prompt.
    for name in names if len(names) > 1 else ():
        lines.append(f"  {name} {before.metrics.get(name, math.nan):.3f} before, {after.metrics[name]:.3f} after")
    # The first sample of each of the first prompts.
    examples: list[list[dict[str, Any]]] = []
    for evaluation in (before, after):
        first: dict[int, dict[str, Any]] = {}
        for sample in read_samples(run.run_dir, evaluation):
            first.setdefault(sample["group"], sample)
        examples.append(list(first.values())[:EXAMPLES])
    pairs = zip(*examples, strict=False)
    texts = [(b["prompt"], b["label"], b["response"], a["response"]) for b, a in pairs]
    rows = [[shortened(str(text), WIDEST) for text in row] for row in texts]
    shown = table(("prompt", "label", "before", "after"), rows) if rows else ""
    return [*lines, *(f"  {line}" for line in shown.splitlines())]
