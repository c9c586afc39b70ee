"""Elements of a recorded tensor into a live parameter of torch."""

from __future__ import annotations

import numpy as np
import torch

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.backends.torch_digest import ELEMENTS


def load_parameter(parameter: torch.Tensor, host: HostTensor) -> None:
    """Copy elements into a parameter in place; autograd does not see it.

    Args:
        parameter: ``[...]`` of any strides, on any device.
        host: the elements; same shape and dtype.
    """
    bits = np.ascontiguousarray(host.bits)
    signed = torch.from_numpy(bits.view(f"i{bits.dtype.itemsize}").copy())
    values = signed.view(ELEMENTS[parameter.dtype].view).view(parameter.dtype).reshape(bits.shape)
    with torch.no_grad():
        parameter.data.copy_(values)
