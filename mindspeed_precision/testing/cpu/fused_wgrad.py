"""A stand-in for the CUDA extension ``fused_weight_gradient_mlp_cuda``: same result, no fusion.

With gradient accumulation fusion Megatron lets this extension add dW to ``main_grad`` inside the backward
pass, so that no autograd hook sees it. The stand-in lets a CPU take the same path. It is no piece of the
layer: it is there only inside ``with fused_wgrad.stand_in():``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

MODULE = "fused_weight_gradient_mlp_cuda"
LAYERS = "megatron.core.tensor_parallel.layers"
_AVAILABLE = "_grad_accum_fusion_available"


def wgrad_gemm_accum_fp32(total_input: Any, grad_output: Any, main_grad: Any) -> None:
    """Add dW to a float32 ``main_grad``; the product is not rounded to the operands' type in between.

    Args:
        total_input: ``[N, I]``.
        grad_output: ``[N, O]``, same type.
        main_grad: ``[O, I]`` float32; changed in place.
    """
    main_grad.addmm_(grad_output.t().float(), total_input.float())


def wgrad_gemm_accum_fp16(total_input: Any, grad_output: Any, main_grad: Any) -> None:
    """Add dW to a ``main_grad`` of the operands' own 16-bit type; arguments as for float32."""
    main_grad.addmm_(grad_output.t(), total_input)


@contextmanager
def stand_in() -> Iterator[ModuleType]:
    """Provide the extension's name, also to Megatron's layers when they were imported without it."""
    module = ModuleType(MODULE)
    vars(module).update(
        wgrad_gemm_accum_fp32=wgrad_gemm_accum_fp32, wgrad_gemm_accum_fp16=wgrad_gemm_accum_fp16
    )
    layers = sys.modules.get(LAYERS)
    before = (sys.modules.get(MODULE), dict(vars(layers)) if layers else {})
    sys.modules[MODULE] = module
    if layers:
        setattr(layers, MODULE, module)
        setattr(layers, _AVAILABLE, True)
    try:
        yield module
    finally:
        _restore(*before)


def _restore(module: ModuleType | None, names: dict[str, Any]) -> None:
    if module is None:
        del sys.modules[MODULE]
    else:
        sys.modules[MODULE] = module
    if layers := sys.modules.get(LAYERS):
        setattr(layers, _AVAILABLE, names.get(_AVAILABLE, False))
        if MODULE in names:
            setattr(layers, MODULE, names[MODULE])
        else:
            vars(layers).pop(MODULE, None)
