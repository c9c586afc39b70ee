"""Run a script without oneDNN: ``plain_kernels.py SCRIPT ARGS…``. For CPUs whose oneDNN hides the layout."""

from __future__ import annotations

import runpy
import sys

import torch

if __name__ == "__main__":
    torch.backends.mkldnn.enabled = False
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
