#!/usr/bin/env python
"""Prove the GPU back end on one device, in parts that each run in a process of their own.

    python scripts/gpu_check.py [--device cuda|cpu] [--out DIR] [--only PART ...]

| part | what it shows |
|---|---|
| machine | versions, device, peak of a matrix product in the training type |
| parity | log-probabilities, values and gradients of the device equal those of the CPU in fp32; bf16 is near |
| sleep | attention takes a fused kernel; memory before, during and after sleep; weights and the next step unchanged |
| quickstart | `relax train` on the quickstart task learns: reward and held-out score before and after |
| resume | 4 steps straight against 2 + 2 resumed |
| speed | PPO on a model of SmolLM2-135M's shape: tokens per second and model FLOP utilisation |

The speed part uses random weights: they do not change how long a step takes, and nothing has to be carried along.
Results are printed and written to OUT/gpu_check.json. Exit code 1 if a part fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_cli.backends.megatron.micro_batch import ModelKind

PARTS = ("machine", "parity", "sleep", "quickstart", "resume", "speed")
LIMIT = 240.0
"""Seconds that a part may take."""
FUSED_ATTENTION = re.compile("flash_attention|efficient_attention|cudnn_attention|FlashAttn|FusedAttn")
"""Names of torch's and TransformerEngine's kernels that do not make a matrix of scores."""
TOTAL = 480.0
"""Seconds that all parts may take on a GPU; parts that find no time left fail."""


@dataclass(frozen=True)
class Check:
    """Where and how large."""

    device: str
    out: Path

    @property
    def on_gpu(self) -> bool:
        """Sizes are for a GPU; on a CPU they only show that the script works."""
        return self.device == "cuda"


def machine(check: Check) -> dict[str, Any]:
    """Versions, the device, and FLOP/s of one large matrix product (the peak that utilisation is measured against)."""
    import torch

    size, dtype = (8192, torch.bfloat16) if check.on_gpu else (1024, torch.float32)
    left, right = (torch.randn(size, size, device=check.device).to(dtype) for _ in range(2))
    for _ in range(3):
        product = left @ right
    _synchronise(check)
    started = time.perf_counter()
    for _ in range(10):
        product = left @ right
    _synchronise(check)
    flops = 10 * 2 * size**3 / (time.perf_counter() - started)
    assert product.isfinite().all()
    return {
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "megatron-core", "transformer-engine", "transformers")},
        "device": torch.cuda.get_device_name() if check.on_gpu else platform.processor() or platform.machine(),
        "peak_flops": flops,
    }


def parity(check: Check) -> dict[str, Any]:
    """One forward pass and one optimizer step of the quickstart model, CPU fp32 against the device."""
    import torch

    reference = _one_step("cpu", torch.float32)
    found = {}
    for name, dtype, limit in (("fp32", torch.float32, 1e-4), ("bf16", torch.bfloat16, 0.05)):
        step = _one_step(check.device, dtype)
        gaps = {key: float((step[key] - reference[key]).abs().mean()) for key in ("log_probs", "values")}
        gaps["grad_norm"] = abs(float(step["grad_norm"]) / float(reference["grad_norm"]) - 1)
        assert max(gaps.values()) < limit, f"{name} on {check.device} differs from fp32 on the CPU: {gaps}"
        found[name] = gaps
    return found


def sleep(check: Check) -> dict[str, Any]:
    """Memory curve of a training role that leaves the device and comes back, and that it is the same afterwards."""
    import torch

    folder = _shaped_model(check)
    rested, unrested = (_trainable("policy", folder, check.device, None, parks=True) for _ in range(2))
    attention = _attention_of(rested)
    assert any(FUSED_ATTENTION.search(name) for name in attention), f"attention ran without a fused kernel: {attention}"
    for model in (rested, unrested):
        _train_once(model)
    # One of the two at a time on the device, so that the curve is that of one model.
    unrested.sleep()
    curve = {"awake": _used_memory_bytes(check)}
    before = [p.detach().clone().cpu() for p in rested.model.parameters()]
    started = time.perf_counter()
    rested.sleep()
    _synchronise(check)
    curve |= {"asleep": _used_memory_bytes(check)}
    slept = time.perf_counter()
    rested.wake()
    _synchronise(check)
    woken = time.perf_counter()
    curve |= {"awake again": _used_memory_bytes(check)}
    same = all(torch.equal(p.detach().cpu(), b) for p, b in zip(rested.model.parameters(), before, strict=True))
    assert same, "sleeping changed a parameter"
    norms = [_train_once(rested)]
    rested.sleep()
    unrested.wake()
    norms.append(_train_once(unrested))
    assert abs(norms[0] / norms[1] - 1) < 1e-3, f"the step after sleep differs: gradient norms {norms}"
    seconds = {"sleep": slept - started, "wake": woken - slept}
    return {"attention": attention, "bytes": curve, "seconds": seconds, "grad_norms": norms}


def _attention_of(model: Any) -> list[str]:
    """Names of the operations that computed the attention of one forward pass."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        model.forward([_batch()])
    return sorted({event.key for event in seen.key_averages() if re.search("attention|attn", event.key, re.I)})


