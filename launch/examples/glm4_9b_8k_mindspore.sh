#!/usr/bin/env bash
# GLM4 9B, sequences of 8192, one node of 8 NPUs (DP 2, TP 2, PP 2), on MindSpore, recorded.
# Run it in MindSpeed-LLM's directory, with the import of pretrain in pretrain_gpt.py changed (README, "Use it").
set -euo pipefail

# shellcheck source=launch/start.bash
source "$(dirname "${BASH_SOURCE[0]}")/../start.bash"

require_paths DATA_PATH TOKENIZER_PATH CKPT_LOAD_DIR
# shellcheck source=launch/examples/glm4_9b_8k.bash
source "$(dirname "${BASH_SOURCE[0]}")/glm4_9b_8k.bash"

exec "$(dirname "${BASH_SOURCE[0]}")/../mindspore.sh" "${SCRIPT:-pretrain_gpt.py}" "${arguments[@]}" --ai-framework mindspore \
  --precision-debug --precision-debug-config "${PRECISION_CONFIG:-full-size}" --precision-debug-out "${RUN:-runs/glm4-mindspore}" "$@"
