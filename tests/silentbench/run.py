"""Run SilentBench and print the score card: ``make silentbench``.

``PYTHONPATH=tests python -m silentbench.run --megatron DIRECTORY [CASE...]``
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from silentbench import native
from silentbench.card import markdown, plain, totals, write_json
from silentbench.case import Case
from silentbench.cases import every
from silentbench.healthy import grid
from silentbench.score import Score, alarms_of, score
from silentbench.trainings import record_all


def main() -> int:
    """Record, ask, and print; the status says whether all could be run, whatever the score is."""
    arguments = _parser().parse_args()
    with ExitStack() as stack:
        runs = arguments.runs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runs.mkdir(parents=True, exist_ok=True)
        if arguments.healthy:
            return _healthy(runs.resolve(), arguments.megatron)
        cases = every()
        chosen = [c for c in cases.values() if not arguments.cases or c.id in arguments.cases]
        if len(chosen) < len(set(arguments.cases)):
            sys.stderr.write(f"no such case: {' '.join(sorted(set(arguments.cases) - set(cases)))}\n")
            return 2
        scores = _score(chosen, runs.resolve(), arguments.megatron)
        whole = len(chosen) == len(cases)
        on_mindspore, why_not = native.scores(runs.resolve() / "mindspore") if whole else ([], "")
    for one in on_mindspore:
        _say(f"on MindSpore: {plain(one)}")
    if why_not:
        _say(f"on MindSpore: {' '.join(native.CASES)}: {why_not}")
    for name, number in totals(scores).items():
        _say(f"{name}: {number}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(scores, arguments.json)
    if arguments.card and whole:
        told = arguments.msprobe
        probed = json.loads(told.read_text(encoding="utf-8")) if told and told.is_file() else None
        page = markdown(scores, mindspore=on_mindspore, why_not=why_not, msprobe=probed)
        arguments.card.write_text(page, encoding="utf-8")
    return int(any(one.failure for one in (*scores, *on_mindspore)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="ids of cases; none: all")
    parser.add_argument("--megatron", type=Path, required=True, help="directory with the package megatron")
    parser.add_argument("--runs", type=Path, help="keep the runs here, and record only what is missing")
    parser.add_argument("--json", type=Path, help="write the scores here")
    parser.add_argument("--card", type=Path, help="write the card here, if all cases were asked for")
    parser.add_argument("--msprobe", type=Path, help="what `make silentbench-msprobe` wrote, for the card")
    parser.add_argument(
        "--healthy", action="store_true", help="the grid of healthy trainings instead of cases"
    )
    return parser


def _score(chosen: list[Case], runs: Path, megatron: Path) -> list[Score]:
    failures = record_all([t for case in chosen for t in case.trainings], runs, megatron)
    scores = []
    for case in chosen:
        failed = [failures[t.name] for t in case.trainings if t.name in failures]
        scores.append(Score(case=case.id, failure=failed[0]) if failed else score(case, runs))
        _say(plain(scores[-1], trap=not case.answers))
    return scores


def _healthy(runs: Path, megatron: Path) -> int:
    failures = record_all([t for pair in grid() for t in pair], runs, megatron)
    alarmed = run = 0
    for reference, candidate in grid():
        failed = [failures[t.name] for t in (reference, candidate) if t.name in failures]
        if failed:
            _say(f"{candidate.name}: could not be run: {failed[0]}")
            continue
        alarms = alarms_of(reference, candidate, runs)
        run += 1
        alarmed += bool(alarms)
        for alarm in alarms:
            _say(f"{candidate.name}: {alarm}")
    _say(f"{run} of {len(grid())} healthy pairs were run; {alarmed} with a false alarm")
    return int(alarmed > 0 or run < len(grid()))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
