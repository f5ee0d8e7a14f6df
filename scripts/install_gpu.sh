#!/usr/bin/env bash
# Install relax for GPUs into a new environment; the packages of SGLang and of Megatron-Bridge exclude each other.
#
#   scripts/install_gpu.sh sglang .venv           trains and generates
#   scripts/install_gpu.sh bridge .venv           trains with Megatron-Bridge; give it --sglang-python of another environment
#   scripts/install_gpu.sh sglang .venv --print   only prints the commands
#
# Needs python3.12 (or PYTHON=…) and, for bridge, an NVIDIA driver: nv-grouped-gemm asks the GPU for its architecture.
set -euo pipefail
kind=${1:-} venv=${2:-} mode=${3:-}
cd "$(dirname "$0")/.."
run() {
    echo "+ $*"
    if [ "$mode" != --print ]; then "$@"; fi
}
usage() {
    grep '^#   ' "$0" | cut -c5- >&2
    exit 2
}
[ -n "$venv" ] || usage
case "$mode" in "" | --print) ;; *) usage ;; esac

case "$kind" in
sglang)
    run "${PYTHON:-python3.12}" -m venv "$venv"
    run "$venv/bin/pip" install -c constraints-gpu.txt -e '.[sglang]'
    ;;
bridge)
    run "${PYTHON:-python3.12}" -m venv "$venv"
    # fast-hadamard-transform, nv-grouped-gemm and TransformerEngine import torch while they are built.
    run "$venv/bin/pip" install torch setuptools wheel packaging ninja pybind11 hatchling editables
    run "$venv/bin/pip" install --no-build-isolation -e '.[bridge]'
    ;;
*) usage ;;
esac
run "$venv/bin/relax" doctor
