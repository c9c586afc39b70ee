# shellcheck shell=bash
# Sourced by the scripts of this directory: what they check before they start anything, and the dry run.
#
# MSP_DRY_RUN=1 prints what would run, as lines that a shell takes (bash launch.txt does what the script would have
# done), and runs nothing. What is missing on this machine (launcher, training script) is then a note on stderr.

case "$0" in
  */examples/../*) here="launch/$(basename "$0")" ;;
  */examples/*) here="launch/examples/$(basename "$0")" ;;
  *) here="launch/$(basename "$0")" ;;
esac

refuse() {
  echo "$here: $*" >&2
  exit 2
}

is_dry() {
  case "${MSP_DRY_RUN:-0}" in
    1) return 0 ;;
    0 | "") return 1 ;;
    *) refuse "MSP_DRY_RUN is $MSP_DRY_RUN, expected 1 or 0" ;;
  esac
}

# missing TEXT: an error, or a note in a dry run, which may be made on another machine
missing() {
  is_dry || refuse "$*"
  echo "$here: note: $*" >&2
}

# require_number NAME VALUE LEAST MOST WHAT
require_number() {
  if [[ ! "$2" =~ ^(0|[1-9][0-9]{0,8})$ ]] || (($2 < $3 || $2 > $4)); then
    refuse "$1 is $2, expected $5"
  fi
}

require_processes() {
  require_number NPROC "$1" 1 65536 "a number of processes"
}

# require_one_node: a script that starts its processes on this machine alone says so where NNODES asks for more
require_one_node() {
  local nodes="${NNODES:-1}"
  require_number NNODES "$nodes" 1 65536 "a number of nodes"
  ((nodes == 1)) || refuse "NNODES is $nodes, expected 1: this script starts processes on one machine alone"
}

# require_layout PROCESSES NODES WORD...: as many processes as the parallel sizes among the words can share. Megatron
# wants a multiple of tensor x pipeline x context, and of pipeline x expert (experts are shared by what remains).
require_layout() {
  local world=$(($1 * $2)) said="NPROC is $1" name="" word value
  local -A sizes=([tensor-model-parallel-size]=1 [pipeline-model-parallel-size]=1 [context-parallel-size]=1
    [expert-model-parallel-size]=1)
  (($2 == 1)) || said+=" and NNODES $2"
  shift 2
  for word in "$@"; do
    value="$word"
    if [[ "$word" == --*=* ]]; then
      name="${word%%=*}" name="${name#--}" value="${word#*=}"
    fi
    if [[ -n "$name" && -n "${sizes[$name]:-}" && "$value" =~ ^[1-9][0-9]{0,5}$ ]]; then
      sizes[$name]=$value
    fi
    name=""
    [[ "$word" == --*=* || "$word" != --* ]] || name="${word#--}"
  done
  local tensor="${sizes[tensor-model-parallel-size]}" pipeline="${sizes[pipeline-model-parallel-size]}"
  local context="${sizes[context-parallel-size]}"
  local model=$((tensor * pipeline * context))
  ((world % model == 0)) ||
    refuse "$said, expected a multiple of $model processes: --tensor-model-parallel-size $tensor x" \
      "--pipeline-model-parallel-size $pipeline x --context-parallel-size $context"
  local expert="${sizes[expert-model-parallel-size]}"
  ((world % (pipeline * expert) == 0)) ||
    refuse "$said, expected a multiple of $((pipeline * expert)) processes: --pipeline-model-parallel-size $pipeline x" \
      "--expert-model-parallel-size $expert"
}

require_port() {
  require_number MASTER_PORT "$1" 1 65535 "a port, 1 to 65535"
}

# require_nodes: NNODES, and what several nodes need to find each other
require_nodes() {
  local nodes="${NNODES:-1}"
  require_number NNODES "$nodes" 1 65536 "a number of nodes"
  if ((nodes > 1)); then
    [[ -n "${MASTER_ADDR:-}" ]] ||
      refuse "NNODES is $nodes and MASTER_ADDR is not set, expected the address of the node whose NODE_RANK is 0"
    [[ -n "${NODE_RANK:-}" ]] ||
      refuse "NNODES is $nodes and NODE_RANK is not set, expected 0 to $((nodes - 1)), another on each node"
  fi
  require_number NODE_RANK "${NODE_RANK:-0}" 0 "$((nodes - 1))" "0 to $((nodes - 1)), since NNODES is $nodes"
}

# require_script WORD...: the training script is the first word that is no option of ours; modules are not looked for
require_script() {
  while [[ "${1:-}" == --without ]]; do
    shift 2 || refuse "--without expects the name of a piece"
  done
  [[ $# -gt 0 ]] || refuse "no training script was given"
  [[ "$1" == -m || -f "$1" ]] || missing "no such script: $1 (looked in $PWD)"
}

# require_program NAME HINT
require_program() {
  command -v "$1" >/dev/null || missing "$1 is not on PATH: $2"
}

# require_paths NAME...: variables without which an example cannot say what to train on
require_paths() {
  local name
  for name in "$@"; do
    [[ -n "${!name:-}" ]] || refuse "$name is not set, expected a path (DATA_PATH: that of the .bin and .idx files, without the ending)"
  done
}

# print_exports: the variables that the calling script exports, where this is a dry run; and those in `changed`
changed=()
print_exports() {
  is_dry || return 0
  local name
  while read -r name; do
    printf 'export %s=%q\n' "$name" "${!name}"
  done < <(sed -n 's/^export \([A-Za-z_][A-Za-z0-9_]*\)=.*/\1/p' "$0")
  for name in ${changed[@]+"${changed[@]}"}; do # an empty array is unset for older shells
    printf 'export %s=%q\n' "$name" "${!name}"
  done
}

# print_if_dry COUNT WORD...: print the command and end, where this is a dry run; its first COUNT words start it (the
# launcher, its options, what runs the script), the rest are the user's. A line for each option, with its values.
print_if_dry() {
  is_dry || return 0
  local before=$1 word previous="" at=0
  shift
  print_exports
  for word in "$@"; do
    if ((at > 0)) && { [[ "$word" =~ ^--?[A-Za-z] || "$previous" == --*=* ]] || ((at == before)); }; then
      printf ' \\\n ' # the next word brings its blank
    fi
    ((at > 0)) && printf ' '
    printf '%q' "$word"
    at=$((at + 1)) previous=$word
  done
  printf '\n'
  exit 0
}
