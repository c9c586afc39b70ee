"""Copy dumps of ``small_net.py`` to ``golden``, without call stacks and paths of the machine that made them.

``python make_golden.py DUMPS``, where DUMPS holds ``torch-L0-statistics-statistics`` and the like.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

GOLDEN = Path(__file__).with_name("golden")


def main():
    for source in sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir()):
        target = GOLDEN / source.name
        shutil.rmtree(target, ignore_errors=True)
        for file in sorted(source.rglob("*")):
            place = target / file.relative_to(source)
            if not file.is_file() or file.name == "stack.json":
                continue
            rank = place.parent if place.suffix == ".json" else place.parent.parent
            if rank.name.startswith("proc"):
                place = rank.with_name("proc0") / place.relative_to(rank)
            place.parent.mkdir(parents=True, exist_ok=True)
            if file.name == "dump.json":
                plain = json.loads(file.read_text())
                plain["dump_data_dir"] = None if plain["dump_data_dir"] is None else "./dump_tensor_data"
                place.write_text(json.dumps(plain, indent=1))
            else:
                shutil.copyfile(file, place)


if __name__ == "__main__":
    main()
