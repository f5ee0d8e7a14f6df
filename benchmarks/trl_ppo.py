"""The TRL side of `ppo_step.py`; runs inside a virtual environment with TRL, the last release line that has PPO.

One step: sample `--batch` responses, log-probabilities, reference log-probabilities, values and rewards of all of them,
then one epoch of `--batch / --minibatch` optimizer steps for policy and value model. The first step is dropped.
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1", CUDA_VISIBLE_DEVICES=""
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="folder with the policy and the tokenizer")
    parser.add_argument("--prompts", required=True, help="JSONL with `input`")
    parser.add_argument("--ragged", action="store_true", help="response lengths from `lengths.response_length`")
    for name in ("steps", "batch", "minibatch", "new-tokens", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser.parse_args()


def make_config(args: argparse.Namespace) -> Any:
    """TRL's settings for the same work: one epoch, `batch / minibatch` optimizer steps."""
    from trl.experimental.ppo import PPOConfig

    return PPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-ppo-"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        seed=0,
        learning_rate=1e-4,
        # With gradient accumulation TRL takes one optimizer step per epoch instead of one per minibatch.
        gradient_accumulation_steps=1,
        per_device_train_batch_size=args.batch,
        num_mini_batches=args.batch // args.minibatch,
        num_ppo_epochs=1,
        total_episodes=args.batch * args.steps,
        response_length=args.new_tokens,
        temperature=1.0,
        local_rollout_forward_batch_size=args.batch,
        num_sample_generations=0,
    )


def end_at_lengths(model: Any, most: int) -> None:
    """Let each row that `model.generate` continues end at its `response_length`."""
    import torch
    from lengths import response_length
    from transformers import StoppingCriteriaList

    generate = model.generate

    def ragged(*, input_ids: torch.Tensor, **options: Any) -> Any:
        prompt = input_ids.shape[1]
        ends_B = prompt + torch.tensor([response_length(row, most) for row in input_ids.tolist()])
        stopping = StoppingCriteriaList([lambda ids, scores, **_: ends_B <= ids.shape[1]])
        return generate(input_ids=input_ids, stopping_criteria=stopping, **options)

    model.generate = ragged


def main() -> None:
    args = parse()
    import datasets
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        PreTrainedTokenizerFast,
        TrainerCallback,
    )
    from trl.experimental.ppo import PPOTrainer

    torch.set_num_threads(args.threads)

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.wall: list[float] = []
            self.cpu: list[float] = []

        def tick(self) -> None:
            self.wall.append(time.perf_counter())
            self.cpu.append(time.process_time())

        def on_train_begin(self, *_: object, **__: object) -> None:
            self.tick()

        def on_step_end(self, *_: object, **__: object) -> None:
            self.tick()

    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model, padding_side="left")
    policy, reference = (AutoModelForCausalLM.from_pretrained(args.model) for _ in range(2))
    value, reward = (AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=1) for _ in range(2))
    with open(args.prompts) as lines:
        rows = [tokenizer(json.loads(line)["input"]).input_ids for line in lines]
    if args.ragged:
        end_at_lengths(policy, args.new_tokens)
    clock = Clock()
    trainer = PPOTrainer(
        args=make_config(args),
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=value,
        train_dataset=datasets.Dataset.from_dict({"input_ids": rows}),
        callbacks=[clock],
    )
    trainer.train()
    state = trainer.optimizer.optimizer.state
    wall, cpu = ([b - a for a, b in itertools.pairwise(times)][1:] for times in (clock.wall, clock.cpu))
    print(
        json.dumps(
            {
                "wall": statistics.median(wall),
                "cpu": statistics.median(cpu),
                "steps": len(wall),
                "optimizer_steps": max(int(s["step"]) for s in state.values()),
            }
        )
    )


if __name__ == "__main__":
    main()
