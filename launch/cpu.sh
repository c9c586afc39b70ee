#!/usr/bin/env bash
# Start a Megatron script on this machine's CPU (gloo), the environment pinned before anything reads it.
# Why each variable: mindspeed_precision/determinism/environment.py.
set -euo pipefail

# shellcheck source=launch/start.bash
source "$(dirname "${BASH_SOURCE[0]}")/start.bash"

if [[ $# -eq 0 ]]; then
  cat >&2 <<'USAGE'
usage: launch/cpu.sh SCRIPT.py [ARGUMENT...]
  starts SCRIPT.py on CPU processes; add --precision-debug to its arguments to record the run
  environment: NPROC (1) processes, OMP_NUM_THREADS (1) threads of each;
               MSP_DRY_RUN=1 prints what would run, and runs nothing
USAGE
  exit 2
fi

require_processes "${NPROC:-1}"
require_one_node
require_script "$@"
require_layout "${NPROC:-1}" 1 "$@"
require_program torchrun "it comes with torch: activate the environment in which you train"

export PYTHONHASHSEED="${PYTHONHASHSEED:-1234}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # how a sum is split depends on it

command=(torchrun --standalone --nproc-per-node "${NPROC:-1}" -m mindspeed_precision.testing.cpu "$@")
print_if_dry "$((${#command[@]} - $#))" "${command[@]}"
exec "${command[@]}"
