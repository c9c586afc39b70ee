"""Let Megatron parse and validate this command line, and build its configuration objects; as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from contextlib import redirect_stdout

from mindspeed_precision.testing import cpu

cpu.install()
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")

from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.training import training  # noqa: E402
from megatron.training.arguments import (  # noqa: E402
    core_transformer_config_from_args,
    parse_args,
    validate_args,
)

from mindspeed_precision.capture.configuration import plain  # noqa: E402


def ddp_config(args):
    """Return what ``get_model`` makes: in a function of its own since 0.19, inline before."""
    if hasattr(training, "get_megatron_ddp_config"):
        return training.get_megatron_ddp_config(args)
    fields = [entry.name for entry in dataclasses.fields(DistributedDataParallelConfig)]
    same = {name: getattr(args, name) for name in fields if hasattr(args, name)}
    return DistributedDataParallelConfig(
        **{
            **same,
            "grad_reduce_in_fp32": args.accumulate_allreduce_grads_in_fp32,
            "average_in_collective": args.ddp_average_in_collective,
        }
    )


def optimizer_config(args):
    found = training.get_megatron_optimizer_config(args)
    return found[0] if isinstance(found, tuple) else found


with redirect_stdout(sys.stderr):
    args = parse_args()
    validate_args(args)
    sections = {
        "transformer_config": core_transformer_config_from_args(args),
        "ddp_config": ddp_config(args),
        "optimizer_config": optimizer_config(args),
    }
sys.stdout.write(
    json.dumps(
        {
            "megatron_args": plain(vars(args)),
            **{
                name: {e.name: plain(getattr(config, e.name)) for e in dataclasses.fields(config)}
                for name, config in sections.items()
            },
        }
    )
)
