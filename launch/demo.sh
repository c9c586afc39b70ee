#!/usr/bin/env bash
# Run a real two-run case on this machine's CPU and open the verdict.
set -euo pipefail

if [[ $# -eq 0 ]]; then
  cat >&2 <<'USAGE'
usage: launch/demo.sh CASE [OPTION...]
  CASE: glm4, mindspore (all that follow), mindspore-healthy, mindspore-accumulate, mindspore-split, mindspore-optimizer
  environment: PYTHON (python3), OMP_NUM_THREADS (1); the mindspore cases want MSP_MINDSPORE_PYTHON,
               MSP_MINDSPORE_NATIVE_PYTHON and MSP_MCORE, which `make demo-mindspore` names by itself
USAGE
  exit 2
fi

export PYTHONHASHSEED="${PYTHONHASHSEED:-1234}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

exec "${PYTHON:-python3}" -m mindspeed_precision demo "$@"
