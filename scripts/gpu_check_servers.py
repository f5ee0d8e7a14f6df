#!/usr/bin/env python
"""Prove training with SGLang on 2 to 8 GPUs of one machine, stage by stage; what proves the most comes first.

    scripts/gpu_check.sh --servers [--gpus N] [--sglang-python PYTHON] [--out DIR] [--device cuda|cpu]

| stage | what it shows |
|---|---|
| build | Ray starts, and every rank of actor and critic builds its model on its GPU |
| start | one SGLang server a GPU starts and answers, then gives its memory up |
| publish | weights go from the actor's ranks to every server |
| gap | greedy responses: the servers' log-probabilities are those of the trainer's own model |
| sleep | servers give up and take back their memory; seconds, and bytes of each GPU |
| checksum | after another sleep and publication all servers have the weights that they had before, bit by bit |
| ppo | two PPO steps: finite losses, and log-probabilities that agree after each update |

The stages after a failed one are left out, because they need it. Every line has its seconds; OUT/servers.json has
everything that was measured. Exit code 1 if a stage fails. Weights are random, in the shape of a small Qwen3.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from relax_cli.backends.rollout.sglang.client import SglangClient
from relax_cli.config.layers import Layers
from relax_cli.config.schema import Config
from relax_cli.engine.run import closing, launch, prepare_run
from relax_cli.engine.run_folder import claimed, written_folders
from relax_cli.engine.session import Session
from relax_cli.engine.stopping import StopRequest
from relax_cli.engine.trainer import Recorder, Trainer
from relax_cli.plugin.launch_plan import LaunchPlan
from relax_cli.plugin.manager import load_plugins
from relax_cli.preflight.check_run import check_run
from relax_cli.quickstart.task import MODEL, prepare
from relax_cli.roles.actor import ActorRole
from relax_cli.roles.sample_files import read_samples, sample_files

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 11,
}
GAP = {"cuda": 0.05, "cpu": 1e-4}
"""Most mean |trainer - server| in nats: rounding of bf16 and of fp32."""
FIRST_ROLLOUT = 1000
"""Of the gap's samples: a number that no PPO step has."""


@dataclass
class Check:
    """What the stages work on."""

    device: str
    gpus: int
    out: Path
    sglang_python: str | None
    options: tuple[str, ...] = ()
    """More `section.key=value`."""
    config: Config = field(init=False)
    session: Session = field(init=False)
    sums: list[str] = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)
    started: dict[str, float] = field(default_factory=dict)
    """When the launcher began what."""

    @property
    def on_gpu(self) -> bool:
        """On a CPU the stages only show that the script works."""
        return self.device == "cuda"


