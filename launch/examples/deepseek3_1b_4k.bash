# shellcheck shell=bash disable=SC2034,SC2154 # the script that sources it reads and sets them
# Sourced by deepseek3_1b_4k_pta.sh and deepseek3_1b_4k_mindspore.sh: what both sides must be given alike.
#
# The shape is that of MindSpeed-LLM's examples/mindspore/deepseek3/pretrain_deepseek3_1b_4k_8p_ms.sh (four layers of
# DeepSeek-V3, 64 experts, PP 2, EP 4, one node of 8 NPUs), because MindSpeed-LLM's other scripts of this model,
# examples/{mcore,mindspore}/deepseek3/pretrain_deepseek3_671b_4k_{ptd,ms}.sh, need 64 nodes. What those two ask for
# differently is left out: --reuse-fp32-param and --moe-tp-extend-ep of the one, --gemm-gradient-accumulation-fusion,
# --swap-optimizer and --moe-permute-fusion of the other. Both sides dispatch tokens by alltoall_seq.
# --exit-on-missing-checkpoint is added: without it a wrong path means random weights.

model=(
  --use-mcore-models
  --spec mindspeed_llm.tasks.models.spec.deepseek_spec layer_spec
  --transformer-impl local
  --num-layers 4
  --noop-layers 3
  --hidden-size 7168
  --ffn-hidden-size 18432
  --num-attention-heads 128
  --max-position-embeddings 163840
  --vocab-size 129280
  --padded-vocab-size 129280
  --make-vocab-size-divisible-by 1
  --untie-embeddings-and-output-weights
  --disable-bias-linear
  --swiglu
  --normalization RMSNorm
  --norm-epsilon 1e-6
  --init-method-std 0.02
  # multi-latent attention
  --multi-latent-attention
  --qk-pos-emb-head-dim 64
  --qk-head-dim 128
  --q-lora-rank 1536
  --kv-lora-rank 512
  --v-head-dim 128
  --qk-layernorm
  --mla-fa-without-pad
  # rotary embedding
  --position-embedding-type rope
  --rotary-base 10000
  --beta-fast 32
  --beta-slow 1
  --rope-scaling-type yarn
  --rope-scaling-factor 40
  --rope-scaling-mscale 1.0
  --rope-scaling-mscale-all-dim 1.0
  --rope-scaling-original-max-position-embeddings 4096
  # experts
  --num-experts 64
  --n-shared-experts 1
  --first-k-dense-replace 1
  --moe-layer-freq 1
  --moe-grouped-gemm
  --moe-permutation-async-comm
  --moe-token-dispatcher-type alltoall_seq
  --moe-router-dtype fp32
  --moe-router-topk 8
  --moe-router-num-groups 8
  --moe-router-group-topk 4
  --moe-router-topk-scaling-factor 2.5
  --moe-router-load-balancing-type none
  --moe-router-score-function sigmoid
  --moe-router-enable-expert-bias
  --moe-aux-loss-coeff 0.0001
  --seq-aux
  --norm-topk-prob
  # multi-token prediction
  --mtp-num-layers 1
  --mtp-loss-scaling-factor 0.3
  --mtp-mem-efficient-logits
)

kernels=(
  --use-flash-attn
  --use-fused-rotary-pos-emb
  --use-rotary-position-embeddings
  --use-fused-swiglu
  --use-fused-rmsnorm
  --use-ascend-coc
  --coc-fused-kernel
  --no-masked-softmax-fusion
  --attention-softmax-in-fp32
  --no-gradient-accumulation-fusion
)

parallel=(
  --tensor-model-parallel-size 1
  --pipeline-model-parallel-size 2
  --expert-model-parallel-size 4
  --context-parallel-size 1
  --context-parallel-algo ulysses_cp_algo
  --sequence-parallel
  --use-distributed-optimizer
  --recompute-granularity full
  --recompute-method uniform
  --recompute-num-layers 1
  --distributed-timeout-minutes 120
  --distributed-backend nccl
)

training=(
  --seq-length 4096
  --reset-attention-mask
  --micro-batch-size 1
  --global-batch-size 16
  --bf16
  --initial-loss-scale 65536
  --train-iters 2000
  --lr 1.0e-5
  --min-lr 1.0e-7
  --lr-decay-style cosine
  --lr-warmup-iters 500
  --weight-decay 1e-2
  --clip-grad 1.0
  --adam-beta1 0.9
  --adam-beta2 0.999
  --attention-dropout 0.0
  --hidden-dropout 0.0
  --no-shared-storage
)

# shellcheck source=launch/examples/inputs.bash
source "$(dirname "${BASH_SOURCE[0]}")/inputs.bash"

arguments=("${model[@]}" "${kernels[@]}" "${parallel[@]}" "${training[@]}" "${data[@]}" "${checkpoints[@]}" "${output[@]}")
