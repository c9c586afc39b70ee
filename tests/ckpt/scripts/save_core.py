"""Saves what megatron.core trained, in its format ``torch_dist``: ``save_core.py OUT JSON``.

JSON: ``settings`` of the trainer; ``load``: a directory that this script saved, taken instead of training, in
any layout; ``sharding``: how a distributed optimizer's tensors are saved (from 0.16). Where nothing is
loaded, one rank writes the parameters beside it, whole, as ``OUT.npz``.
"""

import inspect
import json
import queue
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

from mindspeed_precision.testing.trainer import CpuTrainer, TrainerSettings


def main(out, asked):
    with CpuTrainer(TrainerSettings(**asked["settings"])) as trainer:
        if not asked.get("load"):
            trainer.train(1)
            if asked["settings"].get("tp", 1) == 1 and torch.distributed.get_rank() == 0:
                whole = {name: p.detach().float().numpy() for name, p in trainer.named_parameters().items()}
                np.savez(out.with_suffix(".npz"), **whole)
        else:
            load(trainer, asked)
        save(trainer, out, asked)


def state_of(trainer, asked, *, loading=False):
    """Return the sharded state dict of the model and of its optimizer."""
    (chunk,) = trainer.model
    while hasattr(chunk, "module"):
        chunk = chunk.module
    model = chunk.sharded_state_dict()
    more = {}
    if asked.get("sharding"):
        more["metadata"] = {"distrib_optim_sharding_type": asked["sharding"]}
    return {
        "model": model,
        "optimizer": trainer.optimizer.sharded_state_dict(model, is_loading=loading, **more),
    }


def save(trainer, out, asked):
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    writer = filesystem_async.FileSystemWriterAsync
    if hasattr(writer, "write_preloaded_data_multithread"):  # else a process is spawned that imports triton
        filesystem_async._results_queue = queue.Queue()
    elif "serialization_format" not in inspect.getsource(filesystem_async):  # 0.12 knows an older torch
        kind = torch.distributed.checkpoint.filesystem.SerializationFormat.TORCH_SAVE
        filesystem_async._write_item = partial(filesystem_async._write_item, serialization_format=kind)
    if torch.distributed.get_rank() == 0:
        out.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save({**state_of(trainer, asked), "iteration": 1}, str(out))
    if torch.distributed.get_rank() == 0:
        assert (out / ".metadata").is_file()


def load(trainer, asked):
    from megatron.core import dist_checkpointing

    found = dist_checkpointing.load(state_of(trainer, asked, loading=True), asked["load"])
    (chunk,) = trainer.model
    while hasattr(chunk, "module"):
        chunk = chunk.module
    chunk.load_state_dict(found["model"], strict=False)
    trainer.optimizer.load_state_dict(found["optimizer"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
