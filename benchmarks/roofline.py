"""Expected seconds of each phase of a step of the GPU recipes: arithmetic and bytes over what a GPU can do.

    python benchmarks/roofline.py [RECIPE ...] [--tflops 989] [--hbm 3350] [--pcie 50] [--busy 0.4] [--read 0.6]

Nothing is measured: a roofline with the assumptions it prints. A run that is much slower has something to find.

Generation reads all weights once for every token position, and the cache of every running response; it ends with the
longest response. Prompts and training are matrix products: 2 flops per parameter and token forward, 4 backward, 2 more
where activations are computed again; attention's own products are left out. Sleeping roles move their numbers over
PCIe, out and in.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from relax_cli import api
from relax_cli.preflight.check_run import CheckedRun

RECIPES = ("qwen3-4B-8xgpu-ppo", "qwen3-4B-8xgpu-grpo", "qwen3-8B-16xgpu-ppo", "qwen3-30B-A3B-8xgpu-ppo")
SHARE_OF_LONGEST = 0.25
"""Mean length of prompts and responses over the longest that the recipe allows."""
BYTES = 2
"""Of a weight and of a number in the cache: bf16."""


@dataclass(frozen=True)
class Hardware:
    """One GPU, by default an H100 SXM; the shares are what a good run reaches."""

    flops: float
    bandwidth: float
    pcie: float
    busy: float
    read: float


def phases(checked: CheckedRun, gpu: Hardware) -> dict[str, float]:
    """Seconds of each phase."""
    config, plan = checked.config, checked.plan
    assert plan is not None, checked.errors
    assert plan.memory is not None, checked.errors
    assert checked.inputs.model is not None, checked.errors
    spec, samples = checked.inputs.model, config.batch.samples_per_rollout
    longest = config.rollout.rollout_max_response_len
    response, prompt = SHARE_OF_LONGEST * longest, SHARE_OF_LONGEST * (config.rollout.rollout_max_prompt_len or 0)
    servers = plan.gpus // config.sglang.rollout_num_gpus_per_engine
    per_token = 2 * spec.cached_layers * spec.num_kv_heads * spec.head_dim * BYTES
    cache_read = samples / plan.gpus * per_token * response * (prompt + response / 2)
    weights_read = longest * BYTES * plan.parameters["policy"] * servers / plan.gpus
    tokens = samples * (prompt + response)
    again = 2 if config.parallel.recompute_granularity == "full" else 0
    rate = plan.gpus * gpu.flops * gpu.busy
    # Of a mixture of experts a token uses a part; a batch reads all of them.
    idle = spec.parameters - spec.active_parameters
    found = {
        "generate": (weights_read + cache_read) / (gpu.bandwidth * gpu.read)
        + 2 * (plan.parameters["policy"] - idle) * samples * prompt / rate
    }
    for name, role in (("critic", "critic"), ("policy", "actor")):
        if name in plan.parameters:
            forward = 2 * (plan.parameters[name] - idle) * tokens / rate
            found[f"{role}: forward"] = (
                forward if role == "critic" or not config.algorithm.use_rollout_logprobs else 0.0
            )
            found[f"{role}: update"] = (6 + again) / 2 * forward
    moved = sum(sum(m.resident.values()) for m in plan.memory.roles if m.role in ("actor", "critic"))
    found["sleep and wake"] = 2 * moved / gpu.pcie
    found["publish"] = BYTES * plan.parameters["policy"] / gpu.pcie
    return {name: seconds for name, seconds in found.items() if seconds}


def main() -> None:
    """Print a table for each recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--tflops", type=float, default=989, help="peak of dense bf16 products of one GPU")
    parser.add_argument("--hbm", type=float, default=3350, help="GB/s of its memory")
    parser.add_argument("--pcie", type=float, default=50, help="GB/s between it and the host")
    parser.add_argument("--busy", type=float, default=0.4, help="share of the peak that prompts and training reach")
    parser.add_argument("--read", type=float, default=0.6, help="share of the bandwidth that generation reaches")
    args = parser.parse_args()
    gpu = Hardware(args.tflops * 1e12, args.hbm * 1e9, args.pcie * 1e9, args.busy, args.read)
    print(f"mean lengths: {SHARE_OF_LONGEST:g} of the longest; {vars(gpu)}")
    for recipe in args.recipes:
        found = phases(api.check(recipe, here=False), gpu)
        total = sum(found.values())
        print(f"\n{recipe}: {total:.0f} s a step")
        for name, seconds in found.items():
            print(f"  {name:<16} {seconds:7.1f} s  {seconds / total:4.0%}")


if __name__ == "__main__":
    main()
