"""Pieces inside Megatron, each applied right after the module that it concerns has been imported."""

from __future__ import annotations

import contextlib
import functools
from types import ModuleType
from typing import Any

from mindspeed_precision.testing.mindtorch.piece import CompatPiece, Mends
from mindspeed_precision.testing.piece import after_import


def _keep_one_generator(module: Any) -> None:
    tracker = module.CudaRNGStatesTracker

    def add(self: Any, name: str, seed: int) -> None:
        self._is_initialized = True
        self.seeds_.add(seed)

    def fork(self: Any, name: str = "") -> Any:
        return contextlib.nullcontext()

    tracker.add, tracker.fork = add, fork


def _compute_cross_entropy_out_of_place(module: ModuleType) -> None:
    from mindspeed_precision.testing.mindtorch import cross_entropy  # torch has its name by now

    cross_entropy.replace(module)


def _embed_out_of_place(module: Any) -> None:
    embedding = module.VocabParallelEmbedding
    original = embedding.forward

    @functools.wraps(original)
    def forward(self: Any, input_: Any) -> Any:
        """Look up ``input_`` ``[b, s]``; what another rank has is 0 before the sum over the group."""
        if self.tensor_model_parallel_size == 1 or self.reduce_scatter_embeddings:
            return original(self, input_)
        elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        own = (input_ - self.vocab_start_index).masked_fill(elsewhere, 0)
        found = module.F.embedding(own, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return module.reduce_from_tensor_model_parallel_region(found)

    embedding.forward = forward


def _clip_out_of_place(module: Any) -> None:
    def clip_grad_by_total_norm_fp32(
        parameters: Any, max_norm: float, total_norm: float, use_decoupled_grad: bool = False
    ) -> None:
        """Scale every ``.grad`` by ``max_norm / (total_norm + 1e-6)`` where that is below 1."""
        coefficient = max_norm / (total_norm + 1.0e-6)
        if coefficient >= 1.0:
            return
        for parameter in [parameters] if isinstance(parameters, module.torch.Tensor) else parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad * coefficient

    module.clip_grad_by_total_norm_fp32 = clip_grad_by_total_norm_fp32


PIECES = (
    CompatPiece(
        name="one_generator",
        mends=Mends.MINDSPORE_CPU,
        changes=("megatron.core.tensor_parallel.random:CudaRNGStatesTracker.add .fork",),
        why="The RNG tracker swaps the state of a device generator that a CPU does not have. There is one "
        "generator, which is never forked: dropout, where a script asks for it, differs from torch's.",
        error_without="AttributeError: Module 'mindtorch.cuda' has no attribute 'default_generators'",
        when="every run",
        apply=after_import("megatron.core.tensor_parallel.random", _keep_one_generator),
    ),
    CompatPiece(
        name="cross_entropy_out_of_place",
        mends=Mends.MINDSPORE_CPU,
        changes=("megatron.core.tensor_parallel.cross_entropy:VocabParallelCrossEntropy",),
        why="Megatron's vocabulary-parallel cross entropy subtracts, exponentiates and scales in place, "
        "through views. MindSpore CPU leaves the targets of such writes unchanged. The same formulas, out "
        "of place.",
        error_without="RuntimeError: Can not modify tensor id; with other versions silent: the loss is "
        "right, every gradient wrong",
        when="every run",
        apply=after_import(
            "megatron.core.tensor_parallel.cross_entropy", _compute_cross_entropy_out_of_place
        ),
    ),
    CompatPiece(
        name="embedding_out_of_place",
        mends=Mends.MINDTORCH,
        changes=("megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward",),
        why="Each rank zeroes, through a two-dimensional mask, the rows that another rank has. mindtorch "
        "takes no such mask on a CPU. The same, out of place.",
        error_without="NotImplementedError: Need rank 1 for bool index",
        when="TP > 1",
        apply=after_import("megatron.core.tensor_parallel.layers", _embed_out_of_place),
    ),
    CompatPiece(
        name="clip_out_of_place",
        mends=Mends.MINDSPORE_CPU,
        changes=("megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32",),
        why="Megatron scales a detached alias of .grad in place. On MindSpore CPU that never reaches .grad "
        "(and mindtorch's Tensor.type(), which Megatron asserts on before, raises). Scaled and assigned "
        "instead.",
        error_without="NameError: name 'dtype_class_map' is not defined; without that silent: nothing is "
        "clipped",
        when="every run that clips",
        apply=after_import("megatron.core.optimizer.clip_grads", _clip_out_of_place),
    ),
)
