"""Environment variables that decide whether a run repeats: a table, and what pins those that still can be.

Nothing is assigned that can no longer take effect: such an assignment looks right in a log and does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from mindspeed_precision.determinism.progress import Deadline, Progress


class Matching(str, Enum):
    """How a value found is compared with the accepted ones."""

    EXACT = "exact"
    IGNORE_CASE = "ignore case"
    TOKENS = "comma list"
    """A comma list, every item of which is accepted."""
    FIXED_NUMBER = "any fixed number"
    """Any number will do as long as both runs have the same; ``verify`` compares them."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentSwitch:
    """One environment variable that is pinned.

    Attributes:
        name: the variable.
        value: what is set where nothing acceptable is.
        accepted: further values that are as good, compared by ``matching``.
        matching: how.
        read_by: who reads it.
        devices: ``npu``, ``cuda``, ``cpu``: where it means something.
        until: when it is read, and can no longer take effect.
        why: what it does to the bits.
        source: where that is known from.
    """

    name: str
    value: str
    accepted: tuple[str, ...] = ()
    matching: Matching = Matching.EXACT
    read_by: str
    devices: tuple[str, ...]
    until: Deadline
    why: str
    source: str

    def accepts(self, found: str | None) -> bool:
        """Tell whether ``found`` (None: unset) is as good as ``value``."""
        if found is None:
            return False
        if self.matching is Matching.FIXED_NUMBER:
            return found.isascii() and found.isdigit() and int(found) <= 2**32 - 1
        good = {self.value, *self.accepted}
        if self.matching is Matching.IGNORE_CASE:
            return found.lower() in {value.lower() for value in good}
        if self.matching is Matching.TOKENS:
            return all(token.strip() in good for token in found.split(","))
        return found in good


