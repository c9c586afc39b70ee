"""Train with CpuTrainer as argv[1] (JSON settings) says, argv[2] steps; write argv[3]/rankN.json."""

import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from mindspeed_precision.testing.trainer import CpuTrainer, TrainerSettings


def digest(tensors):
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


settings, steps, out = json.loads(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
with CpuTrainer(TrainerSettings(**settings)) as trainer:
    results = trainer.train(steps)
    parameters = trainer.named_parameters()
    report = {
        "losses": [result.loss for result in results],
        "grad_norms": [result.grad_norm for result in results],
        "parameters": digest(tensor for _, tensor in sorted(parameters.items())),
    }
    rank = dist.get_rank()
out.mkdir(parents=True, exist_ok=True)
(out / f"rank{rank}.json").write_text(json.dumps(report))
