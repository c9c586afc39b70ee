"""Train the native twin: ``python -m mindspeed_precision.testing.twin --steps 3 --split chunk``."""

from __future__ import annotations

import sys

from mindspeed_precision.errors import PrecisionError
from mindspeed_precision.testing.twin.command import main

if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except PrecisionError as error:
        sys.exit(str(error))
