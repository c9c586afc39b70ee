"""What the observers need of torch: hooks on tensors, nodes, modules and optimizers; the process group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mindspeed_precision.backends import torch_laws
from mindspeed_precision.backends.capture_base import Handle, ObserveProduct
from mindspeed_precision.backends.torch import TorchBackend
from mindspeed_precision.backends.torch_api import TorchApi

_PRODUCTS = frozenset({torch.matmul, torch.Tensor.matmul, torch.mm, torch.Tensor.mm})


class TorchCapture(TorchBackend, TorchApi):
    """Implements ``backends.capture_base.CaptureBackend`` for torch."""

    framework = "torch"
    patch_groups = ()

    def detach(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view without autograd."""
        return tensor.detach()

    def address(self, tensor: torch.Tensor) -> int:
        """Return where the first element lies."""
        return int(tensor.data_ptr())

    def version(self, tensor: torch.Tensor) -> int:
        """Return torch's own count of writes."""
        return int(tensor._version)

    def integers(self, values: Sequence[int]) -> torch.Tensor:
        """Return ``values`` as an int64 tensor on the host, whatever the default device is."""
        return torch.tensor(values, dtype=torch.int64, device="cpu")

    def number(self, value: object) -> float | None:
        """Return a number that can be read without waiting for a device."""
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return None
        return float(value)  # type: ignore[arg-type]

    def norm(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the 2-norm over all tensors, which may lie on several devices and have several types."""
        norms = [_norm(tensor.detach()) for tensor in tensors]
        wide = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
        return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device, wide) for n in norms]))

    def wide_scalar(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a one-element tensor as a float64 scalar ``[]`` on its own device."""
        return tensor.detach().reshape(()).to(torch.float64)

    def difference(self, after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return ``after - before``."""
        return after - before

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy."""
        return tensor.detach().clone()

    def product_excess(
        self,
        product: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        sides: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Compare on the tensors' own device."""
        return torch_laws.product_excess(product, left, right, sides)

    def not_the_sum(self, total: torch.Tensor, before: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """Add again, as ``add_`` does."""
        return torch_laws.not_the_sum(total, before, added)

    def inside_backward(self) -> bool:
        """Tell whether this thread is running an autograd graph."""
        return bool(torch._C._current_graph_task_id() != -1)

    def requires_grad(self, tensor: torch.Tensor) -> bool:
        """Tell whether a gradient will be computed."""
        return bool(tensor.requires_grad)

    def is_leaf(self, tensor: torch.Tensor) -> bool:
        """Tell whether no operation made it."""
        return bool(tensor.is_leaf)

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return ``main_grad`` where Megatron's DDP keeps one, else ``.grad``."""
        return getattr(parameter, "main_grad", parameter.grad)

    def hook_gradient(self, tensor: torch.Tensor, observe: Callable[[torch.Tensor], None]) -> Handle:
        """Hook the tensor."""
        handle: Handle = tensor.register_hook(observe)
        return handle

    def hook_before_write(self, tensor: torch.Tensor, observe: Callable[[torch.Tensor], None]) -> None:
        """Hook the node that autograd puts into the history of the tensor that a written view looks at.

        A hook on the view itself sits on a node that the write takes out of the graph. Of a view of a part
        the node tells nothing that could be cut out safely.
        """
        base = tensor._base if tensor._is_view() else None
        if base is None or base.numel() != tensor.numel() or base.grad_fn is None:
            return
        shape, whole = tensor.shape, tensor.is_contiguous() and base.is_contiguous()
        if whole:
            base.grad_fn.register_hook(
                lambda before, _: observe(before[0].reshape(shape)) if before[0] is not None else None
            )

    def hook_accumulation(
        self,
        parameter: nn.Parameter,
        before: Callable[[torch.Tensor], None],
        after: Callable[[], None] | None,
    ) -> list[Any]:
        """Hook the parameter's ``AccumulateGrad`` node.

        Its pre-hook sees dW of this microbatch alone (summed over the uses of a tied weight); its post-hooks
        run in the order in which they were registered, so ours runs after the one with which Megatron's DDP
        adds dW to ``main_grad``.
        """

        def first(grads: tuple[torch.Tensor | None, ...]) -> None:
            if grads[0] is not None:
                before(grads[0])

        with torch.enable_grad():
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        kept = [node, node.register_prehook(first)]
        if after is not None:
            kept.append(node.register_hook(lambda *_: after()))
        return kept

    def watch_products(self, observe: ObserveProduct) -> AbstractContextManager[Any]:
        """Return a torch function mode that shows matrix products."""
        return _ProductMode(observe)

    def version_text(self) -> str:
        """Return torch's version."""
        return str(torch.__version__)

    def numerics(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the switches that a replay needs."""
        return {
            "device": parameter.device.type,
            "num_threads": torch.get_num_threads(),
            "mkldnn": bool(torch.backends.mkldnn.enabled),
            "float32_matmul_precision": torch_laws.matmul_precision(parameter.device),
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "digest_kernel": self.digest_kernel,
        }

    def random_states(self) -> Mapping[str, Any]:
        """Return the states of the host's generator and of each device's that is in use."""
        states = {"torch": torch.get_rng_state()}
        for device in ("cuda", "npu"):
            module = getattr(torch, device, None)
            if module is not None and module.is_available() and module.is_initialized():
                states[device] = module.get_rng_state()
        return states


class _ProductMode(TorchFunctionMode):
    """Shows matrix products to an observer; the call goes on as it came."""

    def __init__(self, observe: ObserveProduct) -> None:
        super().__init__()
        self._observe = observe

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = len(args) == 2 and all(isinstance(operand, torch.Tensor) for operand in args)
        if func not in _PRODUCTS or not tensors:
            return func(*args, **kwargs)
        return self._observe(args[0], args[1], lambda: func(*args, **kwargs))


def _norm(grad: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm of a gradient of any layout and type, in float32, or float64 for float64."""
    dense = grad.coalesce().values() if grad.layout is torch.sparse_coo else grad
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    wide = torch.float64 if real.dtype is torch.float64 else torch.float32
    return torch.linalg.vector_norm(real, dtype=wide)
