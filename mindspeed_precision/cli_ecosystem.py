"""The commands that meet what users already have: data, evaluation, export; no logic."""

from __future__ import annotations

import argparse
from typing import Any

from mindspeed_precision.cli_examine import answer


def add_ecosystem_commands(commands: Any) -> None:
    """Add the commands to the parser of all commands."""
    data = commands.add_parser("data", help="samples as the model gets them, of one side or of two")
    about = "a run directory, the prefix of a .bin and .idx, or a .jsonl file"
    data.add_argument("baseline", metavar="DATA", help=about)
    data.add_argument("candidate", metavar="DATA2", nargs="?", help="the other side")
    data.add_argument("--samples", type=int, default=4, metavar="N", help="how many (%(default)s)")
    data.add_argument("--step", type=int, metavar="N", help="of runs, only this step")
    data.add_argument(
        "--tokenizer", metavar="NAME", help="tokenizer.json, a vocabulary, a directory with one, or bytes"
    )
    data.add_argument(
        "--seq-length", type=int, metavar="N", help="of .bin and .idx: cut the stream as a model does"
    )
    data.add_argument(
        "--json-key", default="text", metavar="KEY", help="of .jsonl: where the text is (%(default)s)"
    )
    data.add_argument("--json", action="store_true", help="print JSON, with every number")
    data.set_defaults(run=_data)

    export = commands.add_parser(
        "export", help="the statistics of each step for TensorBoard or Weights & Biases"
    )
    export.add_argument("directory", metavar="RUN", help="run directory")
    export.add_argument("--tensorboard", default="", metavar="DIR", help="write event files below DIR")
    export.add_argument("--wandb", default="", metavar="PROJECT", help="write runs of PROJECT, offline")
    export.add_argument("--json", action="store_true", help="print JSON")
    export.set_defaults(run=_export)

    evaluation = commands.add_parser("evaluation", help="evaluation results of two trainings, task by task")
    evaluation.add_argument("baseline", metavar="BASELINE", help="file of results to agree with")
    evaluation.add_argument("candidate", metavar="CANDIDATE", help="file of results to examine")
    evaluation.add_argument("--json", action="store_true", help="print JSON")
    evaluation.set_defaults(run=_evaluation)


def _data(arguments: argparse.Namespace) -> int:
    from mindspeed_precision.samples import look
    from mindspeed_precision.samples.showing import plain_samples

    seen = look(
        arguments.baseline,
        arguments.candidate,
        count=arguments.samples,
        step=arguments.step,
        tokenizer=arguments.tokenizer,
        seq_length=arguments.seq_length,
        json_key=arguments.json_key,
    )
    return answer(seen.examination(), json=arguments.json, samples=plain_samples(seen))


def _evaluation(arguments: argparse.Namespace) -> int:
    from mindspeed_precision.evaluation import compare_evaluations

    return answer(compare_evaluations(arguments.baseline, arguments.candidate), json=arguments.json)


def _export(arguments: argparse.Namespace) -> int:
    from mindspeed_precision.export import export_run
    from mindspeed_precision.report.progress import progress_bar

    with progress_bar(wanted=not arguments.json) as progress:
        found = export_run(
            arguments.directory,
            tensorboard=arguments.tensorboard,
            wandb=arguments.wandb,
            progress=progress,
        )
    return answer(found, json=arguments.json)


__all__ = ["add_ecosystem_commands"]
