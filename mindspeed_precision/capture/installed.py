"""Versions of what is installed beside Python: CANN, drivers. Read from their files; no command is run.

Where the files are: CANN's ``set_env.sh`` exports ``ASCEND_HOME_PATH`` (``ASCEND_TOOLKIT_HOME``), under which
the toolkit has ``<arch>-linux/ascend_toolkit_install.info`` and its parts a ``version.info``; the driver's
installer notes its directory in ``/etc/ascend_install.info``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_USUAL = "usr/local/Ascend"
_CANN = (
    "*/ascend_toolkit_install.info",
    "ascend_toolkit_install.info",
    "runtime/version.info",
)
_VERSION = re.compile(r"^\s*(?:runtime_running_)?version\s*=\s*\[?([^\]\s]+)", re.IGNORECASE | re.MULTILINE)
_DRIVER_PATH = re.compile(r"^Driver_Install_Path_Param\s*=\s*(\S+)", re.MULTILINE)
_NVIDIA = re.compile(r"Kernel Module(?: for \S+)?\s+(\S+)")
_LONGEST = 1 << 16


def installed_versions(environ: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """Return the versions of CANN (``cann``) and of the device's driver (``driver``), where there are any.

    Args:
        environ: the environment.
        root: directory that stands for ``/``.
    """
    found = {"cann": _first(_cann_files(environ, root)), "driver": _first(_driver_files(root))}
    nvidia = _NVIDIA.search(_text(root / "proc/driver/nvidia/version"))
    if not found["driver"] and nvidia:
        found["driver"] = nvidia.group(1)
    return {name: version for name, version in found.items() if version}


def _cann_files(environ: Mapping[str, str], root: Path) -> Iterator[Path]:
    homes = [Path(environ[name]) for name in _HOMES if environ.get(name)]
    for home in (*homes, root / _USUAL / "ascend-toolkit/latest"):
        for pattern in _CANN:
            yield from sorted(home.glob(pattern))


def _driver_files(root: Path) -> Iterator[Path]:
    noted = _DRIVER_PATH.search(_text(root / "etc/ascend_install.info"))
    if noted:
        yield root / noted.group(1).lstrip("/") / "driver/version.info"
    yield root / _USUAL / "driver/version.info"


def _first(files: Iterator[Path]) -> str:
    for path in files:
        version = _VERSION.search(_text(path))
        if version:
            return version.group(1)
    return ""


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_LONGEST)
    except OSError:
        return ""
