"""The demo's training script, and at its end: do replicated parameters differ between tensor-parallel ranks?

Prints ``REPLICAS DIFFER: name, ...`` or ``REPLICAS EQUAL (count)``, of gradients and of parameters.
"""

import sys

import torch
from megatron.core import mpu

from mindspeed_precision import pretrain
from mindspeed_precision.testing.demo import pretrain_gpt as script
from mindspeed_precision.testing.demo.pretrain_call import call_pretrain

models = []


def forward_step(data_iterator, model):
    models.append(model)
    return script.forward_step(data_iterator, model)


def same_on_all_ranks(tensor):
    group = mpu.get_tensor_model_parallel_group()
    copies = [torch.empty_like(tensor) for _ in range(mpu.get_tensor_model_parallel_world_size())]
    torch.distributed.all_gather(copies, tensor.detach().contiguous(), group=group)
    return all(torch.equal(copies[0], other) for other in copies[1:])


call_pretrain(
    pretrain,
    datasets_provider=script.train_valid_test_datasets_provider,
    model_provider=script.model_provider,
    forward_step=forward_step,
    args_defaults={"tokenizer_type": "NullTokenizer"},
)
checked, different = 0, []
for name, parameter in models[-1].named_parameters():
    if getattr(parameter, "tensor_model_parallel", False):
        continue
    checked += 2
    for kind, tensor in (("main_grad", parameter.main_grad), ("param", parameter)):
        if not same_on_all_ranks(tensor):
            different.append(f"{name} ({kind})")
if torch.distributed.get_rank() == 0:
    verdict = f"REPLICAS DIFFER: {', '.join(different)}" if different else f"REPLICAS EQUAL ({checked})"
    sys.stdout.write(f"{verdict}\n")
