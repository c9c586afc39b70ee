"""Install our patches behind real MindSpeed's, let it patch again; print what the audit says each time."""

from __future__ import annotations

import functools
import json
import sys

from mindspeed_precision.testing import cpu, torch_npu_stand_in

cpu.install()
torch_npu_stand_in.install()

import mindspeed.megatron_adaptor as adaptor  # noqa: E402
from mindspeed.patch_utils import MindSpeedPatchesManager as Manager  # noqa: E402

from mindspeed_precision.errors import PatchError  # noqa: E402
from mindspeed_precision.patching.declare import load_declarations, select  # noqa: E402
from mindspeed_precision.patching.session import PatchSession  # noqa: E402

GROUPS = ("data", "determinism", "loop", "optimizer", "reduce", "wgrad", "fused_wgrad", "collectives")
UNTOUCHED = "megatron.training.training.train_step"  # by MindSpeed's default features
THEIRS = "megatron.core.optimizer.optimizer.ChainedOptimizer.step"  # MindSpeed sets its own


def later_wrapper(function):
    """Wrap as a feature of MindSpeed's does: its manager stacks what ends in ``wrapper``."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


def audit(session):
    return {line.name: [line.status.value, line.problem] for line in session.audit()}


def refusal(session):
    try:
        session.require_healthy(at="start")
    except PatchError as error:
        return str(error)
    return ""


found = {
    "registered": len(Manager.patches_info),
    "applied": sum(p.is_applied for p in Manager.patches_info.values()),
}
session = PatchSession(select(load_declarations(), groups=GROUPS))
session.install()
found["installed"] = audit(session)

Manager.apply_patches()
found["applied again"] = audit(session)

for target in (UNTOUCHED, THEIRS):
    Manager.register_patch(target, later_wrapper)
Manager.apply_patches()
found["another feature"], found["refusal"] = audit(session), refusal(session)

adaptor.repatch({})
found["repatched"] = audit(session)

found["left in place"] = session.undo()
json.dump(found, sys.stdout)
