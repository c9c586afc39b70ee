"""Import real MindSpeed on a CPU: ``torch_npu``, ``torchair`` and ``acl`` as stand-ins that compute nothing.

MindSpeed and MindSpeed-LLM import them at module level, all over. Here are the few names that they ask
for where no NPU is needed, and no other: one that they ask for beyond them raises and says why.
``torch.npu`` shows the streams and generators that the CPU layer (``mindspeed_precision.testing.cpu``)
shows as ``torch.cuda``, and says that no device is available.

It is for tests. Nothing but ``install()`` puts it there; it says so on stderr, and its version, which
``run.json`` records, says so too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from mindspeed_precision.errors import PatchError

VERSION = "0.0.0+cpu-stand-in"

# The part of torch.npu that is no computation; the CPU layer's torch.cuda answers.
_ANSWERED_BY_CUDA = (
    *("Stream", "Event", "stream", "current_stream", "default_stream", "set_stream", "synchronize"),
    *("manual_seed", "manual_seed_all", "get_rng_state", "set_rng_state", "default_generators"),
    *("_lazy_call", "_lazy_init", "current_device", "set_device", "empty_cache", "device"),
)


class _Converted:
    """Stands in for torchair's types: MindSpeed names them in annotations."""


def _converter(*_: Any) -> Callable[[Any], Any]:
    """Stand in for the decorator that registers how an operator is put into a graph: there is no graph."""
    return lambda function: function


class _StandIn(ModuleType):
    def __init__(self, name: str, **names: Any) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=VERSION, is_package=True)
        self.__path__: list[str] = []
        self.__file__ = f"{name.replace('.', '/')}/{VERSION}"  # MindSpeed looks for headers beside it
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        # AttributeError, so that hasattr() says no as well
        raise AttributeError(f"{self.__name__}.{name} needs an NPU: this is the stand-in {VERSION}")


def install() -> None:
    """Put the stand-in where ``torch_npu`` is not installed, and say so on stderr.

    Call it after ``cpu.install()`` and before the first import of MindSpeed; a second call does nothing.
    Nothing is undone: the process is a test's own.

    Raises:
        PatchError: the real torch_npu is installed; it is not replaced.
    """
    if isinstance(sys.modules.get("torch_npu"), _StandIn):
        return
    if importlib.util.find_spec("torch_npu") is not None:
        raise PatchError(
            "torch_npu is installed, and a stand-in would hide it",
            where="mindspeed_precision.testing.torch_npu_stand_in",
            remedy="run this in an environment without torch-npu",
        )
    for module in _modules():
        sys.modules[module.__name__] = module
    torch.npu = sys.modules["torch_npu.npu"]
    sys.stderr.write(f"torch_npu {VERSION}: a stand-in for tests, nothing here computes on an NPU\n")


def _modules() -> tuple[_StandIn, ...]:
    answered = {name: getattr(torch.cuda, name) for name in _ANSWERED_BY_CUDA}
    npu = _StandIn("torch_npu.npu", **answered, is_available=lambda: False, device_count=lambda: 0)
    transfer = _StandIn("torch_npu.contrib.transfer_to_npu")  # the CPU layer has mapped cuda already
    contrib = _StandIn("torch_npu.contrib", transfer_to_npu=transfer)
    # HCCL's options, of which MindSpeed asks whether they have what a newer HCCL has
    hccl = _StandIn("torch_npu._C._distributed_c10d.ProcessGroupHCCL", Options=type("Options", (), {}))
    c = _StandIn("torch_npu._C", _distributed_c10d=SimpleNamespace(ProcessGroupHCCL=hccl))
    # asked for while MoE modules are imported, to tell an old CANN from others
    environment = _StandIn("torch_npu.utils.collect_env", get_cann_version=lambda: VERSION)
    utils = _StandIn("torch_npu.utils", collect_env=environment)
    ge = _StandIn("torchair.ge", Tensor=_Converted, TensorSpec=_Converted, DataType=_Converted)
    return (
        _StandIn("acl"),
        _StandIn(
            "torch_npu",
            __version__=VERSION,
            npu=npu,
            contrib=contrib,
            utils=utils,
            _C=c,
            unsupported_dtype=[],
        ),
        utils,
        environment,
        c,
        npu,
        contrib,
        transfer,
        _StandIn("torchair", ge=ge, register_fx_node_ge_converter=_converter),
        ge,
    )


__all__ = ["VERSION", "install"]
