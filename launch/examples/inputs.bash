# shellcheck shell=bash disable=SC2034,SC2154 # the list that sources it reads them
# What every example reads and writes alike: data, tokenizer, checkpoint, logs. Sourced by the lists of arguments.

data=(
  --data-path "$DATA_PATH"
  --split "100,0,0"
  --tokenizer-type PretrainedFromHF
  --tokenizer-name-or-path "$TOKENIZER_PATH"
)

checkpoints=(
  --load "$CKPT_LOAD_DIR"
  --no-load-optim
  --no-load-rng
  --ckpt-format torch
  --exit-on-missing-checkpoint
)

output=(
  --log-interval 1
  --save-interval 2000
  --eval-interval 2000
  --eval-iters 0
)
