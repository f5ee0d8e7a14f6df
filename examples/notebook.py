# A run from Python, cell by cell: open it as a notebook (Jupyter with jupytext, VS Code, PyCharm), or run it as it is.
# %% A tiny model and a task to teach it, in a folder
from importlib.util import find_spec
from pathlib import Path

from relax_cli import api
from relax_cli.quickstart.task import prepare

if not Path("quickstart").exists():
    prepare(Path("quickstart"), seed=1234, steps=40)

# %% What will run? Options have the names of the flags
run = {"num_rollout": 3, "num_critic_only_steps": 1, "launcher": "local", "run_dir": "runs/notebook"}
config = api.load_config("tiny-ppo-cpu", **run)
print(config.algorithm.advantage_estimator, config.optimizer.lr, config.batch.rollout_batch_size)

# %% Is anything wrong with it? Nothing starts before this is empty
checked = api.check("tiny-ppo-cpu", **run)
for problem in checked.problems:
    print(problem.severity, problem.option, problem.message, problem.fix)

# %% Train
result = api.train("tiny-ppo-cpu", progress=False, **run)
print(result.completed, result.summary["steps"], result.summary["eval_before"], result.summary["eval_after"])

# %% Look at it, now or later: metrics and samples are plain records
done = api.read_run("runs/notebook")
rewards = {record["step"]: record["reward/mean"] for record in done.metrics if "reward/mean" in record}
best = max(done.samples(step=3), key=lambda sample: sample["reward"])
print(rewards)
print(best["prompt"], best["response"], best["reward"], best["advantages"])

# %% As tables, where pandas is installed
if find_spec("pandas"):
    print(api.to_pandas(done.metrics)[["step", "reward/mean", "value_loss", "phase_seconds/critic"]])
    print(api.to_pandas(done.samples(step=3)).groupby("prompt")["reward"].mean().head())
