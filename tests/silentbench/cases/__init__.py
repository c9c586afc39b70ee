"""One bug per module; ``every`` reads them all."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from silentbench.case import Case


@cache
def every() -> dict[str, Case]:
    """Return the cases by id, in the order of their ids."""
    modules = [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]
    cases = [module.CASE for module in modules]
    assert len({case.id for case in cases}) == len(cases), "two cases share an id"
    return {case.id: case for case in sorted(cases, key=lambda case: case.id)}
