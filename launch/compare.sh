#!/usr/bin/env bash
# Compare two recorded runs; needs no framework, so it runs on a laptop too.
set -euo pipefail

if [[ $# -eq 0 ]]; then
  cat >&2 <<'USAGE'
usage: launch/compare.sh BASELINE CANDIDATE [OPTION...]
  exit status: 0 aligned, 1 diverged, 2 the question could not be answered
  environment: PYTHON (python3)
USAGE
  exit 2
fi

exec "${PYTHON:-python3}" -m mindspeed_precision compare "$@"
