#!/usr/bin/env bash
# Prove the GPU back end on one GPU of 80 GB or more; stops after 8 minutes. See gpu_check.py for the parts.
# Then prove training with SGLang on 2 to 8 GPUs of one machine. See gpu_check_servers.py for the stages.
#
#   scripts/gpu_check.sh [--wheels DIR] [options of gpu_check.py]
#   scripts/gpu_check.sh --servers [options of gpu_check_servers.py]
#
# On a machine where relax is installed nothing else is needed. On one without a package registry, carry the wheels of
# scripts/gpu_check_wheels.txt in a folder: they are installed into a temporary place for this run. torch, transformers,
# safetensors, tokenizers, psutil, pluggy, typer and rich must be there already.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if [ "${1:-}" = --wheels ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" "$2"/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
    shift 2
fi
part=gpu_check.py
if [ "${1:-}" = --servers ]; then
    part=gpu_check_servers.py
    shift
fi
python3 "$here/$part" "$@"