class Watcher:
    """Keeps the metrics of steps."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.display = self

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        self.steps.append(metrics)

    def evaluated(self, step: int, metrics: dict[str, Any]) -> None:
        raise AssertionError("nothing is held out")

    def warn(self, message: str) -> None:
        print(f"     {message}", flush=True)

    def phase(self, name: str) -> None:
        """Their seconds are in the metrics."""

    def status(self, text: str) -> None:
        """Nothing that takes long."""


def build(check: Check) -> dict[str, Any]:
    """Launch every role; the launcher starts servers last."""
    folder = check.out / "task"
    prepare(folder, seed=1, steps=2)
    if check.on_gpu:
        write_model(folder / "model")
    plugins = load_plugins()
    checked = check_run(plugins, Layers(["tiny-ppo-cpu"], {"TINY_DIR": str(folder)}, overrides(check)), here=True)
    check.config, run_dir = prepare_run(checked.require_valid())
    graph = plugins.service_graph(check.config)
    begun = time.perf_counter()

    def status(text: str) -> None:
        check.started[text] = time.perf_counter() - begun
        print(f"     {check.started[text]:6.1f} s  {text}", flush=True)

    plan = LaunchPlan(check.config, graph, folder / "model", run_dir, None, None, status)
    check.stack.enter_context(claimed(written_folders(check.config)))
    check.session = check.stack.enter_context(closing(launch(plugins, plan)))
    return {"began_after_seconds": check.started}


def start(check: Check) -> dict[str, Any]:
    """The servers are there, and asleep."""
    targets = check.session.targets
    assert len(targets) == check.gpus, f"{len(targets)} servers for {check.gpus} GPUs"
    for target in targets:
        asked(target.address, "/model_info")
    return {"servers": [target.address for target in targets], "free_bytes": free_memory(check)}


def publish(check: Check) -> dict[str, Any]:
    """Version 0; it is read back from every server."""
    check.session.publish_weights(0)
    check.sums = checksums(check)
    return {"checksums": check.sums}


def gap(check: Check) -> dict[str, Any]:
    """Servers sample greedily, and the actor, which has the same weights, scores the same tokens."""
    roles = check.session.roles
    with roles.rollout.awake():
        roles.rollout.generate(FIRST_ROLLOUT)

    def score(actor: ActorRole) -> None:
        share = actor.fetch_share(FIRST_ROLLOUT, ())
        actor.write(share, {"ref_log_probs": actor.answers(share, lambda output: output.log_probs_BT)})

    with roles.actor.awake():
        roles.actor.ranks.all(score)
    roles.rollout.dump(FIRST_ROLLOUT, ["ref_log_probs"])
    roles.rollout.finish_dump()
    roles.rollout.clear(FIRST_ROLLOUT)
    (paths,) = sample_files(Path(check.config.run.run_dir or "")).values()
    samples = list(read_samples(paths))
    gaps = [abs(a - b) for s in samples for a, b in zip(s["log_probs"], s["ref_log_probs"], strict=True)]
    mean = float(sum(gaps) / len(gaps))
    assert mean < GAP[check.device], f"log-probabilities differ by {mean:.2g} nats on average"
    return {"tokens": len(gaps), "mean": mean, "max": float(max(gaps))}


def sleep(check: Check) -> dict[str, Any]:
    """Asleep after the generation of before; then awake with new weights, and asleep again."""
    seconds: dict[str, float] = {}
    free = {"asleep": free_memory(check)}
    with timed(seconds, "publish"):
        check.session.publish_weights(0)
    rollout = check.session.roles.rollout
    with timed(seconds, "wake"):
        rollout.ranks.all(lambda role: role.wake())
    free["awake"] = free_memory(check)
    with timed(seconds, "sleep"):
        rollout.ranks.all(lambda role: role.sleep())
    free["asleep again"] = free_memory(check)
    for before, after in zip(free["awake"], free["asleep again"], strict=True):
        assert after > 2 * before, f"a sleeping server leaves {after} of a GPU's bytes free, an awake one {before}"
    return {"seconds": seconds, "free_bytes": free}


def checksum(check: Check) -> dict[str, Any]:
    """The weights that were given up and sent again are those of the first time, on every server."""
    check.session.publish_weights(0)
    found = checksums(check)
    assert len(set(found)) == 1, f"servers have different weights: {found}"
    assert found == check.sums, f"weights that were sent twice differ: {check.sums}, then {found}"
    return {"checksums": found}


def ppo(check: Check) -> dict[str, Any]:
    """Two steps of critic and actor, with the weights of each published to the servers."""
    watcher, stop = Watcher(), StopRequest(lambda _: None)
    trainer = Trainer(
        check.session, check.config, cast(Recorder, watcher), stop, first=0, dump_fields=[], checkpoint_meta={}
    )
    trainer.run()
    losses = ("reward/mean", "pg_loss", "value_loss", "actor/grad_norm", "critic/grad_norm")
    names = (*losses, "train_rollout_logprob_diff/mean", "step_seconds", "phase_seconds")
    steps = [{name: step[name] for name in names} for step in watcher.steps]
    assert len(steps) == 2
    for step in steps:
        assert all(math.isfinite(step[name]) for name in names[:-1]), step
        assert step["train_rollout_logprob_diff/mean"] < GAP[check.device], step
    assert checksums(check) != check.sums, "two steps changed no weight of a server"
    return {"steps": steps}


STAGES: dict[str, Callable[[Check], dict[str, Any]]] = {
    "build": build,
    "start": start,
    "publish": publish,
    "gap": gap,
    "sleep": sleep,
    "checksum": checksum,
    "ppo": ppo,
}


def overrides(check: Check) -> list[str]:
    """The quickstart's recipe with a server for each GPU."""
    ranks = check.gpus
    resource = {name: [1, ranks] for name in ("actor", "critic", "rollout")} | {"advantages": [1, 0]}
    words: dict[str, Any] = {
        "parallel.resource": json.dumps(resource),
        "parallel.device": check.device,
        "parallel.launcher": "ray" if check.on_gpu else "local",
        "parallel.tensor_model_parallel_size": 2 if ranks % 2 == 0 else 1,
        "rollout.rollout_engine": "sglang",
        "rollout.rollout_top_k": 1,
        "critic.num_critic_only_steps": 0,
        "batch.num_rollout": 2,
        "batch.rollout_batch_size": 32 * ranks,
        "batch.micro_batch_size": 16,
        "eval.eval_prompt_data": "[]",
        "eval.eval_interval": "null",
        "run.run_dir": check.out / "run",
        "run.dump_rollouts": "all",
    }
    if check.on_gpu:
        words |= {"rollout.rollout_max_response_len": 64, "sglang.sglang_mem_fraction_static": 0.5}
    else:
        words["sglang.sglang_options"] = '{"device": "cpu"}'
    if check.sglang_python:
        words["sglang.sglang_python"] = check.sglang_python
    return [*(f"{name}={value}" for name, value in words.items()), *check.options]


