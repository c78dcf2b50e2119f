#!/usr/bin/env bash
# What a CUDA device is for, in less than eight minutes: every kernel against its torch form in fp32, then in bf16; the
# public fixtures; then the roofline. Goes on after a failure and ends with 1. PYTHON=… names the interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
  echo "device_check: no CUDA device here; run it on a machine that has one" >&2
  exit 2
}
# Where the project is not installed the links for the type checker show its folders under their names.
"$python" -c 'import replayscope.kernels.impl' 2>/dev/null || export PYTHONPATH="$PWD/typings:$PWD"
# Most of the time goes into compiling; a machine with pytest-xdist compiles side by side.
workers=()
"$python" -c 'import xdist' 2>/dev/null && workers=(-n 8)

status=0
step() { # name, seconds, command
  echo "== $1"
  timeout "$2" "${@:3}" || status=1
}
tests=("$python" -m pytest -q -W default -p no:cacheprovider "${workers[@]}" -m gpu)
step "kernels, fp32" 150 "${tests[@]}" tests/test_kernels_triton.py -k float32
step "kernels, bf16" 110 "${tests[@]}" tests/test_kernels_triton.py -k bfloat16
step "fixtures" 60 "${tests[@]}" tests/test_kernels_parity.py
step "roofline" 150 "$python" benchmarks/roofline.py
exit $status
