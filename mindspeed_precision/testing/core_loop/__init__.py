"""A training loop for megatron-core wheels that ship no ``megatron.training`` (0.16 and earlier).

It is registered under that name, by a declared piece of the CPU layer and of the mindtorch layer, when and
only when no other is installed, and says so on stderr. Names, signatures and results are those of Megatron
0.12.1 as far as a pretraining script and our patches meet them; models, schedules, parallel state, optimizer
wrapper, clipping and learning-rate schedule are megatron-core's own. What is different:

- no DDP wrapper: gradients accumulate in ``.grad``, and there is no ``main_grad``. Views of a flat buffer do
  not write through on MindSpore CPU. Data-parallel gradients are averaged after the last microbatch.
- AdamW is written out of place (``core_loop.adamw``): in-place arithmetic is lost on MindSpore CPU.
- initial weights come from numpy, the same on every framework, or from a safetensors file
  (``core_loop.weights``).
- fp32 only; no pipeline, context or expert parallelism, no sequence parallelism, no checkpoints. What it
  cannot do it refuses.

``core_loop/training/`` is the package that is imported as ``megatron.training``.
"""

from __future__ import annotations
