"""The parameters that a run began with, whole, whatever its layout: what another run can begin with."""

from __future__ import annotations

from mindspeed_precision.align.lanes import Lanes
from mindspeed_precision.align.layout import canonical
from mindspeed_precision.align.vocabulary import SETTING, vocabulary_size
from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.reader import Run
from mindspeed_precision.errors import ConfigError, IncomparableError
from mindspeed_precision.record.placement import of_vocabulary
from mindspeed_precision.records import INIT_STEP, Role, Side, TensorRecord

_REMEDY = (
    "record that run with --precision-debug-set "
    "'capture.rules=[{role: param, phase: init, level: tensor}]', on all ranks"
)


class InitialParameters:
    """Initial parameters of a recorded run by canonical name; elements are read when they are asked for.

    Args:
        run: the run; every rank that holds a part of the model must have recorded it.
    """

    def __init__(self, run: Run) -> None:
        found = canonical(run, Side.BASELINE, lanes=Lanes.NONE)
        self._run = run
        self._rank = found.run.ranks[0]
        self._unruled = found.unruled
        self._records: dict[str, TensorRecord] = {
            record.key.fqn: record
            for record in self._rank.records
            if record.key.step == INIT_STEP and record.key.role is Role.PARAM
        }

    def read(self, name: str, *, shape: tuple[int, ...], dtype: str) -> HostTensor:
        """Return a canonical tensor; of the vocabulary, which runs pad otherwise, all rows that it has there.

        Args:
            name: of the parameter.
            shape: canonical, as the model has it that begins.
            dtype: of the parameter there.

        Raises:
            ConfigError: the run did not record it, not its elements, or not all of them.
            IncomparableError: it has another shape or dtype there.
            DumpError: a payload that the index promises cannot be read.
        """
        record, where = self._records.get(name), f"init_from: {self._run.path}"
        if record is None:
            raise ConfigError(f"that run has no initial {name}", where=where, remedy=_REMEDY)
        if record.key in self._unruled:
            found = self._unruled[record.key]
            raise ConfigError(f"that run's {name} cannot be put together", where=where, found=found)
        padded = of_vocabulary(name) and vocabulary_size(self._run) is not None
        fits = (record.shape[1:] == shape[1:]) if padded else (record.shape == shape)
        if not fits or record.dtype != dtype:
            raise IncomparableError(
                f"that run's {name} is of another kind",
                where=where,
                found=f"{record.dtype}{list(record.shape)}",
                expected=f"{dtype}{list(shape)}",
                remedy="begin with a run of the same model; one that pads the vocabulary otherwise must say "
                f"how long it is (setting {SETTING})",
            )
        if record.payload is None:
            raise ConfigError(f"that run did not keep the elements of {name}", where=where, remedy=_REMEDY)
        return self._rank.payload(record)
