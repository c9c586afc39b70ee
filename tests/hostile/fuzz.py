"""Spoil what others write, and read it: each input is refused by an error of ours, or read, and that is all.

    python tests/hostile/fuzz.py 100000 --seed 7

Watched meanwhile: any other exception, a reader that takes more than ``PATIENCE`` seconds, memory (a limit on
the address space), a program that is started, a connection, a file that is opened outside of what was given.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import signal
import sys
import sysconfig
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from readers import READERS, ROOT, Reader
from spoiling import SPOILS, Spoil, spoil

from mindspeed_precision.errors import PrecisionError

PATIENCE = 10
"""Seconds of CPU that one file may take; ten times that by the clock, on a machine that does other things."""
LONGEST = 1500
MEMORY = 1 << 30
"""Bytes of address space beyond what the process has when it begins."""

_STARTS = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.spawn",
    "subprocess.Popen",
    "socket.connect",
)
_OURS = tuple(
    os.path.realpath(path)
    for path in (ROOT, sys.prefix, sys.base_prefix, sysconfig.get_path("purelib"), "/proc/self", "/dev/null")
)


class Breach(BaseException):
    """Something was done that no file may bring about; passes every ``except Exception``."""


class Guard:
    """Looks at what the interpreter does while a file is read."""

    def __init__(self) -> None:
        self.inside = ""
        sys.addaudithook(self._look)
        signal.signal(signal.SIGALRM, self._too_long)
        signal.signal(signal.SIGPROF, self._too_long)

    def _look(self, event: str, args: tuple[object, ...]) -> None:
        if not self.inside:
            return
        if event in _STARTS:
            self.inside, breach = "", f"{event} {args}"
            raise Breach(breach)
        if event == "open" and isinstance(args[0], (str, bytes)):
            path = os.path.realpath(os.fsdecode(args[0])) if b"\0" not in os.fsencode(args[0]) else ""
            if path and not path.startswith((self.inside, *_OURS)):
                self.inside = ""
                raise Breach(f"opened {path}")

    def _too_long(self, *_: object) -> None:
        raise Breach(f"still reading after {PATIENCE} s")

    def _wait(self, seconds: int) -> None:
        """Interrupt after ``seconds`` of CPU, and again: a callback of the collector may lose it."""
        signal.setitimer(signal.ITIMER_PROF, seconds, bool(seconds))
        signal.setitimer(signal.ITIMER_REAL, 10 * seconds, bool(seconds))

    def read(self, reader: Reader, directory: Path) -> str:
        """Return ``read`` or ``refused``.

        Raises:
            BaseException: anything else that comes out.
        """
        self._wait(PATIENCE)
        self.inside = os.path.realpath(directory)
        try:
            reader.read(directory)
        except PrecisionError as error:
            self.inside = ""
            text = str(error)
            if not error.what or len(text) > 20_000:
                raise AssertionError(f"no message for a person: {text[:200]!r}") from error
            return "refused"
        finally:
            self.inside = ""
            self._wait(0)
        return "read"


def fuzz(name: str, inputs: int, start: int, guard: Guard, base: Path) -> Counter[str]:
    """Give ``inputs`` spoilt files to one reader; return how many were read and refused.

    Raises:
        BaseException: the smallest input that was neither, as hypothesis reports it.
    """
    reader = READERS[name]
    directory = base / str(list(READERS).index(name))
    directory.mkdir()
    reader.seeds(directory)
    path = directory / reader.file
    healthy = path.read_bytes()
    assert guard.read(reader, directory) == "read", f"{name}: the healthy file is refused"
    found: Counter[str] = Counter()

    def one(spoils: list[Spoil]) -> None:
        path.write_bytes(spoil(healthy, spoils))
        try:
            found[guard.read(reader, directory)] += 1
        except Breach as breach:  # hypothesis shrinks what is an Exception
            raise AssertionError(str(breach)) from breach

    run = given(SPOILS)(one)
    run = settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )(run)
    seed(start)(run)()
    return found


def shares(total: int) -> dict[str, int]:
    """Return how many inputs each reader gets, by its share, rounded up."""
    whole = sum(reader.share for reader in READERS.values())
    return {name: -(-total * reader.share // whole) for name, reader in READERS.items()}


def limit_memory() -> None:
    """Let this process grow by ``MEMORY`` and no further."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def told(error: BaseException) -> Iterator[str]:
    """Yield what an error says and what hypothesis notes of it, shortened; of a group, for each in it."""
    for one in getattr(error, "exceptions", ()) or (error,):
        if one is not error:
            yield from told(one)
            continue
        text = "\n    ".join([f"{type(one).__name__}: {one}", *getattr(one, "__notes__", ())])
        yield text if len(text) < LONGEST else f"{text[:LONGEST]} …"


def main() -> int:
    """Fuzz, print the counts. Status 1 where an input was neither read nor refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("inputs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", choices=READERS, help="this one alone")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    wanted = {arguments.reader: arguments.inputs} if arguments.reader else shares(arguments.inputs)
    guard, failed, total = Guard(), 0, 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as base:
        limit_memory()
        for name, inputs in wanted.items():
            began = time.monotonic()
            try:
                found = fuzz(name, inputs, arguments.seed, guard, Path(base))
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                failed += 1
                sys.stdout.writelines(f"FAILED {name}: {line}\n" for line in told(error))
                sys.stdout.flush()
                if os.environ.get("FUZZ_TRACE"):
                    sys.excepthook(type(error), error, error.__traceback__)
                continue
            total += found.total()
            counts = f"{found['refused']:7} refused {found['read']:6} read"
            sys.stdout.write(f"{name:24} {counts}   {time.monotonic() - began:6.1f} s\n")
            sys.stdout.flush()
            gc.collect()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    sys.stdout.write(f"{total} inputs, seed {arguments.seed}, peak {peak} MiB: {failed} readers failed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
