#!/usr/bin/env bash
# four layers of DeepSeek-V3, sequences of 4096, one node of 8 NPUs (PP 2, EP 4), on MindSpore, recorded.
# Run it in MindSpeed-LLM's directory, with the import of pretrain in pretrain_gpt.py changed (README, "Use it").
set -euo pipefail

# shellcheck source=launch/start.bash
source "$(dirname "${BASH_SOURCE[0]}")/../start.bash"

require_paths DATA_PATH TOKENIZER_PATH CKPT_LOAD_DIR
# shellcheck source=launch/examples/deepseek3_1b_4k.bash
source "$(dirname "${BASH_SOURCE[0]}")/deepseek3_1b_4k.bash"

export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-3600}"
export HCCL_ALGO="${HCCL_ALGO:-alltoall=level0:NA;level1:pipeline}"
export HCCL_BUFFSIZE="${HCCL_BUFFSIZE:-400}"
export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}"
print_exports # in a dry run; the rest is exported, and printed, by the launch script

exec "$(dirname "${BASH_SOURCE[0]}")/../mindspore.sh" "${SCRIPT:-pretrain_gpt.py}" "${arguments[@]}" --ai-framework mindspore \
  --precision-debug --precision-debug-config "${PRECISION_CONFIG:-full-size}" --precision-debug-out "${RUN:-runs/deepseek3-mindspore}" "$@"