def quickstart(check: Check) -> dict[str, Any]:
    """The quickstart task, trained on the device."""
    folder = check.out / "quickstart"
    _relax("quickstart", str(folder), "--prepare-only", "--steps", "40" if check.on_gpu else "8")
    result = _relax("train", "--recipe", str(folder / "recipe.yaml"), *_where(check), "--format", "json")
    found: dict[str, Any] = json.loads(result)
    assert found["ok"], found
    gain = found["eval_after"] - found["eval_before"]
    assert gain > (0.3 if check.on_gpu else -0.2), f"held-out score {found['eval_before']} -> {found['eval_after']}"
    metrics = _metrics(folder / "run")
    return found | {"train_rollout_logprob_diff": metrics[-1].get("train_rollout_logprob_diff/mean")}


def resume(check: Check) -> dict[str, Any]:
    """Four steps straight against two, a checkpoint, and two more."""
    folder = check.out / "resume"
    _relax("quickstart", str(folder), "--prepare-only", "--steps", "4")
    recipe = ["train", "--recipe", str(folder / "recipe.yaml"), *_where(check), "--format", "json"]

    def run(name: str, *words: str) -> list[dict[str, Any]]:
        _relax(*recipe, "--run-dir", str(folder / name), *words)
        return _metrics(folder / name)

    actor, critic = str(folder / "half" / "actor"), str(folder / "half" / "critic")
    places = ["--save", actor, "--critic-save", critic]
    only = ["--num-critic-only-steps", "1"]
    straight = run("straight", "--save", str(folder / "s" / "a"), "--critic-save", str(folder / "s" / "c"), *only)
    run("halves", "--num-rollout", "2", *places, *only)
    halves = run("halves", *places, "--load", actor, "--critic-load", critic, *only)
    assert [m["step"] for m in halves] == [1, 2, 3, 4], "steps repeat or are missing"
    names = ("reward/mean", "value_loss", "pg_loss", "critic/grad_norm", "actor/grad_norm")
    gaps = {n: max(abs(a[n] - b[n]) for a, b in zip(straight, halves, strict=True) if n in a) for n in names}
    # Kernels on a GPU add in no fixed order, so a sampled token may flip.
    limit = 0.1 if check.on_gpu else 0.0
    assert gaps["reward/mean"] <= limit, f"resumed steps differ: {gaps}"
    return {"largest_difference": gaps}


