#!/usr/bin/env bash
# Start a Megatron script on this machine's CPU with MindSpore, through mindtorch: not MSAdapter, not Ascend.
# Why each variable: mindspeed_precision/determinism/environment.py. For tests and the demo.
set -euo pipefail

if [[ $# -eq 0 ]]; then
  cat >&2 <<'USAGE'
usage: launch/mindspore_cpu.sh SCRIPT.py [ARGUMENT...]
  starts SCRIPT.py on MindSpore CPU, one process by itself or several through msrun; add --precision-debug to its
  arguments to record the run
  environment: PYTHON (python3) of .venv-mindspore, NPROC (1) processes, MASTER_PORT (8118), MSRUN_LOG_DIR (msrun_log),
               OMP_NUM_THREADS (1) threads of each
USAGE
  exit 2
fi

export PYTHONHASHSEED="${PYTHONHASHSEED:-1234}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # how a sum is split depends on it

if [[ ! "${NPROC:-1}" =~ ^[1-9][0-9]*$ ]]; then
  echo "launch/mindspore_cpu.sh: NPROC is $NPROC, expected a number of processes" >&2
  exit 2
fi
python="${PYTHON:-python3}"
if [[ "${NPROC:-1}" -eq 1 ]]; then
  exec "$python" -m mindspeed_precision.testing.mindtorch "$@"
fi

# msrun starts what is called python on the PATH, and takes a file, not a module
[[ "$python" == */* ]] && PATH="$(dirname "$python"):$PATH"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec msrun --worker_num "$NPROC" --local_worker_num "$NPROC" \
  --master_addr 127.0.0.1 --master_port "${MASTER_PORT:-8118}" --log_dir "${MSRUN_LOG_DIR:-msrun_log}" --join=True \
  "$root/mindspeed_precision/testing/mindtorch/__main__.py" "$@"
