"""Files of ``torch.save``, read where torch is not installed; nothing in them is ever run."""

from mindspeed_precision.torch_archive.archive import TorchArchive
from mindspeed_precision.torch_archive.mapped import MappedFile
from mindspeed_precision.torch_archive.opcodes import TensorReference

__all__ = ["MappedFile", "TensorReference", "TorchArchive"]
