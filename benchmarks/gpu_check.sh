#!/usr/bin/env bash
# Checks and measures the engine on one CUDA card, in under eight minutes and without a download:
# the tests marked `gpu` (bf16 and fp32), then benchmarks/gpu_check.py with random weights.
#   bash benchmarks/gpu_check.sh [options of gpu_check.py]
# PYTHON names another interpreter than .venv/bin/python.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
python="${PYTHON:-.venv/bin/python}"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
if [[ " $* " != *" --device cpu "* ]]; then
    timeout 180 "$python" -m pytest -q -m gpu tests/gpu
fi
exec timeout 290 "$python" benchmarks/gpu_check.py "$@"
