"""Train the demo's model in Megatron's loop, whose third step goes wrong in a way that FAILS names.

``nan``: the loss is NaN, each time it is computed. ``once``: the first time alone. ``error``: the user's code
raises. ``again``: it raises once, and the training is called a second time in this process, as Megatron's
``--inprocess-restart`` does, after what that does to end the first attempt.
"""

from __future__ import annotations

import os
import sys

import torch
from megatron.core import parallel_state, rerun_state_machine
from megatron.training import get_args, training

from mindspeed_precision.testing.demo import pretrain_gpt as script
from mindspeed_precision.testing.demo.pretrain_call import call_pretrain

FAILS, STEP = os.environ["FAILS"], 2
failed: list[str] = []


def loss_func(loss_mask, output_tensor):
    """The demo's, checked as Megatron's pretrain_gpt.py checks it."""
    loss, tokens, report = script_loss(loss_mask, output_tensor)
    if get_args().curr_iteration == STEP:
        if FAILS == "error" or (FAILS == "again" and not failed):
            failed.append("raised")
            raise ValueError("the user's own")
        if FAILS == "nan" or (FAILS == "once" and not failed):
            failed.append("nan")
            loss = loss * float("nan")
    if get_args().check_for_nan_in_loss_and_grad:
        machine = rerun_state_machine.get_rerun_state_machine()
        machine.validate_result(
            result=loss, rejection_func=torch.isnan, message="found NaN in local forward loss", tolerance=0.0
        )
    return loss, tokens, report


script_loss, script.loss_func = script.loss_func, loss_func


def train():
    """Train as the script would."""
    call_pretrain(
        script.pretrain,
        datasets_provider=script.train_valid_test_datasets_provider,
        model_provider=script.model_provider,
        forward_step=script.forward_step,
        args_defaults={"tokenizer_type": "NullTokenizer"},
    )


try:
    train()
except ValueError:
    if FAILS != "again":
        raise
    sys.stdout.write("once more in this process\n")
    training.destroy_global_state()
    rerun_state_machine.destroy_rerun_state_machine()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    train()
