#!/usr/bin/env bash
# Start a Megatron script on this machine's CPU with MindSpore, through mindtorch: not MSAdapter, not Ascend.
# Why each variable: mindspeed_precision/determinism/environment.py. For tests and the demo.
set -euo pipefail

# shellcheck source=launch/start.bash
source "$(dirname "${BASH_SOURCE[0]}")/start.bash"

if [[ $# -eq 0 ]]; then
  cat >&2 <<'USAGE'
usage: launch/mindspore_cpu.sh SCRIPT.py [ARGUMENT...]
  starts SCRIPT.py on MindSpore CPU, one process by itself or several through msrun; add --precision-debug to its
  arguments to record the run
  environment: PYTHON (python3) of .venv-mindspore, NPROC (1) processes, MASTER_PORT (8118), MSRUN_LOG_DIR (msrun_log),
               OMP_NUM_THREADS (1) threads of each; MSP_DRY_RUN=1 prints what would run, and runs nothing
USAGE
  exit 2
fi

require_processes "${NPROC:-1}"
require_one_node
require_port "${MASTER_PORT:-8118}"
require_script "$@"
require_layout "${NPROC:-1}" 1 "$@"

export PYTHONHASHSEED="${PYTHONHASHSEED:-1234}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # how a sum is split depends on it

python="${PYTHON:-python3}"
require_program "$python" "PYTHON names the interpreter that has mindspore"
if [[ "${NPROC:-1}" -eq 1 ]]; then
  command=("$python" -m mindspeed_precision.testing.mindtorch "$@")
  print_if_dry "$((${#command[@]} - $#))" "${command[@]}"
  exec "${command[@]}"
fi

# msrun starts what is called python on the PATH, and takes a file, not a module
if [[ "$python" == */* ]]; then
  PATH="$(dirname "$python"):$PATH"
  changed+=(PATH)
fi
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
declare -x PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
changed+=(PYTHONPATH)
require_program msrun "it comes with mindspore: PYTHON names the interpreter beside it"
command=(
  msrun --worker_num "$NPROC" --local_worker_num "$NPROC" --master_addr 127.0.0.1
  --master_port "${MASTER_PORT:-8118}" --log_dir "${MSRUN_LOG_DIR:-msrun_log}" --join=True
  "$root/mindspeed_precision/testing/mindtorch/__main__.py" "$@"
)
print_if_dry "$((${#command[@]} - $#))" "${command[@]}"
exec "${command[@]}"
