#!/usr/bin/env bash
# Run a real two-run case on this machine's CPU and open the verdict.
set -euo pipefail

# shellcheck source=launch/start.bash
source "$(dirname "${BASH_SOURCE[0]}")/start.bash"

if [[ $# -eq 0 ]]; then
  cat >&2 <<'USAGE'
usage: launch/demo.sh CASE [OPTION...]
  CASE: glm4, config, data-order, structure, nondeterminism, first-loss, drift, nan; mindspore (all that follow),
        mindspore-healthy, mindspore-accumulate, mindspore-split, mindspore-optimizer; --list says what each shows
  environment: PYTHON (python3), OMP_NUM_THREADS (1); the mindspore cases want MSP_MINDSPORE_PYTHON,
               MSP_MINDSPORE_NATIVE_PYTHON and MSP_MCORE, which `make demo-mindspore` names by itself;
               MSP_DRY_RUN=1 prints what would run, and runs nothing
USAGE
  exit 2
fi

require_program "${PYTHON:-python3}" "PYTHON names the interpreter that has mindspeed_precision"

export PYTHONHASHSEED="${PYTHONHASHSEED:-1234}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

command=("${PYTHON:-python3}" -m mindspeed_precision demo "$@")
print_if_dry "$((${#command[@]} - $#))" "${command[@]}"
exec "${command[@]}"
