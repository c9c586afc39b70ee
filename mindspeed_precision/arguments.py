"""The flags: read early from the command line, and registered with Megatron's own parser."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_precision.config import Settings, load_settings

FLAG = "--precision-debug"


@dataclass(frozen=True, kw_only=True)
class DebugRequest:
    """What the user asked for on the command line."""

    config: str | None
    overrides: tuple[str, ...]
    out: Path | None

    def settings(self) -> Settings:
        """Return the settings.

        Raises:
            ConfigError: see ``load_settings``.
        """
        return load_settings(self.config, self.overrides, self.out)


def requested(argv: Sequence[str]) -> DebugRequest | None:
    """Return the request in ``argv`` (without the program's name), or None when debugging is off.

    Only ``--precision-debug`` itself turns it on: alone, its companions are unknown flags to Megatron.
    """
    if FLAG not in argv:
        return None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_flags(parser)
    known, _ = parser.parse_known_args(list(argv))
    return DebugRequest(
        config=known.precision_debug_config,
        overrides=tuple(known.precision_debug_set),
        out=None if known.precision_debug_out is None else Path(known.precision_debug_out),
    )


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the four flags to ``parser`` and return it."""
    group = parser.add_argument_group("mindspeed_precision")
    group.add_argument(FLAG, action="store_true", help="record this run for comparison")
    group.add_argument(f"{FLAG}-config", metavar="FILE", help="settings: a YAML file, or a preset's name")
    group.add_argument(
        f"{FLAG}-set", nargs="*", default=[], metavar="key=value", help="settings as an OmegaConf dot list"
    )
    group.add_argument(f"{FLAG}-out", metavar="DIR", help="the run directory to write")
    return parser


def register_flags(
    wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Let Megatron's parser know the flags. Wraps ``parse_args(extra_args_provider=None, …)``."""
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    provider = bound.arguments.get("extra_args_provider")

    def with_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_flags(provider(parser) if provider is not None else parser)

    bound.arguments["extra_args_provider"] = with_flags
    return wrapped(*bound.args, **bound.kwargs)


def command_line() -> list[str]:
    """Return the arguments of this process."""
    return sys.argv[1:]
