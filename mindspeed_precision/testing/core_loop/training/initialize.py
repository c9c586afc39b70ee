"""Start-up: arguments, process groups, random generators, microbatch calculator."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import get_args, set_args


def initialize_megatron(extra_args_provider: Any = None, args_defaults: dict[str, Any] | None = None) -> None:
    """Parse and check the arguments, then set up everything that is global to the process."""
    set_args(validate_args(parse_args(extra_args_provider), args_defaults))
    args = get_args()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(backend=args.distributed_backend)
    mpu.initialize_model_parallel(tensor_model_parallel_size=args.tensor_model_parallel_size)
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    init_num_microbatches_calculator(
        rank=args.rank,
        rampup_batch_size=None,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size,
        decrease_batch_size_if_needed=False,
    )
