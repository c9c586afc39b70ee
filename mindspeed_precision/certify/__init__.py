"""A certificate: a training repeats bit for bit, and goes on from a checkpoint as if unbroken."""

from __future__ import annotations

from mindspeed_precision.certify.certificate import (
    Certificate,
    certify_runs,
    examination_of,
    write_certificate,
)
from mindspeed_precision.certify.running import certify_launch

__all__ = ["Certificate", "certify_launch", "certify_runs", "examination_of", "write_certificate"]
