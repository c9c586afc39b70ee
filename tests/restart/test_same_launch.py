"""What torchrun restarts is told from what another launch left: by when the run was made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ATTEMPT = """
import sys
from pathlib import Path
from mindspeed_precision.dump.attempts import begin_attempt
from mindspeed_precision.errors import DumpError
try:
    print(begin_attempt(Path(sys.argv[1]), "refuse").name)
except DumpError as error:
    print(error.what)
"""
LAUNCHER = """
import datetime, json, os, subprocess, sys
from pathlib import Path
run, created, through_a_shell = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "shell"
if created == "now":
    created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
run.mkdir()
(run / "run.json").write_text(json.dumps({"schema": 4, "created": created}))
words = [sys.executable, "-c", sys.argv[4], str(run)]
words = ["sh", "-c", '"$@"; true', "sh", *words] if through_a_shell else words
subprocess.run(words, env={**os.environ, "TORCHELASTIC_RESTART_COUNT": sys.argv[5]}, check=True)
"""
REFUSED = "the run directory is not empty, and nothing is overwritten"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells when a process began")
@pytest.mark.parametrize("way", ["directly", "shell"])
@pytest.mark.parametrize(
    ("created", "count", "found"),
    [
        ("now", "1", "restart01"),
        ("now", "0", REFUSED),
        ("now", "", REFUSED),
        ("2020-01-01T00:00:00+00:00", "1", REFUSED),
        ("no date", "1", REFUSED),
    ],
)
def test_a_restart_belongs_to_its_launch(tmp_path, created, count, found, way):
    words = [sys.executable, "-c", LAUNCHER, str(tmp_path / "run"), created, way, ATTEMPT, count]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == found
