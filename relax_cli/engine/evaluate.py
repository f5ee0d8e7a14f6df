"""`relax eval`: held-out sets without a trainer, Ray or a queue. The numbers are those of a run's own evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from relax_cli.checkpoint.layout import read_meta
from relax_cli.config.schema import Config
from relax_cli.engine.build import RoleBuilder, worker_specs
from relax_cli.engine.run import unpacked_model
from relax_cli.engine.run_folder import claimed, new_run_folder, run_record
from relax_cli.plugin.launch_plan import LaunchPlan
from relax_cli.plugin.manager import Plugins
from relax_cli.preflight.check_run import CheckedRun
from relax_cli.roles.evaluation import eval_metrics
from relax_cli.roles.run_folder import run_folder_errors
from relax_cli.tracking.run_files import Evaluation, MetricsWriter, evaluations_of, write_config


def evaluate(
    plugins: Plugins, checked: CheckedRun, checkpoint: Path | None, status: Callable[[str], None]
) -> tuple[list[Evaluation], Path]:
    """Evaluate the policy of an actor's checkpoint, or the model of `--hf-checkpoint`, on every set; the run folder.
    Raises RelaxError: the checkpoint cannot be used, generation or the reward failed, or the folder is not writable."""
    from relax_cli.backends.rollout.sglang.engine import SglangEngine
    from relax_cli.engine.transfer import LocalQueue

    config, given = checked.config, checked.config.run.run_dir
    run_dir = Path(given) if given is not None else new_run_folder("eval")
    step = 0 if checkpoint is None else read_meta(checkpoint).iteration
    with run_folder_errors(run_dir), claimed({run_dir: "--run-dir"}):
        write_config(run_dir, run_record(checked, config, "eval"))
        with policy_folder(config, checkpoint, status) as folder, MetricsWriter(run_dir, step) as metrics:
            record: dict[str, float] = {"step": step, "time": time.time()}
            graph = plugins.service_graph(config)
            status("building rollout")
            (spec,) = worker_specs(LaunchPlan(config, graph, folder, run_dir, None, None, status), "rollout")
            with closing(RoleBuilder(spec).build(LocalQueue(graph))) as rollout:
                if isinstance(rollout.engine, SglangEngine):
                    rollout.engine.use_loaded()
                rollout.wake()
                for name, _ in config.eval.sets:
                    status(f"evaluating {name}")
                    record |= eval_metrics(name, rollout.evaluate(name), config.eval.eval_pass_reward)
                rollout.dump_evaluation(step)
            metrics.write(record)
    return evaluations_of(record), run_dir


@contextmanager
def policy_folder(config: Config, checkpoint: Path | None, status: Callable[[str], None]) -> Iterator[Path]:
    """The model to evaluate as a Hugging Face folder, which for a checkpoint is temporary."""
    model = unpacked_model(config.model.hf_checkpoint)
    if checkpoint is None:
        yield model
        return
    from relax_cli.checkpoint.export import export_hf

    status(f"reading {checkpoint}")
    with TemporaryDirectory(prefix="relax-eval-") as temporary:
        yield export_hf(checkpoint, Path(temporary) / "model", model).folder
