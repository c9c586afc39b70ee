"""Configurations of msprobe (``config.json``, ``config_pt.json``, ``config_ms.json``) as settings of ours.

For each key it is said what it became, or that nothing here does what it asks for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mindspeed_precision.errors import ConfigError, DumpError
from mindspeed_precision.msprobe.config_lists import OF_TASK
from mindspeed_precision.msprobe.files import read_json
from mindspeed_precision.msprobe.translation import Translation
from mindspeed_precision.permissions import write_text

_TASKS = ("statistics", "tensor")
_LARGEST = 1 << 20
"""Bytes of a configuration that are read."""

_WITHOUT = {
    "extra_info": "call stacks are not recorded; what ran inside what is in the names of modules",
    "precision": "statistics are summed in float64 always",
    "risk_level": "operations (L1) are not recorded",
    "custom_op_namespaces": "operations (L1) are not recorded",
    "dump_enable": "settings are fixed when training starts",
    "load": "a module's inputs cannot be replaced; `reference` begins each step with another run's state",
    "slice": "whole tensors are recorded",
    "request_id": "inference is not recorded",
    "bench_path": "runs are compared afterwards, by `compare`",
    "diff_nums": "runs are compared afterwards, by `compare`",
    "device": "statistics are computed where the tensor is",
    "file_format": "elements are kept as safetensors",
    "acl_config": "kernels are not dumped",
    "overflow_nums": "NaN and Inf are counted in every record, and told while training",
    "check_mode": "NaN and Inf are counted in every record, and told while training",
}
"""Keys that nothing here answers to, with what holds instead."""


def looks_like_config(plain: object) -> bool:
    """Tell whether a mapping is a configuration of msprobe: settings of ours have none of these keys."""
    return isinstance(plain, Mapping) and bool({"task", "dump_path"} & plain.keys())


def load_config(file: str | Path) -> Translation:
    """Read a configuration of msprobe and translate it.

    Raises:
        ConfigError: there is no such file, or it is none of msprobe's.
    """
    path = Path(file)
    try:
        if path.is_file() and path.stat().st_size > _LARGEST:
            raise ConfigError("too large for a configuration", where=str(path), expected=f"{_LARGEST} bytes")
        plain = read_json(path)
    except DumpError as error:
        raise ConfigError(error.what, where=str(path), found=error.found, expected="a JSON file") from error
    if not looks_like_config(plain):
        raise ConfigError(
            "no configuration of msprobe",
            where=str(path),
            found=", ".join(list(plain)[:5]) or "nothing",
            expected="task, dump_path, rank, step, level …",
        )
    return translate(plain, where=str(path))


def write_config(found: Translation, out: str | Path, *, source: str) -> None:
    """Write the settings of a translation as a new YAML file.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    path = Path(out)
    part = path.with_name(path.name + ".part")
    if path.exists():
        raise ConfigError("exists, and nothing is overwritten", where=str(path), expected="a new file")
    try:
        write_text(part, found.yaml(source))
        part.rename(path)
    except OSError as error:
        raise ConfigError(f"cannot write: {error.strerror}", where=str(path)) from error


def translate(plain: Mapping[str, Any], *, where: str = "configuration of msprobe") -> Translation:
    """Translate a configuration.

    Raises:
        ConfigError: a value is none that msprobe takes.
    """
    made = Translation()
    task = plain.get("task", "statistics")
    own = plain.get(task) if isinstance(task, str) else None
    own = own if isinstance(own, Mapping) else {}
    _task(made, task, own, where)
    for key, value in plain.items():
        if key == "task" or key == task:
            continue
        if key in _TOP:
            _TOP[key](made, value, f"{where}: {key}")
        elif isinstance(value, Mapping) and key not in _WITHOUT:
            made.without[key] = f"settings of another task than {task}"
        else:
            made.without[key] = _WITHOUT.get(key, "not known")
    for key, value in own.items():
        name = f"{task}.{key}"
        if key in OF_TASK:
            OF_TASK[key](made, value, name, where)
        elif key != "summary_mode":
            made.without[name] = _WITHOUT.get(key, "not known")
    return made


