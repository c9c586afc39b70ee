#!/usr/bin/env bash
# Compare two recorded runs; needs no framework, so it runs on a laptop too.
set -euo pipefail

# shellcheck source=launch/start.bash
source "$(dirname "${BASH_SOURCE[0]}")/start.bash"

if [[ $# -eq 0 ]]; then
  cat >&2 <<'USAGE'
usage: launch/compare.sh BASELINE CANDIDATE [OPTION...]
  exit status: 0 aligned, 1 diverged, 2 the question could not be answered
  environment: PYTHON (python3); MSP_DRY_RUN=1 prints what would run, and runs nothing
USAGE
  exit 2
fi

require_program "${PYTHON:-python3}" "PYTHON names the interpreter that has mindspeed_precision"

command=("${PYTHON:-python3}" -m mindspeed_precision compare "$@")
print_if_dry "$((${#command[@]} - $#))" "${command[@]}"
exec "${command[@]}"
