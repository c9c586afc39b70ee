"""What the checks of ``ckpt`` ask of two checkpoints, and where they register."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mindspeed_precision.ckpt.remainder import Configurations, Remainder, configurations, remainder
from mindspeed_precision.ckpt.results import Compared, Result
from mindspeed_precision.verify.registry import Checks


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the checks ask of two checkpoints."""

    compared: Compared

    @cached_property
    def remainder(self) -> Remainder:
        """Everything that is no tensor."""
        return remainder(self.compared.one.checkpoint, self.compared.two.checkpoint)

    @cached_property
    def configurations(self) -> Configurations:
        """The arguments."""
        return configurations(self.compared.one.checkpoint, self.compared.two.checkpoint)

    def parameters(self) -> list[Result]:
        """Return what is said of the parameters."""
        return self.compared.of_role(parameters=True)


CKPT: Checks[Facts] = Checks()

__all__ = ["CKPT", "Facts"]
