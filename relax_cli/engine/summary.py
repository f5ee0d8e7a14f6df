"""The closing words of a run: what was reached, where the files are, what to do next."""

from __future__ import annotations

from typing import Any

from relax_cli.engine.run import FinishedRun, resume_lines
from relax_cli.engine.trainer import Evaluation
from relax_cli.tracking.plots import curve


def summary_dict(run: FinishedRun) -> dict[str, Any]:
    """The object that `--format json` prints."""
    rewards = run.report.rewards
    pairs = before_and_after(run)
    return {
        "ok": run.ended_by is None,
        "run_dir": str(run.run_dir),
        "steps": run.report.steps,
        "seconds": round(run.report.seconds, 2),
        "reward_before": rewards[0] if rewards else None,
        "reward_after": rewards[-1] if rewards else None,
        "eval_before": pairs[0][0].reward.mean if pairs else None,
        "eval_after": pairs[0][1].reward.mean if pairs else None,
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
    for before, after in before_and_after(run):
        found = f"mean reward {after.reward.mean:.3f}"
        if before is not after:
            found = f"mean reward {before.reward.mean:.3f} before, {after.reward.mean:.3f} after"
        lines += ["", f"Held-out set `{before.name}`: {found}"]
        lines += [f"  ({before.reward.count} samples at temperature {config.rollout.rollout_temperature:g})"]
        lines += example_lines(before, after)
    lines += ["", f"Metrics   {run.run_dir / 'metrics.jsonl'}", f"Samples   {run.run_dir / 'rollouts'}"]
    if config.checkpoint.save and report.saved_iteration is not None:
        lines.append(f"Saved     iteration {report.saved_iteration} in {config.checkpoint.save}")
        if config.critic.critic_save:
            lines.append(f"          and {config.critic.critic_save}")
    lines += ["", *next_lines(run)]
    return lines


def next_lines(run: FinishedRun) -> list[str]:
    """What to type next."""
    return resume_lines(run.config, run.resume, complete=run.ended_by is None)


def before_and_after(run: FinishedRun) -> list[tuple[Evaluation, Evaluation]]:
    """First and last evaluation of each held-out set; the same one twice where there was nothing left to train."""
    found = run.report.evaluations
    names = {e.name: None for e in found}
    by_name = [[e for e in found if e.name == name] for name in names]
    return [(evals[0], evals[-1]) for evals in by_name if len(evals) > 1 or not run.report.steps]


def example_lines(before: Evaluation, after: Evaluation) -> list[str]:
    """A few responses side by side."""
    rows: list[dict[str, Any]] = [
        {"prompt": b["prompt"], "label": b["label"], "before": b["response"], "after": a["response"]}
        for b, a in zip(before.examples, after.examples, strict=True)
    ]
    if not rows:
        return []
    shown = [{k: _short(v) for k, v in row.items()} for row in rows]
    widths = {k: max(len(k), *(len(row[k]) for row in shown)) for k in shown[0]}
    header = "  ".join(k.ljust(w) for k, w in widths.items())
    return [f"  {header}", *("  " + "  ".join(row[k].ljust(w) for k, w in widths.items()) for row in shown)]


def _short(value: object, limit: int = 28) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
