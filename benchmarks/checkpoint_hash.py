"""What the sha256 of every file costs a save: one role's checkpoint written with it, with the CRC-32 that torch writes
by itself and that the sha256 replaces, and with neither, alternating.

python benchmarks/checkpoint_hash.py [--layers 30] [--rounds 5] [--folder DIR] [--format json]

The model has the shape of SmolLM2-135M (30 layers) and random weights; written are parameters, Adam's moments, schedule
and random state, in fp32 on a CPU, with every fsync. `--folder` names the disk to write to.
"""

from __future__ import annotations

import os

os.environ.update(OMP_WAIT_POLICY="passive", HF_HUB_OFFLINE="1")

import argparse
import json
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import torch
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.serialization import set_crc32_options
from transformers import AutoModelForCausalLM, LlamaConfig

from relax_cli.algorithms.schedule import Schedule
from relax_cli.backends.device import select_device
from relax_cli.backends.megatron import checkpointing, parallel
from relax_cli.backends.megatron.micro_batch import ModelKind
from relax_cli.backends.megatron.trainer import Build, TrainableModel
from relax_cli.checkpoint import layout, store
from relax_cli.config.schema import OptimizerSection, ParallelSection

MOST = 0.15
"""Share of a save's time that hashing may take."""


Kind = Literal["crc32", "neither", "sha256"]
KINDS: tuple[Kind, ...] = ("crc32", "neither", "sha256")


class PlainFileSystem(FileSystem):
    """torch's file system as it is; knows no hashes."""

    def entries(self) -> list[layout.FileEntry]:
        """Nothing."""
        return []


def write_model(layers: int, folder: Path) -> None:
    """A folder with random weights of SmolLM2's widths and `layers` layers."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def build(folder: Path, kind: ModelKind = "policy") -> TrainableModel:
    """The model of that folder with its optimizer."""
    device = select_device("cpu")
    parallel.initialize(ParallelSection(), device, seed=0)
    settings = Build(ParallelSection(), device, seed=0)
    return TrainableModel(kind, folder, settings, Schedule(OptimizerSection(), 1e-6, warmup_iters=0, decay_iters=10))


def save_seconds(model: TrainableModel, folder: Path, kind: Kind) -> float:
    """Wall-clock seconds of one checkpoint."""
    with ExitStack() as stack:
        if kind != "sha256":
            stack.enter_context(patch.object(checkpointing, "HashingFileSystem", PlainFileSystem))
            stack.enter_context(patch.object(layout, "sha256_of", lambda path: ""))
        if kind == "crc32":
            set_crc32_options(True)
            stack.enter_context(patch.object(checkpointing, "leave_out_crc32", lambda: None))
        started = time.perf_counter()
        store.prepare(model, folder, 1, "actor", {}, copied=False)()
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30, help="30 is SmolLM2-135M; fewer is smaller")
    parser.add_argument("--rounds", type=int, default=5, help="measured alternations; one more warms up")
    parser.add_argument("--folder", type=Path, help="where to write, default: the system's temporary folder")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args()
    seconds: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        write_model(args.layers, Path(name) / "model")
        model = build(Path(name) / "model")
        with torch.no_grad():
            for tensor in model.optimizer.tensors():
                tensor.normal_()
        target = Path(name) / "checkpoints"
        for number in range(args.rounds + 1):
            # A later write finds the disk busier, so they take turns.
            turn = number % len(KINDS)
            for kind in (*KINDS[turn:], *KINDS[:turn]):
                taken = save_seconds(model, target, kind)
                size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
                shutil.rmtree(target)
                if number:
                    seconds[kind].append(taken)
    # Other work on the machine only adds time.
    fastest = {kind: min(taken) for kind, taken in seconds.items()}
    extra = fastest["sha256"] / fastest["crc32"] - 1
    if args.format == "json":
        print(json.dumps({"bytes": size, "seconds": seconds, "fastest": fastest, "extra": extra, "most": MOST}))
    else:
        shown = ", ".join(f"{fastest[kind]:.2f} s with {kind}" for kind in KINDS)
        print(f"{size / 1e9:.2f} GB: {shown} (fastest of {args.rounds} each)")
        print(f"sha256 instead of torch's crc32: {extra:+.1%}; at most {MOST:+.0%}")


if __name__ == "__main__":
    main()
