"""What this package raises. Every error says what, where, found against expected, and what to do."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class PrecisionError(Exception):
    """Base of every error that this package raises on purpose.

    Attributes:
        what: one sentence, what went wrong.
        where: file, target, argument or record that it concerns; empty when there is none.
        found: what was there.
        expected: what should have been there.
        remedy: what the reader can do about it.
    """

    what: str
    where: str = ""
    found: str = ""
    expected: str = ""
    remedy: str = ""

    def __post_init__(self) -> None:
        super().__init__(*(getattr(self, field.name) for field in fields(PrecisionError)))

    def __str__(self) -> str:
        """Return the error as one line for a person."""
        line = f"{self.where}: {self.what}" if self.where else self.what
        sides = {"found": self.found, "expected": self.expected}
        told = ", ".join(f"{name} {value}" for name, value in sides.items() if value)
        line += f" ({told})" if told else ""
        return f"{line}; {self.remedy}" if self.remedy else line


class ConfigError(PrecisionError):
    """A setting is unknown, of the wrong type, or contradicts another."""


class PatchError(PrecisionError):
    """A patch could not be resolved, installed, undone, or was displaced or never called."""


class DeterminismError(PrecisionError):
    """A determinism switch was set too late or was changed by somebody else."""


class DumpError(PrecisionError):
    """A run directory, an index or a payload cannot be read or written."""


class IncomparableError(PrecisionError):
    """Two runs, or two tensors, do not answer the same question."""


class ReplayError(PrecisionError):
    """A captured operation could not be replayed."""


class ExternalCommandError(PrecisionError):
    """A process that this package started (a training run, a replay) failed."""


class CheckpointError(PrecisionError):
    """A checkpoint cannot be read, or is not what its format says."""
