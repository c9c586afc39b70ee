#!/usr/bin/env bash
# Start a training script on Ascend NPUs with MindSpore, the environment pinned before anything reads it.
# Why each variable: mindspeed_precision/determinism/environment.py. Source the toolkit's set_env.sh before, and
# put MSAdapter first on PYTHONPATH as MindSpeed's own set_path.sh does.
set -euo pipefail

# shellcheck source=launch/start.bash
source "$(dirname "${BASH_SOURCE[0]}")/start.bash"

if [[ $# -eq 0 ]]; then
  cat >&2 <<'USAGE'
usage: launch/mindspore.sh SCRIPT.py [ARGUMENT...]
  starts SCRIPT.py through msrun; add --ai-framework mindspore --precision-debug to its arguments to record the run
  environment: NPROC (8) processes per node, NNODES (1), NODE_RANK (0), MASTER_ADDR (127.0.0.1), MASTER_PORT (6000),
               MSRUN_LOG_DIR (msrun_log); MSP_DEVICE=cpu hands over to launch/mindspore_cpu.sh;
               MSP_DRY_RUN=1 prints what would run, and runs nothing
USAGE
  exit 2
fi

case "${MSP_DEVICE:-npu}" in
  npu) ;;
  cpu) exec "$(dirname "${BASH_SOURCE[0]}")/mindspore_cpu.sh" "$@" ;;
  *) refuse "MSP_DEVICE is $MSP_DEVICE, expected npu or cpu" ;;
esac

require_processes "${NPROC:-8}"
require_nodes
require_port "${MASTER_PORT:-6000}"
require_script "$@"
require_layout "${NPROC:-8}" "${NNODES:-1}" "$@"
require_program msrun "it comes with mindspore: activate the environment in which you train"

export PYTHONHASHSEED="${PYTHONHASHSEED:-1234}"
export HCCL_DETERMINISTIC="${HCCL_DETERMINISTIC:-true}" # or "strict", where the chip can
export LCCL_DETERMINISTIC=1
export CLOSE_MATMUL_K_SHIFT=1
export ATB_MATMUL_SHUFFLE_K_ENABLE=0 # not a default: set_env.sh of the toolkit exports 1
export ATB_LLM_LCOC_ENABLE=0
export CUSTOM_MATMUL_SHUFFLE=off
export ASCEND_LAUNCH_BLOCKING=1
export NCCL_DETERMINISTIC=1
export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"

nproc_per_node="${NPROC:-8}"
command=(
  msrun --worker_num "$((nproc_per_node * ${NNODES:-1}))" --local_worker_num "$nproc_per_node"
  --node_rank "${NODE_RANK:-0}" --master_addr "${MASTER_ADDR:-127.0.0.1}" --master_port "${MASTER_PORT:-6000}"
  --log_dir "${MSRUN_LOG_DIR:-msrun_log}" --join=True "$@"
)
print_if_dry "$((${#command[@]} - $#))" "${command[@]}"
exec "${command[@]}"
