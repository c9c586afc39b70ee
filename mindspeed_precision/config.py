"""Settings: OmegaConf at the door, frozen dataclasses inside."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mindspeed_precision.errors import ConfigError
from mindspeed_precision.foreign_yaml import load_yaml
from mindspeed_precision.records import Level, Phase, RecordKey, Role, Side
from mindspeed_precision.repeats import FirstRun, read_first_runs
from mindspeed_precision.shipped import read_shipped

DROP = "drop"


@dataclass(frozen=True, kw_only=True)
class NumberSet:
    """A set of steps or ranks, written ``"0-3,10"``; the empty text is every number."""

    text: str
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, text: str, *, where: str) -> NumberSet:
        """Read ``"0-3,10"``.

        Raises:
            ConfigError: ``text`` is not a list of numbers and ranges.
        """
        ranges = []
        for part in filter(None, str(text).replace(" ", "").split(",")):
            low, dash, high = part.partition("-")
            if not low.isdigit() or (dash and not high.isdigit()):
                raise ConfigError(
                    "not a list of numbers and ranges",
                    where=where,
                    found=repr(text),
                    expected='like "0-3,10"',
                )
            if int(high or low) < int(low):
                raise ConfigError(
                    "a range that ends before it begins", where=where, found=part, expected=f"{high}-{low}"
                )
            ranges.append((int(low), int(high or low)))
        return cls(text=str(text), ranges=tuple(ranges))

    def __contains__(self, number: int) -> bool:
        return not self.ranges or any(low <= number <= high for low, high in self.ranges)

    def below(self, size: int) -> list[range]:
        """Return the numbers of ``0 … size - 1`` in the set: disjoint ranges, ascending."""
        found: list[range] = []
        for low, high in sorted(self.ranges or ((0, size - 1),)):
            start = max(low, found[-1].stop if found else 0)
            if start < min(high + 1, size):
                found.append(range(start, min(high + 1, size)))
        return found


@dataclass(frozen=True, kw_only=True)
class CaptureRule:
    """Which records are kept how: shell patterns on names, sets of steps, microbatches and ranks.

    Attributes:
        level: a level, or None to drop the record.
    """

    fqn: str
    role: str
    phase: str
    steps: NumberSet
    microbatches: NumberSet
    ranks: NumberSet
    level: Level | None

    def applies(self, key: RecordKey) -> bool:
        """Tell whether the rule speaks of ``key``, on those of the ranks that it is for."""
        return (
            key.step in self.steps
            and key.microbatch in self.microbatches
            and fnmatchcase(key.role.value, self.role)
            and fnmatchcase(key.phase.value, self.phase)
            and fnmatchcase(key.fqn, self.fqn)
        )

    def describe(self) -> str:
        """Return the rule as the user wrote it."""
        level = self.level.value if self.level else DROP
        narrow = {"microbatches": self.microbatches.text, "ranks": self.ranks.text}
        numbers = {"steps": self.steps.text or "all"} | {name: text for name, text in narrow.items() if text}
        chosen = " ".join(f"{name}={text}" for name, text in numbers.items())
        return f"fqn={self.fqn} role={self.role} phase={self.phase} {chosen} level={level}"


@dataclass(frozen=True, kw_only=True)
class CaptureSettings:
    """What is captured, and how much is kept of it (``configs/default.yaml``)."""

    level: Level
    rules: tuple[CaptureRule, ...]
    modules: bool
    collectives: bool
    wgrad: bool
    optimizer: bool
    batch: bool
    verify_products: bool
    verify_sums: bool
    live_warnings: bool

    def on_rank(self, rank: int) -> CaptureSettings:
        """Return the settings with the rules that are for ``rank``."""
        return replace(self, rules=tuple(rule for rule in self.rules if rank in rule.ranks))

    def level_of(self, key: RecordKey) -> Level | None:
        """Return how much to keep of ``key``, or None to drop it; the last rule that applies wins.

        Rules are taken for those of this rank (``on_rank``). Of what is left of a law the number is kept at
        least: it was asked for by a setting of its own.
        """
        level = next((rule.level for rule in reversed(self.rules) if rule.applies(key)), self.level)
        if key.role is Role.RESIDUAL and level is Level.FINGERPRINT:
            return Level.STATISTICS
        return level


@dataclass(frozen=True, kw_only=True)
class DeterminismSettings:
    """What is pinned (``configs/default.yaml``)."""

    enabled: bool
    seed: int
    reseed: bool
    zero_dropout: bool
    fill_uninitialized_memory: bool
    strict: bool


@dataclass(frozen=True, kw_only=True)
class PatchSettings:
    """Where declarations are found, and which wrappers may be loaded."""

    search_path: tuple[str, ...]
    allow_external: bool


REFUSE, CONTINUE = "refuse", "continue"
"""Values of ``restart``: what happens where the run directory holds a run."""

AUTO = "auto"
"""The unit roundoff of each parameter's dtype."""