def speed(check: Check) -> dict[str, Any]:
    """PPO steps on a model of SmolLM2's shape.

    FLOPs are 2 (forward) and 6 (training) a weight and token; the output layer works on response tokens only.
    """
    from relax_cli.models.spec import read_spec

    folder, prompts = _shaped_model(check), check.out / "prompts.jsonl"
    rows = 128 if check.on_gpu else 8
    prompts.write_text("".join(json.dumps({"input": f"{n:02d}+{n:02d}=" * 40}) + "\n" for n in range(10, 99)))
    reward = check.out / "length_reward.py"
    reward.write_text("def reward(samples):\n    return [float(len(s.response) % 7) for s in samples]\n")
    run_dir = check.out / "speed"
    sizes = {
        "--rollout-batch-size": rows,
        "--num-steps-per-rollout": 2,
        "--micro-batch-size": 32 if check.on_gpu else 4,
        "--num-rollout": 4 if check.on_gpu else 2,
        "--rollout-max-response-len": 32 if check.on_gpu else 8,
    }
    _relax(
        *["train", "--advantage-estimator", "ppo", "--use-rollout-logprobs", "--colocate", *_where(check)],
        *["--resource", '{"actor": [1, 1], "critic": [1, 1], "rollout": [1, 1], "advantages": [1, 0]}'],
        *["--hf-checkpoint", str(folder), "--prompt-data", str(prompts), "--custom-rm-path", f"{reward}:reward"],
        *["--run-dir", str(run_dir), "--lr", "1e-6", *(word for n, v in sizes.items() for word in (n, str(v)))],
    )
    last = _metrics(run_dir)[-1]
    seconds, tokens = last["phase_seconds"], last["tokens/total"]
    peak = json.loads((check.out / "machine.json").read_text())["peak_flops"]
    spec = read_spec(folder)
    head = spec.vocab_size * spec.hidden_size
    body = (spec.parameters - head) * tokens
    flops = {"critic": (2 + 6) * body, "actor": 6 * (body + head * last["tokens/response"])}
    return {
        "tokens": tokens,
        "phase_seconds": seconds,
        "tokens_per_second": {name: tokens / seconds[name] for name in ("rollout", "critic", "actor")},
        # A CPU's peak depends on the size of the product, so its utilisation would say nothing.
        "model_flop_utilisation": {n: flops[n] / seconds[n] / peak for n in flops} if check.on_gpu else None,
    }


def _shaped_model(check: Check) -> Path:
    """A folder with random weights in SmolLM2-135M's shape (smaller on a CPU) and the quickstart's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from relax_cli.quickstart.task import MODEL

    folder = check.out / "shaped-model"
    if not (folder / "config.json").exists():
        shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
        shape |= {"num_attention_heads": 9, "num_key_value_heads": 3}
        if not check.on_gpu:
            shape |= {"num_hidden_layers": 2, "vocab_size": 512}
        torch.manual_seed(0)
        config = LlamaConfig(**shape, tie_word_embeddings=True, max_position_embeddings=2048, eos_token_id=11)
        LlamaForCausalLM(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return folder


def _used_memory_bytes(check: Check) -> int:
    """Allocated by this process on a CUDA device, or its resident memory on a CPU."""
    import psutil
    import torch

    return torch.cuda.memory_allocated() if check.on_gpu else int(psutil.Process().memory_info().rss)


def _trainable(kind: ModelKind, folder: Path, device: str, dtype: Any, *, parks: bool = False) -> Any:
    """A model in training; `dtype` None is the device's own type."""
    from relax_cli.algorithms.schedule import Schedule
    from relax_cli.backends.device import select_device
    from relax_cli.backends.megatron import parallel
    from relax_cli.backends.megatron.trainer import Build, TrainableModel
    from relax_cli.config.schema import OptimizerSection, ParallelSection

    chosen = select_device("cuda" if device == "cuda" else "cpu")
    chosen = replace(chosen, training_dtype=dtype or chosen.training_dtype, shared_memory=parks)
    parallel.initialize(ParallelSection(), chosen, seed=5)
    schedule = Schedule(OptimizerSection(lr=1e-4), lr=1e-4, warmup_iters=0, decay_iters=10)
    return TrainableModel(kind, folder, Build(ParallelSection(), chosen, seed=7), schedule)


def _batch() -> Any:
    """Twelve short samples of the quickstart vocabulary."""
    import torch

    from relax_cli.backends.megatron.trainer import MicroBatch

    tokens_BS = torch.randint(0, 14, (12, 10), generator=torch.Generator().manual_seed(3))
    return MicroBatch(tokens_BS, torch.full((12,), 6), torch.full((12,), 4), {})


