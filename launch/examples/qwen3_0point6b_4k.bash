# shellcheck shell=bash disable=SC2034,SC2154 # the script that sources it reads and sets them
# Sourced by qwen3_0point6b_4k_pta.sh and qwen3_0point6b_4k_mindspore.sh: what both sides must be given alike.
#
# The numbers are those of MindSpeed-LLM's examples/mcore/qwen3/pretrain_qwen3_0point6b_4K_ptd.sh and
# examples/mindspore/qwen3/pretrain_qwen3_0point6b_4K_ms.sh: one node of 8 NPUs, DP 8. The two scripts differ: global
# batch 32 and 8, seed 42 and Megatron's 1234, data handled by GeneralPretrainHandler and by the default. Here both
# sides have the first of each, where it is a number, and the default handler. --exit-on-missing-checkpoint is in both.

model=(
  --use-mcore-models
  --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec
  --transformer-impl local
  --num-layers 28
  --hidden-size 1024
  --ffn-hidden-size 3072
  --num-attention-heads 16
  --kv-channels 128
  --qk-layernorm
  --group-query-attention
  --num-query-groups 8
  --max-position-embeddings 32768
  --padded-vocab-size 151936
  --make-vocab-size-divisible-by 1
  --disable-bias-linear
  --swiglu
  --normalization RMSNorm
  --norm-epsilon 1e-6
  --position-embedding-type rope
  --rotary-base 1000000
)

kernels=(
  --use-flash-attn
  --use-fused-rotary-pos-emb
  --use-rotary-position-embeddings
  --use-fused-swiglu
  --use-fused-rmsnorm
  --no-masked-softmax-fusion
  --attention-softmax-in-fp32
  --no-gradient-accumulation-fusion
)

parallel=(
  --tensor-model-parallel-size 1
  --pipeline-model-parallel-size 1
  --sequence-parallel
  --use-distributed-optimizer
  --distributed-backend nccl
)

training=(
  --seq-length 4096
  --micro-batch-size 1
  --global-batch-size 32
  --seed 42
  --bf16
  --initial-loss-scale 4096
  --train-iters 2000
  --lr 1.25e-6
  --min-lr 1.25e-7
  --weight-decay 1e-1
  --clip-grad 1.0
  --adam-beta1 0.9
  --adam-beta2 0.95
  --attention-dropout 0.0
  --hidden-dropout 0.0
  --no-shared-storage
)

# shellcheck source=launch/examples/inputs.bash
source "$(dirname "${BASH_SOURCE[0]}")/inputs.bash"

arguments=("${model[@]}" "${kernels[@]}" "${parallel[@]}" "${training[@]}" "${data[@]}" "${checkpoints[@]}" "${output[@]}")
