"""``data A [B]``: what a training reads, before it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_precision.counting import count
from mindspeed_precision.errors import ConfigError
from mindspeed_precision.records import CheckOutcome, Examination
from mindspeed_precision.samples.as_run import judged
from mindspeed_precision.samples.showing import sample_lines
from mindspeed_precision.samples.sources import TEXT, Sample, Source, open_source
from mindspeed_precision.samples.tokens import Decoder, load_decoder
from mindspeed_precision.verify.registry import Answer


@dataclass(frozen=True, kw_only=True)
class Look:
    """What was read.

    Attributes:
        sides: one source, or the baseline and the candidate.
        decoder: shows tokens as text; None: they are numbers.
        answer: how the two sides differ; None: there is one.
    """

    sides: tuple[Source, ...]
    decoder: Decoder | None
    answer: Answer | None

    @property
    def rows(self) -> list[tuple[Sample | None, ...]]:
        """The samples beside each other; None where a side has no more."""
        most = max(len(side.samples) for side in self.sides)
        return [
            tuple(side.samples[at] if at < len(side.samples) else None for side in self.sides)
            for at in range(most)
        ]

    def examination(self) -> Examination:
        """Return what is shown."""
        kinds = ", ".join(dict.fromkeys(side.kind for side in self.sides))
        shown = len(self.rows)
        notes = [note for side in self.sides for note in side.notes]
        if self.answer is not None and not all(side.run for side in self.sides):
            notes.append("a sample counts as a microbatch of step 0")
        return Examination(
            command="data",
            subjects={
                name: side.path for name, side in zip(("baseline", "candidate"), self.sides, strict=False)
            },
            findings=() if self.answer is None else self.answer.findings,
            outcomes=(self._outcome(shown),),
            notes=tuple(dict.fromkeys(notes)),
            headline=self._headline(shown, kinds),
            tables={
                f"sample {at}": tuple(sample_lines(row, self.decoder)) for at, row in enumerate(self.rows)
            },
        )

    def _headline(self, shown: int, kinds: str) -> str:
        """Return the answer in one sentence; empty where findings give it."""
        answer = self.answer
        if answer is not None and answer.findings:
            return ""
        compared = 0 if answer is None else answer.exercised
        if not shown and not compared:
            return "NO ANSWER: no sample could be shown, and none was compared."
        if not shown:
            return (
                f"The batches of both sides are the same ({count(compared, 'microbatch')}, by fingerprint). "
                "No sample is shown: their elements were not kept."
            )
        same = " The two sides are the same in what was compared." if compared else ""
        return f"{count(shown, 'sample')} of {kinds}.{same}"

    def _outcome(self, shown: int) -> CheckOutcome:
        if self.answer is None:
            return CheckOutcome(
                name="data.shown",
                holds="shown as the model gets them",
                exercised=shown,
                unit="samples",
                skipped="" if shown else "there is no sample whose elements were kept",
            )
        both_runs = all(side.run is not None for side in self.sides)
        return CheckOutcome(
            name="data.batch_differs",
            holds="both sides have the same samples, in the same order, read in the same way",
            exercised=self.answer.exercised,
            unit="microbatches" if both_runs else "samples",
            failed=len(self.answer.findings) if self.answer.failed is None else self.answer.failed,
            skipped=self.answer.skipped,
        )


def look(
    baseline: str | Path,
    candidate: str | Path | None = None,
    *,
    count: int = 4,
    step: int | None = None,
    tokenizer: str | None = None,
    seq_length: int | None = None,
    json_key: str = TEXT,
) -> Look:
    """Read the first samples of one side, or of two, and compare them.

    Args:
        baseline: a run directory, the prefix of a ``.bin`` and ``.idx``, or a JSONL file.
        candidate: the other side; None: there is one.
        count: how many samples.
        step: of runs, only this one.
        tokenizer: shows tokens as text (``load_decoder``).
        seq_length: of an indexed data set, tokens of a sample; None: its sequences.
        json_key: where a JSONL file has its text.

    Raises:
        DumpError: a source cannot be read.
        ConfigError: it is none, or an option does not fit.
        IncomparableError: the fingerprints of two runs are of two definitions, and elements were not kept.
    """
    if count < 1:
        raise ConfigError("no number of samples", where="--samples", found=str(count), expected="1 or more")
    decoder = None if tokenizer is None else load_decoder(tokenizer)
    paths: Sequence[str | Path] = [baseline] if candidate is None else [baseline, candidate]
    sides = tuple(
        open_source(path, count=count, step=step, decoder=decoder, seq_length=seq_length, json_key=json_key)
        for path in paths
    )
    if step is not None and not any(side.run is not None for side in sides):
        raise ConfigError("only runs have steps", where="--step", found=str(step))
    return Look(sides=sides, decoder=decoder, answer=judged(*sides) if len(sides) == 2 else None)


__all__ = ["Look", "look"]
