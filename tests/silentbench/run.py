"""Run SilentBench and print the score card: ``make silentbench``.

``PYTHONPATH=tests python -m silentbench.run --megatron DIRECTORY [CASE...]``
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from silentbench.card import markdown, plain, write_json
from silentbench.cases import every
from silentbench.score import Score, score
from silentbench.trainings import record_all


def main() -> int:
    """Record, ask, and print; the status is 0 whatever the score is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="ids of cases; none: all")
    parser.add_argument("--megatron", type=Path, required=True, help="directory with the package megatron")
    parser.add_argument(
        "--runs", type=Path, help="keep the recorded runs here, and record only what is missing"
    )
    parser.add_argument("--quick", action="store_true", help="only the cases that always run in the tests")
    parser.add_argument("--json", type=Path, help="write the scores here")
    parser.add_argument("--markdown", type=Path, help="write the card here")
    arguments = parser.parse_args()
    cases = every()
    unknown = set(arguments.cases) - set(cases)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    chosen = [c for c in cases.values() if not arguments.cases or c.id in arguments.cases]
    chosen = [c for c in chosen if c.quick or not arguments.quick]
    with ExitStack() as stack:
        runs = arguments.runs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runs.mkdir(parents=True, exist_ok=True)
        runs = runs.resolve()
        failures = record_all([t for c in chosen for t in c.trainings], runs, arguments.megatron)
        scores = []
        for case in chosen:
            failed = [failures[t.name] for t in case.trainings if t.name in failures]
            scores.append(Score(case=case.id, failure=failed[0]) if failed else score(case, runs))
            sys.stdout.write(plain(scores[-1]) + "\n")
            sys.stdout.flush()
    if arguments.json:
        write_json(scores, arguments.json)
    if arguments.markdown:
        arguments.markdown.write_text(markdown(scores), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
