"""``python -m mindspeed_precision``: the same commands as ``mindspeed-precision``."""

from __future__ import annotations

import sys

from mindspeed_precision.cli import main

if __name__ == "__main__":
    sys.exit(main())
