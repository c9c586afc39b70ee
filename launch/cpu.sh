#!/usr/bin/env bash
# Start a Megatron script on this machine's CPU (gloo), the environment pinned before anything reads it.
# Why each variable: mindspeed_precision/determinism/environment.py.
set -euo pipefail

if [[ $# -eq 0 ]]; then
  cat >&2 <<'USAGE'
usage: launch/cpu.sh SCRIPT.py [ARGUMENT...]
  starts SCRIPT.py on CPU processes; add --precision-debug to its arguments to record the run
  environment: NPROC (1) processes, OMP_NUM_THREADS (1) threads of each
USAGE
  exit 2
fi

export PYTHONHASHSEED="${PYTHONHASHSEED:-1234}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # how a sum is split depends on it

exec torchrun --standalone --nproc-per-node "${NPROC:-1}" -m mindspeed_precision.testing.cpu "$@"
