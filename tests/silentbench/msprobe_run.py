"""The cases by msprobe's compare: ``make silentbench-msprobe``; what it cannot see is named.

``PYTHONPATH=tests python -m silentbench.msprobe_run --python FILE --megatron DIRECTORY [CASE...]``

Bug, twin and reference of each case are trained under msprobe (``msprobe_train``), and compared by its own
command (``msprobe_compare``). The rules:

- **detected**: in the table of the first faulty step a row is marked that is not marked for the healthy twin.
- **exact place**: the first such row is of a module that the case names, or of a function that such a module
  called, in a phase that it names (a backward row counts for the gradient of the input and for dW).
- **false alarms**: rows that are marked for the healthy twin.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from silentbench.case import Answer, Case, Training
from silentbench.cases import every
from silentbench.msprobe_tables import Row, marked
from silentbench.score import matches

MODES = ("statistics", "md5")
HERE = Path(__file__).parent


def unseen(case: Case) -> str:
    """Say why msprobe's compare cannot be asked of a case; empty: it can."""
    if not case.answers:
        return "a trap: nothing is wrong"
    one, two = case.reference, case.faulty
    if one.world != two.world:
        return "the reference has another layout, which its compare does not align"
    answers = [answer for answer in case.answers if "compare" in answer.by]
    if not answers:
        return "no comparison shows it"
    phases = {phase for answer in answers for phase in answer.phases}
    if not phases & {"fprop", "dgrad", "wgrad", "accumulate", "loss"}:
        return f"it is in the {' or '.join(sorted(phases))}, which its modules and functions do not name"
    return ""


def main() -> int:
    """Train, compare, score, write."""
    options = _parser().parse_args()
    if not options.python.is_file() or _without(options.python):
        sys.stdout.write(f"msprobe is not here ({options.python}): nothing was compared\n")
        return 0
    cases = [case for case in every().values() if not options.cases or case.id in options.cases]
    found: dict[str, Any] = {case.id: {"unseen": unseen(case)} for case in cases if unseen(case)}
    seen = [case for case in cases if not unseen(case)]
    for mode in options.modes:
        _train(seen, mode, options)
        _compare(seen, mode, options)
        for case in seen:
            found.setdefault(case.id, {})[mode] = _score(case, options.dumps / mode)
            _say(f"{case.id} {mode:11}{_text(found[case.id][mode])}")
    totals = {mode: _totals(found, mode) for mode in options.modes}
    for mode, counted in totals.items():
        _say(f"msprobe, {mode}: {counted}")
    if options.json:
        told = {"msprobe": _version(options.python), "totals": totals, "cases": dict(sorted(found.items()))}
        options.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="ids of cases; none: all that msprobe can see")
    parser.add_argument("--python", type=Path, required=True, help="interpreter of msprobe's environment")
    parser.add_argument("--megatron", type=Path, required=True, help="directory with the package megatron")
    parser.add_argument("--dumps", type=Path, default=Path("build/silentbench-msprobe"))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--json", type=Path, help="write what was found here")
    return parser


def _without(python: Path) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('msprobe') is None)"
    return subprocess.run([str(python), "-c", code], check=False).returncode != 0