def _task(made: Translation, task: object, own: Mapping[str, Any], where: str) -> None:
    """Choose how much is kept of each record."""
    mode = own.get("summary_mode", "statistics")
    if task == "tensor":
        level = "tensor"
    elif task == "statistics":
        level = "fingerprint" if mode in ("xor", "hash", ["md5"], ["hash"]) else "statistics"
    elif isinstance(task, str) and task:
        made.without["task"] = f"{task}: fingerprints and statistics of every record are kept instead"
        level = "statistics"
    else:
        raise ConfigError("no task", where=f"{where}: task", found=repr(task), expected=" or ".join(_TASKS))
    made.capture()["level"] = level
    if task in _TASKS:
        made.became["task"] = f"capture.level={level}"
    if "summary_mode" in own:
        text = "64-bit fingerprints of the bits, in every record" if mode != "statistics" else "statistics"
        made.became[f"{task}.summary_mode"] = f"{text} (capture.level={level})"


def _path(made: Translation, value: object, where: str) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError("no directory", where=where, found=repr(value)[:60], expected="a path")
    made.settings["out"] = value
    made.became["dump_path"] = f"out={value}, which must be new or empty"


def _numbers(name: str) -> Callable[[Translation, Any, str], None]:
    def numbers(made: Translation, value: Any, where: str) -> None:
        listed = [] if value is None else value if isinstance(value, list) else [value]
        parts = [str(one).replace(" ", "") for one in listed if not isinstance(one, bool)]
        if len(parts) < len(listed) or not all(re.fullmatch(r"\d{1,9}(-\d{1,9})?", part) for part in parts):
            raise ConfigError("not a list of numbers", where=where, found=repr(value)[:60], expected="[0, 2]")
        text = ",".join(parts)
        made.settings[name] = text
        made.became[name.removesuffix("s")] = f'{name}="{text}"' + ("" if parts else ", which is all")

    return numbers


def _level(made: Translation, value: object, where: str) -> None:
    texts = {
        "L0": "capture.modules=true; with it dW at its GEMM, main_grad, reduction and optimizer are recorded",
        "mix": "capture.modules=true, whose operations have no counterpart; dW is recorded at its GEMM",
    }
    if isinstance(value, str) and value in texts:
        made.capture()["modules"] = True
        made.became["level"] = texts[value]
    elif value == "L1":
        made.without["level"] = "L1: operations are not recorded; modules and dW at its GEMM are"
    elif value in ("L2", "debug"):
        made.without["level"] = f"{value}: kernels and single variables are not recorded; modules are"
    else:
        raise ConfigError("no such level", where=where, found=repr(value)[:60], expected="L0, L1, L2 or mix")


def _dataloader(made: Translation, value: object, where: str) -> None:
    made.capture()["batch"] = True
    made.became["enable_dataloader"] = "capture.batch=true: batches, sample ids, losses and random states"


def _asynchronous(made: Translation, value: object, where: str) -> None:
    made.became["async_dump"] = (
        "write_queue_mib=1024, the default: a thread writes while training goes on"
        if value
        else "nothing: elements are snapshots of their moment also where a thread writes them later"
    )


def _seed(made: Translation, value: object, where: str) -> None:
    if type(value) is not int:
        raise ConfigError("no seed", where=where, found=repr(value)[:60], expected="a number")
    made.settings.setdefault("determinism", {}).update(seed=value, reseed=True)
    made.became["seed"] = f"determinism.seed={value} determinism.reseed=true"


def _deterministic(made: Translation, value: object, where: str) -> None:
    made.settings.setdefault("determinism", {})["enabled"] = bool(value)
    made.became["is_deterministic"] = f"determinism.enabled={str(bool(value)).lower()}"


_TOP: Mapping[str, Callable[[Translation, Any, str], None]] = {
    "dump_path": _path,
    "rank": _numbers("ranks"),
    "step": _numbers("steps"),
    "level": _level,
    "enable_dataloader": _dataloader,
    "async_dump": _asynchronous,
    "seed": _seed,
    "is_deterministic": _deterministic,
}
