"""Compare dumps by msprobe's own command, in its environment: ``msprobe_compare.py PAIRS.json``.

``PAIRS.json`` is a list of ``[target, golden, out]``: two files ``dump.json`` and the directory of the table.
msprobe is imported once; each comparison runs in a process that is forked from this one.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from msprobe import msprobe


def compare(target: str, golden: str, out: Path) -> int:
    """Run ``msprobe compare`` and return its status."""
    out.mkdir(mode=0o750, parents=True, exist_ok=True)
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    status = 1
    try:
        sys.argv = ["msprobe", "compare", "-tp", target, "-gp", golden, "-o", str(out)]
        msprobe.main()
        status = 0
    except SystemExit as ended:
        status = int(bool(ended.code))
    finally:
        if status:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    os.umask(0o027)  # it refuses files that others may write
    for target, golden, out in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        failed = compare(target, golden, Path(out))
        (Path(out) / "STATUS").write_text(str(failed), encoding="utf-8")
