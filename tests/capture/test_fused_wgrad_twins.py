"""Where MindSpeed stands in for the CUDA extension, one fused GEMM has two names and is still seen once."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from mindspeed_precision.patching.declare import load_declarations, select
from mindspeed_precision.patching.session import PatchSession

pytestmark = pytest.mark.torch

EXTENSION = "fused_weight_gradient_mlp_cuda"
OPS = "mindspeed.ops.npu_matmul_add"


def npu_matmul_add_fp32(total_input, grad_output, grad):
    """Has the parameter names of MindSpeed's function, which is put in place of the extension's."""
    grad.append((total_input, grad_output))


def npu_matmul_add_fp16(total_input, grad_output, grad):
    """As npu_matmul_add_fp32."""
    grad.append((total_input, grad_output))


@pytest.fixture
def linears(monkeypatch):
    """A module that bound MindSpeed's name, as its coc and MoE linears do."""
    for name in (EXTENSION, "mindspeed", "mindspeed.ops", OPS, "mindspeed.linears"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for kind, function in (("fp32", npu_matmul_add_fp32), ("fp16", npu_matmul_add_fp16)):
        setattr(sys.modules[EXTENSION], f"wgrad_gemm_accum_{kind}", function)
        setattr(sys.modules[OPS], f"npu_matmul_add_{kind}", function)
    sys.modules["mindspeed.linears"].npu_matmul_add_fp32 = npu_matmul_add_fp32
    return sys.modules["mindspeed.linears"]


def test_mindspeeds_function_in_place_of_the_extension_is_patched_once(linears):
    main_grad: list[tuple[str, str]] = []
    with PatchSession(select(load_declarations(), groups=["fused_wgrad"])) as session:
        sys.modules[EXTENSION].wgrad_gemm_accum_fp32("x", "dy", main_grad)
        sys.modules[OPS].npu_matmul_add_fp32("x", "dy", main_grad)
        linears.npu_matmul_add_fp32("x", "dy", main_grad)
        calls = {line.name: line.calls for line in session.audit()}
    assert main_grad == [("x", "dy")] * 3
    assert calls["fused_gemm_fp32"] + calls["npu_matmul_add_fp32"] == 3
    assert linears.npu_matmul_add_fp32 is sys.modules[OPS].npu_matmul_add_fp32 is npu_matmul_add_fp32
