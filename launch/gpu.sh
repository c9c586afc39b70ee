#!/usr/bin/env bash
# Start a training script on CUDA GPUs, the environment pinned before anything reads it.
# Why each variable: mindspeed_precision/determinism/environment.py.
set -euo pipefail

# shellcheck source=launch/start.bash
source "$(dirname "${BASH_SOURCE[0]}")/start.bash"

if [[ $# -eq 0 ]]; then
  cat >&2 <<'USAGE'
usage: launch/gpu.sh SCRIPT.py [ARGUMENT...]
  starts SCRIPT.py through torchrun; add --precision-debug to its arguments to record the run
  environment: NPROC (8) processes per node, NNODES (1), NODE_RANK (0), MASTER_ADDR (localhost), MASTER_PORT (6000);
               MSP_DRY_RUN=1 prints what would run, and runs nothing
USAGE
  exit 2
fi

require_processes "${NPROC:-8}"
require_nodes
require_port "${MASTER_PORT:-6000}"
require_script "$@"
require_layout "${NPROC:-8}" "${NNODES:-1}" "$@"
require_program torchrun "it comes with torch: activate the environment in which you train"

export PYTHONHASHSEED="${PYTHONHASHSEED:-1234}"
export NCCL_ALGO="${NCCL_ALGO:-Ring}"
export NCCL_DETERMINISTIC=1
export CUBLAS_WORKSPACE_CONFIG="${CUBLAS_WORKSPACE_CONFIG:-:4096:8}"
export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"

command=(
  torchrun --nproc-per-node "${NPROC:-8}" --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}"
  --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}" "$@"
)
print_if_dry "$((${#command[@]} - $#))" "${command[@]}"
exec "${command[@]}"