ENVIRONMENT: tuple[EnvironmentSwitch, ...] = (
    EnvironmentSwitch(
        name="PYTHONHASHSEED",
        value="1234",
        matching=Matching.FIXED_NUMBER,
        read_by="the Python interpreter",
        devices=("npu", "cuda", "cpu"),
        until=Deadline.INTERPRETER_START,
        why="orders sets of strings, and so whatever iterates over one; read once, before any code runs",
        source="https://docs.python.org/3/using/cmdline.html#envvar-PYTHONHASHSEED",
    ),
    EnvironmentSwitch(
        name="HCCL_DETERMINISTIC",
        value="true",
        accepted=("strict",),
        matching=Matching.IGNORE_CASE,  # HCCL upper-cases it, and refuses "1"
        read_by="HCCL when it initialises; MC2 operator tiling",
        devices=("npu",),
        until=Deadline.PROCESS_GROUP,
        why="fixes the order of a reduction between cards; a communicator's own hcclDeterministic wins",
        source="CANN reference of environment variables, HCCL_DETERMINISTIC; hcomm ParseDeterministic",
    ),
    EnvironmentSwitch(
        name="LCCL_DETERMINISTIC",
        value="1",
        accepted=("true",),  # "True" is ignored
        read_by="LCAL when a communicator is made; LCOC tiling",
        devices=("npu",),
        until=Deadline.PROCESS_GROUP,
        why="fixes the order of a reduction inside a node (at most 8 ranks); 0 is the default",
        source="LcalComm::InitCommon",
    ),
    EnvironmentSwitch(
        name="CLOSE_MATMUL_K_SHIFT",
        value="1",  # compared as text: "true" is ignored
        read_by="CANN matmul tiling",
        devices=("npu",),
        until=Deadline.FIRST_USE,
        why="stops cores from starting K at different places, which changes the order in which a matmul sums",
        source="CANN matmul tiling; MindSpeed mindspeed/functional/npu_deterministic",
    ),
    EnvironmentSwitch(
        name="ATB_MATMUL_SHUFFLE_K_ENABLE",
        value="0",
        read_by="ATB, whose Linear makes the fused dW on A2 and A3",
        devices=("npu",),
        until=Deadline.DEVICE_INIT,
        why="shuffles K per core; the toolkit's set_env.sh exports 1, so this must be set after sourcing it",
        source="ATB set_env.sh; MindSpeed --npu-deterministic leaves it on",
    ),
    EnvironmentSwitch(
        name="ATB_LLM_LCOC_ENABLE",
        value="0",
        read_by="ATB models (inference, rollouts)",
        devices=("npu",),
        until=Deadline.DEVICE_INIT,
        why="overlaps communication with computation in pieces whose order of summation is not fixed",
        source="ATB models; set by verl and vllm-ascend for repeatable rollouts",
    ),
    EnvironmentSwitch(
        name="CUSTOM_MATMUL_SHUFFLE",
        value="off",
        read_by="MindSpore's custom matmul of MindFormers",
        devices=("npu",),
        until=Deadline.FIRST_USE,
        why="the same shuffle of K as ATB's, in the custom kernel",
        source="MindFormers guide to reproducible training",
    ),
    EnvironmentSwitch(
        name="ASCEND_LAUNCH_BLOCKING",
        value="1",
        read_by="torch_npu, once, when its task queue starts",
        devices=("npu",),
        until=Deadline.DEVICE_INIT,
        why="launches operators one by one, so an error shows where it is; for diagnosis: it is slow and can "
        "hide the race that is looked for; turns TASK_QUEUE_ENABLE off",
        source="torch_npu reference of environment variables",
    ),
    EnvironmentSwitch(
        name="NCCL_DETERMINISTIC",
        value="1",
        read_by="no known reader: NCCL has no such variable",
        devices=("npu", "cuda"),
        until=Deadline.ANY_TIME,
        why="harmless; set because guides for Ascend list it and comparisons of environments look for it",
        source="MindSpeed-Core-MS docs/precision_opt.md",
    ),
    EnvironmentSwitch(
        name="NCCL_ALGO",
        value="Ring",
        accepted=("CollnetDirect", "CollnetChain", "^NVLS"),
        matching=Matching.TOKENS,
        read_by="NCCL when a communicator is made",
        devices=("cuda",),
        until=Deadline.PROCESS_GROUP,
        why="otherwise NCCL chooses by message size and topology, and so the order of summation",
        source="Megatron-LM megatron/training/determinism.py",
    ),
    EnvironmentSwitch(
        name="CUBLAS_WORKSPACE_CONFIG",
        value=":4096:8",
        accepted=(":16:8",),
        read_by="cuBLAS when a handle is made; PyTorch, which refuses deterministic matmul without it",
        devices=("cuda",),
        until=Deadline.DEVICE_INIT,
        why="with one fixed workspace per stream cuBLAS picks the same split of K every time",
        source="https://docs.nvidia.com/cuda/cublas/#results-reproducibility",
    ),
    EnvironmentSwitch(
        name="NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        value="0",
        read_by="Transformer Engine when attention is built; MindSpeed's copy of it",
        devices=("npu", "cuda"),
        until=Deadline.FIRST_USE,
        why="lets attention's backward add with atomics",
        source="Megatron-LM megatron/training/determinism.py",
    ),
)
"""Every variable that is pinned."""

RECORDED: Mapping[str, str] = {
    "TASK_QUEUE_ENABLE": "torch_npu's queue; ASCEND_LAUNCH_BLOCKING=1 turns it off; changes speed, not bits",
    "INF_NAN_MODE_ENABLE": "overflow gives Inf or saturates; the right value depends on the chip",
    "HCCL_OP_EXPANSION_MODE": "where collectives are unrolled; no value is right for all chips",
    "HCCL_ALGO": "algorithm of a collective; the default is chosen by topology",
    "VLLM_ASCEND_ENABLE_NZ": "storage format of weights in rollouts",
    "NVIDIA_TF32_OVERRIDE": "precision of float32 matmul, whatever the program asks for",
    "CUDA_DEVICE_MAX_CONNECTIONS": "order in which streams reach the device; Megatron wants 1",
    "OMP_NUM_THREADS": "how CPU operators split a sum",
    "MKL_NUM_THREADS": "how MKL splits a sum",
    "ONEDNN_MAX_CPU_ISA": "which instructions oneDNN may use",
    "MKL_CBWR": "MKL's conditional numerical reproducibility",
    "MAMBA_DETERMINISTIC": "Mamba's kernels; unset, they follow torch.use_deterministic_algorithms",
}
"""Variables that decide bits but have no single right value: recorded and compared, never set."""


