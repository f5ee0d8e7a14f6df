#!/usr/bin/env bash
# PPO on Qwen3.5-9B on one node of 8 GPUs: checks the configuration on this machine, then trains.
#
#   MODEL_DIR=/models DATA_DIR=/data EXP_DIR=/exp/qwen35-ppo scripts/training/text/run-qwen35-9B-8xgpu-ppo.sh
#
# The recipe says what is expected in the three folders (`relax recipes show qwen35-9B-8xgpu-ppo`). Further arguments are
# options of `relax train`, for example `--num-rollout 2`, or `--load "$EXP_DIR/actor" --critic-load "$EXP_DIR/critic"` to
# go on after an interruption.

set -euo pipefail

readonly RECIPE=qwen35-9B-8xgpu-ppo

missing=()
for name in MODEL_DIR DATA_DIR EXP_DIR; do
  if [[ -z "${!name:-}" ]]; then
    missing+=("$name")
  fi
done
if ((${#missing[@]} > 0)); then
  echo "error: ${missing[*]} not set" >&2
  echo "  expected  MODEL_DIR (models), DATA_DIR (prompts), EXP_DIR (where to write)" >&2
  echo "  fix       export ${missing[0]}=/path/to/folder" >&2
  exit 2
fi
export MODEL_DIR DATA_DIR EXP_DIR

# The report is long: it is shown whole only where something is wrong.
status=0
report=$(relax validate-config --here --recipe "$RECIPE" "$@") || status=$?
if ((status != 0)); then
  printf '%s\n' "$report" >&2
  exit "$status"
fi

exec relax train --recipe "$RECIPE" "$@"