@dataclass(frozen=True, kw_only=True)
class PerturbSettings:
    """Noise on the parameters of a start, or of each state that is taken (``configs/default.yaml``).

    Attributes:
        epsilon: its relative size; ``auto``: one rounding of the dtype; empty: none.
        seed: of its signs.
        fqn: shell pattern of the parameters that get it.
    """

    epsilon: str
    seed: int
    fqn: str

    @property
    def enabled(self) -> bool:
        """Whether there is any."""
        return bool(self.epsilon)

    @property
    def size(self) -> float | None:
        """Its relative size; None: one rounding of the dtype."""
        return None if self.epsilon == AUTO else float(self.epsilon)

    def applies(self, name: str) -> bool:
        """Tell whether a parameter gets it."""
        return fnmatchcase(name, self.fqn)


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Where the statistics of each step go while it trains; empty: nowhere (``configs/default.yaml``)."""

    tensorboard: str
    wandb: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every setting of a run, frozen."""

    out: Path
    steps: NumberSet
    ranks: NumberSet
    stop_after: int | None
    capture: CaptureSettings
    determinism: DeterminismSettings
    init_from: str
    vocab_size: int
    write_queue_mib: int
    restart: str
    perturb: PerturbSettings
    reference: str
    remedies: tuple[str, ...]
    patches: PatchSettings
    export: ExportSettings
    refines: Mapping[Side, FirstRun]
    source: dict[str, Any] = field(compare=False, repr=False)


@dataclass
class _Rule:
    fqn: str = "*"
    role: str = "*"
    phase: str = "*"
    steps: str = ""
    microbatches: str = ""
    ranks: str = ""
    level: str = "tensor"


@dataclass
class _Capture:
    level: str = "statistics"
    rules: list[_Rule] = field(default_factory=list)
    modules: bool = True
    collectives: bool = True
    wgrad: bool = True
    optimizer: bool = True
    batch: bool = True
    verify_products: bool = False
    verify_sums: bool = False
    live_warnings: bool = True


@dataclass
class _Determinism:
    enabled: bool = True
    seed: int = 1234
    reseed: bool = False
    zero_dropout: bool = False
    fill_uninitialized_memory: bool = True
    strict: bool = True


@dataclass
class _Perturb:
    epsilon: str = ""
    seed: int = 0
    fqn: str = "*"


@dataclass
class _Patches:
    search_path: list[str] = field(default_factory=list)
    allow_external: bool = False


@dataclass
class _Export:
    tensorboard: str = ""
    wandb: str = ""


@dataclass
class _FirstRun:
    run: str = ""
    records: list[Any] = field(default_factory=list)


@dataclass
class _Refines:
    baseline: _FirstRun = field(default_factory=_FirstRun)
    candidate: _FirstRun = field(default_factory=_FirstRun)


@dataclass
class _Schema:
    out: str = "precision_runs/run"
    steps: str = ""
    ranks: str = ""
    stop_after: int | None = None
    capture: _Capture = field(default_factory=_Capture)
    determinism: _Determinism = field(default_factory=_Determinism)
    init_from: str = ""
    vocab_size: int = 0
    write_queue_mib: int = 1024
    restart: str = REFUSE
    perturb: _Perturb = field(default_factory=_Perturb)
    reference: str = ""
    remedies: list[str] = field(default_factory=list)
    patches: _Patches = field(default_factory=_Patches)
    export: _Export = field(default_factory=_Export)
    refines: _Refines = field(default_factory=_Refines)


def read_document(path: Path, schema: type, *, kind: str, remedy: str) -> dict[str, Any]:
    """Read a YAML file into plain data, checked against a schema.

    Args:
        path: of the file, which is there.
        schema: a dataclass with the defaults of every key; its first is ``schema``, the version.
        kind: what the file is, in one word, for messages.
        remedy: where that is described.

    Raises:
        ConfigError: it is no YAML, has unknown keys or values of another type, or is of another version.
    """
    own = read_shipped(path, schema) if path.is_relative_to(data_directory("configs")) else None
    return own if own is not None else read_foreign(path, schema, kind=kind, remedy=remedy)


