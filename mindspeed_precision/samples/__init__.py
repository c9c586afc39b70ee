"""The data of a training, sample by sample, as the model gets it: alone, or two sides beside each other."""

from __future__ import annotations

from mindspeed_precision.samples.looking import look
from mindspeed_precision.samples.sources import Sample, Source, open_source
from mindspeed_precision.samples.tokens import Decoder, load_decoder

__all__ = ["Decoder", "Sample", "Source", "load_decoder", "look", "open_source"]
