"""Ask the real parser and validation of Megatron about launches: one JSON line, what each raised."""

from __future__ import annotations

import json
import os
import sys

from mindspeed_precision.testing import cpu

assert cpu.install()
from megatron.training import arguments  # noqa: E402


def ask(words: list[str], world_size: int) -> dict[str, str]:
    """Return the error that these arguments meet, empty where none, and what some of them became."""
    os.environ.update(WORLD_SIZE=str(world_size), RANK="0")
    sys.argv = ["pretrain_gpt.py", *words]
    try:
        args = arguments.validate_args(arguments.parse_args(), {})
        config = getattr(arguments, "core_transformer_config_from_args", None)
        if config is not None:
            config(args)
    except (AssertionError, ValueError, RuntimeError, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": "", "sequence_parallel": str(args.sequence_parallel)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps([ask(*case) for case in json.loads(sys.stdin.read())]) + "\n")
