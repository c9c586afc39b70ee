"""Train the demo's model behind Megatron's own ``--inprocess-restart``; rank FAILS raises once, in step 2.

What stands in: the CPU layer for CUDA, and an annotation. The wheel of megatron-core 0.17.1 says ``Any``
where Megatron-LM says ``CallWrapper``, by which nvidia-resiliency-ext finds the argument; without it a
second attempt shares the keys of the first one's store, with or without us.
"""

from __future__ import annotations

import os
from typing import Any

from megatron.core.enums import ModelType
from megatron.training import get_args, inprocess_restart, training
from nvidia_resiliency_ext.inprocess import CallWrapper

from mindspeed_precision.testing.demo import pretrain_gpt as script

FAILS, STEP = os.environ["FAILS"], 2
failed: list[int] = []


def loss_func(loss_mask, output_tensor):
    """The demo's, which raises once on one rank."""
    step = get_args().curr_iteration
    if step == STEP and os.environ["RANK"] == FAILS and not failed:
        failed.append(step)
        raise ValueError("the user's own")
    return script_loss(loss_mask, output_tensor)


def soon(parser: Any) -> Any:
    """Let the other rank, which waits in a collective of gloo, be told after seconds; NCCL's are aborted."""
    parser.set_defaults(distributed_timeout_minutes=0.15)
    return parser


script_loss, script.loss_func = script.loss_func, loss_func
training.pretrain.__annotations__["inprocess_call_wrapper"] = CallWrapper | None
pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(script.pretrain)
pretrain(
    script.train_valid_test_datasets_provider,
    script.model_provider,
    ModelType.encoder_or_decoder,
    script.forward_step,
    args_defaults={"tokenizer_type": "NullTokenizer"},
    extra_args_provider=soon,
    store=store,
)
