"""Writes a checkpoint of every kind that MindSpore has: ``write_mindspore.py DIRECTORY``."""

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, save_checkpoint


def tensors():
    weight = np.arange(12, dtype=np.float32).reshape(3, 4) - 5
    return {
        "model.layers.0.attention.wo.weight": Tensor(weight),
        "adam_m.model.layers.0.attention.wo.weight": Tensor(weight * 0.5),
        "adam_v.model.layers.0.attention.wo.weight": Tensor(weight * weight),
        "model.norm_out.weight": Tensor(np.array([1, -2, 3], np.float32), ms.bfloat16),
        "half": Tensor(np.array([1.5, 2], np.float32), ms.float16),
        "count": Tensor(np.array([1, 2, 3], np.int32)),
        "global_step": Tensor(np.array([7], np.int32)),
    }


def write(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    values = [{"name": name, "data": tensor} for name, tensor in tensors().items()]
    more = {"epoch_num": 3, "learning": 0.5, "text": "abc"}
    save_checkpoint(values, str(directory / "plain.ckpt"), append_dict=more)
    save_checkpoint(values, str(directory / "checked.ckpt"), crc_check=True)
    save_checkpoint(values, str(directory / "plain"), format="safetensors")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
