#!/usr/bin/env bash
# Qwen3 0.6B, sequences of 4096, one node of 8 NPUs (DP 8), on MindSpore, recorded.
# Run it in MindSpeed-LLM's directory, with the import of pretrain in pretrain_gpt.py changed (README, "Use it").
set -euo pipefail

# shellcheck source=launch/start.bash
source "$(dirname "${BASH_SOURCE[0]}")/../start.bash"

require_paths DATA_PATH TOKENIZER_PATH CKPT_LOAD_DIR
# shellcheck source=launch/examples/qwen3_0point6b_4k.bash
source "$(dirname "${BASH_SOURCE[0]}")/qwen3_0point6b_4k.bash"

export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}"
print_exports # in a dry run; the rest is exported, and printed, by the launch script

exec "$(dirname "${BASH_SOURCE[0]}")/../mindspore.sh" "${SCRIPT:-pretrain_gpt.py}" "${arguments[@]}" --ai-framework mindspore \
  --precision-debug --precision-debug-config "${PRECISION_CONFIG:-full-size}" --precision-debug-out "${RUN:-runs/qwen3-mindspore}" "$@"
