"""The demo's training script where ``model.eval()`` leaves dropout on: evaluations draw numbers."""

from __future__ import annotations

import runpy

import torch

from mindspeed_precision.testing.demo.launch import SCRIPT

torch.nn.Module.eval = lambda module: module.train()  # type: ignore[method-assign,assignment,return-value]

if __name__ == "__main__":
    runpy.run_path(str(SCRIPT), run_name="__main__")
