"""The arguments that the demo and the tests give to Megatron."""

from __future__ import annotations

from collections.abc import Sequence

DTYPES = {"fp32": (), "bf16": ("--bf16",), "fp16": ("--fp16", "--initial-loss-scale", "1024")}

# What a CPU has no kernels for, and what a run of five steps does not want.
_PLAIN = (
    *("--transformer-impl", "local", "--distributed-backend", "gloo", "--no-gradient-accumulation-fusion"),
    *(
        "--no-persist-layer-norm",
        "--no-masked-softmax-fusion",
        "--no-bias-gelu-fusion",
        "--no-bias-swiglu-fusion",
    ),
    *("--no-bias-dropout-fusion", "--no-rope-fusion", "--num-workers", "0", "--eval-iters", "0"),
    *("--eval-interval", "1000", "--log-interval", "1", "--split", "100,0,0"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "255", "--position-embedding-type", "rope"),
)


def demo_arguments(
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    cp: int = 1,
    ep: int = 1,
    sequence_parallel: bool = False,
    distributed_optimizer: bool = False,
    overlap: bool = False,
    experts: int = 0,
    recompute: bool = False,
    untie: bool = False,
    dtype: str = "fp32",
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    seq_length: int = 32,
    micro_batch_size: int = 2,
    global_batch_size: int = 8,
    dropout: float = 0.1,
    iterations: int = 5,
    learning_rate: float = 1e-3,
    seed: int = 1234,
    extra: Sequence[str] = (),
) -> list[str]:
    """Return the arguments of a small GPT that trains on bytes: 2 layers, hidden 64, 4 heads, ffn 256.

    Args:
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        vpp: model chunks per pipeline rank; 1 for no interleaving.
        cp: context-parallel size.
        ep: expert-parallel size.
        sequence_parallel: split the sequence over the tensor-parallel group outside the parallel linears.
        distributed_optimizer: shard the optimizer over the data-parallel group.
        overlap: overlap the gradient reduction, and the parameter gather of a distributed optimizer.
        experts: experts per MoE layer with the alltoall dispatcher; 0 for a dense model.
        recompute: recompute every layer in the backward pass.
        untie: an output layer of its own instead of the embedding's weight.
        dtype: ``fp32``, ``bf16`` or ``fp16``.
        layers: transformer layers.
        hidden: hidden size; the ffn is four times as wide.
        heads: attention heads.
        seq_length: tokens per sample.
        micro_batch_size: samples per microbatch.
        global_batch_size: samples per step over all data-parallel ranks.
        dropout: probability, of hidden and attention dropout.
        iterations: steps.
        learning_rate: at its highest; decays by a cosine to a tenth.
        seed: of everything.
        extra: further arguments, as Megatron takes them.
    """
    values = {
        "--tensor-model-parallel-size": tp,
        "--pipeline-model-parallel-size": pp,
        "--context-parallel-size": cp,
        "--expert-model-parallel-size": ep,
        "--num-layers": layers,
        "--hidden-size": hidden,
        "--ffn-hidden-size": 4 * hidden,
        "--num-attention-heads": heads,
        "--seq-length": seq_length,
        "--max-position-embeddings": seq_length,
        "--micro-batch-size": micro_batch_size,
        "--global-batch-size": global_batch_size,
        "--hidden-dropout": dropout,
        "--attention-dropout": dropout,
        "--train-iters": iterations,
        "--lr-decay-iters": iterations,
        "--lr": learning_rate,
        "--min-lr": learning_rate / 10,
        "--lr-decay-style": "cosine",
        "--weight-decay": 0.1,
        "--clip-grad": 1.0,
        "--seed": seed,
    }
    switches = {
        "--sequence-parallel": sequence_parallel,
        "--use-distributed-optimizer": distributed_optimizer,
        "--overlap-grad-reduce": overlap,
        "--overlap-param-gather": overlap and distributed_optimizer,
        "--untie-embeddings-and-output-weights": untie,
    }
    return [
        *_PLAIN,
        *(word for name, value in values.items() for word in (name, str(value))),
        *(name for name, on in switches.items() if on),
        *DTYPES[dtype],
        *(_interleaving(layers, pp, vpp) if vpp > 1 else ()),
        *(_mixture(experts) if experts else ()),
        *(("--recompute-granularity", "full", "--recompute-method", "uniform") if recompute else ()),
        *(("--recompute-num-layers", "1") if recompute else ()),
        *extra,
    ]


def _interleaving(layers: int, pp: int, vpp: int) -> tuple[str, ...]:
    # Megatron overlaps p2p by default, and with two stages it must
    return ("--num-layers-per-virtual-pipeline-stage", str(layers // (pp * vpp)))


def _mixture(experts: int) -> tuple[str, ...]:
    return (
        *("--num-experts", str(experts), "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall"),
        *(
            "--moe-router-load-balancing-type",
            "aux_loss",
            "--moe-aux-loss-coeff",
            "0.01",
            "--disable-bias-linear",
        ),
    )