def read_foreign(path: Path, schema: type, *, kind: str, remedy: str) -> dict[str, Any]:
    """Do what ``read_document`` does, wherever the file is."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), load_yaml(path))
        plain = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0], where=str(path), remedy=remedy) from error
    except ConfigError:
        raise
    except Exception as error:
        found = " ".join(str(error).split())[:120]
        raise ConfigError(
            "not readable as YAML", where=str(path), found=found, expected=f"a {kind}", remedy=remedy
        ) from error
    assert isinstance(plain, dict)
    if plain["schema"] != 1:
        raise ConfigError(
            f"another version of the {kind} format",
            where=str(path),
            found=str(plain["schema"]),
            expected="1",
        )
    return {str(key): value for key, value in plain.items()}


def data_directory(name: str) -> Path:
    """Return the directory of shipped data (``patches`` or ``configs``), installed or in a checkout."""
    installed = Path(__file__).parent / "_data" / name
    return installed if installed.is_dir() else Path(__file__).parent.parent / name


def load_settings(
    file: str | Path | None = None, overrides: Sequence[str] = (), out: str | Path | None = None
) -> Settings:
    """Merge the defaults, a YAML file, a dot list and the run directory, in this order.

    Args:
        file: YAML file, or the name of a preset in ``configs/presets``; None for the defaults.
        overrides: ``key=value`` items of an OmegaConf dot list.
        out: run directory; wins over the file and the dot list.

    Raises:
        ConfigError: a file is missing or no YAML mapping, a key is unknown, or a value does not fit.
    """
    layers: list[Any] = [OmegaConf.structured(_Schema)]
    try:
        if file is not None:
            layers.append(_load_yaml(_find(file)))
        layers += [OmegaConf.from_dotlist([item]) for item in overrides]
        if out is not None:
            layers.append(OmegaConf.create({"out": str(out)}))
        merged = OmegaConf.merge(*layers)
        plain = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        message = str(error).splitlines()[0]
        raise ConfigError(
            message, where=getattr(error, "full_key", None) or "settings", remedy="see configs/default.yaml"
        ) from error
    assert isinstance(plain, dict)
    return _freeze({str(key): value for key, value in plain.items()})


def _find(file: str | Path) -> Path:
    path = Path(file)
    preset = data_directory("configs") / "presets" / f"{path.name}.yaml"
    if not path.exists() and path.suffix == "" and preset.exists():
        return preset
    if not path.is_file():
        known = sorted(p.stem for p in preset.parent.glob("*.yaml"))
        raise ConfigError(
            "no such settings file",
            where=str(file),
            remedy=f"give a YAML file or a preset of {', '.join(known)}",
        )
    return path


def _load_yaml(path: Path) -> DictConfig:
    try:
        loaded: Any = load_yaml(path)
        if path.suffix == ".json":
            loaded = _of_msprobe(loaded, path)
    except (OmegaConfBaseException, ConfigError):
        raise
    except Exception as error:
        message = " ".join(str(error).split())
        raise ConfigError(f"not readable as YAML: {message}", where=str(path)) from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(
            "not a mapping", where=str(path), found=type(loaded).__name__, expected="key: value lines"
        )
    return loaded


def _of_msprobe(loaded: Any, path: Path) -> Any:
    """Return the settings that a configuration of msprobe stands for; what is none stays as it is."""
    from mindspeed_precision.msprobe.config import load_config, looks_like_config

    if not looks_like_config(loaded):
        return loaded
    found = load_config(path)
    head = f"mindspeed-precision: {path} is a configuration of msprobe"
    sys.stderr.write("".join(f"{line}\n" for line in (head, *(f"  {line}" for line in found.lines()))))
    return OmegaConf.create(found.settings)


def _level(text: str, *, where: str) -> Level:
    try:
        return Level(text)
    except ValueError:
        known = ", ".join(level.value for level in Level)
        raise ConfigError("no such level", where=where, found=text, expected=f"one of {known}") from None


def _pattern(text: str, kind: type[Role] | type[Phase], *, where: str) -> str:
    """Return a pattern that some role, or phase, fits: one that none fits would select nothing in silence."""
    if not any(fnmatchcase(member.value, text) for member in kind):
        known = ", ".join(member.value for member in kind)
        raise ConfigError("matches nothing", where=where, found=repr(text), expected=f"a pattern for {known}")
    return text


def _rule(plain: dict[str, Any], where: str) -> CaptureRule:
    return CaptureRule(
        fqn=plain["fqn"],
        role=_pattern(plain["role"], Role, where=f"{where}.role"),
        phase=_pattern(plain["phase"], Phase, where=f"{where}.phase"),
        # a rule that a run of an earlier version noted speaks of every microbatch and rank
        **{
            name: NumberSet.parse(plain.get(name, ""), where=f"{where}.{name}")
            for name in ("steps", "microbatches", "ranks")
        },
        level=None if plain["level"] == DROP else _level(plain["level"], where=f"{where}.level"),
    )


def _perturb(plain: dict[str, Any]) -> PerturbSettings:
    text = str(plain["epsilon"]).strip()
    if text and text != AUTO:
        try:
            usable = 0 < float(text) < 1
        except ValueError:
            usable = False
        if not usable:
            raise ConfigError(
                "not a relative size of noise",
                where="perturb.epsilon",
                found=repr(text),
                expected=f'"{AUTO}", a number between 0 and 1, or nothing',
            )
    return PerturbSettings(epsilon=text, seed=plain["seed"], fqn=plain["fqn"])


def capture_rules(source: object) -> tuple[CaptureRule, ...]:
    """Return the rules in the settings that a run noted; none where they are not those of this version."""
    capture = source.get("capture") if isinstance(source, dict) else None
    try:
        return tuple(_rule(rule, "settings.capture.rules") for rule in capture["rules"]) if capture else ()
    except (ConfigError, KeyError, TypeError, AttributeError):
        return ()


def _freeze(plain: dict[str, Any]) -> Settings:
    capture = dict(plain["capture"])
    rules = tuple(_rule(rule, f"capture.rules[{index}]") for index, rule in enumerate(capture.pop("rules")))
    level = _level(capture.pop("level"), where="capture.level")
    if plain["init_from"] and plain["reference"]:
        raise ConfigError(
            "two runs to begin with",
            where="init_from",
            found=f"init_from={plain['init_from']} reference={plain['reference']}",
            expected="one of the two: a reference gives the initial parameters, too",
        )
    if re.match(r"[a-z][a-z0-9+.-]+:/", plain["out"], re.IGNORECASE):
        raise ConfigError(
            "a run is written to a directory",
            where="out",
            found=plain["out"],
            expected="a path",
            remedy="record it on a file system and copy it there; what reads runs reads URLs",
        )
    return Settings(
        out=Path(plain["out"]),
        steps=NumberSet.parse(plain["steps"], where="steps"),
        ranks=NumberSet.parse(plain["ranks"], where="ranks"),
        stop_after=_stop_after(plain["stop_after"]),
        capture=CaptureSettings(level=level, rules=rules, **capture),
        determinism=DeterminismSettings(**plain["determinism"]),
        init_from=plain["init_from"],
        vocab_size=_count(plain["vocab_size"], where="vocab_size"),
        write_queue_mib=_count(plain["write_queue_mib"], where="write_queue_mib"),
        restart=_restart(plain["restart"]),
        perturb=_perturb(plain["perturb"]),
        reference=plain["reference"],
        remedies=tuple(plain["remedies"]),
        patches=PatchSettings(
            search_path=tuple(plain["patches"]["search_path"]),
            allow_external=plain["patches"]["allow_external"],
        ),
        export=ExportSettings(**plain["export"]),
        refines=read_first_runs(plain["refines"], where="refines"),
        source=plain,
    )


def default_settings() -> dict[str, Any]:
    """Return every setting with its default, as plain data."""
    plain = OmegaConf.to_container(OmegaConf.structured(_Schema))
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items()}


def _stop_after(step: int | None) -> int | None:
    if step is not None and step < 0:
        raise ConfigError("no step", where="stop_after", found=str(step), expected="a step, from 0")
    return step


def _restart(text: str) -> str:
    if text not in (REFUSE, CONTINUE):
        raise ConfigError(
            "no way to restart", where="restart", found=repr(text), expected=f"{REFUSE} or {CONTINUE}"
        )
    return text


def _count(number: int, where: str) -> int:
    if number < 0:
        raise ConfigError("not a count", where=where, found=str(number), expected="0 or more")
    return number


def setting_names() -> list[str]:
    """Return every dotted setting name of the schema, for tests of ``configs/default.yaml``."""

    def walk(schema: type, prefix: str) -> list[str]:
        names = []
        for entry in dataclasses.fields(schema):
            default = None if entry.default_factory is dataclasses.MISSING else entry.default_factory()
            nested = dataclasses.is_dataclass(default)
            names += walk(type(default), f"{prefix}{entry.name}.") if nested else [f"{prefix}{entry.name}"]
        return names

    return walk(_Schema, "")
