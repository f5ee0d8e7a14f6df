"""Seconds per PPO step: `relax train` against TRL 1.12.0's PPOTrainer on the same model, prompts and batch sizes.

    python benchmarks/ppo_step.py [--lengths fixed|ragged] [--rounds 3] [--steps 6] [--format json]

Both sides run alternately in this one run. TRL gets a virtual environment of its own, made on the first run in
`--work`. A TRL step also runs a reference and a reward model over the samples, two forward passes that our step has no
use for; ours also moves the samples through TransferQueue, the weights to the rollout workers, and writes metrics and
samples to disk. With ragged lengths every response ends at a length that is a function of its prompt, on both sides; in
ours `ragged/sitecustomize.py` gives each request that limit. CPU seconds are those of the whole process tree, Ray's and
TransferQueue's own processes included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

import psutil
from lengths import add_lengths

PROMPT_TOKENS, NEW_TOKENS, BATCH, MINIBATCH, VOCABULARY = 16, 32, 64, 16, 512
TRL = ("trl==1.12.0", "torch", "transformers", "datasets", "accelerate")
HERE = Path(__file__).resolve().parent


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_lengths(parser)
    parser.add_argument("--rounds", type=int, default=3, help="alternations")
    parser.add_argument("--steps", type=int, default=6, help="steps a side and round; the first is dropped")
    parser.add_argument("--cores", type=int, default=2, help="rollout workers here, threads in TRL")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "relax-bench")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    return parser.parse_args()


def new_tokens(args: argparse.Namespace) -> int:
    """Most tokens of a response; ragged ones have as many on average as fixed ones."""
    return NEW_TOKENS * (4 if args.lengths == "ragged" else 1)


def make_inputs(work: Path, layers: int = 4) -> tuple[Path, Path]:
    """A random Qwen2 (2.5 M parameters with 4 layers) with a word tokenizer, and prompts of `PROMPT_TOKENS` words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    model, prompts = work / "model", work / "prompts.jsonl"
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(VOCABULARY - 3))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(model)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(model)
    draw = random.Random(0)
    rows = (" ".join(draw.choices(words[3:], k=PROMPT_TOKENS)) for _ in range(BATCH * 4))
    prompts.write_text("".join(json.dumps({"input": row, "label": "w1"}) + "\n" for row in rows))
    return model, prompts


def trl_python(work: Path) -> str:
    """Python of TRL's environment, made when it is not there yet, with this environment's torch and transformers."""
    python = work / "trl-venv" / "bin" / "python"
    if not (work / "trl-venv" / "ready").exists():
        from importlib.metadata import version

        pins = [f"{name}=={version(name).split('+')[0]}" for name in ("torch", "transformers")]
        venv.create(work / "trl-venv", with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *TRL, *pins], check=True, stdout=sys.stderr)
        (work / "trl-venv" / "ready").touch()
    return str(python)


def run_trl(python: str, model: Path, prompts: Path, args: argparse.Namespace) -> dict[str, float]:
    """Median wall and CPU seconds per step of TRL."""
    command = [python, str(HERE / "trl_ppo.py"), "--model", str(model), "--prompts", str(prompts)]
    command += ["--ragged"] if args.lengths == "ragged" else []
    sizes = {
        "steps": args.steps,
        "batch": BATCH,
        "minibatch": MINIBATCH,
        "new-tokens": new_tokens(args),
        "threads": args.cores,
    }
    command += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=quiet_environment())
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    assert result["optimizer_steps"] == args.steps * BATCH // MINIBATCH, "TRL took other steps than asked"
    return result


def run_relax(model: Path, prompts: Path, work: Path, args: argparse.Namespace) -> dict[str, float]:
    """Median wall and CPU seconds per step of `relax train`, read off its metrics file as it grows."""
    run_dir = work / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    sizes = {
        "rollout-batch-size": BATCH,
        "num-steps-per-rollout": BATCH // MINIBATCH,
        "micro-batch-size": MINIBATCH,
        "num-rollout": args.steps,
        "rollout-max-response-len": new_tokens(args),
        "lr": 1e-4,
        "lambd": 0.95,
    }
    # Actor and critic learn at the same time: at this size a second intra-op thread gains little.
    command = train_command(model, prompts, run_dir, args.cores, sizes)
    command += ["--overlap-updates", "--normalize-advantages"]
    environment = quiet_environment()
    if args.lengths == "ragged":
        environment["PYTHONPATH"] = f"{HERE / 'ragged'}{os.pathsep}{HERE}"
    with open(work / "relax.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    cpu_marks: list[float] = []
    wall: list[float] = []
    metrics = run_dir / "metrics.jsonl"
    while process.poll() is None:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if len(lines) > len(cpu_marks):
            cpu_marks.append(tree_cpu_seconds(process.pid))
        time.sleep(0.01)
    if process.returncode:
        raise SystemExit(f"relax train failed, see {work / 'relax.log'}")
    wall = [json.loads(line)["step_seconds"] for line in metrics.read_text().splitlines()]
    cpu = [b - a for a, b in itertools.pairwise(cpu_marks)]
    return {"wall": statistics.median(wall[1:]), "cpu": statistics.median(cpu)}


def train_command(model: Path, prompts: Path, run_dir: Path, workers: int, sizes: dict[str, Any]) -> list[str]:
    """`relax train` with one actor, one critic and so many rollout workers on the same cores."""
    ranks = {"actor": [1, 1], "critic": [1, 1], "rollout": [1, workers], "advantages": [1, 0]}
    options: dict[str, Any] = {
        "advantage-estimator": "ppo",
        "hf-checkpoint": model,
        "prompt-data": prompts,
        "label-key": "label",
        "rm-type": "exact",
        "resource": json.dumps(ranks),
        "run-dir": run_dir,
        **sizes,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [str(Path(sys.executable).with_name("relax")), "train", "--colocate", "--use-rollout-logprobs", *words]


def tree_cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and all its descendants so far."""
    total = 0.0
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def quiet_environment() -> dict[str, str]:
    """Sleeping instead of spinning OpenMP threads, for both sides."""
    return {**os.environ, "OMP_WAIT_POLICY": "passive", "NO_COLOR": "1"}


def main() -> None:
    args = parse()
    args.work.mkdir(parents=True, exist_ok=True)
    model, prompts = make_inputs(args.work)
    python = trl_python(args.work)
    ours, theirs = [], []
    for number in range(args.rounds):
        theirs.append(run_trl(python, model, prompts, args))
        ours.append(run_relax(model, prompts, args.work, args))
        print(f"round {number + 1}/{args.rounds}: TRL {theirs[-1]}, relax {ours[-1]}", file=sys.stderr)
    result = {
        side: {kind: BATCH / statistics.median(r[kind] for r in rounds) for kind in ("wall", "cpu")}
        for side, rounds in (("relax", ours), ("trl", theirs))
    }
    ratio = {kind: result["relax"][kind] / result["trl"][kind] for kind in ("wall", "cpu")}
    if args.format == "json":
        more = {"lengths": args.lengths, "reference": "TRL 1.12.0", "cores": args.cores}
        print(json.dumps({"samples_per_second": result, "ratio": ratio} | more))
        return
    for kind, name in (("wall", "wall"), ("cpu", "CPU ")):
        print(
            f"samples per {name} second, {args.lengths}: relax {result['relax'][kind]:.1f}, "
            f"TRL {result['trl'][kind]:.1f}, ratio {ratio[kind]:.2f}"
        )


if __name__ == "__main__":
    main()
