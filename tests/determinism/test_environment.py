"""The environment: what is right, what can still be set, and what is too late."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mindspeed_precision.determinism.environment import (
    ENVIRONMENT,
    RECORDED,
    EnvironmentSwitch,
    Status,
    judge,
    pin_environment,
    recorded_environment,
)
from mindspeed_precision.determinism.progress import Deadline, Progress, look, start_environment

DEVICES = ("npu", "cuda", "cpu")
EARLY = Progress(passed={Deadline.INTERPRETER_START: "running"}, start_environment={"PYTHONHASHSEED": "7"})
LATE = Progress(passed={deadline: f"{deadline.value} is over" for deadline in Deadline}, start_environment={})


def switch(name: str) -> EnvironmentSwitch:
    (found,) = [row for row in ENVIRONMENT if row.name == name]
    return found


@pytest.fixture
def clean_environment(monkeypatch):
    """Remove every variable of the table; monkeypatch puts them back, also those that are set meanwhile."""
    for row in ENVIRONMENT:
        monkeypatch.setenv(row.name, "")
        monkeypatch.delenv(row.name)


def test_table_names_every_variable_that_the_task_asks_for():
    wanted = {
        "HCCL_DETERMINISTIC",
        "LCCL_DETERMINISTIC",
        "NCCL_DETERMINISTIC",
        "CLOSE_MATMUL_K_SHIFT",
        "ATB_MATMUL_SHUFFLE_K_ENABLE",
        "ATB_LLM_LCOC_ENABLE",
        "ASCEND_LAUNCH_BLOCKING",
        "CUBLAS_WORKSPACE_CONFIG",
        "NCCL_ALGO",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "PYTHONHASHSEED",
        "CUSTOM_MATMUL_SHUFFLE",
    }
    names = [row.name for row in ENVIRONMENT]
    assert wanted <= set(names)
    assert len(names) == len(set(names))
    assert not set(names) & set(RECORDED), "a variable is either pinned or only recorded"


@pytest.mark.parametrize("row", ENVIRONMENT, ids=lambda row: row.name)
def test_row_is_complete_and_accepts_its_own_value(row):
    assert row.accepts(row.value)
    assert not row.accepts(None)
    assert set(row.devices) <= set(DEVICES)
    assert row.devices
    assert row.read_by
    assert row.why
    assert row.source


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("HCCL_DETERMINISTIC", "True", True),
        ("HCCL_DETERMINISTIC", "STRICT", True),
        ("HCCL_DETERMINISTIC", "1", False),  # HCCL refuses it
        ("LCCL_DETERMINISTIC", "true", True),
        ("LCCL_DETERMINISTIC", "True", False),  # LCAL ignores it
        ("CLOSE_MATMUL_K_SHIFT", "true", False),
        ("NCCL_ALGO", "Ring,CollnetDirect", True),
        ("NCCL_ALGO", "Ring,Tree", False),
        ("NCCL_ALGO", "", False),
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8", True),
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", False),
        ("PYTHONHASHSEED", "0", True),
        ("PYTHONHASHSEED", "4294967295", True),
        ("PYTHONHASHSEED", "4294967296", False),
        ("PYTHONHASHSEED", "random", False),
        ("PYTHONHASHSEED", "", False),
    ],
)
def test_accepted_values(name, value, accepted):
    assert switch(name).accepts(value) is accepted


@pytest.mark.parametrize("row", ENVIRONMENT, ids=lambda row: row.name)
@pytest.mark.parametrize("device", DEVICES)
def test_wrong_value_is_set_in_time_and_only_then(row, device):
    early, late = (judge(row, device, "wrong", now) for now in (EARLY, LATE))
    if device not in row.devices:
        assert (early.status, late.status) == (Status.NOT_APPLICABLE, Status.NOT_APPLICABLE)
        return
    assert late.status is Status.TOO_LATE
    if row.until is Deadline.INTERPRETER_START:
        assert early.status is Status.ALREADY_RIGHT, "what counts is the environment at the start"
    else:
        assert early.status is Status.SET
        assert row.until.value in late.message
    if row.until is not Deadline.ANY_TIME:
        only = Progress(passed={row.until: "over"}, start_environment={})
        assert judge(row, device, "wrong", only).status is Status.TOO_LATE


@pytest.mark.usefixtures("clean_environment")
def test_pin_sets_what_can_take_effect_and_leaves_the_rest_alone(monkeypatch):
    monkeypatch.setenv("HCCL_DETERMINISTIC", "false")
    monkeypatch.setenv("LCCL_DETERMINISTIC", "true")
    now = Progress(passed={Deadline.PROCESS_GROUP: "there is a process group"}, start_environment={})
    outcomes = {outcome.name: outcome for outcome in pin_environment("npu", now=now)}
    assert [outcome.name for outcome in outcomes.values()] == [row.name for row in ENVIRONMENT]
    assert outcomes["HCCL_DETERMINISTIC"].status is Status.TOO_LATE
    assert os.environ["HCCL_DETERMINISTIC"] == "false", (
        "an assignment without effect would only hide the fault"
    )
    assert outcomes["LCCL_DETERMINISTIC"].status is Status.ALREADY_RIGHT
    assert os.environ["LCCL_DETERMINISTIC"] == "true"
    assert outcomes["ATB_MATMUL_SHUFFLE_K_ENABLE"].status is Status.SET
    assert os.environ["ATB_MATMUL_SHUFFLE_K_ENABLE"] == "0"
    assert outcomes["NCCL_ALGO"].status is Status.NOT_APPLICABLE
    assert "NCCL_ALGO" not in os.environ
    assert outcomes["PYTHONHASHSEED"].status is Status.TOO_LATE
    assert "PYTHONHASHSEED" not in os.environ


@pytest.mark.usefixtures("clean_environment")
def test_recorded_environment_holds_both_tables(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    found = recorded_environment()
    assert found["NCCL_ALGO"] == "Ring"
    assert found["TASK_QUEUE_ENABLE"] == "2"
    assert "HCCL_DETERMINISTIC" not in found


HASH_SEED = """
import os, sys
from mindspeed_precision.determinism.environment import pin_environment
from mindspeed_precision.determinism.progress import look
{assignment}
(outcome,) = [o for o in pin_environment("cpu", now=look("cpu")) if o.name == "PYTHONHASHSEED"]
sys.stdout.write(outcome.status.value + "|" + outcome.message)
"""


@pytest.mark.parametrize(
    ("exported", "assignment", "flags", "status", "says"),
    [
        ("42", "", [], "already_right", "'42'"),
        (None, "", [], "too_late", "unset"),
        ("random", "", [], "too_late", "'random'"),
        ("42", "", ["-E"], "too_late", "-E"),
        pytest.param(
            None,
            "os.environ['PYTHONHASHSEED'] = '42'",
            [],
            "too_late",
            "no effect",
            marks=pytest.mark.skipif(start_environment() is None, reason="this system hides it"),
        ),
    ],
)
def test_hash_seed_in_a_process_of_its_own(exported, assignment, flags, status, says):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if exported is not None:
        environment["PYTHONHASHSEED"] = exported
    program = HASH_SEED.format(assignment=assignment)
    done = subprocess.run(
        [sys.executable, *flags, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    found_status, message = done.stdout.split("|")
    assert found_status == status
    assert says in message


def test_looking_imports_nothing():
    program = (
        "import sys; from mindspeed_precision.determinism import progress; now = progress.look('cuda');"
        "assert 'torch' not in sys.modules; assert len(now.passed) == 1, now"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


GROUP = """
import os, tempfile, torch, torch.distributed as dist
from mindspeed_precision.determinism.progress import Deadline, look
assert Deadline.FRAMEWORK_IMPORT in look("npu").passed
assert Deadline.PROCESS_GROUP not in look("npu").passed
dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
from mindspeed_precision.determinism.environment import Status, pin_environment
outcomes = {o.name: o for o in pin_environment("npu", now=look("npu"))}
late = outcomes["HCCL_DETERMINISTIC"]
assert late.status is Status.TOO_LATE and "torch.distributed is initialised" in late.message, late
assert "HCCL_DETERMINISTIC" not in os.environ
assert outcomes["CLOSE_MATMUL_K_SHIFT"].status is Status.SET
"""


@pytest.mark.torch
def test_hccl_is_too_late_once_a_process_group_exists():
    environment = {
        name: value for name, value in os.environ.items() if name not in {r.name for r in ENVIRONMENT}
    }
    subprocess.run([sys.executable, "-c", GROUP], env=environment, check=True)


class DeviceRuntime:
    """Stands in for ``torch.npu``: there is no such device here."""

    def __init__(self, *, initialised: bool, allocated: int) -> None:
        self.is_initialized = lambda: initialised
        self.max_memory_allocated = lambda: allocated


@pytest.mark.torch
@pytest.mark.parametrize(
    ("initialised", "allocated", "passed"),
    [
        (False, 0, set()),
        (True, 0, {Deadline.DEVICE_INIT}),
        (True, 512, {Deadline.DEVICE_INIT, Deadline.FIRST_USE}),
    ],
)
def test_device_deadlines(monkeypatch, initialised, allocated, passed):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(
        torch, "npu", DeviceRuntime(initialised=initialised, allocated=allocated), raising=False
    )
    assert {Deadline.DEVICE_INIT, Deadline.FIRST_USE} & set(look("npu").passed) == passed
    assert not {Deadline.DEVICE_INIT, Deadline.FIRST_USE} & set(look("cpu").passed)
