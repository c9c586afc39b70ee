"""Switches of the environment, and whether those that a launch sets come in time."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from mindspeed_precision.determinism.environment import ENVIRONMENT, EnvironmentSwitch, Status, judge
from mindspeed_precision.determinism.progress import Deadline, Progress
from mindspeed_precision.preflight.planned import Planned
from mindspeed_precision.records import Finding, Severity
from mindspeed_precision.verify.registry import Answer

_LAUNCHERS = {"pta": "torch_npu.sh", "mindspore": "mindspore.sh", "cuda": "gpu.sh", "cpu": "cpu.sh"}
_HARMLESS = ("NCCL_DETERMINISTIC", "ASCEND_LAUNCH_BLOCKING")
"""Without a reader, and for looking only: not missed."""


def switches(planned: Planned) -> Answer:
    """Look at every variable that decides whether a run repeats (``docs/determinism.md``)."""
    environment = planned.launch.environment
    meant = [row for row in ENVIRONMENT if planned.device in row.devices]
    now = Progress(start_environment=environment)
    wrong = [
        row for row in meant if judge(row, planned.device, environment.get(row.name), now).status in _WRONG
    ]
    early = [row for row in wrong if row.until is Deadline.INTERPRETER_START]
    later = [row for row in wrong if row not in early and row.name not in _HARMLESS]
    debug = planned.launch.arguments.on("precision_debug")
    findings = [_too_late(planned, early, stops=debug)] if early else []
    if later:
        findings.append(_not_set(planned, later, pinned=debug))
    return Answer(
        exercised=len(meant), failed=len(early) + (0 if debug else len(later)), findings=tuple(findings)
    )


_WRONG = (Status.SET, Status.TOO_LATE)


def _too_late(planned: Planned, rows: list[EnvironmentSwitch], *, stops: bool) -> Finding:
    return Finding(
        id="determinism.too_late",
        severity=Severity.ERROR if stops else Severity.WARNING,
        confidence=1.0,
        title=f"{', '.join(row.name for row in rows)} must be set before the interpreter starts",
        evidence=tuple(_line(row, planned.launch.environment) for row in rows),
        remedy=f"export {_wanted(rows)}, or start by launch/{_LAUNCHERS[planned.backend]}",
    )


def _not_set(planned: Planned, rows: list[EnvironmentSwitch], *, pinned: bool) -> Finding:
    return Finding(
        id="determinism.environment",
        severity=Severity.INFO if pinned else Severity.WARNING,
        confidence=1.0,
        title=f"{len(rows)} variables that make a run repeat are not set"
        + (": --precision-debug sets them while it still can" if pinned else ""),
        evidence=tuple(_line(row, planned.launch.environment) for row in rows),
        remedy=f"start by launch/{_LAUNCHERS[planned.backend]}, or export {_wanted(rows)}",
    )


def _wanted(rows: list[EnvironmentSwitch]) -> str:
    return " ".join(f"{row.name}={row.value}" for row in rows)


def _line(row: EnvironmentSwitch, environment: Mapping[str, str]) -> str:
    found = environment.get(row.name)
    shown = "unset" if found is None else f"{found!r}"
    return f"{row.name} is {shown}, wanted {row.value!r} until {row.until.value}: {row.why}"


def in_time(planned: Planned) -> Answer:
    """Look for variables of the table that are set where it has no effect.

    That is after the start, without an export, or by the training script itself once it runs.
    """
    launch = planned.launch
    table = {row.name: row for row in ENVIRONMENT if planned.device in row.devices}
    late = [
        _ineffective(name, f"{launch.late[name]} sets it after the training was started", "move it up")
        for name in sorted(table.keys() & launch.late.keys())
    ]
    lost = [
        _ineffective(name, f"{launch.unexported[name]} sets it and does not export it", f"export {name}")
        for name in sorted(table.keys() & launch.unexported.keys() - launch.environment.keys())
    ]
    assigned, read = _assigned_by(launch.script)
    own = [
        _ineffective(
            name,
            f"{launch.script}:{line} assigns it in a running interpreter, which reads it at its start",
            f"export {name} before",
        )
        for name, line in assigned
        if name in table and table[name].until is Deadline.INTERPRETER_START
    ]
    skipped = "" if read else f"the script {launch.script or '(none given)'} was not read"
    return Answer(exercised=len(table), findings=(*late, *lost, *own), skipped=skipped)


def _ineffective(name: str, reason: str, remedy: str) -> Finding:
    return Finding(
        id="env.not_in_effect",
        severity=Severity.WARNING,
        confidence=1.0,
        title=f"{name} is set where it has no effect",
        evidence=(reason,),
        remedy=remedy,
    )


def sourced_after(planned: Planned) -> Answer:
    """Look for a toolkit's ``set_env.sh`` on the way: it exports ATB_MATMUL_SHUFFLE_K_ENABLE=1."""
    files = [name for name in planned.launch.sourced if "set_env" in name]
    if planned.device != "npu":
        return Answer(exercised=0, applies=False)
    finding = Finding(
        id="env.sourced_toolkit",
        severity=Severity.INFO,
        confidence=0.7,
        title="a toolkit's set_env.sh is sourced: what it exports was not read",
        evidence=(*files, "ATB's exports ATB_MATMUL_SHUFFLE_K_ENABLE=1, which shuffles K in each matmul"),
        remedy="export ATB_MATMUL_SHUFFLE_K_ENABLE=0 behind it",
    )
    return Answer(exercised=1, findings=(finding,) if files else ())


def _assigned_by(script: str) -> tuple[list[tuple[str, int]], bool]:
    """Return what a training script assigns in ``os.environ``, with lines, and whether it could be read."""
    path = Path(script)
    if path.suffix != ".py" or not path.is_file():
        return [], False
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return [], False
    return list(_assignments(tree)), True


def _assignments(tree: ast.AST) -> Iterator[tuple[str, int]]:
    targets = (target for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets)
    for target in targets:
        if not isinstance(target, ast.Subscript) or not isinstance(target.slice, ast.Constant):
            continue
        if ast.unparse(target.value).endswith("environ"):
            yield str(target.slice.value), target.lineno
