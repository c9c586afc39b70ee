"""What several cases need to plant something: the place in the model, the declaration of where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_precision.patching.declare import PatchDeclaration
from silentbench.case import plant

Wrapper = Callable[..., Any]

_CORE = "megatron.core"
_LINEAR = f"{_CORE}.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication"
_BUCKETS = f"{_CORE}.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
_TRAINER = "mindspeed_precision.testing.trainer:CpuTrainer"


def layer_built(wrapper: Wrapper, why: str) -> PatchDeclaration:
    """Change a transformer layer right after it was built: ``instance.layer_number`` is 1-based, global."""
    return plant(
        f"{_CORE}.transformer.transformer_layer:TransformerLayer.__init__",
        wrapper,
        "(self, config, submodules, layer_number, hidden_dropout, pg_collection, vp_stage)",
        why,
    )


def model_built(wrapper: Wrapper, why: str) -> PatchDeclaration:
    """Change how the GPT model is built, or the model right after it was built."""
    return plant(
        f"{_CORE}.models.gpt.gpt_model:GPTModel.__init__",
        wrapper,
        "(self, config, transformer_layer_spec, vocab_size, max_sequence_length, pre_process, post_process, "
        "fp16_lm_cross_entropy, parallel_output, share_embeddings_and_output_weights, "
        "position_embedding_type, rotary_percent, rotary_base, rope_scaling, rope_scaling_factor, "
        "scatter_embedding_sequence_parallel, seq_len_interpolation_factor, mtp_block_spec, pg_collection, "
        "vp_stage)",
        why,
    )


def linear_backward(wrapper: Wrapper, why: str) -> PatchDeclaration:
    """Change the backward of parallel linears: ``(ctx, grad_output)`` to ``(dX, dW, db, ...)``."""
    return plant(f"{_LINEAR}.backward", wrapper, "(ctx, grad_output)", why)


def linear_forward(wrapper: Wrapper, why: str) -> PatchDeclaration:
    """Change the forward of parallel linears."""
    return plant(
        f"{_LINEAR}.forward",
        wrapper,
        "(ctx, input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, "
        "grad_output_buffer, wgrad_deferral_limit, tp_group)",
        why,
    )


def grad_sync(wrapper: Wrapper, why: str, *, of: str = "start") -> PatchDeclaration:
    """Change the start or the ``finish`` of the reduction of a group of gradient buckets."""
    return plant(f"{_BUCKETS}.{of}_grad_sync", wrapper, "(self, force_all_reduce)", why)


def finalize(wrapper: Wrapper, why: str) -> PatchDeclaration:
    """Change what happens to gradients between the backward of the last microbatch and the optimizer.

    ``connect`` tells Megatron's schedule what to call then.
    """
    return plant(
        "mindspeed_precision.testing.model_building:connect",
        wrapper,
        "(config, model, optimizer, settings)",
        why,
    )


def training_step(wrapper: Wrapper, why: str) -> PatchDeclaration:
    """Change something before or after a step: ``instance.step`` counts from 0."""
    return plant(f"{_TRAINER}.train_one_step", wrapper, "(self)", why)


def batches(wrapper: Wrapper, why: str) -> PatchDeclaration:
    """Change the stream of batches: dicts of tokens, labels, loss_mask, position_ids, ``[b, s]`` each."""
    return plant(f"{_TRAINER}._batches", wrapper, "(self)", why)


def attention(wrapper: Wrapper, why: str) -> PatchDeclaration:
    """Change core attention: query, key, value ``[s, b, heads, d]``."""
    return plant(
        f"{_CORE}.transformer.dot_product_attention:DotProductAttention.forward",
        wrapper,
        "(self, query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params)",
        why,
    )


def adam_state(wrapper: Wrapper, why: str) -> PatchDeclaration:
    """Change the state that Adam makes of a parameter, or uses."""
    return plant(
        "torch.optim.adam:Adam._init_group",
        wrapper,
        "(self, group, params_with_grad, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps)",
        why,
    )


def backward_of(module: Any, change: Callable[[Any], Any]) -> None:
    """Let ``change`` replace the gradient that arrives at the output of ``module``."""

    def hook(_: Any, __: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        passed = first.view_as(first)
        passed.register_hook(change)
        return (passed, *output[1:]) if isinstance(output, tuple) else passed

    module.register_forward_hook(hook)


def parameters(trainer: Any) -> dict[str, Any]:
    """Return the parameters of the model chunks of this rank by their names in the model."""
    return {name: p for chunk in trainer.model for name, p in chunk.module.named_parameters()}


def forward_step(wrapper: Wrapper, why: str) -> PatchDeclaration:
    """Change something before the forward of a microbatch."""
    return plant(f"{_TRAINER}._forward_step", wrapper, "(self, data_iterator, model)", why)


def trainer_built(wrapper: Wrapper, why: str) -> PatchDeclaration:
    """Change the trainer right after its model, optimizer and schedule were built and connected."""
    return plant(f"{_TRAINER}._build", wrapper, "(self)", why)


def mlp_forward(wrapper: Wrapper, why: str) -> PatchDeclaration:
    """Change the forward of an MLP."""
    return plant(
        f"{_CORE}.transformer.mlp:MLP.forward",
        wrapper,
        "(self, hidden_states, per_token_scale, **kwargs)",
        why,
    )


def checkpointed(wrapper: Wrapper, why: str) -> PatchDeclaration:
    """Change what activation checkpointing runs, the first time and again."""
    return plant(
        f"{_CORE}.tensor_parallel.random:CheckpointFunction.forward",
        wrapper,
        "(ctx, run_function, distribute_saved_activations, *args)",
        why,
    )


def grad_norm(wrapper: Wrapper, why: str) -> PatchDeclaration:
    """Change how the gradient norm is computed."""
    return plant(
        f"{_CORE}.optimizer.clip_grads:get_grad_norm_fp32",
        wrapper,
        "(grads_for_norm, norm_type, grad_stats_parallel_group)",
        why,
    )


def optimizers(trainer: Any) -> list[Any]:
    """Return Megatron's optimizers, of which a chain has several."""
    return list(getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]))


def misread(tensor: Any) -> Any:
    """Return what a kernel reads that takes the transposed tensor for a dense one."""
    return tensor.transpose(-1, -2).contiguous().view(tensor.shape)
