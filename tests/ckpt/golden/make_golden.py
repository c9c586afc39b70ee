"""Writes the checkpoints of this directory that torch makes: ``python tests/ckpt/golden/make_golden.py``.

They are kept, since what is fuzzed must be there without torch. MindSpore's own were written by MindSpore.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

HERE = Path(__file__).parent


def main() -> None:
    """Write them."""
    weight = torch.arange(24.0).reshape(4, 6)
    names = ("embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc1.weight")
    model = {name: weight + number for number, name in enumerate(names)}
    model["decoder.final_layernorm.weight"] = torch.ones(6, dtype=torch.bfloat16)
    args = Namespace(
        num_layers=1,
        hidden_size=6,
        num_attention_heads=2,
        tensor_model_parallel_size=1,
        lr=1e-4,
        save="somewhere",
    )
    moments = {
        number: {"step": torch.tensor(7.0), "exp_avg": tensor.float() / 8, "exp_avg_sq": tensor.float() / 16}
        for number, tensor in enumerate(model.values())
    }
    groups = [{"lr": 1e-4, "betas": (0.9, 0.999), "params": [0, 1, 2], "wd_mult": 1.0, "is_expert": False}]
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": model,
        "optimizer": {"optimizer": {"state": moments, "param_groups": groups}},
        "opt_param_scheduler": {"max_lr": 1e-4, "num_steps": 56},
    }
    where = HERE / "megatron" / "iter_0000007" / "mp_rank_00"
    where.mkdir(parents=True, exist_ok=True)
    torch.save(state, where / "model_optim_rng.pt")
    (HERE / "megatron" / "latest_checkpointed_iteration.txt").write_text("7\n", "ascii")
    shutil.rmtree(HERE / "torch_dist", ignore_errors=True)
    whole = {"a.weight": weight, "b": {"c": torch.ones(3, dtype=torch.bfloat16)}, "n": 3}
    dcp.save(whole, checkpoint_id=HERE / "torch_dist", no_dist=True)


if __name__ == "__main__":
    main()