def _train_once(model: Any) -> float:
    """One optimizer step on a fixed batch; its gradient norm."""

    def loss_fn(output: Any, _: Any) -> Any:
        answer_BT = output.log_probs_BT if model.kind == "policy" else (output.values_BT - 1.0) ** 2
        return -answer_BT.mean(), {}

    norm: float = model.train_step([_batch()], loss_fn).grad_norm
    return norm


def _one_step(device: str, dtype: Any) -> dict[str, Any]:
    """Outputs before, and the policy's gradient norm of, one optimizer step of the quickstart model.

    In a process of its own for each device: the process groups of one process have one back end.
    """
    code = f"import gpu_check as g; g._print_step({device!r}, {str(dtype).removeprefix('torch.')!r})"
    here = str(Path(__file__).resolve().parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    import torch

    return {name: torch.tensor(value) for name, value in json.loads(done.stdout.splitlines()[-1]).items()}


def _print_step(device: str, dtype: str) -> None:
    import torch

    from relax_cli.quickstart.task import MODEL

    policy, value = (_trainable(kind, MODEL, device, getattr(torch, dtype)) for kind in ("policy", "value"))
    answers = {
        "log_probs": policy.forward([_batch()])[0].log_probs_BT.float().tolist(),
        "values": value.forward([_batch()])[0].values_BT.float().tolist(),
        "grad_norm": _train_once(policy),
    }
    print(json.dumps(answers))


def _where(check: Check) -> list[str]:
    """No Ray and no SGLang are needed: roles in one process, the embedded engine on the host's CPU."""
    return ["--device", check.device, "--launcher", "local", "--rollout-engine", "embedded"]


def _relax(*words: str) -> str:
    """stdout of a `relax` command."""
    code = "import sys; from relax_cli.cli.app import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, f"relax {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-3000:]}"
    return done.stdout


def _metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _synchronise(check: Check) -> None:
    import torch

    if check.on_gpu:
        torch.cuda.synchronize()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def run_part(name: str, check: Check) -> int:
    """Run one part in this process; its result goes to OUT/<part>.json."""
    functions: dict[str, Callable[[Check], dict[str, Any]]] = {
        "machine": machine,
        "parity": parity,
        "sleep": sleep,
        "quickstart": quickstart,
        "resume": resume,
        "speed": speed,
    }
    try:
        found = {"ok": True, **functions[name](check)}
    except Exception as error:  # noqa: BLE001 - the other parts still run; the failure is in the result
        traceback.print_exc()
        found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
    (check.out / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")
    return 0 if found["ok"] else 1


def main() -> int:
    """Run the parts one after another and gather their results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    check = Check(options.device, options.out.resolve())
    if options.part:
        return run_part(options.part, check)
    results = {}
    began = time.perf_counter()
    for name in options.only:
        left = TOTAL - (time.perf_counter() - began) if check.on_gpu else LIMIT
        started = time.perf_counter()
        command = [sys.executable, __file__, "--device", check.device, "--out", str(check.out), "--part", name]
        # A part that dies must not leave the result of an earlier run.
        (check.out / f"{name}.json").unlink(missing_ok=True)
        try:
            subprocess.run(command, check=False, timeout=max(0.0, min(LIMIT, left)))
            found = json.loads((check.out / f"{name}.json").read_text())
        except (subprocess.TimeoutExpired, OSError) as error:
            found = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        seconds = time.perf_counter() - started
        results[name] = found | {"wall_seconds": round(seconds, 1)}
        print(f"{'ok  ' if found['ok'] else 'FAIL'} {name:<11} {seconds:6.1f} s  {json.dumps(found)}", flush=True)
    summary = {"device": check.device, "parts": results}
    (check.out / "gpu_check.json").write_text(json.dumps(summary, indent=2) + "\n")
    return 0 if all(found["ok"] for found in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