class Status(str, Enum):
    """What became of one variable."""

    ALREADY_RIGHT = "already_right"
    SET = "set"
    TOO_LATE = "too_late"
    NOT_APPLICABLE = "not_applicable"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one variable.

    Attributes:
        name: the variable.
        status: what became of it.
        found: its value before; None when it was unset.
        wanted: the value of the table.
        message: one sentence for a person.
    """

    name: str
    status: Status
    found: str | None
    wanted: str
    message: str


def pin_environment(device: str, *, now: Progress) -> list[Outcome]:
    """Set every variable of ``ENVIRONMENT`` that is wrong and can still take effect.

    A variable that is wrong and whose time has passed is left as it is and reported as ``too_late``.

    Args:
        device: ``npu``, ``cuda`` or ``cpu``.
        now: how far the process has got (``progress.look``).
    """
    outcomes = []
    for switch in ENVIRONMENT:
        outcome = judge(switch, device, os.environ.get(switch.name), now)
        if outcome.status is Status.SET:
            os.environ[switch.name] = switch.value
        outcomes.append(outcome)
    return outcomes


def judge(switch: EnvironmentSwitch, device: str, found: str | None, now: Progress) -> Outcome:
    """Decide what becomes of ``switch``; changes nothing.

    Args:
        switch: a row of the table.
        device: ``npu``, ``cuda`` or ``cpu``.
        found: the value in ``os.environ``; None when it is unset.
        now: how far the process has got.
    """

    def outcome(status: Status, message: str) -> Outcome:
        return Outcome(name=switch.name, status=status, found=found, wanted=switch.value, message=message)

    shown = "unset" if found is None else repr(found)
    if device not in switch.devices:
        return outcome(Status.NOT_APPLICABLE, f"means nothing on {device}")
    if switch.until is Deadline.INTERPRETER_START:
        return outcome(*_judge_start(switch, found, now))
    if switch.accepts(found):
        return outcome(Status.ALREADY_RIGHT, f"is {shown}")
    if switch.until in now.passed:
        return outcome(
            Status.TOO_LATE,
            f"is {shown}, should be {switch.value!r}, and is too late to set: it takes effect only until "
            f"{switch.until.value}, and {now.passed[switch.until]} (read by {switch.read_by})",
        )
    return outcome(Status.SET, f"was {shown}, set to {switch.value!r}")


def _judge_start(switch: EnvironmentSwitch, found: str | None, now: Progress) -> tuple[Status, str]:
    at_start = found if now.start_environment is None else now.start_environment.get(switch.name)
    once = f"{switch.read_by} reads it once, at its start"
    if now.ignores_environment:
        return Status.TOO_LATE, "is not read: the interpreter was started with -E or -I"
    if switch.accepts(at_start):
        return Status.ALREADY_RIGHT, f"is {at_start!r} since the interpreter started"
    if switch.accepts(found):
        return Status.TOO_LATE, f"was set to {found!r} by the running process, which has no effect: {once}"
    shown = "unset" if found is None else repr(found)
    return Status.TOO_LATE, f"is {shown} and too late to set: {once}"


def recorded_environment() -> dict[str, str]:
    """Return every variable of both tables that is set, for ``run.json``."""
    names = [switch.name for switch in ENVIRONMENT] + list(RECORDED)
    return {name: os.environ[name] for name in names if name in os.environ}