def _version(python: Path) -> str:
    code = "from importlib.metadata import version; print(version('mindstudio-probe'))"
    return subprocess.run(
        [str(python), "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def _train(cases: Iterable[Case], mode: str, options: argparse.Namespace) -> None:
    wanted = {t.name: t for case in cases for t in (case.reference, case.twin, case.faulty)}
    missing = [name for name in wanted if not (options.dumps / mode / name / "DONE").exists()]
    if missing:
        _run(options, "msprobe_train.py", str(options.dumps.resolve()), mode, *missing)


def _compare(cases: Iterable[Case], mode: str, options: argparse.Namespace) -> None:
    pairs = {}
    for case in cases:
        for target in (case.faulty, case.twin):
            for dump, out in _tables(case, target, options.dumps.resolve() / mode):
                golden = dump.parents[3] / case.reference.name / dump.relative_to(dump.parents[2])
                if dump.exists() and golden.exists() and not (out / "STATUS").exists():
                    pairs[str(out)] = [str(dump), str(golden), str(out)]
    if pairs:
        listed = options.dumps / mode / "pairs.json"
        listed.write_text(json.dumps(list(pairs.values())), encoding="utf-8")
        _run(options, "msprobe_compare.py", str(listed.resolve()))


def _tables(case: Case, target: Training, dumps: Path) -> list[tuple[Path, Path]]:
    """Return, by rank of the first faulty step, the dump of a training and the directory of its table."""
    step = _step(case)
    found = []
    for rank in range(target.world):
        inside = f"step{step}/rank{rank}"
        out = dumps / "tables" / f"{target.name}-against-{case.reference.name}" / inside
        found.append((dumps / target.name / inside / "dump.json", out))
    return found


def _step(case: Case) -> int:
    return max(0, min(answer.step for answer in case.answers if "compare" in answer.by))


def _run(options: argparse.Namespace, script: str, *args: str) -> None:
    paths = [str(HERE.parents[1]), str(HERE.parent), str(options.megatron)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    log = options.dumps / f"{Path(script).stem}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream:
        subprocess.run(
            [str(options.python), "-W", "ignore", str(HERE / script), *args],
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            check=True,
        )


def _score(case: Case, dumps: Path) -> dict[str, Any]:
    """Hold the tables of a case against what a perfect tool's compare names."""
    failed = [
        t.name for t in (case.reference, case.twin, case.faulty) if not (dumps / t.name / "DONE").exists()
    ]
    if failed:
        return {"failed": f"training under msprobe did not end: {failed[0]}"}
    told, usual = (_rows(case, target, dumps) for target in (case.faulty, case.twin))
    if told is None or usual is None:
        return {"failed": "its compare gave no table"}
    names = {row.name for row in usual}
    fresh = [row for row in told if row.name not in names]
    answers = [answer for answer in case.answers if "compare" in answer.by]
    first = fresh[0] if fresh else None
    return {
        "detected": bool(fresh),
        "place": first is not None and any(_at(answer, first) for answer in answers),
        "first": "" if first is None else f"{first.name}: {first.result}",
        "marked": len(fresh),
        "false_alarms": len(usual),
    }


def _rows(case: Case, target: Training, dumps: Path) -> list[Row] | None:
    found: list[Row] = []
    for dump, out in _tables(case, target, dumps.resolve()):
        if not list(out.glob("compare_result*.csv")):
            return None
        found += marked(out, dump.with_name("construct.json"))
    return found


def _at(answer: Answer, row: Row) -> bool:
    if row.fqn is None or not set(row.phases) & set(answer.phases):
        return False
    owners = [pattern.removesuffix(".weight").removesuffix(".bias") for pattern in answer.fqn]
    return matches(row.fqn, (*answer.fqn, *owners))


def _text(told: Mapping[str, Any]) -> str:
    if "failed" in told:
        return str(told["failed"])
    words = ["detected" if told["detected"] else "NOT-detected", "place" if told["place"] else "NOT-place"]
    alarms = f" ({told['false_alarms']} rows marked for the healthy twin)" if told["false_alarms"] else ""
    return f"{' '.join(words)} {told['first']}{alarms}"


def _totals(found: Mapping[str, Mapping[str, Any]], mode: str) -> dict[str, int]:
    told = [one[mode] for one in found.values() if mode in one]
    ran = [one for one in told if "failed" not in one]
    return {
        "cases": len(ran),
        "detected": sum(one["detected"] for one in ran),
        "place": sum(one["place"] for one in ran),
        "with false alarms": sum(one["false_alarms"] > 0 for one in ran),
        "not run": len(told) - len(ran),
        "not visible": sum("unseen" in one for one in found.values()),
    }


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
