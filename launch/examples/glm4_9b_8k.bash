# shellcheck shell=bash disable=SC2034,SC2154 # the script that sources it reads and sets them
# Sourced by glm4_9b_8k_pta.sh and glm4_9b_8k_mindspore.sh: what both sides must be given alike.
#
# The numbers are those of MindSpeed-LLM's examples/mcore/glm4/pretrain_glm4_9b_8k_ptd.sh (v2.3.0) and
# examples/mindspore/glm4/pretrain_glm4_9b_8k_ms.sh: GLM4 9B, sequences of 8192, one node of 8 NPUs, TP 2, PP 2 and
# hence DP 2. Added on both sides: --ckpt-format, which one of them has, and --exit-on-missing-checkpoint, without
# which a wrong path means random weights.

model=(
  --use-mcore-models
  --num-layers 40
  --hidden-size 4096
  --ffn-hidden-size 13696
  --num-attention-heads 32
  --group-query-attention
  --num-query-groups 2
  --max-position-embeddings 8192
  --padded-vocab-size 151552
  --make-vocab-size-divisible-by 1
  --untie-embeddings-and-output-weights
  --disable-bias-linear
  --add-qkv-bias
  --swiglu
  --normalization RMSNorm
  --norm-epsilon 1.5625e-07
  --init-method-std 0.01
  --position-embedding-type rope
  --use-glm-rope
  --rotary-percent 0.5
  --no-rope-fusion
)

kernels=(
  --use-flash-attn
  --use-fused-rmsnorm
  --use-fused-swiglu
  --no-bias-swiglu-fusion
  --no-masked-softmax-fusion
  --attention-softmax-in-fp32
  --no-gradient-accumulation-fusion
)

parallel=(
  --tensor-model-parallel-size 2
  --pipeline-model-parallel-size 2
  --sequence-parallel
  --use-distributed-optimizer
  --overlap-grad-reduce
  --overlap-param-gather
  --distributed-backend nccl
)

training=(
  --seq-length 8192
  --micro-batch-size 1
  --global-batch-size 64
  --bf16
  --initial-loss-scale 4096
  --train-iters 2000
  --lr 1.25e-6
  --min-lr 1.25e-7
  --lr-decay-style cosine
  --lr-warmup-fraction 0.01
  --weight-decay 1e-1
  --clip-grad 1.0
  --adam-beta1 0.9
  --adam-beta2 0.95
  --attention-dropout 0.0
  --hidden-dropout 0.0
)

# shellcheck source=launch/examples/inputs.bash
source "$(dirname "${BASH_SOURCE[0]}")/inputs.bash"

arguments=("${model[@]}" "${kernels[@]}" "${parallel[@]}" "${training[@]}" "${data[@]}" "${checkpoints[@]}" "${output[@]}")