def write_model(folder: Path) -> None:
    """Random weights in the place of the quickstart's model; its tokenizer stays."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((MODEL / name).read_bytes())


def checksums(check: Check) -> list[str]:
    """Of the weights of every server."""
    reply = [asked(target.address, "/weights_checker", {"action": "checksum"}) for target in check.session.targets]
    return [str(said["per_engine_checksum"]) for said in reply]


def asked(address: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """A server's answer."""
    return SglangClient(address).request("GET" if body is None else "POST", path, body, timeout=120)


def free_memory(check: Check) -> list[int]:
    """Free bytes of each GPU, as its driver says."""
    if not check.on_gpu:
        return []
    import torch

    return [torch.cuda.mem_get_info(index)[0] for index in range(check.gpus)]


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Note how long the block takes."""
    begun = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - begun, 2)


def run_stage(name: str, check: Check) -> dict[str, Any]:
    """The result of one stage, with its seconds; printed."""
    begun = time.perf_counter()
    try:
        found = {"ok": True, **STAGES[name](check)}
    except Exception as error:  # noqa: BLE001 - the failure is the result
        traceback.print_exc()
        found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
    found["wall_seconds"] = round(time.perf_counter() - begun, 1)
    print(
        f"{'ok  ' if found['ok'] else 'FAIL'} {name:<9} {found['wall_seconds']:6.1f} s  {json.dumps(found)}", flush=True
    )
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Run the stages in order, up to the first that fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=int, default=0, help="how many; all that there are without it")
    parser.add_argument("--sglang-python", help="interpreter of the environment that has sglang")
    parser.add_argument("--out", type=Path, default=Path("gpu-check-servers"))
    parser.add_argument("--set", action="append", default=[], help="section.key=value of the run's configuration")
    given = parser.parse_args(words)
    gpus = given.gpus or 1
    if given.device == "cuda" and not given.gpus:
        import torch

        gpus = torch.cuda.device_count()
    given.out.mkdir(parents=True, exist_ok=True)
    check = Check(given.device, gpus, given.out.absolute(), given.sglang_python, tuple(given.set))
    results: dict[str, Any] = {}
    with check.stack:
        for name in STAGES:
            results[name] = run_stage(name, check)
            if not results[name]["ok"]:
                break
    (check.out / "servers.json").write_text(json.dumps({"device": check.device, "stages": results}, indent=2) + "\n")
    return 0 if all(found["ok"] for found in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
