"""How many processes a shrunk launch has: TP, PP, CP and EP as they are, few data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

from mindspeed_precision.errors import ConfigError
from mindspeed_precision.launches import Launch
from mindspeed_precision.shrink.change import Changes

REPLICAS = 2
"""As many data-parallel ranks show every reduction; more of them add nothing but ranks."""
_NAMES = {
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
}


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Sizes of the parallel groups.

    Attributes:
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        cp: context-parallel size.
        ep: expert-parallel size.
        etp: tensor-parallel size of the experts.
        dp: data-parallel size, without context parallelism.
        chunks: model chunks of each pipeline rank.
    """

    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    dp: int
    chunks: int = 1

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.tp * self.pp * self.cp * self.dp

    def with_least_replicas(self, wanted: int) -> Parallel:
        """Return it with at least ``wanted`` data-parallel ranks: as many more as the experts need."""
        inside = self.tp * self.cp
        step = lcm(inside, self.ep * self.etp) // inside
        return replace(self, dp=-(-wanted // step) * step)


def parallel_of(launch: Launch) -> Parallel:
    """Return the parallel sizes of a launch.

    Raises:
        ConfigError: the number of processes is not known, or does not divide.
    """
    arguments, world = launch.arguments, launch.world_size
    tp, pp = (
        arguments.integer("tensor_model_parallel_size"),
        arguments.integer("pipeline_model_parallel_size"),
    )
    cp = arguments.integer("context_parallel_size")
    model = tp * pp * cp
    if world is None:  # arguments alone: as few as they need
        world = model
    if not model or world % model:
        raise ConfigError(
            "the processes of this launch do not divide into its parallel sizes",
            where="shrink",
            found=f"{world} processes",
            expected=f"a multiple of TP x PP x CP = {model}",
        )
    return Parallel(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=arguments.integer("expert_model_parallel_size"),
        etp=arguments.integer("expert_tensor_parallel_size", tp),
        dp=world // model,
        chunks=_chunks(launch, pp),
    )


def _chunks(launch: Launch, pp: int) -> int:
    """Return the model chunks of each pipeline rank, as either of the two arguments gives them."""
    arguments = launch.arguments
    per_stage = arguments.number("num_layers_per_virtual_pipeline_stage")
    if isinstance(per_stage, int) and per_stage:
        return max(1, arguments.integer("num_layers") // (pp * per_stage))
    return arguments.integer("num_virtual_stages_per_pipeline_rank")


def shrink_parallel(launch: Launch, changes: Changes, *, devices: int, halve: bool) -> Parallel:
    """Return the sizes of the shrunk launch.

    Raises:
        ConfigError: it does not fit and nothing may be halved.
    """
    old = parallel_of(launch)
    new = old.with_least_replicas(min(old.dp, REPLICAS))
    if new.world > devices:
        new = old.with_least_replicas(1)
    while new.world > devices:
        new = _halved(new, devices=devices, allowed=halve)
    for short, name in _NAMES.items():
        before, after = getattr(old, short), getattr(new, short)
        if before != after:
            changes.set(name, before, after, "halved until the launch fits, as asked")
            changes.lost.append(f"{short.upper()} {before}: now {after}, so its collectives join fewer ranks")
    if old.etp != new.etp and launch.arguments.has("expert_tensor_parallel_size"):
        changes.set("expert-tensor-parallel-size", old.etp, new.etp, "halved until the launch fits, as asked")
    if old.dp != new.dp:
        changes.lost.append(
            f"data-parallel reduction over {old.dp} ranks: now {new.dp}"
            + (
                ", in one order only"
                if new.dp == 2
                else ", so gradients are not reduced"
                if new.dp == 1
                else ""
            )
        )
    return new


def _halved(sizes: Parallel, *, devices: int, allowed: bool) -> Parallel:
    even = [name for name in _NAMES if getattr(sizes, name) % 2 == 0]
    if not allowed or not even:
        raise ConfigError(
            "this launch does not fit one node with its parallel sizes",
            where="shrink",
            found=f"TP {sizes.tp} x PP {sizes.pp} x CP {sizes.cp}, EP {sizes.ep}: {sizes.world} processes",
            expected=f"at most {devices}",
            remedy=f"--devices {sizes.world}, or --halve to halve the largest sizes",
        )
    largest = max(even, key=lambda name: getattr(sizes, name))
    changed = {largest: getattr(sizes, largest) // 2}
    if largest == "tp" and sizes.etp == sizes.tp:
        changed["etp"] = changed["tp"]
    return replace(sizes, **changed).with_least_replicas(1)
